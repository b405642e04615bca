"""`jackpot report`: one page about runs."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from jackpot.ui.report.inspector import MAX_TOKENS
from jackpot.ui.report.report import watch as watch_runs
from jackpot.ui.report.report import write_report
from jackpot.ui.terminal.train import show_report


def report(runs: list[Path], out: Path | None, max_tokens: int | None, watch: bool, every: float) -> None:
    """Write the page once, or with `watch` again and again until the runs end."""
    tell = partial(show_report, Console())
    most = MAX_TOKENS if max_tokens is None else max_tokens
    if not watch:
        tell(write_report(runs, out, most))
        return
    with suppress(KeyboardInterrupt):
        watch_runs(runs, out, most, every, tell)
