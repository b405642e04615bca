"""The command line. Layer 7: parse, call, show; no logic of its own."""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.markup import escape

from jackpot.cli_lab import diagnose, folder_about, mismatch, replay, report, simulate
from jackpot.config import Config
from jackpot.config_published import GpusConfig
from jackpot.console import (
    live_progress,
    show_answers,
    show_plan,
    show_result,
    starter_progress,
)
from jackpot.console_compare import arms_progress
from jackpot.console_evaluation import evaluation_progress, show_evaluation
from jackpot.console_plan import show_needs
from jackpot.console_recipes import show_recipe, show_recipes
from jackpot.console_tables import show_files, show_tables
from jackpot.console_tiny import show_tiny
from jackpot.errors import ConfigError, JackpotError
from jackpot.lab.comparison import UNITS
from jackpot.launch.arms import differing_arms
from jackpot.launch.compare import Plan, run_arms
from jackpot.launch.estimate import estimate, is_large
from jackpot.launch.evaluation import evaluate_model, evaluation_config
from jackpot.launch.local import launch
from jackpot.launch.memory import plan_memory
from jackpot.launch.plan import model_sizes
from jackpot.launch.prompts import prompt_lengths
from jackpot.launch.sample import sample_answers
from jackpot.launch.tiny import tiny_run
from jackpot.models.starters import STARTERS, STUDY_STARTERS, make_starters
from jackpot.recipes import (
    load_recipe,
    parse_override,
    recipe_names,
    resolve,
    resolve_arms,
    split_names,
)
from jackpot.recipes.listing import listed, listed_all
from jackpot.recipes.notes import recipe_notes
from jackpot.report.comparison import comparison_sections
from jackpot.report.folder import write_folder
from jackpot.tasks.sets import SETS
from jackpot.telemetry import RunFolder

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train a large language model by reinforcement learning on text that a smaller, cheaper model wrote.",
)

RecipeArgument = Annotated[
    str, typer.Argument(help=f"A recipe ({', '.join(recipe_names())}) or the path of a .yaml file.")
]


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value, e.g. iterations=20.")] = None,
    arm: Annotated[str | None, typer.Option(help="One of the recipe's arms.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE-ARM-seedN.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Try the recipe out anywhere, without hub or GPU: 2 iterations with small random models of the same "
            "families. What it changes is printed; key=value changes the recipe before that.",
        ),
    ] = False,
) -> None:
    """Train, or continue the run that is in the folder from its newest checkpoint that is not corrupt.

    Ctrl-C or SIGTERM stops after the iteration, with a checkpoint; the second one at once. A kill costs at most the
    iterations since the last checkpoint.

    Not yet run on a GPU.
    """
    console = Console()
    config = resolve(recipe, arm, overrides or [])
    name = "-".join(filter(None, [Path(recipe).stem, arm, "tiny" if tiny else None, f"seed{config.seed}"]))
    folder = run or Path("runs") / name
    if tiny:
        if dry_run:
            raise ConfigError("--tiny runs the recipe and --dry-run does not; give one of them")
        with tiny_run(config, folder / "tiny") as small:
            show_tiny(console, small)
            _train_and_show(console, small.config, folder)
        return
    if dry_run:
        _plan(console, config, recipe_notes(recipe, load_recipe(recipe)).gpus, folder)
        return
    _train_and_show(console, config, folder)


def _plan(console: Console, config: Config, gpus: GpusConfig | None, folder: Path) -> None:
    sizes, prompts = model_sizes(config), prompt_lengths(config)
    if is_large(sizes):
        show_plan(console, config, sizes, None, folder)
        show_needs(console, config, estimate(config, sizes, prompts, gpus))
    else:
        show_plan(console, config, sizes, plan_memory(config, sizes, prompts.longest), folder)


def _train_and_show(console: Console, config: Config, folder: Path) -> None:
    finished = _train(console, config, folder)
    show_result(console, config, RunFolder(folder).read("metrics.jsonl"), folder, finished)


def _train(console: Console, config: Config, folder: Path) -> bool:
    with live_progress(console, config) as listen, closing(launch(config, folder, listen)) as trainer:
        if trainer.iteration == config.iterations:
            console.print(f"This run is finished ({config.iterations} iterations); use --run for a new one.")
        return trainer.train()


