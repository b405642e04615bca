"""Progress and tables in the terminal: bars and a changing line in a terminal, few lines in a log."""

import io

import pytest
from rich.console import Console

from jackpot.ui.terminal import progress as module
from jackpot.ui.terminal.progress import LINE_SECONDS, progress, status
from jackpot.ui.terminal.tables import show_table


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test moves."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120)


def printed(shown: Console) -> str:
    return shown.file.getvalue()


def test_a_log_has_a_line_every_few_seconds_and_at_once_where_one_is_due(clock: list[float]) -> None:
    shown = console(is_terminal=False)
    with progress(shown) as bars:
        bars.update("iteration", 0, 10, {"policy": "41%"}, is_due=True)
        clock[0] += LINE_SECONDS / 2
        bars.update("iteration", 1, 10, {"reward": "0.1"})
        bars.update("iteration", 2, 10, {"reward": "0.2"}, is_due=True)
        clock[0] += LINE_SECONDS
        bars.update("iteration", 3, 10, {"reward": "[0.3]"})
    assert printed(shown).splitlines() == [
        "iteration 0/10  policy 41%",
        "iteration 2/10  reward 0.2  10 s left",  # 2.5 s for two iterations
        "iteration 3/10  reward [0.3]  18 s left",  # 7.5 s for three
    ]


def test_a_terminal_keeps_a_fact_until_a_newer_one_comes() -> None:
    shown = console(is_terminal=True)
    with progress(shown) as bars:
        bars.update("arithmetic", 8, 64, {"tokens/s": "1,000"}, noun=" answers", start=0)
        bars.update("other", 1, 2, {"loss": "0.5"})
        bars.update("arithmetic", 16, 64, {"tokens/s": "2,000"}, noun=" answers")
    last = printed(shown).split("tokens/s 2,000")
    assert len(last) > 1 and "loss 0.5" in printed(shown)
    assert "arithmetic 16/64 answers" in printed(shown) and "other 1/2" in printed(shown)


def test_a_status_is_a_line_each_in_a_log_but_not_too_often(clock: list[float]) -> None:
    each, rare = console(is_terminal=False), console(is_terminal=False)
    with status(each, "first") as show_each, status(rare, "first", every=5.0) as show_rare:
        for number in range(4):
            clock[0] += 2.0
            show_each(f"step [{number}]")
            show_rare(f"step [{number}]")
    assert printed(each).splitlines() == [f"step [{number}]" for number in range(4)]
    assert printed(rare).splitlines() == ["step [2]"]


def test_cells_of_a_table_are_never_markup_and_numbers_stand_on_the_right() -> None:
    shown = console(is_terminal=False)
    show_table(shown, "[title]", ("name", "count"), [("[red]a", "1"), ("b", "1,000")], ["count"])
    lines = printed(shown).splitlines()
    assert lines[0] == "[title]"
    assert "│ [red]a │     1 │" in lines and "│ b      │ 1,000 │" in lines
