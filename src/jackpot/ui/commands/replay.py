"""`jackpot replay`: saved rollouts through every correction."""

import json
from pathlib import Path

import typer
from rich.console import Console

from jackpot.analysis.replay.replay import replay as replay_rollouts
from jackpot.analysis.replay.results import as_numbers
from jackpot.config.recipes import split_names
from jackpot.ui.results import plain
from jackpot.ui.terminal.progress import replay_progress, show_replay


def replay(
    path: Path, form: str, model: str | None, temperature: float | None, corrections: str, every: int, as_json: bool
) -> None:
    """Replay the rollouts and print the tables and the recommendation, or JSON."""
    console = Console(stderr=as_json)
    with replay_progress(console) as listen:
        found = replay_rollouts(path, form, split_names(corrections), model, temperature, every, listen)
    if as_json:
        typer.echo(json.dumps(plain(as_numbers(found)), indent=2, allow_nan=False))
    else:
        show_replay(console, found)
