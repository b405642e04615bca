"""Implements `jackpot replay`, which applies every correction to saved rollouts."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import AsJson, ShowAll
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import labelled, print_line, show_answer, show_next
from jackpot.ui.terminal.progress import LINE_SECONDS, status

with lazy():
    from jackpot.analysis.replay import replay as replaying
    from jackpot.analysis.replay import results
    from jackpot.config import recipes
    from jackpot.ui import charts
    from jackpot.ui import results as saving
    from jackpot.ui.views import replay as views


def replay(
    path: Annotated[Path, typer.Argument(help="Run folder, or a file or folder of saved rollouts.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the rollouts: auto, jackpot, verl, trl, prime_rl, areal, jsonl, openrlhf, slime or skyrl.",
        ),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Model or run folder that scores the policy's log-probs, where the file lacks them."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=1e-6, help="Sampling temperature, with --model; default the run's, or 1.")
    ] = None,
    corrections: Annotated[str, typer.Option(help="Names of corrections, separated by commas; default all.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Replay one of every so many responses of a file.")] = 1,
    show_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """Apply every correction to saved rollouts, without training, and recommend one for this run.

    Says what a rollout is then worth, and what a share of the rollout model or its drafts would save. Reads rollouts
    of Jackpot, verl, TRL, SkyRL, slime, prime-rl, OpenRLHF and AReaL, and plain JSONL: docs/replay.md.

    Status: supported. Status of what it says of worth and savings: experimental. --model is not yet run on a GPU.
    """
    console = Console(stderr=as_json)
    with status(console, "reading", LINE_SECONDS) as show:

        def listen(responses: int) -> None:
            show(f"read {responses:,} responses")

        result = replaying.replay(path, form, recipes.split_names(corrections), model, temperature, every, listen)
    if as_json:
        typer.echo(json.dumps(saving.to_json(results.result_numbers(result)), indent=2, allow_nan=False))
    else:
        _show(console, result, show_all)


def _show(console: Console, result: "results.ReplayResult", show_all: bool) -> None:
    """Print the recommendation, every correction, with `show_all` the facts of the run too, and what was left out."""
    about = charts.Section(title="", intro="", items=(views.facts(result),))
    show_answer(console, [labelled(result.answer.lines)], [about, views.corrections(result)], show_all)
    for sentence in result.left_out:
        print_line(console, f"Left out: {sentence}")
    for sentence in result.problems:
        print_line(console, f"Not read: {sentence}")
    if result.unreadable > len(result.problems):
        print_line(console, f"Not read: {result.unreadable:,} records or files in all")

    settings = {"": result.answer.settings.get("name"), **result.answer.settings}
    texts = [
        f"objective.correction{key and '.' + key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
        if key != "name"
    ]
    commands = {f"jackpot train RECIPE {' '.join(texts)}": "train with it"} if result.answer.correction else {}
    show_next(console, commands)
