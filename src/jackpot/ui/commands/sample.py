"""`jackpot sample`: answers of both models before and after training."""

from pathlib import Path

from rich.console import Console

from jackpot.analysis.evaluate.sample import sample_answers
from jackpot.ui.terminal.train import show_answers


def sample(run: Path, problems: int, seed: int) -> None:
    """Generate and print the answers."""
    show_answers(Console(), sample_answers(run, problems, seed))
