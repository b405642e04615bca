"""Implements `jackpot compare`, which trains arms of a recipe with one budget and compares them."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote

import typer
from rich.console import Console

from jackpot.analysis.compare.arms import ComparisonPlan, differing_arms, run_arms
from jackpot.analysis.compare.process import ArmRun
from jackpot.analysis.compare.scheduler import ArmListener, Lines
from jackpot.config.recipes import resolve_arms, split_names
from jackpot.training.run.folder import measure_of
from jackpot.ui.results import measured, write_results
from jackpot.ui.terminal.answer import show_answer
from jackpot.ui.terminal.progress import print_line
from jackpot.ui.views.comparison import comparison_sections, comparison_verdict


def compare(
    recipe: str,
    overrides: list[str] | None,
    arms: str,
    seeds: int,
    first_seed: int,
    jobs: int | None,
    folder: Path | None,
    budget: float | None,
    unit: str,
    accuracy: float | None,
    baseline: str | None,
    keep_collapsed: bool,
) -> None:
    """Run or continue every arm with every seed; write and print their comparison."""
    console, given = Console(), overrides or []
    configs = resolve_arms(recipe, split_names(arms), range(first_seed, first_seed + seeds), given)
    if not arms and (different := differing_arms(configs)):
        reasons = "; ".join(map(": ".join, different.items()))
        print_line(console, f"Left out, because they cannot be compared: {reasons}")
        configs = {key: config for key, config in configs.items() if key[0] not in different}
    where = folder or Path("runs") / f"compare-{Path(recipe).stem}"
    plan = ComparisonPlan(
        unit=unit, budget=budget, accuracy=accuracy, baseline=baseline, stop_collapsed=not keep_collapsed
    )
    try:
        found, runs = run_arms(configs, given, where, plan, jobs, _listener(console))
    except KeyboardInterrupt:
        print_line(console, "Stopped; the same command continues from the newest checkpoints.")
        raise typer.Exit(130) from None
    sections = comparison_sections(found, runs)
    files = write_results(where, "comparison", f"jackpot compare {recipe}", sections, asdict(found))
    commands = {f"jackpot report {quote(str(where))}": "one page with every metric of every run"}
    show_answer(console, [comparison_verdict(found)], sections.values(), True, files, commands)


def _listener(console: Console) -> ArmListener:
    """Return a listener that prints a line for every evaluation of a run and for the end of a run."""
    shown: dict[str, int] = {}  # newest evaluation of each run, iteration

    def listen(run: ArmRun, lines: Lines, end: str) -> None:
        evaluated = [(line, measure) for line in lines if (measure := measure_of(line))]
        newest = evaluated[-1][0]["iteration"] if evaluated else -1
        if end or newest > shown.get(run.name, -1):
            shown[run.name] = newest
            policy = [measured(line[f"eval/policy_{measure}"], measure) for line, measure in evaluated[-1:]]
            accuracy = f"policy {policy[0]}" if policy else ""
            print_line(console, f"{run.name}  iteration {newest}/{run.config.iterations}  {accuracy}  {end}")

    return listen
