"""Run arms, judge them on the way, and lay them side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jackpot.analysis.compare.comparison import UNITS, Comparison, Unit, compare, spent_on
from jackpot.analysis.compare.runs import Job, Judge, Lines, Listener, jobs_at_once, make_jobs, run_jobs, with_budget
from jackpot.analysis.compare.summary import RunSummary, points_of, summarize
from jackpot.analysis.diagnose.collapse import collapse_of
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, TrainingError
from jackpot.core.files import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared, and by what."""

    unit: Unit = "sequences"
    budget: float | None = None  # None: what the recipe's iterations give
    accuracy: float | None = None
    baseline: str | None = None
    stop_collapsed: bool = True


def run_arms(
    recipe: str,
    configs: Mapping[tuple[str, int], Config],
    overrides: Sequence[str],
    folder: Path,
    plan: Plan,
    at_once: int | None,
    listen: Listener,
) -> tuple[Comparison, list[RunSummary]]:
    """Run or continue every arm and seed, and lay them side by side. Writes summaries.jsonl into `folder`.

    Args:
        recipe, overrides: as the user typed them.
        configs: by (arm, seed).
        at_once: None: as many as the cores allow.

    Raises:
        ConfigError: arms that cannot be compared, or an unknown unit or baseline.
        CheckpointError: the folder holds runs with other settings.
        TrainingError: some runs failed, after all others have ended; says how each did.
    """
    check_plan(plan, list(dict.fromkeys(arm for arm, _ in configs)))
    if plan.unit == "sequences" and plan.budget is not None:
        if any(text.startswith("iterations=") for text in overrides):
            raise ConfigError("iterations and a budget in sequences were both given; the one follows from the other")
        configs = with_budget(configs, plan.budget)
    jobs = make_jobs(recipe, configs, overrides, folder)
    failed = run_jobs(jobs, at_once or jobs_at_once(configs.values()), _judge(configs, plan), listen)
    if failed:
        listed = "\n  ".join(f"{job.name}: {words}" for job, words in failed.items())
        raise TrainingError(
            f"{len(failed)} of {len(jobs)} runs failed; the same command tries them again and keeps the others:\n"
            f"  {listed}"
        )
    runs = [summarize(job.folder, job.arm) for job in jobs]
    write_whole(folder / "summaries.jsonl", "".join(f"{run.to_json()}\n" for run in runs).encode())
    return compare(runs, plan.unit, plan.budget, plan.accuracy, plan.baseline), runs


def check_plan(plan: Plan, arms: Sequence[str]) -> None:
    """Refuse before anything runs what could not be compared after it."""
    if plan.unit not in UNITS:
        raise ConfigError(f"unit {plan.unit!r} was given; budgets are in {', '.join(UNITS)}")
    if plan.baseline is not None and plan.baseline not in arms:
        raise ConfigError(f"baseline {plan.baseline!r} is not among the arms {', '.join(arms)}; name one of them")
    if plan.accuracy is not None and not 0.0 < plan.accuracy <= 1.0:
        raise ConfigError(f"accuracy {plan.accuracy:g} was given; it is a share, above 0 and at most 1")
    if plan.budget is not None and plan.budget <= 0.0:
        raise ConfigError(f"budget {plan.budget:g} was given; it must be above 0")


def _judge(configs: Mapping[tuple[str, int], Config], plan: Plan) -> Judge:
    """Stops what has collapsed, and what has used its budget. A budget in sequences is in the run's own iterations."""

    def judge(job: Job, lines: Lines, events: Lines) -> str | None:
        config = configs[job.arm, job.seed]
        collapse = collapse_of(lines, events, config) if plan.stop_collapsed else None
        if collapse:
            return f"collapsed: {collapse.why}"
        points = list(points_of(lines, config))
        if plan.budget is not None and points and spent_on(points[-1], plan.unit) >= plan.budget:
            return f"budget of {plan.budget:.4g} {UNITS[plan.unit]} used"
        return None

    return judge
