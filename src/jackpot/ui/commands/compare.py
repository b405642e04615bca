"""Implements `jackpot compare`, which trains arms of a recipe with one budget and compares them."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import Overrides, Recipe
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import labelled, print_line, show_answer

with lazy():
    from jackpot.analysis.compare import arms as comparing
    from jackpot.analysis.compare import process, scheduler
    from jackpot.config import recipes
    from jackpot.core import cores
    from jackpot.training.run_folder import folder as run_folder
    from jackpot.ui import numbers, results
    from jackpot.ui.views import comparison as views


def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    arms: Annotated[
        str, typer.Option(help="Names of arms, separated by commas; default all that answer the same problems.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for each arm.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="Lowest seed.")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at the same time; default one per free core.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of all runs; default runs/compare-RECIPE.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Budget of each run, in --unit; default all iterations of the recipe.")
    ] = None,
    unit: Annotated[str, typer.Option(help="Unit of the budget: sequences, tokens or flops.")] = "sequences",
    accuracy: Annotated[
        float | None,
        typer.Option(help="Accuracy, 0 to 1, until which costs are counted; default one that all rising runs reach."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Arm that the others are compared with; default the first.")] = (
        None
    ),
    keep_collapsed: Annotated[bool, typer.Option("--keep-collapsed", help="Do not stop collapsed runs.")] = False,
) -> None:
    """Train several arms of a recipe on the same prompts with the same budget, and compare them in tables and charts.

    Existing runs are continued, so the same command continues after Ctrl-C. A run has collapsed when two evaluations
    in a row are below half of its best accuracy; it is stopped, and the table says when.

    Status: supported. Not yet run on a GPU.
    """
    console = Console()
    changes = overrides or []
    configs = recipes.resolve_arms(recipe, recipes.split_names(arms), range(first_seed, first_seed + seeds), changes)
    if not arms and (reasons := comparing.differing_arms(configs)):
        texts = "; ".join(f"{arm}: {reason}" for arm, reason in reasons.items())
        print_line(console, f"Left out, because they cannot be compared: {texts}")
        configs = {(arm, seed): config for (arm, seed), config in configs.items() if arm not in reasons}

    folder = folder or Path("runs") / f"compare-{Path(recipe).stem}"
    plan = comparing.ComparisonPlan(
        unit=unit, budget=budget, accuracy=accuracy, baseline=baseline, stop_collapsed=not keep_collapsed
    )

    try:
        listener = _listener(console, len(configs), jobs)
        comparison, runs = comparing.run_arms(configs, changes, folder, plan, jobs, listener)
    except KeyboardInterrupt:
        print_line(console, "Stopped; the same command continues from the newest checkpoints.")
        raise typer.Exit(130) from None

    sections = views.comparison_sections(comparison, runs)
    files = results.write_results(folder, "comparison", f"jackpot compare {recipe}", sections, asdict(comparison))
    commands = {f"jackpot report {quote(str(folder))}": "one page with every metric of every run"}
    verdicts = [labelled(views.comparison_verdict(comparison))]
    show_answer(console, verdicts, sections.values(), show_all=True, files=files, commands=commands)


def _listener(console: Console, runs: int, jobs: int | None) -> "scheduler.ArmListener":
    """Return a listener that prints a line for every evaluation of a run and for the end of a run.

    From the first iteration of the first run that trains, it also estimates the time that all runs take.
    """
    shown: dict[str, int] = {}  # iteration of the newest evaluation that was printed, by the name of the run
    waiting = runs  # number of runs that have not ended; set to 0 once the time was estimated

    def listen(run: "process.ArmRun", lines: "scheduler.Lines", end: str) -> None:
        """Print what is new about a run; `end` says how it ended, and is empty before."""
        nonlocal waiting  # number of runs that have not ended; set to 0 once the time was estimated
        # Print the estimate once, with the first iteration that some run has trained.
        if waiting and end:
            waiting -= 1
        elif waiting and lines and lines[-1]["iteration"] > 0:
            jobs_at_once = min(waiting, jobs or cores.free_cores())
            # As if every iteration of every run took as long as this one.
            minutes = numbers.iteration_seconds(lines[-1]) * run.config.iterations * waiting / jobs_at_once / 60.0
            duration = f"about {minutes:,.0f} min in all (estimated from {run.name})"
            print_line(console, f"{waiting} runs, {jobs_at_once} at a time: {duration}")
            waiting = 0

        evaluated = [line for line in lines if run_folder.measure_of(line)]
        newest = evaluated[-1]["iteration"] if evaluated else -1
        if end or newest > shown.get(run.name, -1):
            shown[run.name] = newest
            accuracy = f"policy {numbers.evaluated(evaluated[-1], 'policy')}" if evaluated else ""
            print_line(console, f"{run.name}  iteration {newest}/{run.config.iterations}  {accuracy}  {end}")

    return listen
