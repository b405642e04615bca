"""Implements `jackpot train`, which trains a recipe, prints its plan or runs its tiny version."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.core.process_rank import process_rank
from jackpot.ui.arguments import Arm, Overrides, Recipe
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, print_lines, show_next, show_table
from jackpot.ui.terminal.progress import progress

with lazy():
    from jackpot.analysis.compare import summary
    from jackpot.analysis.plan import estimate as estimating
    from jackpot.analysis.plan import memory as planned_memory
    from jackpot.analysis.plan import sizes
    from jackpot.analysis.plan import start as starting
    from jackpot.analysis.plan import tiny as shrinking
    from jackpot.config import config as run_settings
    from jackpot.config import names, processes, published, recipes
    from jackpot.launch import checks, library
    from jackpot.launch import ranks as launched
    from jackpot.models import device
    from jackpot.rollout.tasks import registry
    from jackpot.training import limits
    from jackpot.training.run_folder import folder as run_files
    from jackpot.ui import numbers
    from jackpot.ui.terminal import plan as plans


Typed = tuple[str, str | None, list[str], Path | None]  # what a command line names: recipe, arm, settings, run folder

_FACTS = {  # name on the screen: metric and its format
    "reward": ("reward/mean", "{:.3f}"),
    "policy": ("eval/policy_accuracy", "{:.1%}"),
    "rollout model": ("eval/rollout_model_accuracy", "{:.1%}"),
    "acceptance": ("obrs/acceptance", "{:.3f}"),
    "KL": ("mismatch/kl_rollout_policy", "{:.4f}"),
    "tokens/s": ("speed/tokens_per_second", "{:,.0f}"),
}
# In place of the accuracies of `_FACTS`, if the task has no verdict. Lines above the bars show these names only.
_REWARD_FACTS = {
    "policy": ("eval/policy_reward", "{:.3f}"),
    "rollout model": ("eval/rollout_model_reward", "{:.3f}"),
}


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Arm = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE-ARM-OVERRIDES-seedN.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, which is experimental, and train nothing.")
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs that --dry-run plans for, and that must hold the run, such as 4xH100; default those of the "
            "recipe and of this machine."
        ),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Run 2 iterations with small random models of the same architecture, without GPU or downloads, and "
            "print each setting that this replaces. key=value changes the recipe first.",
        ),
    ] = False,
) -> None:
    """Train a recipe, or continue the run in its folder from the newest intact checkpoint.

    Ctrl-C, SIGTERM or a closed terminal stops after the current iteration and saves a checkpoint; a second signal stops
    at once. A kill costs at most the iterations since the last checkpoint. Settings that decide no number computed
    before, such as iterations, may change when a run continues: `jackpot config KEY` says so.

    For example `jackpot train quickstart iterations=20 seed=3 objective.correction=tis`; `jackpot config` explains the
    settings, and `jackpot recipes` lists the recipes.

    `torchrun --nproc-per-node N -m jackpot train RECIPE` trains with N processes: docs/distributed.md.

    Status: supported. On CPUs, and briefly on a GPU (docs/gpu.md). docs/index.md says what is experimental.
    """
    process = process_rank()
    # Rank 0 alone does all that stands below. The other ranks carry out its commands; a plan has none.
    if process.rank > 0:
        if not dry_run:
            launched.follow_leader(process)
        return

    if dry_run and tiny:
        raise ConfigError("--tiny runs the recipe and --dry-run does not; give one of them")
    if gpus and not dry_run:
        raise ConfigError(
            f"--gpus {gpus} is for --dry-run, and a run takes the GPUs that it is started on; give both, or none"
        )

    console = Console()
    config = recipes.resolve(recipe, arm, overrides or [])
    registry.check_sets(config.evaluation.benchmark_names)
    folder = run or names.run_folder(recipe, arm, overrides or [], config.seed, "tiny" if tiny else None)

    if dry_run:
        _show_dry_run(console, config, (recipe, arm, overrides or [], run), folder, gpus)
        return
    if tiny:
        tiny_run = shrinking.make_tiny(config, folder / "tiny")
        plans.show_tiny(console, tiny_run)
        config = tiny_run.config
    _train_and_show(console, config, folder)


def _show_dry_run(
    console: Console, config: "run_settings.Config", typed: Typed, folder: Path, gpus: str | None
) -> None:
    """Check what a start checks; print the plan, and the commands that try the recipe and that train it."""
    recipe, arm, overrides, _ = typed  # not the typed run folder: `folder` is the one to use
    process = process_rank()
    ranks = max(process.size, config.placement.ranks)
    checks.check_start(config, config.model_paths(), ranks)
    run_files.RunFolder(folder).check(config)

    required = published.parse_gpus(gpus) if gpus else None
    # The GPUs to plan for: those of --gpus, else the recipe's, else (None) those of this machine.
    planned = required or recipes.recipe_notes(recipe, recipes.load_recipe(recipe)).gpus
    needs = _plan(console, config, planned, folder, ranks)

    words = " ".join(map(quote, [recipe, *(["--arm", arm] if arm else []), *overrides]))
    # The trial does not get --run, which names the folder of the full run.
    commands = {f"jackpot train {words} --tiny": "try it here with small models"}
    commands |= dict.fromkeys(starting.downloads(config), "first, once: what is on the hub alone")
    if process.size == process.local_size:  # on several machines, the same command without --dry-run trains
        commands |= _training_commands(console, config, typed, ranks, needs, required)
    show_next(console, commands)


def _plan(
    console: Console, config: "run_settings.Config", gpus: "published.GpusConfig | None", folder: Path, ranks: int
) -> "estimating.CostEstimate | None":
    """Print the plan; return the estimated cost of a run with large models, None for small models.

    Args:
        gpus: GPUs to estimate the cost for; None: those of this machine.
        ranks: number of processes that train.
    """
    models = sizes.model_sizes(config)
    prompts = sizes.prompt_lengths(config)
    if estimating.is_large(models):
        needs = estimating.estimate(config, models, prompts, gpus)
        plans.show_plan(console, config, models, memory=None, prompts=prompts, folder=folder)
        plans.show_needs(console, config, needs)
        return needs

    on_gpu = device.pick_device(config.device).type == "cuda"
    # torchrun starts engines on this machine alone, beside its ranks; Ray places them on all nodes (`beside` is None).
    config = processes.place_engines(config, ranks, on_gpu, local_ranks=process_rank().beside)
    memory = planned_memory.plan_memory(config, models, prompts.longest) if ranks == 1 else None
    plans.show_plan(console, config, models, memory, prompts, folder)
    return None


def _training_commands(
    console: Console,
    config: "run_settings.Config",
    typed: Typed,
    ranks: int,
    needs: "estimating.CostEstimate | None",
    required: "published.GpusConfig | None",
) -> dict[str, str]:
    """Return the commands that train, each with its purpose; if there is none, print why.

    Args:
        typed: what the command line names; each command repeats it.
        ranks: number of processes that were started, or that Ray will start.
        needs: estimated cost of the run; None for small models, which fit any GPU.
        required: GPUs that --gpus names and that the run has to fit.

    Raises:
        ConfigError: the run does not fit the required GPUs.
        JackpotError: the run would refuse to start.
    """
    if required and needs is None:
        print_line(
            console, f"{required.count} {required.kind} are not asked about: models as small as these fit any GPU."
        )
    if required and ranks > 1 and required.count != ranks:
        raise ConfigError(
            f"--gpus names {required.count} GPUs, and {ranks} ranks train, each on one; name "
            f"{ranks}x{required.kind}, or none"
        )

    machines = starting.machines(config, needs, is_asked=required is not None) if needs else []
    if required and needs and not machines:
        raise ConfigError(f"this run does not fit {required.count} {required.kind}. {plans.fitting(needs)}")
    # Small models, or a number of ranks that is given already: there are no GPUs to choose.
    if needs is None or ranks > 1 or config.placement.launcher == "ray":
        return {starting.start(*typed, ranks): "train"}
    if not machines:
        print_line(console, starting.NO_MACHINE)

    commands = {}
    for gpus in machines:  # these may be GPUs of several machines: one machine has at most `MACHINE`
        cluster = " of a Ray cluster (docs/distributed.md)" if gpus.count > starting.MACHINE else ""
        commands[starting.start(*typed, gpus.count)] = f"train, on {gpus.count} {gpus.kind}{cluster}"
    return commands


def _train_and_show(console: Console, config: "run_settings.Config", folder: Path) -> None:
    """Train a run, with its progress on the screen, and print the result."""

    def begin(iteration: int) -> None:
        """Print a note if the run in the folder, which continues after `iteration`, was finished before."""
        if iteration == config.iterations:
            print_line(
                console,
                f"This run is finished ({config.iterations} iterations). To train it further, add --run {folder} and "
                f"iterations=N with a larger N; to begin a new run, add --run and another folder.",
            )

    with _listener(console, config) as listen:
        is_finished = library.train_config(config, folder, listen, begin)
    _show_result(console, config, run_files.RunFolder(folder).read("metrics.jsonl"), folder, is_finished)


@contextmanager
def _listener(console: Console, config: "run_settings.Config") -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a listener to new lines of metrics.jsonl, which shows iteration, metrics of `_FACTS` and remaining time."""
    with progress(console) as counts:

        def listen(line: Mapping[str, Any]) -> None:
            """Show the iteration, the metrics and the seconds of a line of metrics.jsonl."""
            measure = run_files.measure_of(line)
            metrics = _FACTS | (_REWARD_FACTS if measure == "reward" else {}) | {"KL": (config.kl_metric, "{:.4f}")}
            facts = {
                name: form.format(line[metric])
                for name, (metric, form) in metrics.items()
                if line.get(metric) is not None
            }
            if seconds := numbers.iteration_seconds(line):
                facts["s/iteration"] = f"{seconds:.2g}"

            # An evaluation also prints a line that stays and has both models' scores alone: the facts that
            # `_REWARD_FACTS` names, which are mean rewards or accuracies.
            counts.update(
                "iteration",
                line["iteration"],
                config.iterations,
                facts,
                is_due=measure is not None,
                lasting=_REWARD_FACTS,
            )

        yield listen


