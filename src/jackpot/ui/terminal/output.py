"""Prints lines, tables, names of written files and what to type next; no text is read as markup or moves the cursor."""

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

_MOST_ROWS = 40  # of a table in the terminal; a longer one is a detail
_TEXT = 24  # width that a column of text needs at least, if it has as much; it breaks between words, characters
_KEPT = "\n\t"
_CONTROLS = {  # C0, DEL and C1, with which text moves the cursor, clears the screen or renames the window
    code: f"⟨{code:02X}⟩" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT
}


def printable(text: str) -> str:
    r"""Replace control characters but line breaks and tabs by their codes.

    >>> printable("\x1b[2J")
    '⟨1B⟩[2J'
    """
    return text.translate(_CONTROLS)


def plain(text: str, style: str = "") -> Text:
    """Return text to print as it is: `printable`, and `[bold]` in it is not read as markup."""
    return Text(printable(text), style=style)


class PrintableFormatter(logging.Formatter):
    """Formats log messages, which quote servers and paths, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as `printable` text."""
        return printable(super().format(record))


def print_line(console: Console, text: str, is_whole: bool = False) -> None:
    """Print text as it is: no markup, no control characters, no colors for numbers.

    A terminal gets line breaks between words, but for lines that are `is_whole`: commands and files, which are copied.
    A log gets none, so that a program finds whole lines.
    """
    console.print(plain(text), highlight=False, soft_wrap=is_whole or not console.is_terminal)


def labelled(lines: Mapping[str, str]) -> str:
    """Lay texts out below each other, each behind its label."""
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
        verdicts: what answers the user's question: sentences, or `labelled` lines.
        sections: of their tables those marked `is_detail` are printed only with `show_all`.
        files: as in `show_files`.
        commands: as in `show_next`.
    """
    for verdict in verdicts:
        console.print(plain(f"{verdict}\n", style="bold"), highlight=False)
    if left_out := show_tables(console, sections, show_all):
        print_line(console, f"--all prints {left_out} more {'table' if left_out == 1 else 'tables'}.")
    if files:
        show_files(console, files)
    show_next(console, commands or {})


def show_next(console: Console, commands: Mapping[str, str]) -> None:
    """Print what to type next: each command, never broken, with what it is for."""
    if commands:
        print_line(console, "Next:")
    for command, purpose in commands.items():
        line = f"  {command}  # {purpose}"
        fits = cell_len(line) <= console.width
        print_line(console, line if fits else f"  {command}\n      # {purpose}", is_whole=True)


def show_tables(console: Console, sections: Iterable["charts.Section"], show_all: bool = True) -> int:
    """Print the tables of a page with their notes; return how many were left out.

    Left out, but for `show_all`, are those marked `is_detail` and those too long for a terminal.
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
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    box: Box = HEAVY_HEAD,
    show_header: bool = True,
) -> None:
    """Print one table; no cell is read as markup.

    Numbers are never broken. Columns for which the console is too narrow follow in further tables, each of which begins
    with the first column.

    Args:
        columns: heads, of which those in `numbers` are aligned to the right.
    """
    if title:
        print_line(console, title)  # a title of the table itself would be cut into lines of the table's width
    columns, rows = tuple(columns), [tuple(row) for row in rows]
    cells = [[row[index] for row in rows] for index in range(len(columns))]
    needs = [_need(head, texts, head in numbers) for head, texts in zip(columns, cells, strict=True)]
    widths = [max(map(cell_len, [head, *texts])) for head, texts in zip(columns, cells, strict=True)]

    for part in _parts(needs, console.width):
        table = TerminalTable(box=box, show_header=show_header)
        fits = _whole(widths[index] for index in part) <= console.width
        for index in part:
            head, is_number = columns[index], columns[index] in numbers
            if is_number and not fits:
                head = textwrap.fill(head, needs[index], break_long_words=False)
            table.add_column(
                plain(head),
                justify="right" if is_number else "left",
                overflow="fold",
                no_wrap=is_number and not fits,
            )

        for row in rows:
            table.add_row(*(plain(row[index]) for index in part))
        console.print(table)


def _whole(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths, borders included."""
    return sum(width + 3 for width in widths) + 1


def _need(head: str, cells: Sequence[str], is_number: bool) -> int:
    """Return the width below which a column cannot be read, characters."""
    longest = max(map(cell_len, cells), default=0)
    return max(*map(cell_len, head.split() or [""]), longest if is_number else min(longest, _TEXT), 1)


def _parts(needs: Sequence[int], width: int) -> list[list[int]]:
    """Divide the columns, by their indices, into tables that fit, each with the first column."""
    parts: list[list[int]] = [[0]]
    for index in range(1, len(needs)):
        if _whole(needs[column] for column in [*parts[-1], index]) > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(index)
    return parts


def show_files(console: Console, files: Sequence[Path]) -> None:
    """Print the names of written files and the one folder that holds them."""
    names = ", ".join(file.name for file in files)
    print_line(console, f"Wrote {names} to {files[0].parent}")
