"""Implements `jackpot replay`, which applies every correction to saved rollouts."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import AsJson, ShowAll
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import labelled, print_line, print_lines, show_answer, show_next
from jackpot.ui.terminal.progress import LINE_SECONDS, status

with lazy():
    from jackpot.analysis.replay import formats, results
    from jackpot.analysis.replay import replay as replaying
    from jackpot.analysis.replay import rewards as scoring
    from jackpot.config import recipes
    from jackpot.ui import charts
    from jackpot.ui import results as saving
    from jackpot.ui.views import replay as views

_LARGE = 5.0  # MB of saved rollouts; before more are read, the command prints how fast it reads
_MOST_REWARDS = 20  # most changed rewards that are printed, each on a line


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
    _, files = formats.find_format(path, form)
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    if megabytes > _LARGE:
        print_line(
            console, f"{megabytes:,.0f} MB at about 10,000 tokens a second; --every 10 takes a tenth of the time"
        )

    with status(console, "reading", LINE_SECONDS) as show:
        result = replaying.replay(
            path,
            form,
            names=recipes.split_names(corrections),
            model=model,
            temperature=temperature,
            every=every,
            listen=lambda responses: show(f"read {responses:,} responses"),
        )
        rescored = scoring.score_again(path) if rewards else []

    if as_json:
        numbers = results.result_numbers(result)
        if rewards:
            numbers["rewards"] = [reward._asdict() for reward in rescored]
        typer.echo(json.dumps(saving.to_json(numbers), indent=2, allow_nan=False))
        return

    _show(console, result, show_all)
    if rewards:
        changed = [reward for reward in rescored if not reward.is_same]
        same = len(rescored) - len(changed)
        print_line(console, f"Rewards: {same:,} of {len(rescored):,} are the same when computed again")
        for reward in changed[:_MOST_REWARDS]:
            print_line(console, f"  {reward.uid}: {reward.saved:g} saved, {reward.now:g} now")


def _show(console: Console, result: "results.ReplayResult", show_all: bool) -> None:
    """Print the recommendation, every correction, what was not read, and the command that trains as recommended."""
    about = charts.Section(title="", intro="", items=(views.facts(result),))
    show_answer(console, [labelled(result.answer.lines)], [about, views.corrections(result)], show_all)
    print_lines(console, result.left_out, "Left out: ")
    print_lines(console, result.problems, "Not read: ")
    if result.unreadable > len(result.problems):
        print_line(console, f"Not read: {result.unreadable:,} records or files in all")

    if result.answer.correction:
        values = dict(result.answer.settings)
        settings = [f"objective.correction={values.pop('name')}"]
        settings += [
            f"objective.correction.{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in values.items()
        ]
        show_next(console, {f"jackpot train RECIPE {' '.join(settings)}": "train with it"})
