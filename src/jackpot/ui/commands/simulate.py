"""Implements `jackpot simulate`, which shows what OBRS does to a mismatch, without training."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.ui.arguments import Arm, Overrides, ShowAll, complete_recipe
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import show_answer
from jackpot.ui.terminal.progress import status

with lazy():
    from jackpot.analysis.simulate import candidates
    from jackpot.analysis.simulate import simulate as simulating
    from jackpot.config import recipes
    from jackpot.ui import results
    from jackpot.ui.views import simulation, simulation_pairs


def simulate(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe whose two models are measured; default synthetic distributions.",
            autocompletion=complete_recipe,
        ),
    ] = None,
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
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/simulate or runs/simulate-RECIPE-ARM.")] = None,
    show_all: ShowAll = False,
) -> None:
    """Show what OBRS does to the mismatch between two models, without training.

    Three views of the paper's Figure 2, and for real models how large their mismatch is, which
    correction jackpot replay would advise, and what rollouts are then worth: that is how to choose a rollout model.

    Status: supported. Status of what it says of worth and savings: experimental.
    """
    if not recipe and (rollout_model or arm):
        raise ConfigError("--rollout-model and --arm need a recipe, whose policy and task are taken")
    console, prompts = Console(), prompts or candidates.PROMPTS
    if recipe:
        with status(console, "measuring both models"):
            found = simulating.simulate_candidates(
                recipes.resolve(recipe, arm, overrides or []), rollout_model or [], prompts, seed
            )
        sections = simulation_pairs.pair_sections(found)
        several = len(found.candidates) > 1
        verdicts = [f"{one.name}: " * several + one.answer["sentence"] for one in found.candidates]
    else:
        with status(console, "simulating"):
            found = simulating.simulate_families(seed)
        sections, verdicts = simulation.view_sections(found), []
    name = "-".join(filter(None, ["simulate", recipe and Path(recipe).stem, arm]))
    folder = out or Path("runs") / name
    title = " ".join(filter(None, ["jackpot simulate", recipe, arm]))
    files = results.write_results(folder, "simulate", title, sections, asdict(found))
    if recipe:
        typed = [recipe, *(["--arm", arm] if arm else []), *(overrides or [])]
        commands = {f"jackpot train {' '.join(map(quote, typed))}": "train; rollout_model.path=... for another model"}
    else:
        commands = {"jackpot simulate quickstart": "the same views of two real models"}
    show_answer(console, verdicts, sections.values(), show_all, files, commands)
