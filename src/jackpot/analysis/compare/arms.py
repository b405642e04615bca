"""Runs every arm and seed of a recipe at equal budget, and compares the finished runs.

Status: supported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jackpot.analysis.compare.comparison import UNITS, Comparison, compare, spent_on
from jackpot.analysis.compare.process import ArmRun, runs_at_once
from jackpot.analysis.compare.scheduler import ArmListener, Lines, run_all
from jackpot.analysis.compare.summary import RunSummary, points_of, summarize
from jackpot.analysis.diagnose.collapse import collapse_of
from jackpot.config.config import Config
from jackpot.core.errors import ConfigError, TrainingError
from jackpot.core.files import write_whole
from jackpot.training.run_folder.folder import RunFolder

_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids")  # settings that answers depend on


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonPlan:
    """The rules of a comparison: each run's budget, the accuracy up to which costs count, and the baseline."""

    unit: str = "sequences"  # unit of the budget, one of UNITS
    budget: float | None = None  # budget of each run, in `unit`; None: what the recipe's iterations spend
    accuracy: float | None = None  # share in (0, 1]; None: the highest that all runs reach
    baseline: str | None = None  # name of an arm; None: the first
    stop_collapsed: bool = True  # whether a run stops when it has collapsed


def run_arms(
    configs: Mapping[tuple[str, int], Config],
    overrides: Sequence[str],
    folder: Path,
    plan: ComparisonPlan,
    at_once: int | None,
    listen: ArmListener,
) -> tuple[Comparison, list[RunSummary]]:
    """Run or continue every arm and seed, write summaries.jsonl into `folder`, and compare the runs.

    Args:
        configs: resolved settings by (arm, seed), with seed, threads and iterations in them.
        overrides: settings that the user gave as key=value.
        folder: the folder above the run folders.
        plan: what the comparison measures.
        at_once: number of runs at the same time; None: as many as the cores allow.
        listen: function that is called at every new line of a run's metrics, and at the end of the run.

    Raises:
        ConfigError: arms that cannot be compared, a plan that does not fit the arms, or a budget below one rollout
            batch.
        CheckpointError: the folder holds runs with other settings.
        TrainingError: some runs failed; raised after all others have ended, with the end of each failed run's log.
    """
    check_plan(plan, list(dict.fromkeys(arm for arm, _ in configs)))
    if plan.unit == "sequences" and plan.budget is not None:
        if any(text.startswith("iterations=") for text in overrides):
            raise ConfigError("iterations and a budget in sequences were both given; leave one out")
        configs = with_budget(configs, plan.budget)

    runs = make_runs(configs, folder)
    failed = run_all(runs, at_once or runs_at_once(configs.values()), partial(_why_to_stop, plan), listen)

    if failed:
        listed = "\n  ".join(f"{run.name}: {end}" for run, end in failed.items())
        raise TrainingError(
            f"{len(failed)} of {len(runs)} runs failed; the same command tries them again and keeps the others:\n"
            f"  {listed}"
        )

    summaries = [summarize(run.folder, run.arm) for run in runs]
    write_whole(folder / "summaries.jsonl", "".join(f"{summary.to_json()}\n" for summary in summaries).encode())
    comparison = compare(summaries, unit=plan.unit, budget=plan.budget, accuracy=plan.accuracy, baseline=plan.baseline)
    return comparison, summaries


def check_plan(plan: ComparisonPlan, arms: Sequence[str]) -> None:
    """Refuse, before any run, a plan that could not be carried out after the runs.

    Raises:
        ConfigError: an unknown unit or baseline, or an accuracy or budget out of range.
    """
    if plan.unit not in UNITS:
        raise ConfigError(f"unit {plan.unit!r} was given; budgets are in {', '.join(UNITS)}")
    if plan.baseline is not None and plan.baseline not in arms:
        raise ConfigError(f"baseline {plan.baseline!r} is not among the arms {', '.join(arms)}; name one of them")
    if plan.accuracy is not None and not 0.0 < plan.accuracy <= 1.0:
        raise ConfigError(f"accuracy {plan.accuracy:g} was given; it is a share, above 0 and at most 1")
    if plan.budget is not None and not 0.0 < plan.budget < math.inf:
        raise ConfigError(f"budget {plan.budget:g} was given; it must be above 0 and finite")