def _show_result(
    console: Console, config: "run_settings.Config", lines: Sequence[Mapping[str, Any]], folder: Path, is_finished: bool
) -> None:
    """Print how good both models were before and after training, the cost, the run folder and the next commands."""
    evaluated = [line for line in lines if run_files.measure_of(line) is not None]
    first, last = evaluated[0], evaluated[-1]
    is_accuracy = run_files.measure_of(last) == "accuracy"
    # A row for each metric of the evaluation: its label, then its values before and after training and the change.
    rows = [
        (label, *_change_cells(first, last, metric, measure))
        for label, (metric, measure) in _evaluated_metrics(config, last, is_accuracy).items()
    ]

    after, change = f"after {last['iteration']} iterations", "change, points" if is_accuracy else "change"
    columns = ("model", "before", after, change)
    quantity = "Accuracy" if is_accuracy else "Mean reward"
    unit = ", percent ± standard error" if is_accuracy else " ± standard error"
    problems, sampling = limits.problems_of(lines, config), config.evaluation_sampling.described
    show_table(
        console, f"{quantity} on {problems} held-out problems, {sampling}{unit}", columns, rows, numbers=columns[1:]
    )

    print_lines(console, _cost(lines, config))
    print_line(console, f"Run folder: {folder}")
    if not is_finished:
        print_line(console, "Stopped before the end; the same command continues.")

    path = quote(str(folder))
    show_next(
        console,
        {
            f"jackpot diagnose {path}": "signs that something is wrong, since when, and what to try",
            f"jackpot report {path}": "one page with every metric and every saved token",
            f"jackpot sample {path}": "answers of both models, before and after training",
        },
    )


