"""Counts the processor cores that are free, for every layer that starts threads or processes."""

import os


def free_cores() -> int:
    """Estimate the number of cores that no process keeps busy now, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable - round(os.getloadavg()[0]))
