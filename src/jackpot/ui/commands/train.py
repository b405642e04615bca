"""Implements `jackpot train`, which trains a recipe, prints its plan or runs its tiny version."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from jackpot.analysis.compare.summary import points_of
from jackpot.analysis.plan.estimate import CostEstimate, estimate, is_large
from jackpot.analysis.plan.memory import plan_memory
from jackpot.analysis.plan.sharding import blocks, rank_memory, sharded
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.analysis.plan.start import MACHINE, NO_MACHINE, machine, start
from jackpot.analysis.plan.tiny import tiny_run
from jackpot.config.names import run_folder
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import load_recipe, recipe_notes, resolve
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, JackpotError
from jackpot.core.place import place
from jackpot.launch.checks import check_start
from jackpot.launch.library import train_config
from jackpot.launch.local import model_paths
from jackpot.launch.ranks import follow_leader
from jackpot.rollout.tasks.registry import check_sets, set_name
from jackpot.training.collapse import problems_of
from jackpot.training.run.folder import RunFolder, measure_of
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.plan import show_needs, show_plan, show_tiny
from jackpot.ui.terminal.progress import print_line, progress
from jackpot.ui.terminal.tables import show_table

_FACTS = {  # name on the screen: metric and its format
    "reward": ("reward/mean", "{:.3f}"),
    "policy": ("eval/policy_accuracy", "{:.1%}"),
    "rollout model": ("eval/rollout_model_accuracy", "{:.1%}"),
    "acceptance": ("obrs/acceptance", "{:.3f}"),
    "KL": ("mismatch/kl_rollout_policy", "{:.4f}"),
    "tokens/s": ("speed/tokens_per_second", "{:,.0f}"),
}
_REWARD_FACTS = {  # in place of accuracies, where the task has no verdict; a line in the terminal keeps these
    "policy": ("eval/policy_reward", "{:.3f}"),
    "rollout model": ("eval/rollout_model_reward", "{:.3f}"),
}


def train(
    recipe: str, overrides: list[str] | None, arm: str | None, run: Path | None, dry_run: bool, tiny: bool
) -> None:
    """Train or continue the run, or print its plan with `dry_run`. Of several ranks, rank 0 does; others follow it."""
    if (at := place()).rank > 0:
        if not dry_run:
            follow_leader(at)
        return
    console = Console()
    config = resolve(recipe, arm, overrides or [])
    check_sets(config.evaluation.benchmarks)
    folder = run or run_folder(recipe, arm, overrides or [], config.seed, "tiny" if tiny else None)
    if tiny:
        if dry_run:
            raise ConfigError("--tiny runs the recipe and --dry-run does not; give one of them")
        with tiny_run(config, folder / "tiny") as small:
            show_tiny(console, small)
            _train_and_show(console, small.config, folder)
    elif dry_run:
        ranks = max(at.size, config.placement.ranks)
        check_start(config, model_paths(config, None), ranks)
        RunFolder(folder).check(config)
        needs = _plan(console, config, recipe_notes(recipe, load_recipe(recipe)).gpus, folder, ranks)
        typed = " ".join(map(quote, [recipe, *(["--arm", arm] if arm else []), *(overrides or [])]))
        commands = {f"jackpot train {typed} --tiny": "try it here with small models"}  # --run would be of both
        if at.size == at.local_size:  # on several machines it is the same command without --dry-run
            commands |= _starting(console, config, (recipe, arm, overrides or [], run), ranks, needs)
        show_next(console, commands)
    else:
        _train_and_show(console, config, folder)


def _plan(console: Console, config: Config, gpus: GpusConfig | None, folder: Path, ranks: int) -> CostEstimate | None:
    """Print the plan, and for a large run return what it needs."""
    sizes, prompts = model_sizes(config), prompt_lengths(config)
    if is_large(sizes):
        needs = estimate(config, sizes, prompts, gpus, ranks)
        show_plan(console, config, sizes, needs.ranks, prompts, folder)
        show_needs(console, config, needs)
        return needs
    if ranks > 1:
        with sharded():
            memory = plan_memory(config, sizes, prompts.longest)
        show_plan(console, config, sizes, rank_memory(config, sizes, memory, blocks(config), ranks), prompts, folder)
    else:
        show_plan(console, config, sizes, plan_memory(config, sizes, prompts.longest), prompts, folder)
    return None


def _starting(
    console: Console,
    config: Config,
    typed: tuple[str, str | None, list[str], Path | None],
    ranks: int,
    needs: CostEstimate | None,
) -> dict[str, str]:
    """Return the command that trains, with its purpose; print why it adds settings, or why there is none.

    Args:
        typed: recipe, arm, settings and run folder.
        ranks: processes that were started, or that Ray will start.
    """
    count, purpose = ranks, "train"
    if needs and ranks == 1 and config.placement.launcher == "local":
        if (gpus := machine(config, needs)) is None:
            print_line(console, NO_MACHINE)
            return {}
        cluster = " of a Ray cluster (docs/distributed.md)" if gpus.count > MACHINE else ""
        count, purpose = gpus.count, f"train, on {gpus.count} {gpus.kind}{cluster}"
    try:
        found = start(*typed, count)
    except JackpotError as error:
        print_line(console, f"On {count} GPUs these settings do not start: {error}")
        return {}
    if found.refusal:
        print_line(
            console, f"As typed, {count} processes would not start, so the command below adds to it: {found.refusal}"
        )
    return {found.command: purpose}


def _train_and_show(console: Console, config: Config, folder: Path) -> None:
    def begin(iteration: int) -> None:
        if iteration == config.iterations:
            print_line(
                console,
                f"This run is finished ({config.iterations} iterations). iterations=N --run {folder} continues it with "
                f"more; --run with another folder begins a new one.",
            )

    with _listener(console, config) as listen:
        is_finished = train_config(config, folder, listen, begin)
    _show_result(console, config, RunFolder(folder).read("metrics.jsonl"), folder, is_finished)


@contextmanager
def _listener(console: Console, config: Config) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a listener for each new line of metrics that shows the iteration, `_FACTS` and the time left."""
    with progress(console) as shown:

        def listen(line: Mapping[str, Any]) -> None:
            facts = _FACTS if measure_of(line) != "reward" else _FACTS | _REWARD_FACTS
            facts = facts | {"KL": (config.kl_metric, "{:.4f}")}
            found = {name: (line.get(metric), form) for name, (metric, form) in facts.items()}
            texts = {name: form.format(value) for name, (value, form) in found.items() if value is not None}
            is_due = measure_of(line) is not None
            phases = (metric for metric in line if metric.startswith("seconds/") and metric != "seconds/prepass")
            if seconds := sum(line[metric] or 0.0 for metric in phases):  # prepass is a part of train
                texts["s/iteration"] = f"{seconds:.2g}"
            shown.update("iteration", line["iteration"], config.iterations, texts, is_due=is_due, lasting=_REWARD_FACTS)

        yield listen


