"""Limits of time and memory: of this process, and of a child that tries what a stranger's file would have computed."""

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
    if used := address_space():
        lower_limit(resource.RLIMIT_AS, used + MEMORY)


def lower_limit(limit: int, most: int) -> None:
    """Set a limit of this process, such as RLIMIT_AS, which it cannot raise again; a lower one stays."""
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (most, most))


def address_space() -> int:
    """Return the address space of this process in bytes, or 0 where there is no /proc."""
    try:
        return int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
