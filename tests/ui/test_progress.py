"""Progress and tables in the terminal: bars and a changing line in a terminal, few lines in a log."""

import io
import logging
import os
import re

import pytest
from rich.console import Console

from helpers.runs import small_config
from jackpot.core.stages import stage
from jackpot.ui.charts import Section, Table
from jackpot.ui.commands.train import _listener
from jackpot.ui.terminal import progress as module
from jackpot.ui.terminal.output import print_line, show_answer, show_next, show_table
from jackpot.ui.terminal.progress import LINE_SECONDS, Counts, progress, status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test moves."""
    seconds = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


def new_console(is_terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=width)


def printed(console: Console) -> str:
    return console.file.getvalue()


def test_a_log_has_a_line_every_few_seconds_or_where_it_is_due(clock: list[float]) -> None:
    console = new_console(is_terminal=False)
    with progress(console) as bars:
        bars.update("iteration", 0, 10, {"policy": "41%"}, is_due=True)
        clock[0] += LINE_SECONDS / 2
        bars.update("iteration", 1, 10, {"reward": "0.1"})
        bars.update("iteration", 2, 10, {"reward": "0.2"}, is_due=True)
        clock[0] += LINE_SECONDS
        bars.update("iteration", 3, 10, {"reward": "[0.3]"})

    assert printed(console).splitlines() == [
        "iteration 0/10  policy 41%",
        "iteration 2/10  reward 0.2  10 s left",  # 2.5 s for two iterations
        "iteration 3/10  reward [0.3]  18 s left",  # 7.5 s for three
    ]


def test_progress_outlives_its_terminal() -> None:
    """Writing fails before SIGHUP says that the terminal was closed."""
    reading_end, writing_end = os.openpty()
    terminal = os.fdopen(writing_end, "w")
    bars = Counts(Console(file=terminal, force_terminal=True))

    os.close(reading_end)
    with pytest.raises(OSError, match="Input/output error"):
        print("a line", file=terminal, flush=True)

    bars.update("iteration", 1, 2, {}, is_due=True)
    bars.stage("evaluating")

    with pytest.raises(OSError):  # what it has not written
        terminal.close()


def test_a_terminal_keeps_a_fact_until_a_newer_one_comes() -> None:
    console = new_console(is_terminal=True)
    with progress(console) as bars:
        bars.update("arithmetic", 8, 64, {"tokens/s": "1,000"}, noun=" answers", start=0)
        bars.update("other", 1, 2, {"loss": "0.5"})
        bars.update("arithmetic", 16, 64, {"tokens/s": "2,000"}, noun=" answers")

    last_frame = printed(console).rpartition("arithmetic 16/64 answers")[2]  # its first bar, and what is below

    assert "other 1/2" in last_frame
    assert "tokens/s 2,000  loss 0.5" in last_frame
    assert "tokens/s 1,000" not in last_frame


def test_a_terminal_keeps_evaluations_above_the_bars() -> None:
    console = new_console(is_terminal=True, width=80)
    with progress(console) as bars:
        bars.update("iteration", 5, 10, {"policy": "41%", "reward": "0.2"}, is_due=True, lasting=["policy"])
        stage("training")
        bars.live.refresh()
        bars.update("iteration", 6, 10, {"reward": "0.3"})

    frames = printed(console)

    assert frames.count("iteration 5/10  policy 41%\n") == 1  # a line of its own, drawn once
    assert "60%" in frames
    assert "training" in frames

    last_frame = frames.rpartition("iteration 6/10")[2]
    assert "reward 0.3" in last_frame
    assert "policy" not in last_frame
    assert "training" not in last_frame


def test_the_seconds_of_an_iteration_count_each_phase_once() -> None:
    console = new_console(is_terminal=False)
    with _listener(console, small_config()) as listen:
        listen({"iteration": 1, "seconds/rollout": 1.0, "seconds/train": 3.0, "seconds/prepass": 2.0})

    assert "s/iteration 4\n" in printed(console)


def test_a_log_names_the_stages_of_the_start(clock: list[float]) -> None:
    console = new_console(is_terminal=False)
    with progress(console) as bars:
        stage("loading the model m")
        bars.update("iteration", 0, 10, {}, is_due=True)
        stage("training")
    stage("after the end")

    assert printed(console).splitlines() == ["loading the model m", "iteration 0/10"]


def test_a_stage_that_is_shown_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("jackpot.stages")
    with caplog.at_level(logging.INFO), progress(new_console(is_terminal=False)):
        stage("loading the model m")

    assert not caplog.records
    assert logger.propagate


def test_a_status_shows_the_stages_that_begin() -> None:
    console = new_console(is_terminal=True)
    with status(console, "starting"):
        stage("loading the model m")
    assert "loading the model m" in printed(console)


def test_a_terminal_breaks_lines_between_words_but_no_log_does() -> None:
    text = "word " * 30 + "runs/a-long-name-that-stays-whole"
    terminal, log = new_console(is_terminal=True, width=80), new_console(is_terminal=False, width=80)
    print_line(terminal, text)
    print_line(log, text)

    assert printed(log) == f"{text}\n"
    assert printed(terminal).split() == text.split()
    assert max(map(len, printed(terminal).splitlines())) <= 80


def test_a_command_and_a_file_are_never_broken() -> None:
    console = new_console(is_terminal=True, width=80)
    command = "jackpot train quickstart " + " ".join(f"objective.clip_low=0.{digit}" for digit in range(10))
    show_next(console, {command: "train"})
    print_line(console, f"key: {'value ' * 20}", is_whole=True)

    assert f"  {command}\n" in printed(console)
    assert f"key: {'value ' * 20}\n" in printed(console)


def test_a_table_too_wide_goes_on_in_another() -> None:
    console = new_console(is_terminal=False, width=80)
    heads = ("arm", *(f"a long head {index}" for index in range(12)))
    rows = [("obrs", *(f"{index}.{index} ± 0.12" for index in range(12)))]

    show_table(console, "", heads, rows, heads[1:])
    lines = printed(console).splitlines()

    assert max(map(len, lines)) <= 80
    assert sum("obrs" in line for line in lines) == 3  # four columns each
    assert all(any(cell in line for line in lines) for cell in rows[0])

    narrow_console = new_console(is_terminal=False, width=80)
    show_table(narrow_console, "", ("model", "before"), [("policy", "word " * 40)], ["before"][:0])

    assert max(map(len, printed(narrow_console).splitlines())) <= 80


def test_a_column_of_text_has_the_width_that_its_words_need() -> None:
    console = new_console(is_terminal=True, width=80)
    heads = ("arm", "row", "aime24 pass@1", "amc22_23 pass@1", "math500 pass@1", "gsm8k pass@1")
    show_table(console, "", heads, [("mask_only", "Masking-only (best before crash)", *["19.167"] * 4)], heads[2:])
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(console))

    assert "Masking-only (best" in text
    assert text.count("19.167") == 4
    assert max(map(len, text.splitlines())) <= 80


def test_details_are_printed_on_request_alone_and_counted() -> None:
    main_table, detail_table, long_table = (
        Table(title=title, columns=("a",), rows=(("x",),) * rows, is_detail=title == "more")
        for title, rows in (("main", 1), ("more", 1), ("long", 41))
    )
    sections = [Section(title="", intro="", items=(main_table, detail_table, long_table))]
    short_console, detailed_console = new_console(is_terminal=False), new_console(is_terminal=False)

    show_answer(short_console, ["The verdict."], sections, show_all=False, commands={"jackpot report RUN": "the page"})

    assert printed(short_console).startswith("The verdict.\n")
    assert "main" in printed(short_console)
    assert "more\n" not in printed(short_console)
    assert "--all prints 2 more tables." in printed(short_console)
    assert printed(short_console).endswith("Next:\n  jackpot report RUN  # the page\n")

    show_answer(detailed_console, [], sections, show_all=True)
    assert all(f"{title}\n" in printed(detailed_console) for title in ("main", "more", "long"))
    assert "--all" not in printed(detailed_console)


def test_a_status_is_a_line_each_in_a_log_but_not_too_often(clock: list[float]) -> None:
    full_console, rare_console = new_console(is_terminal=False), new_console(is_terminal=False)
    with status(full_console, "first") as show_in_full, status(rare_console, "first", every=5.0) as show_rarely:
        for step in range(4):
            clock[0] += 2.0
            show_in_full(f"step [{step}]")
            show_rarely(f"step [{step}]")

    assert printed(full_console).splitlines() == [f"step [{step}]" for step in range(4)]
    assert printed(rare_console).splitlines() == ["step [2]"]


def test_cells_are_never_markup_and_numbers_stand_on_the_right() -> None:
    console = new_console(is_terminal=False)
    show_table(console, "[title]", ("name", "count"), [("[red]a", "1"), ("b", "1,000")], ["count"])
    lines = printed(console).splitlines()

    assert lines[0] == "[title]"
    assert "│ [red]a │     1 │" in lines
    assert "│ b      │ 1,000 │" in lines
