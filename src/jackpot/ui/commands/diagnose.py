"""`jackpot diagnose`: the verdict on a run."""

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from jackpot.analysis.diagnose.diagnose import diagnose as diagnosis_of
from jackpot.training.run.folder import RunFolder, run_config
from jackpot.ui.terminal.train import show_diagnosis


def diagnose(run: Path, as_json: bool) -> None:
    """Print the diagnosis of a run; exit with code 1 if the run is unhealthy."""
    config, folder = run_config(run), RunFolder(run)
    found = diagnosis_of(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show_diagnosis(Console(), found)
    if found.verdict == "sick":
        raise typer.Exit(1)
