"""Limits of time and memory: for this process, and for a child process that tries what a stranger's file asks for."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPU_SECONDS = 2  # seconds of processor time that a child may take
MEMORY = 2**30  # bytes that a child may take beyond those of this process

_SECONDS = 120  # longest time of a child, seconds of wall clock: a lock held during its fork is never released
_BEYOND = 3  # exit code of a child whose function took too much memory
_STATM = Path("/proc/self/statm")


def ends_in_limits(function: Callable[[], object]) -> bool:
    """Call a pure function in a copy of this process; tell whether it ends within the limits of time and memory.

    It may end in a result or in an error. The limit of time is on the processor time.

    Return True also where this process cannot be copied, as without memory for the copy, and where the copy is killed
    because it waited for too long. Where there is no /proc, as on macOS, the copy has no limit of memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is safe: the function takes no lock
        try:
            child = os.fork()
        except OSError:
            return True

    if child:  # this is the parent
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # Any other end, such as a crash or the alarm after `_SECONDS`, counts as within the limits.
        return code not in (_BEYOND, -signal.SIGXCPU, -signal.SIGKILL)

    # This is the child, which ends here with a code for the parent.
    code = 0
    with suppress(BaseException):
        _limit()
        try:
            function()
        except MemoryError:
            code = _BEYOND
    os._exit(code)


def _limit() -> None:
    """Limit time and memory of this process, which is the child."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if size := address_space():
        lower_limit(resource.RLIMIT_AS, size + MEMORY)


def lower_limit(limit: int, value: int) -> None:
    """Lower a limit of this process, such as RLIMIT_AS, for good: to `value`, or to the hard limit if that is lower."""
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def address_space() -> int:
    """Return the address space of this process in bytes, or 0 where there is no /proc."""
    try:
        return int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
