"""Timing of the phases of an iteration."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from jackpot.core.stages import stage

STAGES = {  # what the command line says of each phase
    "rollout": "generating rollouts",
    "score": "scoring responses",
    "check": "checking the engine's log-probs",
    "train": "training",
    "sync": "sending weights to the engines",
    "save": "saving",
    "evaluate": "evaluating",
}


class Seconds(NamedTuple):
    """Holds the time that one phase took."""

    wall: float = 0.0  # wall-clock time, seconds
    processor: float = 0.0  # processor time of all threads of this process, seconds

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        """Return this time and `times` the other one."""
        return Seconds(self.wall + times * other.wall, self.processor + times * other.processor)


class Clock:
    """Adds up the time of each phase of an iteration: `with clock("rollout"): ...`.

    Phases do not overlap: the time of a phase within another one counts to the inner one alone. What belongs to no
    phase is the phase `other`, so that all phases together are the whole time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, Seconds] = {}
        self._begin = _now()  # of the time that `take` returns
        self._inner = Seconds()  # time of the phases that ended within the one that is open
        self._open: list[str] = []  # phases that have begun and not ended, the outermost first

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Add the time of the block to `phase`, and say so; after it, say again what goes on."""
        self._open.append(STAGES.get(phase, phase))
        stage(self._open[-1])
        begin, before, self._inner = _now(), self._inner, Seconds()
        try:
            yield
        finally:
            self._open.pop()
            if self._open:
                stage(self._open[-1])
        whole = _now().plus(begin, -1.0)
        self._seconds[phase] = self._seconds.get(phase, Seconds()).plus(whole).plus(self._inner, -1.0)
        self._inner = before.plus(whole)

    def take(self) -> dict[str, Seconds]:
        """Return the time of each phase since the last call, and start again from 0."""
        now = _now()
        other = now.plus(self._begin, -1.0)
        for spent in self._seconds.values():
            other = other.plus(spent, -1.0)
        seconds, self._seconds, self._begin = self._seconds | {"other": other}, {}, now
        return seconds


def _now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())
