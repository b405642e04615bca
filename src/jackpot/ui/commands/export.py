"""Implements `jackpot export`, which writes a run's rollouts in the formats of other trainers."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, print_lines, show_next
from jackpot.ui.terminal.progress import LINE_SECONDS, status

with lazy():
    from jackpot.analysis.replay import export as exporting


def export(
    run: Annotated[Path, typer.Argument(exists=True, help="Run folder with saved rollouts.")],
    form: Annotated[str, typer.Option("--format", help="Format to write: jackpot, jsonl or verl.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder, empty or not there yet; default that of the run with -FORMAT."),
    ] = None,
    iteration: Annotated[int | None, typer.Option(help="Iteration to write; default all that are saved.")] = None,
    sample: Annotated[str | None, typer.Option(help="Uid of the response to write; default all.")] = None,
) -> None:
    """Write the saved rollouts of a run in the format of another trainer, a file for each iteration.

    With --format jackpot a file is a bundle of its own: all columns, the run's settings and a schema version, which
    `jackpot replay FILE` reads anywhere, and `jackpot replay FILE --rewards` scores again.

    `jackpot replay` reads them back; docs/replay.md says what each format is, and what of ours it does not have.

    Status: supported.
    """
    console = Console()
    named_run = run if run.name.strip(".") else run.resolve()  # the paths `.` and `..` have no name
    folder = out or named_run.with_name(f"{named_run.name}-{form}")

    with status(console, "writing", LINE_SECONDS) as show:
        written = exporting.export_rollouts(
            run,
            form,
            folder,
            listen=lambda responses: show(f"wrote {responses:,} responses"),
            iteration=iteration,
            sample=sample,
        )

    files = f"{len(written.files)} {'file' if len(written.files) == 1 else 'files'}"
    print_line(console, f"Wrote {written.responses:,} responses of {written.tokens:,} tokens to {files} in {folder}")
    if written.lost:
        print_line(console, f"Not written, because the format {form} has no column for it: {written.lost}")
    print_lines(console, written.problems, "Not read: ")
    show_next(console, {f"jackpot replay {quote(str(folder))}": "reads them back"})
