"""A timer of the phases of an iteration: generating, scoring, training, ..."""

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
    """The time that one phase took."""

    wall: float = 0.0  # wall-clock time, seconds
    processor: float = 0.0  # processor time of all threads of this process, seconds

    def plus(self, seconds: "Seconds", times: float = 1.0) -> "Seconds":
        """Return this time plus the time `seconds` multiplied by `times`; with -1 the difference of both."""
        return Seconds(self.wall + times * seconds.wall, self.processor + times * seconds.processor)


class Clock:
    """A timer that adds up the time of each phase of an iteration: `with clock("rollout"): ...`.

    The times of all phases add up to the whole time: a phase inside another phase counts to the inner phase alone, and
    time outside of all phases to the phase `other`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, Seconds] = {}
        self._begin = _now()  # start of the period whose times the next `take` returns
        self._inner = Seconds()  # time of the phases that ended within the innermost open phase
        self._open: list[str] = []  # what the command line says of the open phases, the outermost first

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Add the time that the `with` block takes to the time of `phase`.

        Meanwhile the command line shows this phase, and after the block the phase around it, if there is one. An error
        in the block ends the run, so no time is added then.
        """
        self._open.append(STAGES.get(phase, phase))
        stage(self._open[-1])

        # Until the block ends, `_inner` counts the phases inside this one. Then it is its old value plus this phase.
        begin = _now()
        inner_before, self._inner = self._inner, Seconds()
        try:
            yield
        finally:
            self._open.pop()
            if self._open:
                stage(self._open[-1])

        # Count the duration of this phase without that of its inner phases, which have counted themselves. For the
        # phase around this one, the whole duration is that of an inner phase. `plus` with -1.0 subtracts.
        duration = _now().plus(begin, -1.0)
        self._seconds[phase] = self._seconds.get(phase, Seconds()).plus(duration).plus(self._inner, -1.0)
        self._inner = inner_before.plus(duration)

    def take(self) -> dict[str, Seconds]:
        """Return the time of each phase since the last call, and start again from 0."""
        # The time since the last call that no phase has counted belongs to the phase `other`. `plus` with -1.0
        # subtracts.
        now = _now()
        outside = now.plus(self._begin, -1.0)
        for seconds in self._seconds.values():
            outside = outside.plus(seconds, -1.0)

        by_phase = self._seconds | {"other": outside}
        self._seconds, self._begin = {}, now
        return by_phase


def _now() -> Seconds:
    """Read the wall clock and the processor clock; only the difference of two readings has a meaning."""
    return Seconds(wall=time.perf_counter(), processor=time.process_time())