def make_runs(configs: Mapping[tuple[str, int], Config], folder: Path) -> list[ArmRun]:
    """Make the list of runs, one for each (arm, seed), seed by seed, so that the first seed can be compared early.

    Raises:
        ConfigError: arms that cannot be compared, since their evaluations differ.
        CheckpointError: the folder holds a run with other settings.
    """
    if different := differing_arms(configs):
        listed = "; ".join(f"{arm!r}: {why}" for arm, why in different.items())
        raise ConfigError(
            f"accuracies compare only where all arms answer the same problems in the same way. {listed}. Leave "
            f"those out, or set it for all"
        )

    runs = []
    for arm, seed in sorted(configs, key=lambda key: key[1]):  # by seed; within a seed in the order of the arms
        config = configs[arm, seed]
        name = f"{arm}-seed{seed}"
        existing = RunFolder(folder / name)
        existing.check(config)
        log = folder / "logs" / f"{name}.log"
        runs.append(ArmRun(arm=arm, seed=seed, folder=existing.path, log=log, config=config))
    return runs


def with_budget(configs: Mapping[tuple[str, int], Config], sequences: float) -> dict[tuple[str, int], Config]:
    """Return the settings of all runs, each with as many iterations as a budget of responses allows.

    Args:
        configs: settings of each run, by arm and seed.
        sequences: the budget of each run: the largest number of responses in all of its rollout batches together.

    Raises:
        ConfigError: the budget is below one rollout batch of some arm.
    """
    largest, arm = max((config.batch.rollouts, arm) for (arm, _), config in configs.items())
    if sequences < largest:
        raise ConfigError(
            f"a budget of {sequences:g} sequences is less than one rollout batch of arm {arm!r}, {largest}; raise it"
        )

    return {
        key: config.model_copy(update={"iterations": int(sequences // config.batch.rollouts)})
        for key, config in configs.items()
    }


def differing_arms(configs: Mapping[tuple[str, int], Config]) -> dict[str, str]:
    """Return the arms that are evaluated on other problems or in another way than the first arm.

    Returns:
        For each such arm, text that names a setting of evaluations that differs, with its value in both arms.
    """
    (first, _), reference = next(iter(configs.items()))
    expected = _evaluation_settings(reference)
    return {
        arm: f"{setting} is {value}, and {expected[setting]} in {first!r}"
        for (arm, _), config in configs.items()
        for setting, value in _evaluation_settings(config).items()
        if value != expected[setting]
    }


def _evaluation_settings(config: Config) -> dict[str, Any]:
    """Return all settings that decide an evaluation's problems and how they are answered, by dotted key."""
    sampling = {f"sampling.{name}": getattr(config.evaluation_sampling, name) for name in _SAMPLING}
    evaluation = {f"evaluation.{name}": getattr(config.evaluation, name) for name in ("problems", "k")}
    return {"task": config.task} | evaluation | sampling


def _why_to_stop(plan: ComparisonPlan, run: ArmRun, lines: Lines, events: Lines) -> str | None:
    """Return why a run must stop now, a collapse or a used budget; None: the run goes on.

    No run stops early for a budget in sequences: `with_budget` has turned that budget into iterations.
    """
    if plan.stop_collapsed and (collapse := collapse_of(lines, events, run.config)):
        return f"collapsed: {collapse.why}"
    if plan.budget is None:
        return None

    spent = [spent_on(point, plan.unit) for point in points_of(lines, run.config)]
    if spent and spent[-1] >= plan.budget:
        return f"budget of {plan.budget:.4g} {UNITS[plan.unit]} used"
    return None