@app.command()
def compare(
    recipe: RecipeArgument,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of all arms as key=value.")] = None,
    arms: Annotated[
        str, typer.Option(help="Names, with commas between them; default all that answer the same problems.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The lowest of them.")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once; default as many as cores are free.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Of all runs; default runs/compare-RECIPE.")] = None,
    budget: Annotated[float | None, typer.Option(help="For each run, in --unit; default by the iterations.")] = None,
    unit: Annotated[str, typer.Option(help=f"Of the budget: {', '.join(UNITS)}.")] = "sequences",
    accuracy: Annotated[float | None, typer.Option(help="Count costs up to it; default what all runs reach.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The arm to compare with; default the first.")] = None,
    keep_collapsed: Annotated[bool, typer.Option("--keep-collapsed", help="Do not stop what has collapsed.")] = False,
) -> None:
    """Run arms of a recipe on the same prompts with the same budget, and lay them side by side.

    Runs that are there are continued, so the same command goes on after Ctrl-C. A run whose policy answers less than
    half of what it did at best, at two evaluations in a row, has collapsed; it is stopped, and the table says when.

    Not yet run on a GPU.
    """
    console, given = Console(), overrides or []
    configs = resolve_arms(recipe, split_names(arms), range(first_seed, first_seed + seeds), given)
    if not arms and (different := differing_arms(configs)):
        console.print(f"Left out, for they cannot be compared: {'; '.join(map(': '.join, different.items()))}")
        configs = {key: config for key, config in configs.items() if key[0] not in different}
    where = folder or Path("runs") / f"compare-{Path(recipe).stem}"
    plan = Plan(unit=unit, budget=budget, accuracy=accuracy, baseline=baseline, stop_collapsed=not keep_collapsed)
    try:
        found, runs = run_arms(recipe, configs, given, where, plan, jobs, arms_progress(console))
    except KeyboardInterrupt:
        console.print("Stopped; the same command continues from the newest checkpoints.")
        raise typer.Exit(130) from None
    sections = comparison_sections(found, runs)
    files = write_folder(where, "comparison", f"jackpot compare {recipe}", sections, asdict(found))
    show_tables(console, sections.values())
    show_files(console, files)


@app.command("eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A folder, a hub name, starter:NAME, or the folder of a run: its best policy."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, e.g. sampling.temperature=0.6.")
    ] = None,
    benchmarks: Annotated[str, typer.Option(help=f"Names, with commas between them: {', '.join(SETS)}.")] = "",
    k: Annotated[int | None, typer.Option(min=1, help="Sampled answers to each problem; default 1.")] = None,
    engine: Annotated[str | None, typer.Option(help="transformers (default), vllm or vllm_server.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all answers; default runs/eval-MODEL.")] = None,
) -> None:
    """Measure a model on sets of problems: mean@k, pass@k with intervals, truncation, and every answer as parquet.

    The same command goes on after Ctrl-C or a kill; no answer is asked twice. Sets can be added to the folder later.

    Not yet run on a GPU.
    """
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


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, shown in full; default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes: which arm is which row of which paper's table, and what was published of it.

    docs/reproducing.md says what the papers leave open, where they contradict themselves, and what we chose.
    """
    if as_json:
        found = listed(name).as_json() if name else [recipe.as_json() for recipe in listed_all()]
        typer.echo(json.dumps(found, indent=2))
    elif name:
        show_recipe(Console(), listed(name))
    else:
        show_recipes(Console(), listed_all())


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="The folder of a run with a checkpoint.")],
    problems: Annotated[int, typer.Option(min=1, help="How many held-out problems.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
) -> None:
    """Show both models answering held-out problems, before and after training."""
    show_answers(Console(), sample_answers(run, problems, seed))


@app.command()
def starter(
    folder: Annotated[Path, typer.Argument(help="Where to write a folder for each model.")],
    seed: Annotated[int, typer.Option(min=0, help="Of weights and examples; 0 is what the package carries.")] = 0,
    study: Annotated[bool, typer.Option("--study", help="Make the three models of benchmarks/study.yaml.")] = False,
) -> None:
    """Make the two starter models again from nothing, or those of the study, which the package does not carry."""
    console = Console()
    specs = STUDY_STARTERS if study else STARTERS
    with starter_progress(console) as progress:
        make_starters(folder, specs, seed, progress)
    console.print(f"Wrote {', '.join(str(folder / name) for name in specs)}", soft_wrap=True)


for command in (diagnose, replay, mismatch, report, simulate):
    app.command()(command)


def main() -> None:
    """Entry point: an error made by the user is printed, not traced."""
    transformers.utils.logging.disable_progress_bar()  # one bar for every model that is read would hide our own
    try:
        app()
    except JackpotError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
