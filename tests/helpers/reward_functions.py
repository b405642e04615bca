"""Reward functions, good ones and bad ones, that the reward workers of the tests import."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

KEPT: list[bytearray] = []  # memory that this process does not give back


def length(problem: str, response: str, answer: str, finished: bool) -> int:
    return len(response)


def minus_length(*, response: str, **_: object) -> float:
    return -float(len(response))


def arguments(*, problem: str, response: str, answer: str, finished: bool) -> float:
    """Return 1 for exactly the arguments of the test."""
    return float((problem, response, answer, finished) == ("What is it?", "Say \\boxed{5}", "5", False))


def says(problem: str, response: str, answer: str, finished: bool) -> float:
    """Do what the first word of the response says, and return 1."""
    word = response.split()[0]
    if word == "exit":
        os._exit(3)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "quit":
        sys.exit("I quit")
    if word == "sleep":
        time.sleep(1000)
    if word == "spin":
        while True:
            pass
    if word == "hoard":
        KEPT.append(bytearray(4 * 2**30))
    if word == "leak":
        KEPT.append(bytearray(60 * 2**20))
    if word == "raise":
        raise KeyError("no such thing")
    if word == "print":
        print('{"value": 7.0, "worn": false}', flush=True)
    if word == "forge":
        for descriptor in range(3, 64):  # the socket to the pool is one of them
            with suppress(OSError):
                os.write(descriptor, (response.split(maxsplit=1)[1] + "\n").encode())
    if word == "escape":
        child = Popen(["sleep", "1000"], start_new_session=True)
        Path(response.split()[1]).write_text(str(child.pid))
        time.sleep(1000)
    if word == "bare":
        Path(response.split()[1]).write_text(str(Popen(["sleep", "1000"], env={}).pid))
        time.sleep(1000)
    if word == "sees":
        return float(response.split()[1] in os.environ)
    if word == "child":
        Path(response.split()[1]).write_text(str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")))
        time.sleep(1000)
    return 1.0


def calls(*, response: str, **_: object) -> int:
    """Return how often this process was called; end it at a path that is new, and wait for other paths."""
    KEPT.append(bytearray())
    word, _, path = response.rpartition(" ")
    if word and not Path(path).exists():
        Path(path).touch()
        os._exit(3)
    while path and not Path(path).exists():
        time.sleep(0.01)
    return len(KEPT)


def waits(*, response: str, **_: object) -> float:
    """Sleep for the number of seconds in the response, and return it."""
    time.sleep(float(response))
    return float(response)


def process(**_: object) -> float:
    """Return the process id."""
    time.sleep(0.02)  # long enough for another one to take the next job
    return float(os.getpid())


def has_torch(**_: object) -> float:
    return float("torch" in sys.modules)


def returns(*, response: str, **_: object) -> object:
    """Return what is no reward."""
    return {"infinite": float("inf"), "huge": -1.1e30, "words": "1.0", "nothing": None}[response]


def raises(**_: object) -> float:
    raise RuntimeError("no judge answers")


number = 5  # no function


ARRIVED: list[str] = []  # responses whose calls wait in `together`


def one(**_: object) -> float:
    return 1.0


async def together(*, response: str, **_: object) -> float:
    """Return 1 when as many calls wait here as the response says."""
    ARRIVED.append(response)
    while len(ARRIVED) < int(response):
        await asyncio.sleep(0.01)
    return 1.0


async def judged(*, response: str, **_: object) -> float:
    """Do what the response says, and return 1."""
    if response == "raise":
        raise KeyError("no such thing")
    if response == "sleep":
        await asyncio.sleep(1000)
    if response == "block":
        time.sleep(1000)
    if response == "exit":
        os._exit(3)
    return 1.0


def batch(*, problems: list[str], responses: list[str], answers: list[str], finished: list[bool]) -> list[object]:
    """Return the size of the batch for every response but those that say something else."""
    if "raise" in responses:
        raise KeyError("no such thing")
    if "exit" in responses:
        os._exit(3)
    assert len(problems) == len(answers) == len(finished)
    rewards = [None if response == "none" else len(responses) for response in responses]
    return rewards[1:] if "short" in responses else rewards


async def async_batch(*, responses: list[str], **_: object) -> list[int]:
    return [len(responses)] * len(responses)


def fails_once(*, response: str, **_: object) -> float:
    """Raise in the first call with a path, and return 1 in later ones."""
    if not Path(response).exists():
        Path(response).touch()
        raise ConnectionError("503")
    return 1.0


def runs_until(*, response: str, **_: object) -> float:
    """Write the process id to the file in the response, and return 1 when the file `go` lies beside it."""
    Path(f"{response}.new").write_text(str(os.getpid()))
    Path(f"{response}.new").rename(response)
    while not Path(response).with_name("go").exists():
        time.sleep(0.01)
    return 1.0


def remainder(response: str, **_: object) -> float:
    """Reward the length of the response, which differs between responses of a random model."""
    return len(response) % 7 / 7
