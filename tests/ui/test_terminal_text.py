"""Text of models, servers, files and paths in the terminal: no control character of it arrives, no markup is read."""

import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

import jackpot
from helpers.commands import jackpot as typed
from jackpot.ui.charts import Section, Table
from jackpot.ui.terminal.output import PrintableFormatter, plain, print_line, printable, show_table, show_tables
from jackpot.ui.terminal.progress import progress, status

HOSTILE = (
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "\x9b31m",
    "a\rb",
    "\x08\x08",
    "[bold]x",
    "runs/[/]x",
    "[/bold]",
    "[link=http://x]",
)
UI = Path(jackpot.__file__).parent / "ui"


def assert_harmless(output: str, text: str) -> None:
    """Only rich's own sequences, for colors and the cursor, are left, and markup stands there as typed."""
    text_without_own_sequences = re.sub(r"\r?\x1b\[[0-9;?]*[mhlAK]", "", output)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text_without_own_sequences)
    assert printable(text) in text_without_own_sequences


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_hostile_text_is_shown_and_does_nothing(text: str, is_terminal: bool) -> None:
    def new_console() -> Console:
        return Console(file=io.StringIO(), force_terminal=is_terminal, width=200)

    line_console, table_console, tables_console, bars_console, status_console = (new_console() for _ in range(5))

    print_line(line_console, f"Run folder: {text}")
    show_table(table_console, text, (text, "other"), [(text, text)])
    table = Table(title=text, columns=("a", "b"), rows=((text, text),), note=text)
    show_tables(tables_console, [Section(title="", intro="", items=(table,))])
    with progress(bars_console) as bars:
        bars.update(text, 1, 2, {text: text}, is_due=True)
    with status(status_console, text) as show:
        show(text)

    for console in (line_console, table_console, tables_console, bars_console, status_console):
        assert_harmless(console.file.getvalue(), text)


def test_line_breaks_and_tabs_stay() -> None:
    text = "a\n\tb é ⟨"
    assert printable(text) == text
    assert plain(text).plain == text


def test_an_error_with_a_hostile_path_is_shown_as_it_is(tmp_path: Path) -> None:
    path = "runs/[/]x\x1b]0;owned\x07\x1b[2J[bold]"
    error = typed("diagnose", path, cwd=tmp_path).stderr

    assert "\x1b]0;" not in error
    assert "\x1b[2J" not in error
    assert "runs/[/]x⟨1B⟩]0;owned⟨07⟩⟨1B⟩[2J[bold]" in error

    record = logging.makeLogRecord({"msg": "server said %s", "args": ("\x1b[2J",)})
    assert PrintableFormatter().format(record) == "server said ⟨1B⟩[2J"
    assert isinstance(logging.lastResort.formatter, PrintableFormatter)


def test_all_text_of_the_terminal_goes_through_one_place() -> None:
    """rich.Text keeps escapes, and a bare string is read as markup."""
    other_paths = [path for path in UI.rglob("*.py") if path.name != "output.py"]
    assert not [path.name for path in other_paths if re.search(r"rich\.(text|markup) import", path.read_text())]
