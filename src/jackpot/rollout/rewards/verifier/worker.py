"""A judge process: verdicts and reward functions, one job after the other.

It reads jobs from its standard input and answers on what was its standard output, one line of JSON each; what a reward
function prints goes to standard error. `rollout/rewards/pool.py` starts it, limits its time and starts another when it
ends. No torch is imported here, unless by a reward function's module.

It does not outlive its parent: an idle one sees the end of its input, and a busy or importing one is ended by an
alarm of the kernel, which needs no cooperation, a little after its time is up. What a reward function started is not
ended with it: that takes the parent. Ctrl-C is the parent's affair.

Memory: an allocation that would take the process more than `MEMORY` beyond what it had when it was ready fails
(RLIMIT_AS), and that job with it. A process that holds `WORN` more than then asks to be replaced after its answer, so
that no later job pays. Where there is no /proc, as on macOS, whose kernel does not enforce the limit, there is none.
"""

import importlib
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from jackpot.rollout.rewards.verifier.compare import compare
from jackpot.rollout.rewards.verifier.expressions import equal_expressions

VERDICT = "verdict"  # the function that is always there
MEMORY, WORN = 2**31, 2**29  # bytes
GRACE = 5.0  # seconds that the parent has to end a job before the alarm does
_STATM = Path("/proc/self/statm")
Function = Callable[..., Any]


def main() -> None:
    """Serve until the input ends. The first line names the reward functions, and the seconds for imports and jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders = json.loads(sys.stdin.buffer.readline())
    functions: dict[str, Function] = {VERDICT: _verdict}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, orders["start_seconds"] + GRACE)
    for path in orders["functions"]:
        try:
            functions[path] = load(path)
        except BaseException as error:  # the module may do anything, even exit
            _write(answers, {"refused": path, "why": f"{type(error).__name__}: {error}"})
            return
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    start = _memory()
    if start:
        resource.setrlimit(resource.RLIMIT_AS, (start + MEMORY, start + MEMORY))
    _write(answers, {"ready": True})
    serve(answers, functions, orders["seconds"], start)


def serve(answers: BinaryIO, functions: dict[str, Function], seconds: float, start: int) -> None:
    """Do jobs until the input ends or the process is worn. `start` is its memory in bytes before the first."""
    told: set[str] = set()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
        job = json.loads(line)
        name, worn = job["function"], False
        try:
            result = {"value": _number(name, functions[name](**job["arguments"]))}
        except Exception as error:
            worn, result = isinstance(error, MemoryError), {"problem": "crash"}
            if name not in told:
                told.add(name)
                traceback.print_exc()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        worn = worn or _memory() > start + WORN
        _write(answers, result | {"worn": worn})
        if worn:
            return


def load(path: str) -> Function:
    """The function of `package.module:function`.

    Raises:
        ImportError, AttributeError, TypeError: there is no such module, function, or it is something else.
    """
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__} and not a function")
    return function


def _verdict(answer: str, reference: str) -> float:
    return float(bool(compare(answer, reference, equal_expressions)))


def _number(name: str, value: Any) -> float:
    """A reward as a float.

    Raises:
        ValueError: it is none that can be trained on.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{name} returned {value!r:.100}; a reward is a finite number")
    return number


def _memory() -> int:
    """Bytes of address space; 0 where nobody tells."""
    try:
        return int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _write(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()