def _evaluated_metrics(
    config: "run_settings.Config", last: Mapping[str, Any], is_accuracy: bool
) -> "dict[str, tuple[str, run_files.Measure]]":
    """Return for each row of the result, by its label, the metric that it shows, and "accuracy" or "reward".

    Args:
        last: the newest line of metrics.jsonl with an evaluation.
        is_accuracy: whether the task has a verdict; else the two models have mean rewards.
    """
    measure: run_files.Measure = "accuracy" if is_accuracy else "reward"
    metrics: dict[str, tuple[str, run_files.Measure]] = {
        role.replace("_", " "): (f"eval/{role}_{measure}", measure) for role in config.model_paths()
    }

    # A row says its unit where this is not the unit of the table's title.
    for name in map(registry.set_name, config.evaluation.benchmark_names):
        if (metric := f"eval/{name}/mean_at_k") in last:  # a benchmark with verdicts; else it has a mean reward
            metrics[f"policy on {name}" + ("" if is_accuracy else ", percent")] = (metric, "accuracy")
        else:
            metrics[f"policy on {name}" + (", mean reward" if is_accuracy else "")] = (f"eval/{name}/reward", "reward")
    return metrics


def _change_cells(
    first: Mapping[str, Any], last: Mapping[str, Any], metric: str, measure: "run_files.Measure"
) -> tuple[str, str, str]:
    """Format a metric before training (line `first` of metrics.jsonl), after it (`last`), and the change, ± errors."""
    before, error_before = first[metric], first.get(f"{metric}_stderr")
    after, error_after = last[metric], last.get(f"{metric}_stderr")
    # The error of the change, as if the two errors were independent.
    error = None if error_before is None or error_after is None else math.hypot(error_before, error_after)
    return (
        numbers.with_error(before, error_before, measure),
        numbers.with_error(after, error_after, measure),
        numbers.with_error(after - before, error, measure, sign="+"),
    )


def _cost(lines: Sequence[Mapping[str, Any]], config: "run_settings.Config") -> list[str]:
    """Return a sentence on the FLOPs and CPU seconds of a run up to its last evaluation; none before training."""
    *_, spent = summary.points_of(lines, config)  # the last evaluation, with what the run has cost up to it
    flops = spent.flops + spent.training_flops  # FLOPs of rollouts and of training
    if not flops:
        return []

    evaluating = sum(line.get("cpu_seconds/evaluate") or 0.0 for line in lines)
    return [
        f"Cost of {spent.iteration} iterations: {flops:.2g} FLOPs, {spent.flops / flops:.0%} for rollouts and "
        f"{spent.training_flops / flops:.0%} for training; {spent.cpu_seconds:.3g} CPU seconds of this process, and "
        f"{evaluating:.3g} more for evaluations."
    ]
