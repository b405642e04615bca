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
    from jackpot.analysis.replay import formats, results
    from jackpot.analysis.replay import replay as replaying
    from jackpot.analysis.replay import rewards as scoring
    from jackpot.config import recipes
    from jackpot.ui import charts
    from jackpot.ui import results as saving
    from jackpot.ui.views import replay as views

_LARGE = 5.0  # MB of saved rollouts, from which on the time is told before
_MOST_REWARDS = 20  # that differ, of which each has a line


def replay(
    path: Annotated[Path, typer.Argument(exists=True, help="Run folder, or a file or folder of saved rollouts.")],
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
    rewards: Annotated[
        bool, typer.Option("--rewards", help="Compute the rewards of Jackpot's rollouts again and compare them.")
    ] = False,
    show_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """Apply every correction to saved rollouts, without training, and recommend one for this run.

    Says what a rollout is then worth, and what a share of the rollout model or its drafts would save. Reads rollouts
    of Jackpot, verl, TRL, SkyRL, slime, prime-rl, OpenRLHF and AReaL, and plain JSONL: docs/replay.md.

    Status: supported. Status of what it says of worth and savings: experimental. --model is not yet run on a GPU.
    """
    console = Console(stderr=as_json)
    megabytes = sum(file.stat().st_size for file in formats.find_format(path, form)[1]) / 1e6
    if megabytes > _LARGE:
        print_line(
            console, f"{megabytes:,.0f} MB at about 10,000 tokens a second; --every 10 takes a tenth of the time"
        )
    with status(console, "reading", LINE_SECONDS) as show:

        def listen(responses: int) -> None:
            show(f"read {responses:,} responses")

        result = replaying.replay(path, form, recipes.split_names(corrections), model, temperature, every, listen)
        again = scoring.score_again(path) if rewards else []
    if as_json:
        numbers = results.result_numbers(result) | ({"rewards": [one._asdict() for one in again]} if rewards else {})
        typer.echo(json.dumps(saving.to_json(numbers), indent=2, allow_nan=False))
    else:
        _show(console, result, show_all)
    others = [one for one in again if not one.is_same]
    if rewards and not as_json:
        print_line(console, f"Rewards: {len(again) - len(others):,} of {len(again):,} are the same when computed again")
        for one in others[:_MOST_REWARDS]:
            print_line(console, f"  {one.uid}: {one.saved:g} saved, {one.now:g} now")


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
