"""Runs in a reward worker process: compares answers and calls reward functions, one job after the other.

The worker reads jobs from standard input and sends results to its original standard output, one line of JSON each; what
a reward function prints goes to standard error. `rollout/rewards/pool.py` starts the process, limits the time of each
job and replaces the process when it ends. The worker itself imports no torch; a reward function's module may.

The process does not outlive its parent: an idle worker sees the end of its input, and a busy or importing one is ended
by a kernel alarm, which needs no cooperation, a little after its time is up. Children of a reward function are ended by
the parent only. Ctrl-C is ignored here and handled by the parent.

Memory: an allocation that would take the process more than `MEMORY` above its size when it was ready fails (RLIMIT_AS),
and only that job fails. A process that has grown by more than `WORN` asks to be replaced after its result, so that no
later job pays for it. Without /proc, as on macOS, whose kernel does not enforce the limit, there is no limit.
"""

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

from jackpot.core.errors import ConfigError
from jackpot.core.imports import import_object
from jackpot.rollout.rewards.verifier.compare import VERIFY, compare
from jackpot.rollout.rewards.verifier.expressions import equal_expressions

MEMORY, WORN = 2**31, 2**29  # bytes above the size at the start
GRACE = 5.0  # seconds that the parent has to end a job before the alarm does
_STATM = Path("/proc/self/statm")
Function = Callable[..., Any]


def main() -> None:
    """Serve until the input ends. The first line of the input names the reward functions and the time limits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.buffer.readline())
    functions: dict[str, Function] = {VERIFY: _verify}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, setup["start_timeout"] + GRACE)
    for path in setup["functions"]:
        try:
            functions[path] = import_object(path, "reward")
        except ConfigError as error:
            _send(results, {"refused": str(error)})
            return
        except BaseException as error:  # such as SystemExit
            _send(results, {"refused": f"the reward {path!r} ends the process that imports it: {error!r}"})
            return
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    start = _memory()
    if start:
        resource.setrlimit(resource.RLIMIT_AS, (start + MEMORY, start + MEMORY))
    _send(results, {"ready": True})
    serve(results, functions, setup["timeout"], start)


def serve(results: BinaryIO, functions: dict[str, Function], timeout: float, start: int) -> None:
    """Do jobs until the input ends or the process is worn.

    Args:
        timeout: seconds for one job.
        start: memory of the process before its first job, bytes.
    """
    reported: set[str] = set()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
        job = json.loads(line)
        name, worn = job["function"], False
        try:
            result = {"value": _number(name, functions[name](**job["arguments"]))}
        except Exception as error:
            worn, result = isinstance(error, MemoryError), {"error": "crash"}
            if name not in reported:
                reported.add(name)
                traceback.print_exc()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        worn = worn or _memory() > start + WORN
        _send(results, result | {"worn": worn})
        if worn:
            return


def _verify(answer: str, reference: str) -> float:
    """Return 1.0 where an answer equals the reference, else 0.0."""
    return float(bool(compare(answer, reference, equal_expressions)))


def _number(name: str, value: Any) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: the value is not a finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{name} returned {value!r:.100}; a reward is a finite number")
    return number


def _memory() -> int:
    """Return the address space of this process in bytes, or 0 where there is no /proc."""
    try:
        return int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _send(results: BinaryIO, message: dict[str, Any]) -> None:
    """Send a message to the pool as one line of JSON."""
    results.write(json.dumps(message).encode() + b"\n")
    results.flush()