def _show_result(
    console: Console, config: Config, lines: Sequence[Mapping[str, Any]], folder: Path, is_finished: bool
) -> None:
    """Print how good both models were before and after training, with standard errors, the folder and what is next.

    That is their accuracy, or their mean reward where the task has no verdict.
    """
    evaluated = [line for line in lines if measure_of(line) is not None]
    first, last = evaluated[0], evaluated[-1]
    measure = measure_of(last)
    is_accuracy = measure == "accuracy"
    roles = ["policy"] if config.rollout_model is None else ["policy", "rollout_model"]
    shown = {role.replace("_", " "): (f"eval/{role}_{measure}", _percent if is_accuracy else _number) for role in roles}
    for name in map(set_name, config.evaluation.benchmarks):
        if (metric := f"eval/{name}/mean_at_k") in last:
            shown[f"policy on {name}" + ", percent" * (not is_accuracy)] = (metric, _percent)
        else:
            shown[f"policy on {name}" + ", mean reward" * is_accuracy] = (f"eval/{name}/reward", _number)
    rows = []
    for name, (metric, form) in shown.items():
        (before, error), (after, newer) = ((line[metric], line.get(f"{metric}_stderr")) for line in (first, last))
        both = None if error is None or newer is None else math.hypot(error, newer)
        rows.append((name, form(before, error), form(after, newer), form(after - before, both, "+")))
    columns = ("model", "before", f"after {last['iteration']} iterations", "change" + ", points" * is_accuracy)
    where = f"on {problems_of(lines, config)} held-out problems"
    accuracy, reward = f"Sampled accuracy {where}, percent", f"Mean reward of sampled responses {where}"
    title = f"{accuracy if is_accuracy else reward} ± standard error"
    show_table(console, title, columns, rows, columns[1:])
    for line in _cost(lines, config):
        print_line(console, line)
    print_line(console, f"Run folder: {folder}")
    if not is_finished:
        print_line(console, "Stopped before the end; the same command continues.")
    where = quote(str(folder))
    show_next(
        console,
        {
            f"jackpot diagnose {where}": "signs that something is wrong, since when, and what to try",
            f"jackpot report {where}": "one page with every metric and every saved token",
            f"jackpot sample {where}": "answers of both models, before and after training",
        },
    )


def _cost(lines: Sequence[Mapping[str, Any]], config: Config) -> list[str]:
    """Say what a run cost until its last evaluation: rollout FLOPs, all FLOPs, CPU seconds; nothing before training."""
    *_, spent = points_of(lines, config)
    flops = spent.flops + spent.training_flops
    if not flops:
        return []

    evaluating = sum(line.get("cpu_seconds/evaluate") or 0.0 for line in lines)
    return [
        f"Cost of {spent.iteration} iterations: {flops:.2g} FLOPs, {spent.flops / flops:.0%} of them for rollouts, the "
        f"others for training; {spent.cpu_seconds:.3g} CPU seconds of this process, {evaluating:.3g} for evaluations."
    ]


def _percent(share: float, error: float | None, sign: str = "") -> str:
    """Format a share and its standard error in percent: `41.8 ± 2.2`; without the error where it is unknown."""
    return f"{100 * share:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _number(value: float, error: float | None, sign: str = "") -> str:
    """Format a mean reward and its standard error: `0.4180 ± 0.022`; without the error where it is unknown."""
    return f"{value:{sign}#.4g}" + ("" if error is None else f" ± {error:#.2g}")
