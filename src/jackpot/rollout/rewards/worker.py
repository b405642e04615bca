"""Runs in a reward worker process: calls one function, such as the verifier or a reward function of the user.

A function has one of four forms. It takes one response or, where it has a parameter `responses`, a batch; and it is
plain or async. A call is given the keyword arguments of its item; a batched one is given the same names in the plural,
each with a list. An async function's items of one job are awaited together.

The worker reads jobs from standard input and sends results to its original standard output, one line of JSON each; what
a function prints goes to standard error. `rollout/rewards/pool.py` starts the process, limits the time of each job and
replaces the process when it ends. The worker itself imports no torch; a reward function's module may.

The process does not outlive its parent: an idle worker sees the end of its input, and a busy or importing one is ended
by a kernel alarm, which needs no cooperation, a little after its time is up. Children of a reward function are ended by
the parent only. Ctrl-C is ignored here and handled by the parent.

Memory: an allocation that would take the process more than its limit above its size when it was ready fails
(RLIMIT_AS), and only that job fails. A process that has grown by more than a share of it asks to be replaced after its
results, so that no later job pays for it. Without /proc, as on macOS, whose kernel does not enforce the limit, there is
no limit.
"""

import asyncio
import inspect
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackpot.core.errors import ConfigError
from jackpot.core.imports import import_object

WORN = 0.25  # share of the memory limit; a process that has grown by more is replaced
GRACE = 5.0  # seconds that the parent has to end a job before the alarm does
MAX_TEXT = 500  # characters of the text of an error
MAX_REWARD = 1e30  # largest |reward|; its square and sums of it are finite in float64, and itself in float32
PLURALS = {"problem": "problems", "response": "responses", "answer": "answers", "finished": "finished"}
_STATM = Path("/proc/self/statm")
Function = Callable[..., Any]
Send = Callable[[Mapping[str, Any]], None]  # sends one message to the pool


def main() -> None:
    """Serve until the input ends. The first line of the input names the function and its limits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(message: Mapping[str, Any]) -> None:
        """Send a message as one line of JSON."""
        results.write(json.dumps(message).encode() + b"\n")

    setup = json.loads(sys.stdin.buffer.readline())
    name = setup["function"]
    signal.setitimer(signal.ITIMER_REAL, setup["start_timeout"] + GRACE)
    try:
        function = import_object(name, "reward")
    except ConfigError as error:
        send({"refused": str(error)})
        return
    except BaseException as error:  # such as SystemExit
        send({"refused": f"the reward {name!r} ends the process that imports it: {error!r}"})
        return
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    start, memory = _memory(), setup["memory"]
    if start and memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (start + memory, start + memory))
    send({"ready": True, "takes_batches": takes_batches(function), "is_async": is_async(function)})
    limit = start + WORN * memory if start and memory is not None else math.inf
    serve(send, _Caller(name, function, setup["timeout"], send), setup["timeout"], limit)


def serve(send: Send, caller: "_Caller", timeout: float, limit: float) -> None:
    """Do jobs until the input ends or the process is worn.

    Args:
        timeout: seconds for one job.
        limit: memory of the process beyond which it is worn, bytes.
    """
    loop = asyncio.new_event_loop()  # one for all jobs, so that a function's connections stay open
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
        loop.run_until_complete(caller.do(json.loads(line)["items"]))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        worn = caller.is_worn or _memory() > limit
        send({"worn": worn})
        if worn:
            return


def takes_batches(function: Function) -> bool:
    """Return whether a function takes the lists of a batch: it has a parameter `responses`."""
    try:
        return "responses" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # a built-in function without a signature


def is_async(function: Function) -> bool:
    """Return whether calls of a function are awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class _Caller:
    """Calls one function for the items of a job and sends each result as soon as it is known."""

    def __init__(self, name: str, function: Function, timeout: float, send: Send) -> None:
        self._name, self._function, self._timeout, self._send = name, function, timeout, send
        self._takes_batches, self._shown = takes_batches(function), False
        self.is_worn = False  # True after a failed allocation

    async def do(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Call the function for all items; the failure of one is its own."""
        if self._takes_batches:
            await self._batch(items)
        else:
            await asyncio.gather(*(self._one(number, item) for number, item in enumerate(items)))

    async def _one(self, number: int, item: Mapping[str, Any]) -> None:
        try:
            value = _number(self._name, await self._call(item))
        except Exception as error:
            self._fail([number], error)
        else:
            self._send({"item": number, "value": value})

    async def _batch(self, items: Sequence[Mapping[str, Any]]) -> None:
        arguments = {PLURALS[key]: [item[key] for item in items] for key in items[0]}
        try:
            values = list(await self._call(arguments))
            if len(values) != len(items):
                raise ValueError(f"{self._name} returned {len(values)} rewards for {len(items)} responses")
        except Exception as error:
            self._fail(range(len(items)), error)
            return
        for number, value in enumerate(values):
            try:
                self._send({"item": number, "value": _number(self._name, value)})
            except InvalidReward as error:
                self._fail([number], error)

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function; what it returns to be awaited has the time limit here, and everything in the pool."""
        value = self._function(**arguments)
        return await asyncio.wait_for(value, self._timeout) if inspect.isawaitable(value) else value

    def _fail(self, numbers: Sequence[int], error: Exception) -> None:
        """Send why these items have no reward; the first traceback of a process is shown."""
        self.is_worn = self.is_worn or isinstance(error, MemoryError)
        causes = {TimeoutError: "timeout", InvalidReward: "invalid"}
        why = next((name for kind, name in causes.items() if isinstance(error, kind)), "crash")
        if not self._shown:
            self._shown = True
            traceback.print_exception(error)
        text = self._described(error)
        for number in numbers:
            self._send({"item": number, "error": why, "text": text})

    def _described(self, error: Exception) -> str:
        """Return type and message of an error in one line, with the last place of it in the function's own file."""
        text = " ".join("".join(traceback.format_exception_only(error)).split()).removeprefix(f"{__name__}.")
        if text == "TimeoutError":  # as `asyncio.wait_for` raises it
            text = f"took longer than {self._timeout:g} s"

        file = getattr(sys.modules.get(self._name.partition(":")[0]), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return text[:MAX_TEXT] + (f" ({file}, line {lines[-1]})" if lines else "")


class InvalidReward(ValueError):
    """Reports a value that is no reward."""


def _number(name: str, value: Any) -> float:
    """Return a reward as a float.

    Raises:
        InvalidReward: the value is not a number of at most `MAX_REWARD` in absolute value.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # an object of the user's may raise anything
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise InvalidReward(f"{name} returned {value!r:.100}; a reward is a number from -1e30 to 1e30")
    return number


def _memory() -> int:
    """Return the address space of this process in bytes, or 0 where there is no /proc."""
    try:
        return int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
