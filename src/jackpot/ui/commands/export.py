"""Implements `jackpot export`, which writes a run's rollouts in the formats of other trainers."""

from pathlib import Path
from shlex import quote

from rich.console import Console

from jackpot.analysis.replay.export import export_rollouts
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.progress import LINE_SECONDS, print_line, status


def export(run: Path, form: str, out: Path | None) -> None:
    """Write the rollouts and say what is in them."""
    console = Console()
    named = run if run.name.strip(".") else run.resolve()  # `.` is no name
    folder = out or named.with_name(f"{named.name}-{form}")
    with status(console, "writing", LINE_SECONDS) as show:
        found = export_rollouts(run, form, folder, lambda responses: show(f"wrote {responses:,} responses"))
    files = f"{len(found.files)} {'file' if len(found.files) == 1 else 'files'}"
    print_line(console, f"Wrote {found.responses:,} responses of {found.tokens:,} tokens to {files} in {folder}")
    print_line(console, f"Not in the format of {form}: {found.lost}")
    for sentence in found.problems:
        print_line(console, f"Not read: {sentence}")
    show_next(console, {f"jackpot replay {quote(str(folder))}": "reads them back"})
