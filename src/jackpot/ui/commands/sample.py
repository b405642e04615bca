"""Implements `jackpot sample`, which prints answers of both models before and after training."""

from pathlib import Path
from shlex import quote

from rich.console import Console

from jackpot.analysis.evaluate.sample import sample_answers
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.progress import status
from jackpot.ui.terminal.tables import show_table


def sample(run: Path, problems: int, seed: int) -> None:
    """Generate the answers and print a table for each problem."""
    console = Console()
    with status(console, "loading the models"):
        found = sample_answers(run, problems, seed)
    for prompt, answers in found:
        rows = [
            (
                answer.role.replace("_", " "),
                "after" if answer.after else "before",
                answer.response,
                f"reward {answer.reward:.4g}" if answer.correct is None else "right" if answer.correct else "wrong",
            )
            for answer in answers
        ]
        title = f"{prompt.text} (answer: {prompt.answers})"
        show_table(console, title, ("model", "training", "response", "verdict"), rows, min_width=60)
    where = quote(str(run))
    show_next(console, {f"jackpot eval {where} --benchmarks own": "accuracy of its best policy"})
