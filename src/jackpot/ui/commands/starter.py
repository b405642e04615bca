"""Implements `jackpot starter`, which trains the small models of the package again."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, show_next
from jackpot.ui.terminal.progress import progress

with lazy():
    from jackpot.launch import lessons, toy_models


def starter(
    folder: Annotated[Path, typer.Argument(help="Folder in which each model gets a folder.")],
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of weights and examples; 0 makes the models of the package.")
    ] = 0,
    text: Annotated[
        bool,
        typer.Option("--text", help="Make the pair that reads text, and word problems to train it on."),
    ] = False,
    study: Annotated[bool, typer.Option("--study", help="Make the four models of benchmarks/study.yaml.")] = False,
) -> None:
    """Train the two starter models from random weights, or with --text or --study other ones.

    Status: supported.
    """
    if text and study:
        raise ConfigError("--text and --study make different models; give one of them")
    console = Console()
    specs = toy_models.TEXT_MODELS if text else toy_models.STUDY_MODELS if study else toy_models.TOY_MODELS
    with progress(console) as shown:

        def listen(name: str, done: int, total: int, loss: float) -> None:
            shown.update(name, done, total, {"loss": f"{loss:.3f} nats/token"}, noun=" steps", is_due=done == total)

        toy_models.make_toy_models(folder, specs, seed, listen)
    written = [folder / name for name in specs] + (lessons.write_word_problems(folder) if text else [])
    print_line(console, f"Wrote {', '.join(map(str, written))}")
    if not (text or study):
        models = f"policy.path={folder / 'policy'} rollout_model.path={folder / 'rollout_model'}"
        show_next(console, {f"jackpot train quickstart {models}": "train with them"})
