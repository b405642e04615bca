"""Every second of an iteration belongs to one phase."""

import pytest

from jackpot.core import clock
from jackpot.core.clock import Clock, Seconds
from jackpot.core.stages import listening


def test_phases_add_up_to_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 100.0, "processor": 7.0}
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(clock.time, "process_time", lambda: now["processor"])

    def work(wall: float, processor: float) -> None:
        now["wall"], now["processor"] = now["wall"] + wall, now["processor"] + processor

    clocked = Clock()
    work(1.0, 0.5)
    for _ in range(2):
        with clocked("train"):
            work(4.0, 8.0)
        work(0.25, 0.25)
    assert clocked.take() == {"train": Seconds(8.0, 16.0), "other": Seconds(1.5, 1.0)}

    with clocked("save"):
        work(2.0, 0.0)
        for _ in range(2):
            with clocked("rollout"):
                work(0.5, 0.5)
                with clocked("score"):
                    work(1.0, 1.0)

    inner = {"rollout": Seconds(1.0, 1.0), "score": Seconds(2.0, 2.0)}
    assert clocked.take() == {"save": Seconds(2.0, 0.0), **inner, "other": Seconds(0.0, 0.0)}


def test_an_inner_phase_that_ends_leaves_the_outer_name() -> None:
    names: list[str] = []
    clocked = Clock()
    with listening(names.append), clocked("rollout"):
        with clocked("score"):
            pass
        with pytest.raises(KeyError), clocked("check"):
            raise KeyError

    outer = "generating rollouts"
    assert names == [outer, "scoring responses", outer, "checking the engine's log-probs", outer]
