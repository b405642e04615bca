"""Implements `jackpot diagnose`, which says what is wrong with a run."""

import json
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import AsJson
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import plain, show_next

with lazy():
    from jackpot.analysis.diagnose import diagnose as diagnosing
    from jackpot.analysis.diagnose import saved
    from jackpot.training.run_folder import folder as run_folder
    from jackpot.ui.views import dumps


def diagnose(
    run: Annotated[
        Path, typer.Argument(help="Run folder, finished or still training; or rollouts that another trainer saved.")
    ],
    as_json: AsJson = False,
) -> None:
    """Look for signs that a run is unhealthy: what is wrong, since when, which metric shows it and what to try.

    Of rollouts of another trainer it looks at the log-probs of engine and policy alone: docs/my-run-collapses.md.
    Without a finding it says which signs it looked at. Exit code 0: no finding; 1: unhealthy; 2: no run there.

    Status: supported.
    """
    # A file, or a folder with files and without config.yaml, holds rollouts of another trainer.
    if run.is_file() or (any(run.glob("*")) and not (run / "config.yaml").is_file()):
        return dumps.diagnose_dump(run, as_json)

    config = run_folder.run_config(run)
    folder = run_folder.RunFolder(run)
    lines, events = folder.read("metrics.jsonl"), folder.read("events.jsonl")
    diagnosis = diagnosing.diagnose(lines, events, config, saved.read_saved(run, config))

    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        console, path = Console(), quote(str(run))
        for text in (diagnosis.summary.replace("RUN", path), *(() if diagnosis.findings else diagnosis.coverage)):
            console.print(plain(text), highlight=False)
        show_next(console, {f"jackpot report {path}": "the charts of these metrics, and every saved token"})
    if diagnosis.verdict == "unhealthy":
        raise typer.Exit(1)
