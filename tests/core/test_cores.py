"""Cores are counted by what keeps them busy now, not by what did a minute ago."""

import itertools
from pathlib import Path

import pytest

from jackpot.core import cores

# /proc/stat before and after: user nice system idle iowait irq softirq steal guest guest_nice
TOTAL = "cpu  900 0 0 900 0 0 0 0 0 0\n"
BEFORE = TOTAL + "cpu0 500 0 0 400 0 0 0 0 7 0\ncpu1 400 0 0 500 0 0 0 0 0 0\ncpu12 0 0 0 9 0 0 0 0 0 0\nintr 5 6\n"
IDLE = "cpu0 500 0 0 430 0 0 0 0 7 0\ncpu1 401 0 0 510 19 0 0 0 0 0\ncpu12 30 0 0 9 0 0 0 0 0 0\n"
ONE_BUSY = "cpu0 515 5 8 400 0 0 0 2 7 0\ncpu1 400 0 0 530 0 0 0 0 0 0\ncpu12 0 0 0 39 0 0 0 0 0 0\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two cores, 0 and 1, of a larger machine whose load was 2 in the last minute."""

    def make(after: str | None, quota: str = "max 100000") -> None:
        stat, limit = tmp_path / "stat", tmp_path / "cpu.max"
        if after:
            stat.write_text(BEFORE)
        limit.write_text(quota)

        monkeypatch.setattr(cores, "_STAT", stat)
        monkeypatch.setattr(cores, "_QUOTA", limit)
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        monkeypatch.setattr(cores.os, "getloadavg", lambda: (2.0, 2.0, 2.0))
        monkeypatch.setattr(cores.time, "process_time", lambda: 0.0)
        monkeypatch.setattr(cores.time, "sleep", lambda _: stat.write_text(after))

    return make


@pytest.mark.parametrize(
    ("after", "quota", "free"),
    [
        (IDLE, "max 100000", 2),  # the load of the last minute has ended, and core 12 is not ours
        (ONE_BUSY, "max 100000", 1),
        (IDLE, "150000 100000", 1),
        (IDLE, "50000 100000", 1),
        (None, "max 100000", 1),  # no /proc: by the load
    ],
)
def test_cores_that_nothing_keeps_busy_now_are_free(after, quota, free, machine) -> None:
    machine(after, quota)
    assert cores.free_cores() == free


def test_what_this_process_does_meanwhile_leaves_its_cores_free(machine, monkeypatch) -> None:
    machine(ONE_BUSY)
    monkeypatch.setattr(cores.time, "process_time", itertools.count().__next__)  # one second of work
    monkeypatch.setattr(cores.time, "perf_counter", itertools.count().__next__)  # in one second
    assert cores.free_cores() == 2


def test_stolen_time_is_busy_and_waiting_for_a_disk_is_not() -> None:
    before = "cpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n"
    assert cores.busy_cores(before, "cpu0 0 0 0 5 5 0 0 10 0 0\ncpu1 20 0 0 0 0 0 0 0 20 0\n", {0, 1}) == 1.5


def test_this_machine_has_a_free_core() -> None:
    assert 1 <= cores.free_cores() <= len(cores._usable_cores())


@pytest.mark.parametrize(("looks", "threads"), [((2,), 2), ((1, 2), 2), ((1, 1), 1)])
def test_auto_looks_twice_and_warns_of_cores_that_stay_busy(looks, threads, machine, monkeypatch, caplog) -> None:
    machine(IDLE)
    seen = iter(looks)
    monkeypatch.setattr(cores, "free_cores", lambda: next(seen))

    assert cores.pick_threads("auto") == threads
    assert next(seen, None) is None
    assert [(record.levelname, record.args) for record in caplog.records] == (
        [("WARNING", (1, 2, 2, 2.0, 2))] if threads == 1 else []
    )


def test_a_given_number_of_threads_is_taken_unseen(monkeypatch) -> None:
    monkeypatch.setattr(cores, "free_cores", lambda: pytest.fail("looked"))
    assert cores.pick_threads(3) == 3
