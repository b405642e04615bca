"""The program of a reward worker process: it calls one function, such as the verifier or the user's reward function.

`rollout/rewards/pool.py` starts the process, limits the time of each job and replaces the process when it ends.
"""

import asyncio
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackpot.core.errors import ConfigError
from jackpot.core.imports import import_object
from jackpot.core.limited import address_space, lower_limit

WORN = 0.25  # share of the memory limit by which a process may grow; one that has grown by more is replaced
GRACE = 5.0  # seconds from a job's time limit, at which the pool ends the process, to the kernel's alarm
MAX_TEXT = 500  # largest number of characters of an error's text
MAX_REWARD = 1e30  # largest |reward|: finite in float32; its square, and sums, are finite in float64
# Names of the arguments of a function that takes one response, with those of a function that takes batches.
PLURALS = {"problem": "problems", "response": "responses", "answer": "answers", "finished": "finished"}
# Limits of a worker: open files, and threads in addition to those that exist at its start (root may start more).
MOST_FILES, MOST_PROCESSES = 4096, 10_000
LARGEST_FILE = 2**33  # largest size of a file that a worker writes, bytes
_LOAD = Path("/proc/loadavg")  # has the number of the machine's threads
Function = Callable[..., Any]
Send = Callable[[Mapping[str, Any]], None]  # sends one message to the pool


def main() -> None:
    """Call the function for the items of job after job, until the socket that the jobs come from is closed.

    The socket is the standard input of the process. Each line on it is JSON: first the function's name and the limits
    of time and memory, then jobs; results are sent back on it. The function itself reads nothing from standard input,
    and its prints go to standard error. The worker itself imports no torch; a reward function's module may.

    The memory limit is how much the process may grow once the function is imported. An allocation beyond the limit
    fails (RLIMIT_AS), and only that job fails. A process that has grown by more than the share `WORN` of the limit
    asks, after its results, to be replaced, so that no later job suffers. Without /proc there is no limit, as on macOS,
    whose kernel would not enforce it.
    """
    _set_limits()

    # Keep the socket, and give the function an empty standard input and standard error as its standard output.
    pool = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    jobs = pool.makefile("rb")

    def send(message: Mapping[str, Any]) -> None:
        """Send a message as one line of JSON."""
        pool.sendall(json.dumps(message).encode() + b"\n")

    setup = json.loads(jobs.readline())
    name, timeout = setup["function"], setup["timeout"]

    # The kernel's alarm ends the process if the import, and later a job, takes too long and the parent does not end it.
    signal.setitimer(signal.ITIMER_REAL, setup["start_timeout"] + GRACE)
    try:
        function = import_object(name, "reward")
    except BaseException as error:  # SystemExit too
        ends = f"the reward {name!r} ends the process that imports it: {error!r}"
        # Tell the pool, and end this process.
        return send({"refused": str(error) if isinstance(error, ConfigError) else ends})
    signal.setitimer(signal.ITIMER_REAL, 0.0)

    size, memory = address_space(), setup["memory"]
    worn_size = math.inf  # bytes of address space beyond which the process asks to be replaced
    if size and memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
        worn_size = size + WORN * memory
    send({"takes_batches": takes_batches(function), "is_async": is_async(function)})

    loop = asyncio.new_event_loop()  # one for all jobs, so that a function's connections stay open
    caller = _Caller(name, function, timeout, send)
    while not caller.is_worn and (line := jobs.readline()):
        signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
        job = json.loads(line)
        loop.run_until_complete(caller.do(job["items"], job["job"]))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        caller.is_worn = caller.is_worn or address_space() > worn_size
        send({"worn": caller.is_worn, "job": job["job"]})


