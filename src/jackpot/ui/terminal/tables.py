"""Prints tables and the names of written files in the terminal."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as TerminalTable

from jackpot.ui.charts import Section, Table
from jackpot.ui.terminal.progress import print_line
from jackpot.ui.terminal.text import plain

_MOST_ROWS = 40  # of a table in the terminal; a longer one is in the page only


def show_tables(console: Console, sections: Iterable[Section]) -> None:
    """Print the tables of a page with their notes; of a table too long for a terminal print only its title."""
    for section in sections:
        for item in section.items:
            if isinstance(item, Table) and len(item.rows) > _MOST_ROWS:
                print_line(console, f"{item.title}: {len(item.rows)} rows, in the page\n")
            elif isinstance(item, Table):
                numbers = item.columns[1:] if len(item.columns) > 2 else ()  # a single second column is text
                show_table(console, item.title, item.columns, item.rows, numbers)
                console.print(plain(item.note + "\n" if item.note else ""), highlight=False)


def show_table(
    console: Console,
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    **options: object,
) -> None:
    """Print one table; no cell is read as markup.

    Args:
        columns: heads, of which those in `numbers` are aligned to the right.
        options: further arguments of `rich.table.Table`.
    """
    if title:
        print_line(console, title)  # a title of the table itself would be cut into lines of the table's width
    table = TerminalTable(**options)
    for column in columns:
        table.add_column(plain(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    console.print(table)


def show_files(console: Console, files: Sequence[Path]) -> None:
    """Print the names of written files and the one folder that holds them."""
    names = ", ".join(file.name for file in files)
    print_line(console, f"Wrote {names} to {files[0].parent}")
