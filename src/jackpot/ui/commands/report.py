"""Implements `jackpot report`, which writes one page about runs."""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, print_lines, show_next

with lazy():
    from jackpot.ui.report import report as page


def report(
    runs: Annotated[list[Path], typer.Argument(exists=True, help="Run folders, or folders that contain run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file; default report.html in the run folder, or in that of several runs."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Saved tokens that the page carries; default 100,000.")
    ] = None,
) -> None:
    """Write one HTML page about runs: every metric with the arms overlaid, and every saved token.

    Status: supported.
    """
    console = Console()
    written = page.write_report(runs, out, page.MAX_TOKENS if max_tokens is None else max_tokens)

    mebibytes = written.path.stat().st_size / 2**20
    count = "1 run" if written.runs == 1 else f"{written.runs} runs"
    unfinished = f", {len(written.unfinished)} of them not finished" if written.unfinished else ""
    print_line(console, f"Wrote {written.path} ({mebibytes:.1f} MiB): {count}{unfinished}")
    print_lines(console, written.unreadable)

    opener = "open" if sys.platform == "darwin" else "xdg-open"
    show_next(console, {f"{opener} {quote(str(written.path))}": "in a browser; it needs no network"})
