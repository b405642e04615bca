"""Counts the processor cores that are free, for every layer that starts threads or processes."""

import logging
import os
import time
from collections.abc import Collection, Container
from pathlib import Path
from typing import Literal

from jackpot.core.process_rank import process_rank

_STAT, _QUOTA = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")
_SECONDS = 0.3  # between the two readings of the cores' counters
_SETTLE = 2.0  # seconds until a second look: by then a process that was ending has ended
_IDLE, _ALL = slice(3, 5), slice(8)  # columns of a core: idle and waiting for a disk; all, guests are in the first two

_log = logging.getLogger(__name__)


def free_cores() -> int:
    """Estimate the number of cores that other processes leave free now, at least one.

    On Linux the counters of the cores that this process may use are read twice, 0.3 seconds apart, so that work which
    has ended does not count, such as an installation a moment ago; a container's quota is the most. Elsewhere the load
    of the last minute is taken.
    """
    cores = _own_cores()
    try:
        before, spent, since = _STAT.read_text(), time.process_time(), time.perf_counter()
        time.sleep(_SECONDS)
        mine = (time.process_time() - spent) / (time.perf_counter() - since)
        busy = max(0.0, busy_cores(before, _STAT.read_text(), cores) - mine)
    except OSError:
        busy = os.getloadavg()[0]
    return max(1, min(len(cores) - round(busy), _quota()))


def busy_cores(before: str, after: str, cores: Container[int]) -> float:
    """Return how many of `cores` were busy between two readings of /proc/stat, with time that other machines stole."""
    first, last = _ticks(before), _ticks(after)
    spent = [
        [end - begin for begin, end in zip(first[core], last[core], strict=True)] for core in last if core in cores
    ]
    return sum(1.0 - sum(ticks[_IDLE]) / max(1, sum(ticks)) for ticks in spent)


def _own_cores() -> Collection[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _ticks(stat: str) -> dict[int, list[int]]:
    """Return the counters of every core by its number."""
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu") and line[3].isdigit()]
    return {int(name.removeprefix("cpu")): list(map(int, ticks))[_ALL] for name, *ticks in rows}


def _quota() -> int:
    """Return the whole cores that the container of this process may keep busy; very many where none is set."""
    try:
        quota, period = _QUOTA.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no cgroup, or "max"
        return 2**31


def pick_threads(setting: int | Literal["auto"]) -> int:
    """Return the number of CPU threads: for `auto` the number of free cores, shared by the ranks on this machine.

    On a machine with another busy process, training with one thread too many was 10 times slower. Where cores are busy,
    `auto` looks again after two seconds, since a process may just be ending, and warns if they still are.
    """
    if setting != "auto":
        return setting

    ranks, cores = process_rank().local_size, min(len(_own_cores()), _quota())
    most = max(1, cores // ranks)
    threads = max(1, free_cores() // ranks)
    if threads < most:
        time.sleep(_SETTLE)
        threads = max(threads, free_cores() // ranks)
    if threads < most:
        _log.warning(
            "threads=auto takes %d of %d CPU threads: other processes keep some of the %d cores busy now (load %.1f in "
            "the last minute). A run keeps the number that it began with; set threads=%d to take all",
            *(threads, most, cores, os.getloadavg()[0], most),
        )
    return threads
