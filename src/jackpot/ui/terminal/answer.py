"""Prints what a command found: the verdict, the main table, what --all adds, written files, what to type next."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.progress import print_line
from jackpot.ui.terminal.tables import show_files, show_tables
from jackpot.ui.terminal.text import plain

with lazy():
    from jackpot.ui import charts


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
        verdicts: sentences that answer what the user asked.
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
