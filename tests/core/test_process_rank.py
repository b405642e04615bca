"""The place of a process among those that torchrun started."""

import pytest

from jackpot.core.errors import ConfigError
from jackpot.core.process_rank import ProcessRank, process_rank

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def given(monkeypatch: pytest.MonkeyPatch, *numbers: str | None) -> None:
    for name, number in zip(NAMES, numbers, strict=True):
        monkeypatch.delenv(name, raising=False)
        if number is not None:
            monkeypatch.setenv(name, number)


@pytest.mark.parametrize("numbers", [(None, None, None, None), ("0", "1", "0", "1"), (None, "1", None, None)])
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, numbers: tuple) -> None:
    given(monkeypatch, *numbers)
    assert process_rank() == ProcessRank(0, 1, 0, 1)


def test_several_processes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "5", "8", "1", "4")
    assert process_rank() == ProcessRank(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    "numbers", [("8", "8", "0", "4"), ("1", "8", "4", "4"), ("1", "2", "1", "4"), (None, "2", "0", "2"), ("x",) * 4]
)
def test_numbers_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, numbers: tuple) -> None:
    given(monkeypatch, *numbers)
    with pytest.raises(ConfigError, match=r"the environment has .*WORLD_SIZE=.* start it with torchrun"):
        process_rank()
