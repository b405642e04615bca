"""Reward functions, good ones and bad ones, that the reward workers of the tests import."""

import os
import signal
import sys
import time
from pathlib import Path

KEPT: list[bytearray] = []


def length(problem: str, response: str, answer: str, finished: bool) -> int:
    return len(response)


def arguments(*, problem: str, response: str, answer: str, finished: bool) -> float:
    """Return 1 for exactly the arguments of the test."""
    return float((problem, response, answer, finished) == ("What is it?", "Say \\boxed{5}", "5", False))


def says(problem: str, response: str, answer: str, finished: bool) -> float:
    """Execute the first word of the response, and return 1."""
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
        KEPT.append(bytearray(300 * 2**20))
    if word == "raise":
        raise KeyError("no such thing")
    if word == "print":
        print('{"value": 7.0, "worn": false}', flush=True)
    if word == "child":
        Path(response.split()[1]).write_text(str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")))
        time.sleep(1000)
    return 1.0


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


def infinite(**_: object) -> float:
    return float("inf")


def words(**_: object) -> str:
    return "1.0"


def nothing(**_: object) -> None:
    return None


number = 5
