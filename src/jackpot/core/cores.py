"""The number of processor cores that are free, for every layer that starts threads or processes."""

import logging
import os
import time
from collections.abc import Collection, Container
from operator import sub
from pathlib import Path
from typing import Literal

from jackpot.core.process_rank import process_rank

_STAT, _QUOTA = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")
_SECONDS = 0.3  # seconds between the two readings of the cores' counters
_SETTLE = 2.0  # seconds until free cores are counted again: by then a process that was ending has ended
_IDLE = slice(3, 5)  # columns of a core in /proc/stat: ticks that it was idle, or waited for a disk
_ALL = slice(8)  # all columns but the ticks of guest machines, which the first two columns contain already

_log = logging.getLogger(__name__)


def free_cores() -> int:
    """Estimate the number of cores that other processes leave free now: at least one, at most a container's quota.

    On Linux the counters of the cores that this process may use are read twice, 0.3 seconds apart, so that work which
    has ended does not count, such as an installation a moment ago. Elsewhere the load of the last minute is taken.
    """
    cores = _usable_cores()
    try:
        before = _STAT.read_text()
        processor_time, start = time.process_time(), time.perf_counter()
        time.sleep(_SECONDS)
        # The cores that this process itself kept busy meanwhile are free for it.
        used_here = (time.process_time() - processor_time) / (time.perf_counter() - start)
        busy = max(0.0, busy_cores(before, _STAT.read_text(), cores) - used_here)
    except OSError:  # no /proc
        busy = os.getloadavg()[0]

    return max(1, min(len(cores) - round(busy), _container_quota()))


def busy_cores(before: str, after: str, cores: Container[int]) -> float:
    """Return how many of `cores`, a fractional number, were busy between two readings of the text of /proc/stat.

    A core that the host gave to another virtual machine counts as busy.
    """
    first, last = _ticks(before), _ticks(after)
    changes = [list(map(sub, last[core], first[core])) for core in last if core in cores]
    return sum(1.0 - sum(ticks[_IDLE]) / max(1, sum(ticks)) for ticks in changes)


def _usable_cores() -> Collection[int]:
    """Return the ids of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _ticks(stat: str) -> dict[int, list[int]]:
    """Parse the text of /proc/stat: the counters of every core, in clock ticks since boot, by the core's id."""
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu") and line[3].isdigit()]
    return {int(name.removeprefix("cpu")): list(map(int, ticks))[_ALL] for name, *ticks in rows}


def _container_quota() -> int:
    """Return how many whole cores the container of this process may keep busy; 2^31 without a limit."""
    try:
        quota, period = _QUOTA.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no cgroup, or "max"
        return 2**31


def pick_threads(setting: int | Literal["auto"]) -> int:
    """Return this process's number of CPU threads: for `auto` its share of the free cores, beside this machine's ranks.

    Beside another busy process, training with one thread more than there were free cores was 10 times slower. Where
    cores are busy, `auto` looks again after two seconds, since a process may just be ending, and warns if cores are
    still busy then.
    """
    if setting != "auto":
        return setting

    ranks, cores = process_rank().local_size, min(len(_usable_cores()), _container_quota())
    full_share = max(1, cores // ranks)  # threads of a rank where no other process runs
    threads = max(1, free_cores() // ranks)
    if threads < full_share:
        time.sleep(_SETTLE)
        threads = max(threads, free_cores() // ranks)

    if threads < full_share:
        _log.warning(
            "threads=auto takes %d of %d CPU threads: other processes keep some of the %d cores busy now (load %.1f in "
            "the last minute). A run keeps the number that it began with; set threads=%d to take all",
            *(threads, full_share, cores, os.getloadavg()[0], full_share),
        )
    return threads
