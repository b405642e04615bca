"""Implements `jackpot sample`, which prints answers of both models before and after training."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import show_next, show_table
from jackpot.ui.terminal.progress import status

with lazy():
    from jackpot.analysis.evaluate import sample as sampling
    from jackpot.core import types


def sample(
    run: Annotated[Path, typer.Argument(exists=True, help="Run folder with a checkpoint.")],
    problems: Annotated[int, typer.Option(min=1, help="Number of held-out problems.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Print the answers of both models to held-out problems, before and after training.

    Status: supported.
    """
    console = Console()
    with status(console, "loading the models"):
        prompts, answers = sampling.sample_answers(run, problems, seed)

    for index, prompt in enumerate(prompts):
        rows = [
            (role.replace("_", " "), when, of_model.responses[index], _verdict(of_model.scores[index]))
            for (role, when), of_model in answers.items()
        ]
        title = f"{prompt.text} (answer: {prompt.answers})"
        show_table(console, title, ("model", "training", "response", "verdict"), rows)

    show_next(console, {f"jackpot eval {quote(str(run))} --benchmarks own": "accuracy of its best policy"})


def _verdict(score: "types.Score") -> str:
    """Return whether a response is right or, where the task has no verdict, its reward."""
    return f"reward {score.reward:.4g}" if score.correct is None else "right" if score.correct else "wrong"
