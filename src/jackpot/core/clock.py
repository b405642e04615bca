"""Timing of the phases of an iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Seconds(NamedTuple):
    """Holds the time that one phase took."""

    wall: float = 0.0  # wall-clock time, seconds
    processor: float = 0.0  # processor time of all threads of this process, seconds


class Clock:
    """Adds up the time of each phase of an iteration: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self._seconds: dict[str, Seconds] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        before = self._seconds.get(phase, Seconds())
        self._seconds[phase] = Seconds(
            before.wall + time.perf_counter() - wall, before.processor + time.process_time() - processor
        )

    def take(self) -> dict[str, Seconds]:
        """Return the time of each phase since the last call, and start again from 0."""
        seconds, self._seconds = self._seconds, {}
        return seconds
