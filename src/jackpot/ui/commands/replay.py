"""Implements `jackpot replay`, which applies every correction to saved rollouts."""

import json
from pathlib import Path

import typer
from rich.console import Console

from jackpot.analysis.replay.formats.records import ReadLimits
from jackpot.analysis.replay.results import ReplayResult, result_numbers
from jackpot.analysis.replay.run import LIMITS
from jackpot.analysis.replay.run import replay as replay_rollouts
from jackpot.config.recipes import split_names
from jackpot.ui.charts import Section
from jackpot.ui.results import to_json
from jackpot.ui.terminal.answer import show_answer, show_next
from jackpot.ui.terminal.progress import LINE_SECONDS, print_line, status
from jackpot.ui.views.replay import facts, replay_sections


def replay(
    path: Path,
    form: str,
    model: str | None,
    temperature: float | None,
    corrections: str,
    every: int,
    max_response_tokens: int | None,
    max_file_gb: float | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Replay the rollouts and print the recommendation and the tables, or JSON."""
    console = Console(stderr=as_json)
    limits = ReadLimits(
        response_tokens=max_response_tokens or LIMITS.response_tokens,
        file_bytes=LIMITS.file_bytes if max_file_gb is None else int(max_file_gb * 1e9),
    )
    with status(console, "reading", LINE_SECONDS) as show:

        def listen(responses: int) -> None:
            show(f"read {responses:,} responses")

        found = replay_rollouts(path, form, split_names(corrections), model, temperature, every, listen, limits)
    if as_json:
        typer.echo(json.dumps(to_json(result_numbers(found)), indent=2, allow_nan=False))
    else:
        _show(console, found, show_all)


def _show(console: Console, found: ReplayResult, show_all: bool) -> None:
    """Print the recommendation, every correction, with `show_all` the facts of the run too, and what was left out."""
    about = Section(title="", intro="", items=(facts(found),))
    given = {"": found.answer.settings.get("name"), **found.answer.settings}
    texts = [
        f"objective.correction{key and '.' + key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in given.items()
        if key != "name"
    ]
    commands = {f"jackpot train RECIPE {' '.join(texts)}": "train with it"} if found.answer.correction else {}
    show_answer(console, [found.answer.sentence], [about, *replay_sections(found).values()], show_all)
    for sentence in found.left_out:
        print_line(console, f"Left out: {sentence}")
    for sentence in found.problems:
        print_line(console, f"Not read: {sentence}")
    if found.unreadable > len(found.problems):
        print_line(console, f"Not read: {found.unreadable:,} records or files in all")
    show_next(console, commands)
