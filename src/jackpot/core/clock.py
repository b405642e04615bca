"""New."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Seconds(NamedTuple):
    wall: float = 0.0
    processor: float = 0.0  # of all threads of this process


class Clock:
    """Adds up the seconds of the phases of an iteration: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self._seconds: dict[str, Seconds] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        before = self._seconds.get(phase, Seconds())
        self._seconds[phase] = Seconds(
            before.wall + time.perf_counter() - wall, before.processor + time.process_time() - processor
        )

    def take(self) -> dict[str, Seconds]:
        """The seconds by phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
