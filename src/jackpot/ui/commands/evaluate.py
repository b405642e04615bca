"""`jackpot eval`: benchmarks of one model."""

from pathlib import Path

import typer
from rich.console import Console

from jackpot.analysis.evaluate.run import evaluate_model, evaluation_config
from jackpot.config.recipes import parse_override, split_names
from jackpot.ui.results import folder_about
from jackpot.ui.terminal.evaluate import evaluation_progress, show_evaluation


def evaluate(
    model: str, overrides: list[str] | None, benchmarks: str, k: int | None, engine: str | None, out: Path | None
) -> None:
    """Generate the missing answers, score all, and print a table; exit with code 130 after Ctrl-C."""
    console = Console()
    given = {"benchmarks": split_names(benchmarks), "k": k, "engine": engine}
    changes = [{key: value} for key, value in given.items() if value]
    config = evaluation_config(model, [*changes, *map(parse_override, overrides or [])])
    folder = out or folder_about("eval", model)
    try:
        with evaluation_progress(console) as listen:
            results = evaluate_model(config, folder, listen)
    except KeyboardInterrupt:
        console.print("Stopped; the same command goes on from here.")
        raise typer.Exit(130) from None
    show_evaluation(console, results, folder)