def _set_limits() -> None:
    """Set fixed limits of open files, the size of a file and the number of processes, and leave Ctrl-C to the parent.

    A crash writes no core file. SIGALRM, the alarm that `main` sets for `GRACE` seconds after each time limit, gets its
    default effect, the end of the process. So no worker outlives its parent for long: an idle worker sees the socket
    close, and the alarm ends one that calls or imports. Processes that a function starts are ended by the parent only.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lower_limit(resource.RLIMIT_NOFILE, MOST_FILES)
    lower_limit(resource.RLIMIT_FSIZE, LARGEST_FILE)
    # The kernel's limit counts all threads of the user, so the threads that exist now (of all users) are added: their
    # number stands after the slash in the fourth field of /proc/loadavg, as in `0.52 0.58 0.59 2/1034 9142`.
    if _LOAD.exists():
        num_threads = int(_LOAD.read_text().split()[3].partition("/")[2])
        lower_limit(resource.RLIMIT_NPROC, MOST_PROCESSES + num_threads)


def takes_batches(function: Function) -> bool:
    """Return whether a function takes a batch of responses, as lists: it does if it has a parameter `responses`."""
    try:
        return "responses" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # a built-in function without a signature


def is_async(function: Function) -> bool:
    """Return whether a function is async, so that its calls must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class _Caller:
    """A caller of one function, which sends the result of each item of a job as soon as the result is known.

    A function has one of four forms. It takes one response or, if it has a parameter `responses`, a batch; and it is
    plain or async. A call gets the keyword arguments of its item; the call of a batch gets them under the names in
    `PLURALS`, as lists. The calls of an async function for the items of one job are awaited together.
    """

    def __init__(self, name: str, function: Function, timeout: float, send: Send) -> None:
        """Begin without a job; `name` is the function's, `timeout` limits an awaited call, `send` sends a message."""
        self._name, self._function = name, function
        self._timeout, self._send = timeout, send
        self._takes_batches = takes_batches(function)
        self._has_printed = False  # True once the traceback of a failure was printed
        self.is_worn = False  # True once an allocation failed or the process grew too large: it is to be replaced

    async def do(self, items: Sequence[Mapping[str, Any]], job: str) -> None:
        """Call the function for all items of a job; a failed call gives its item, or its batch, an error."""
        self._job = job
        if self._takes_batches:
            await self._call({PLURALS[key]: [item[key] for item in items] for key in items[0]}, range(len(items)))
        else:
            await asyncio.gather(*(self._call(item, [index]) for index, item in enumerate(items)))

    async def _call(self, arguments: Mapping[str, Any], indices: Sequence[int]) -> None:
        """Call the function once, and send the results of the job's items at these `indices`: an error if it fails."""
        try:
            returned = self._function(**arguments)
            # Here the time of one awaited call is limited; the pool limits the time of a whole job of any function.
            if inspect.isawaitable(returned):
                returned = await asyncio.wait_for(returned, self._timeout)
            values = list(returned) if self._takes_batches else [returned]
            if len(values) != len(indices):
                raise ValueError(f"{self._name} returned {len(values)} rewards for {len(indices)} responses")

        except Exception as error:
            failure = self._failure(error)
            for index in indices:
                self._send({"item": index, "result": failure, "job": self._job})
            return

        for index, value in zip(indices, values, strict=True):
            try:
                result = {"value": _reward(self._name, value), "error": None}
            except InvalidReward as error:
                result = self._failure(error)
            self._send({"item": index, "result": result, "job": self._job})

    def _failure(self, error: Exception) -> dict[str, Any]:
        """Return the result of a call that failed; print the traceback of the first failure in this process."""
        self.is_worn = self.is_worn or isinstance(error, MemoryError)  # True: the process is to be replaced
        if not self._has_printed:
            self._has_printed = True
            traceback.print_exception(error)
        reasons = {TimeoutError: "timeout", InvalidReward: "invalid"}
        reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), "crash")

        # Describe the error in one line: its type, its message, and the last line of its traceback that is in the file
        # of the reward function (`self._name` is `package.module:function`).
        description = "".join(traceback.format_exception_only(error))
        text = " ".join(description.split()).removeprefix(f"{__name__}.")
        if text == "TimeoutError":  # raised by `asyncio.wait_for`, without a message
            text = f"took longer than {self._timeout:g} s"
        file = getattr(sys.modules.get(self._name.partition(":")[0]), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        text = text[:MAX_TEXT] + (f" ({file}, line {lines[-1]})" if lines else "")
        return {"value": 0.0, "error": reason, "text": text}


class InvalidReward(ValueError):
    """The error of a function that returned a value which is no reward."""


def _reward(name: str, value: Any) -> float:
    """Return a reward as a float.

    Raises:
        InvalidReward: the value is not a number of at most `MAX_REWARD` in absolute value.
    """
    try:
        reward = math.nan if isinstance(value, str) else float(value)  # a text is no reward, not even "1"
    except Exception:  # the user's object may raise anything
        reward = math.nan
    if not abs(reward) <= MAX_REWARD:
        raise InvalidReward(f"{name} returned {value!r:.100}; a reward is a number from -1e30 to 1e30")
    return reward
