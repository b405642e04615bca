"""`process_rank` reads the rank of a process from torchrun's variables, and refuses those that contradict."""

import pytest

from jackpot.core.errors import ConfigError
from jackpot.core.process_rank import ProcessRank, process_rank

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def set_variables(monkeypatch: pytest.MonkeyPatch, *values: str | None) -> None:
    """Set the four `VARIABLES` of the environment in this order; None leaves a variable out."""
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("values", [(None, None, None, None), ("0", "1", "0", "1"), (None, "1", None, None)])
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, values: tuple) -> None:
    set_variables(monkeypatch, *values)

    assert process_rank() == ProcessRank(rank=0, size=1, local_rank=0, local_size=1)


def test_several_processes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, "5", "8", "1", "4")

    assert process_rank() == ProcessRank(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(("8", "8", "0", "4"), id="rank not below size"),
        pytest.param(("1", "8", "4", "4"), id="local rank not below local size"),
        pytest.param(("1", "2", "1", "4"), id="local size above size"),
        pytest.param((None, "2", "0", "2"), id="no rank among several"),
        pytest.param(("x",) * 4, id="no numbers"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, values: tuple) -> None:
    set_variables(monkeypatch, *values)

    with pytest.raises(ConfigError, match=r"the environment has .*WORLD_SIZE=.* start it with torchrun"):
        process_rank()
