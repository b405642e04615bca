"""Tries in a child process, with limits of time and memory, what a stranger's file would have this process compute."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPU_SECONDS = 2
MEMORY = 2**30  # bytes beyond those of this process

_SECONDS = 120  # by the clock, of a child that waits for a lock which a thread held when it was forked
_BEYOND = 3  # exit code of a function that took too much memory
_STATM = Path("/proc/self/statm")


def ends_in_limits(function: Callable[[], object]) -> bool:
    """Call a pure function in a copy of this process; tell whether it came to an end, by an error too, in the limits.

    Where that cannot be tried, as without memory for a copy, the answer is True. Without /proc, as on macOS, memory has
    no limit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, whose locks the function must not need
        try:
            child = os.fork()
        except OSError:
            return True

    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code not in (_BEYOND, -signal.SIGXCPU, -signal.SIGKILL)  # a copy may also crash for its own reasons

    code = 0
    with suppress(BaseException):
        _limit()
        try:
            function()
        except MemoryError:
            code = _BEYOND
    os._exit(code)


def _limit() -> None:
    """Limit time and memory of this process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if not _STATM.exists():
        return

    most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + MEMORY
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
