"""Tries in a child process, with limits of time and memory, what a stranger's file would have this process compute."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

CPU_SECONDS = 2
_SECONDS = 120  # by the clock, of a child that waits for a lock which a thread held when it was forked
_STOPPED = (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
MEMORY = 2**30  # bytes beyond those of this process

_STATM = Path("/proc/self/statm")


def ends_in_limits(function: Callable[[], object]) -> bool:
    """Call a pure function in a copy of this process; tell whether it came to an end, by an error too, in the limits.

    Without /proc, as on macOS, memory has no limit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, whose locks the function must not need
        child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code not in (
            1,
            *(-number for number in _STOPPED),
        )  # a copy may crash for reasons of its own, as on macOS

    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        if _STATM.exists():
            most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        function()
        status = 0
    except MemoryError:
        pass
    except BaseException:
        status = 0
    os._exit(status)
