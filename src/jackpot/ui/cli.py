"""The command line. Parse, call, show; no logic of its own."""

import json
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.markup import escape

from jackpot.analysis.compare.arms import ComparisonPlan, differing_arms, run_arms
from jackpot.analysis.compare.comparison import UNITS
from jackpot.analysis.diagnose.diagnose import diagnose as diagnosis_of
from jackpot.analysis.evaluate.run import evaluate_model, evaluation_config
from jackpot.analysis.evaluate.sample import sample_answers
from jackpot.analysis.mismatch.run import measure_mismatch
from jackpot.analysis.mismatch.sides import mismatch_config
from jackpot.analysis.plan.estimate import estimate, is_large
from jackpot.analysis.plan.memory import plan_memory
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.analysis.plan.tiny import tiny_run
from jackpot.analysis.replay.formats import AUTO, FORMATS
from jackpot.analysis.replay.replay import replay as replay_rollouts
from jackpot.analysis.replay.results import as_numbers
from jackpot.analysis.simulate.pairs import PROMPTS
from jackpot.analysis.simulate.runs import simulate_candidates, simulate_run
from jackpot.analysis.simulate.simulate import simulate_families
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import (
    load_recipe,
    parse_override,
    parse_overrides,
    recipe_names,
    resolve,
    resolve_arms,
    split_names,
)
from jackpot.config.recipes.listing import listed, listed_all
from jackpot.config.recipes.notes import recipe_notes
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, JackpotError
from jackpot.launch.local import launch
from jackpot.launch.starters import STARTERS, STUDY_STARTERS, make_starters
from jackpot.rollout.tasks.registry import SETS
from jackpot.training.run.folder import RunFolder, run_config
from jackpot.ui.report.inspector import MAX_TOKENS
from jackpot.ui.report.report import watch as watch_runs
from jackpot.ui.report.report import write_report
from jackpot.ui.results import plain, write_folder
from jackpot.ui.terminal.evaluate import evaluation_progress, show_evaluation
from jackpot.ui.terminal.plan import show_needs, show_tiny
from jackpot.ui.terminal.progress import arms_progress, mismatch_progress, replay_progress, show_mismatch, show_replay
from jackpot.ui.terminal.recipes import show_recipe, show_recipes
from jackpot.ui.terminal.tables import show_files, show_tables
from jackpot.ui.terminal.train import (
    live_progress,
    show_answers,
    show_diagnosis,
    show_plan,
    show_report,
    show_result,
    starter_progress,
)
from jackpot.ui.views.comparison import comparison_sections
from jackpot.ui.views.mismatch import mismatch_sections
from jackpot.ui.views.simulation import view_sections
from jackpot.ui.views.simulation_pairs import pair_sections


def folder_about(command: str, model: str) -> Path:
    """Where a command writes about a model, which may be a path, a hub name or starter:NAME, if nobody says."""
    return Path("runs") / f"{command}-{model.strip('/.').replace('/', '-').replace(':', '-')}"


def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or still going.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a run is healthy, or what is wrong, since when, which metric says so and what to try.

    Exit code 0: healthy, or too early to say; 1: sick; 2: no run there.
    """
    config, folder = run_config(run), RunFolder(run)
    found = diagnosis_of(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show_diagnosis(Console(), found)
    if found.verdict == "sick":
        raise typer.Exit(1)


def replay(
    path: Annotated[Path, typer.Argument(help="The folder of a run, or a file or folder of saved rollouts.")],
    form: Annotated[str, typer.Option("--format", help=f"{', '.join([AUTO, *FORMATS])}.")] = AUTO,
    model: Annotated[
        str | None,
        typer.Option(help="Scores the policy's log-probs, where the file lacks them: a model, or the folder of a run."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=1e-6, help="Of the sampling, with --model; default the run's, or 1.")
    ] = None,
    corrections: Annotated[str, typer.Option(help="Names, with commas between them; default all.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Of so many responses of a file replay one.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put saved rollouts through every correction, without training, and say which one to use on this run.

    Rollouts of verl, TRL, OpenRLHF and slime are read too, and bare JSONL: docs/replay.md.

    --model is not yet run on a GPU.
    """
    console = Console(stderr=as_json)
    with replay_progress(console) as listen:
        found = replay_rollouts(path, form, split_names(corrections), model, temperature, every, listen)
    if as_json:
        typer.echo(json.dumps(plain(as_numbers(found)), indent=2, allow_nan=False))
    else:
        show_replay(console, found)


