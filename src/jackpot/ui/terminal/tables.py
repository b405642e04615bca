"""The tables of a page in the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from jackpot.ui.charts import Section, Table

_MOST_ROWS = 40


def show_tables(console: Console, sections: Iterable[Section]) -> None:
    """The tables of a page with the notes below them; of those too long for a terminal only that they are there."""
    for section in sections:
        for item in section.items:
            if isinstance(item, Table) and len(item.rows) > _MOST_ROWS:
                console.print(Text(f"{item.title}: {len(item.rows)} rows, in the page\n"), highlight=False)
            elif isinstance(item, Table):
                console.print(_terminal_table(item))
                console.print(Text(item.note + "\n" if item.note else ""), highlight=False)


def show_files(console: Console, files: Sequence[Path]) -> None:
    """What was written; all of it into one folder."""
    names = ", ".join(file.name for file in files)
    console.print(f"Wrote {names} to {files[0].parent}", soft_wrap=True, highlight=False)


def _terminal_table(item: Table) -> TerminalTable:
    """The first column is what the row is about; numbers stand on the right, and a single second column is text."""
    table = TerminalTable(title=Text(item.title), title_justify="left")
    for place, column in enumerate(item.columns):
        is_number = place > 0 and len(item.columns) > 2
        table.add_column(Text(column), justify="right" if is_number else "left", overflow="fold")
    for row in item.rows:
        table.add_row(*map(Text, row))
    return table
