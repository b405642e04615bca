"""Implements `jackpot report`, which writes one page about runs."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote

from rich.console import Console

from jackpot.ui.report.inspector import MAX_TOKENS
from jackpot.ui.report.report import Report, write_report
from jackpot.ui.report.report import watch as watch_runs
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.progress import print_line


def report(runs: list[Path], out: Path | None, max_tokens: int | None, watch: bool, every: float) -> None:
    """Write the page once, or with `watch` whenever the runs have written something, until they end."""
    show = partial(_show, Console())
    most = MAX_TOKENS if max_tokens is None else max_tokens
    if not watch:
        written = write_report(runs, out, most)
        show(written)
        again = " ".join(["jackpot report", *(quote(str(run)) for run in runs), "--watch"])
        more = {again: "write it again while they train"} if written.going else {}
        opener = "open" if sys.platform == "darwin" else "xdg-open"
        show_next(Console(), {f"{opener} {quote(str(written.path))}": "in a browser; it needs no network", **more})
        return
    with suppress(KeyboardInterrupt):
        watch_runs(runs, out, most, every, show)


def _show(console: Console, written: Report) -> None:
    """Print the page's path and size, the number of runs, and the files that were left out."""
    size = written.path.stat().st_size / 2**20
    going = f", {len(written.unfinished)} of them not finished" if written.unfinished else ""
    runs = "1 run" if written.runs == 1 else f"{written.runs} runs"
    print_line(console, f"Wrote {written.path} ({size:.1f} MiB): {runs}{going}")
    for sentence in written.unreadable:
        print_line(console, sentence)