def mismatch(
    model: Annotated[
        str, typer.Argument(help="A folder, a hub name, starter:NAME, or the folder of a run: its engine, its policy.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, e.g. sampling.temperature=0.6.")
    ] = None,
    sampler: Annotated[
        list[str] | None, typer.Option(help="What writes: name=vllm,dtype=bf16; again for each further one.")
    ] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="What reads: dtype=bf16,attn_implementation=eager,path=OTHER; again for more."),
    ] = None,
    benchmarks: Annotated[str, typer.Option(help="Sets of prompts as in jackpot eval; default made-up sums.")] = "",
    responses: Annotated[int | None, typer.Option(min=1, help="That each sampler writes; default 256.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of a response; default 256.")] = None,
    short: Annotated[
        int | None, typer.Option(min=2, help="Also so many responses of a so much lower limit, to compare with.")
    ] = None,
    reread: Annotated[bool, typer.Option("--reread", help="Samplers too are measured by reading.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything that is drawn; default 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/mismatch-MODEL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Measure how far two descriptions of a model are apart: engine, dtype, attention, quantisation, weights.

    Samplers write responses, learners read them: |p - q| of every response, KL, ratios, by length, position and
    entropy. docs/mismatch.md says what each number means.

    Not yet run on a GPU, nor with tensor-parallel engines.
    """
    console = Console(stderr=as_json)
    given = {"responses": responses, "short": short, "reread": reread or None, "seed": seed}
    given |= {"benchmarks": split_names(benchmarks) or None, "sampling": {"max_new_tokens": max_new_tokens}}
    if max_new_tokens is None:
        del given["sampling"]
    changes = [{key: value} for key, value in given.items() if value is not None]
    sides = [[parse_overrides(text) for text in texts or []] for texts in (sampler, learner)]
    config = mismatch_config(model, *sides, [*changes, *map(parse_override, overrides or [])])
    with mismatch_progress(console) as listen:
        found = measure_mismatch(config, listen)
    folder = out or folder_about("mismatch", model)
    sections = mismatch_sections(found)
    files = write_folder(folder, "mismatch", f"jackpot mismatch {model}", sections, asdict(found))
    if as_json:
        typer.echo(files[-1].read_text(), nl=False)
        return
    show_mismatch(console, found, sections)
    show_files(console, files)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; default report.html in or beside the run folders.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Saved tokens in the page.")] = MAX_TOKENS,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again while a run goes on; Ctrl-C ends.")] = False,
    every: Annotated[float, typer.Option(min=1.0, help="With --watch: seconds between two looks.")] = 10.0,
) -> None:
    """Write one HTML file about runs, finished or going on: every metric with arms overlaid, and every saved token."""
    tell = partial(show_report, Console())
    if not watch:
        tell(write_report(runs, out, max_tokens))
        return
    with suppress(KeyboardInterrupt):
        watch_runs(runs, out, max_tokens, every, tell)


def simulate(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe, whose two models are measured; none: made-up distributions.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.")] = None,
    arm: Annotated[str | None, typer.Option(help="One of the recipe's arms.")] = None,
    rollout_model: Annotated[
        list[str] | None,
        typer.Option(help="A candidate in place of rollout_model.path; give it again for each further one."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A run in place of a recipe: measured at every checkpoint.")] = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts that each real rollout model answers.")
    ] = PROMPTS,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Default runs/simulate, runs/simulate-RECIPE-ARM, RUN/simulate.")
    ] = None,
) -> None:
    """Show what OBRS does to a gap between two models, without training.

    Three views of the paper's Figure 2, both theorems, Z from the top k, and, of real models, how far apart they are:
    that is how to choose a rollout model.
    """
    if run and (recipe or rollout_model or arm):
        raise ConfigError("--run measures the models of a run; leave out the recipe, its arm and --rollout-model")
    if not recipe and (rollout_model or arm):
        raise ConfigError("--rollout-model and --arm need a recipe, whose policy and task are taken")
    console = Console()
    if recipe or run:
        with console.status("measuring both models"):
            if run:
                found = simulate_run(run, prompts, seed)
            else:
                found = simulate_candidates(resolve(recipe, arm, overrides or []), rollout_model or [], prompts, seed)
        sections = pair_sections(found)
    else:
        with console.status("simulating"):
            found = simulate_families(seed)
        sections = view_sections(found)
    name = "-".join(filter(None, ["simulate", recipe and Path(recipe).stem, arm]))
    folder = out or (run / "simulate" if run else Path("runs") / name)
    title = " ".join(filter(None, ["jackpot simulate", recipe, arm, run and str(run)]))
    files = write_folder(folder, "simulate", title, sections, asdict(found))
    show_tables(console, sections.values())
    show_files(console, files)


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
    plan = ComparisonPlan(
        unit=unit, budget=budget, accuracy=accuracy, baseline=baseline, stop_collapsed=not keep_collapsed
    )
    try:
        found, runs = run_arms(configs, given, where, plan, jobs, arms_progress(console))
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
