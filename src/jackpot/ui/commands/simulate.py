"""Implements `jackpot simulate`, which compares candidate rollout models without training."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import Arm, Overrides, Recipe, ShowAll
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import labelled, print_line, show_answer
from jackpot.ui.terminal.progress import status

with lazy():
    from jackpot.analysis.simulate import candidates
    from jackpot.config import recipes
    from jackpot.ui import results
    from jackpot.ui.views import simulation


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Arm = None,
    rollout_model: Annotated[
        list[str] | None,
        typer.Option(help="Candidate to measure in place of rollout_model.path; repeat it for more candidates."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Held-out prompts that each rollout model answers; default 256.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/simulate-RECIPE-ARM.")] = None,
    show_all: ShowAll = False,
) -> None:
    """Compare candidate rollout models with a recipe's policy, without training.

    For each: how large the mismatch is, what OBRS does to it, which correction jackpot replay would advise, and what
    rollouts are then worth. That is how to choose a rollout model.

    Status: supported. Status of what it says of worth and savings: experimental.
    """
    console = Console()
    config = recipes.resolve(recipe, arm, overrides or [])
    count = prompts or candidates.PROMPTS

    with status(console, "measuring both models"):
        measured = candidates.simulate_candidates(
            config,
            candidates=rollout_model or [],
            prompts=count,
            seed=seed,
            listen=lambda seconds: print_line(
                console,
                f"{count} answers of the rollout model took {seconds:.0f} s; next: the policy's answers",
            ),
        )

    sections = simulation.candidate_sections(measured)
    folder = out or Path("runs") / "-".join(filter(None, ["simulate", Path(recipe).stem, arm]))
    title = " ".join(filter(None, ["jackpot simulate", recipe, arm]))
    numbers = {"seed": seed, "candidates": list(map(asdict, measured))}
    files = results.write_results(folder, "simulate", title, sections, numbers)

    verdicts = [
        (f"{candidate.name}\n" if len(measured) > 1 else "") + labelled(candidate.answer["lines"])
        for candidate in measured
    ]
    typed = [recipe, *(["--arm", arm] if arm else []), *(overrides or [])]
    commands = {f"jackpot train {' '.join(map(quote, typed))}": "train; rollout_model.path=... for another model"}
    show_answer(console, verdicts, sections.values(), show_all, files, commands)
