"""Implements `jackpot simulate`, which shows what OBRS does to a mismatch, without training."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote

from rich.console import Console

from jackpot.analysis.simulate.candidates import PROMPTS
from jackpot.analysis.simulate.run import simulate_candidates, simulate_families
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from jackpot.ui.results import write_results
from jackpot.ui.terminal.answer import show_answer
from jackpot.ui.terminal.progress import status
from jackpot.ui.views.simulation import view_sections
from jackpot.ui.views.simulation_pairs import pair_sections


def simulate(
    recipe: str | None,
    overrides: list[str] | None,
    arm: str | None,
    rollout_model: list[str] | None,
    prompts: int | None,
    seed: int,
    out: Path | None,
    show_all: bool,
) -> None:
    """Simulate synthetic distributions or a recipe's models; write and print the results."""
    if not recipe and (rollout_model or arm):
        raise ConfigError("--rollout-model and --arm need a recipe, whose policy and task are taken")
    console, prompts = Console(), prompts or PROMPTS
    if recipe:
        with status(console, "measuring both models"):
            found = simulate_candidates(resolve(recipe, arm, overrides or []), rollout_model or [], prompts, seed)
        sections = pair_sections(found)
        several = len(found.candidates) > 1
        verdicts = [f"{one.name}: " * several + one.answer["sentence"] for one in found.candidates]
    else:
        with status(console, "simulating"):
            found = simulate_families(seed)
        sections, verdicts = view_sections(found), []
    name = "-".join(filter(None, ["simulate", recipe and Path(recipe).stem, arm]))
    folder = out or Path("runs") / name
    title = " ".join(filter(None, ["jackpot simulate", recipe, arm]))
    files = write_results(folder, "simulate", title, sections, asdict(found))
    if recipe:
        typed = [recipe, *(["--arm", arm] if arm else []), *(overrides or [])]
        commands = {f"jackpot train {' '.join(map(quote, typed))}": "train; rollout_model.path=... for another model"}
    else:
        commands = {"jackpot simulate quickstart": "the same views of two real models"}
    show_answer(console, verdicts, sections.values(), show_all, files, commands)
