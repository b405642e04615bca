"""Prints lines, tables, names of written files and commands to type next.

No text is read as markup, and no control character in it reaches the terminal.
"""

import logging
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import HEAVY_HEAD, Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from jackpot.ui.lazy import lazy

with lazy():
    from jackpot.ui import charts

_MOST_ROWS = 40  # most rows of a table that the terminal shows without --all
_TEXT_WIDTH = 24  # least width of a column of longer texts, characters; such texts break between words
_CONTROLS = {  # C0, DEL and C1, with which text moves the cursor, clears the screen or renames the window
    code: f"⟨{code:02X}⟩" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    r"""Replace every control character, except line breaks and tabs, by its code.

    >>> printable("\x1b[2J")
    '⟨1B⟩[2J'
    """
    return text.translate(_CONTROLS)


def plain(text: str, style: str = "") -> Text:
    """Return a text that rich prints as it is: without control characters, and `[bold]` in it is no markup."""
    return Text(printable(text), style=style)


class PrintableFormatter(logging.Formatter):
    """A formatter that removes control characters from log messages, which quote servers and paths."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a message, then replace its control characters."""
        return printable(super().format(record))


def print_line(console: Console, text: str, is_whole: bool = False) -> None:
    """Print text as it is: no markup, no control characters, no colors for numbers.

    A terminal breaks long lines between words. A log has no line breaks, so that programs find whole lines.

    Args:
        is_whole: whether the terminal must not break the line either, because users copy it: a command or a path.
    """
    console.print(plain(text), highlight=False, soft_wrap=is_whole or not console.is_terminal)


def print_lines(console: Console, texts: Iterable[str], head: str = "") -> None:
    """Print each text on its own line, after `head`, as `print_line` does."""
    for text in texts:
        print_line(console, head + text)


def labelled(lines: Mapping[str, str]) -> str:
    """Return the texts as lines, each after its label, with all texts beginning in one column."""
    width = max(map(len, lines)) + 1
    return "\n".join(f"{label + ':':<{width}} {text}" for label, text in lines.items())


def show_answer(
    console: Console,
    verdicts: Iterable[str],
    sections: Iterable["charts.Section"],
    show_all: bool,
    files: Sequence[Path] = (),
    commands: Mapping[str, str] | None = None,
) -> None:
    """Print verdicts, then tables, then the names of written files, then commands.

    Args:
        verdicts: the answer to the user's question: sentences, or texts that `labelled` returned.
        sections: sections with the tables; their charts are not printed.
        show_all: whether to print the tables marked `is_detail` too.
        files: files that were written, all in one folder.
        commands: each command to type next, with its purpose.
    """
    for verdict in verdicts:
        console.print(plain(f"{verdict}\n", style="bold"), highlight=False)
    if left_out := show_tables(console, sections, show_all):
        print_line(console, f"--all prints {left_out} more {'table' if left_out == 1 else 'tables'}.")
    if files:
        show_files(console, files)
    show_next(console, commands or {})


def show_next(console: Console, commands: Mapping[str, str]) -> None:
    """Print the commands to type next, each with its purpose; a command is never broken into lines."""
    if commands:
        print_line(console, "Next:")
    for command, purpose in commands.items():
        line = f"  {command}  # {purpose}"
        if cell_len(line) > console.width:
            line = f"  {command}\n      # {purpose}"
        print_line(console, line, is_whole=True)


def show_tables(console: Console, sections: Iterable["charts.Section"], show_all: bool = True) -> int:
    """Print the tables of a page with their notes; return how many were left out.

    Without `show_all`, tables that are marked `is_detail` or too long for a terminal are left out.
    """
    tables = [item for section in sections for item in section.items if isinstance(item, charts.Table)]
    shown = [table for table in tables if show_all or not (table.is_detail or len(table.rows) > _MOST_ROWS)]
    for table in shown:
        numbers = table.columns[1:] if len(table.columns) > 2 else ()  # a single second column is text
        show_table(console, table.title, table.columns, table.rows, numbers)
        console.print(plain(table.note + "\n" if table.note else ""), highlight=False)
    return len(tables) - len(shown)


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Collection[Sequence[str]],
    numbers: Collection[str] = (),
    box: Box = HEAVY_HEAD,
    show_header: bool = True,
) -> None:
    """Print one table; no cell is read as markup.

    If the console is too narrow, the last columns follow in further tables, each of which repeats the first column.

    Args:
        columns: heads of the columns.
        rows: texts [row][column].
        numbers: heads of the columns of numbers, which are aligned to the right and never broken into lines.
    """
    if title:
        print_line(console, title)  # a title of the table itself would be cut into lines of the table's width
    needed: list[int] = []  # width of each column below which it cannot be read
    widths: list[int] = []  # width of each column without line breaks
    for index, head in enumerate(columns):
        cells = [row[index] for row in rows]
        needed.append(_needed_width(head, cells, head in numbers))
        widths.append(max(map(cell_len, [head, *cells])))

    for indices in _divide_columns(needed, console.width):
        table = TerminalTable(box=box, show_header=show_header)
        # Whether the table fits the console without line breaks in its cells.
        fits = _table_width(widths[index] for index in indices) <= console.width
        for index in indices:
            head = columns[index]
            is_number = head in numbers
            # Where the table is too wide, a number stays on one line, and its column's head is broken into lines.
            if is_number and not fits:
                head = textwrap.fill(head, needed[index], break_long_words=False)
            table.add_column(
                plain(head),
                justify="right" if is_number else "left",
                overflow="fold",
                no_wrap=is_number and not fits,
            )

        for row in rows:
            table.add_row(*(plain(row[index]) for index in indices))
        console.print(table)


def _table_width(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths, including its borders."""
    return sum(width + 3 for width in widths) + 1


def _needed_width(head: str, cells: Sequence[str], is_number: bool) -> int:
    """Return the width below which a column cannot be read, characters."""
    longest_word = max(map(cell_len, head.split()), default=0)
    longest_cell = max(map(cell_len, cells), default=0)
    return max(longest_word, longest_cell if is_number else min(longest_cell, _TEXT_WIDTH), 1)


def _divide_columns(needed: Sequence[int], width: int) -> list[list[int]]:
    """Divide the columns of a table that is too wide into several tables that fit the console.

    Args:
        needed: width of each column below which it cannot be read, characters.
        width: width of the console, characters.

    Returns:
        For each table the indices of its columns: the first column, which all tables repeat, and at least one other.
    """
    tables: list[list[int]] = [[0]]
    for index in range(1, len(needed)):
        if _table_width(needed[column] for column in [*tables[-1], index]) > width and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(index)
    return tables


def show_files(console: Console, files: Sequence[Path]) -> None:
    """Print the names of written files and the one folder that holds them."""
    names = ", ".join(file.name for file in files)
    print_line(console, f"Wrote {names} to {files[0].parent}")
