"""Compares arms at equal budget, from the summaries of their runs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.core.errors import ConfigError
from jackpot.core.statistics import Sample, paired_differences
from jackpot.training.limits import two_errors
from jackpot.training.run_folder.folder import Measure

FEW_SEEDS = 3  # with fewer, the spread over seeds may be small by chance
UNITS = {  # of a budget, and what each counts
    "sequences": "sequences generated",
    "tokens": "response tokens generated",
    "flops": "rollout FLOPs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Holds the difference of an arm to the baseline, paired by seed, which cancels the chance that both arms share."""

    spread: Sample
    higher: int  # number of seeds on which the arm is above the baseline
    lower: int  # on which it is below
    noise: float | None  # standard error by the evaluations' problems alone, as if each arm had its own; None: unknown

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean; of fewer than `FEW_SEEDS` seeds not less than `noise`."""
        if self.seeds >= FEW_SEEDS:
            return self.spread.error
        return max(filter(None, (self.spread.error, self.noise)), default=None)

    @property
    def seeds(self) -> int:
        """Return the number of seeds that arm and baseline share."""
        return len(self.spread.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostToAccuracy:
    """What runs had spent when their policy reached an accuracy (`RunSummary.spent_until`), as medians over the runs.

    A run that never reaches it counts as infinite; an infinite median is None.
    """

    reached: int  # number of runs that reach the accuracy
    of: int  # number of all runs
    flops: float | None  # of generating the rollouts
    all_flops: float | None  # of rollouts and training
    cpu_seconds: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRow:
    """Holds the results of one arm. Accuracies at the budget are those of the last evaluation within it.

    They are mean rewards where `Comparison.measure` says so.
    """

    arm: str
    seeds: tuple[int, ...]
    before: Sample
    after: Sample
    rollout_model_after: Sample | None  # None where the policy generates its own rollouts
    difference: Difference | None  # None for the baseline, or without a seed in common
    cost: CostToAccuracy | None  # None without an accuracy to count to
    collapsed: tuple[str, ...]  # a sentence for each seed whose run collapsed
    short: int  # number of runs that ended before the budget without a collapse


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Holds the results of all arms, compared at one budget and one accuracy."""

    unit: str  # one of UNITS
    budget: float
    baseline: str
    accuracy: float | None  # accuracy to which costs are counted; None where no run rose above the starts
    rows: tuple[ArmRow, ...]
    best: str  # arm of the highest mean at the budget
    ahead: Mapping[str, Difference | None]  # the best arm minus each other one; None without a seed in common
    measure: Measure = "accuracy"  # reward: the task has no verdict, and mean rewards stand in place of accuracies
    sampling: str = "sampled"  # how the answers were sampled


def compare(
    runs: Sequence[RunSummary],
    unit: str = "sequences",
    budget: float | None = None,
    accuracy: float | None = None,
    baseline: str | None = None,
) -> Comparison:
    """Compare arms at equal budget.

    Args:
        runs: at least one; arms keep the order in which they come.
        unit: one of UNITS, in which the budget is.
        budget: None takes the most that every run which did not collapse has spent.
        accuracy: accuracy to which costs are counted; None takes the highest that all those runs reached which did not
            collapse and rose above every run's start by more than the noise of two evaluations.
        baseline: the arm that others are compared with; None takes the first.

    Raises:
        ConfigError: no run, an unknown baseline, a budget below what the first evaluation after training needs, or
            accuracies of some runs and mean rewards of others, or answers that were sampled in different ways.
    """
    if not runs:
        raise ConfigError("no run was given; compare needs at least one with an evaluation")
    arms = {run.arm: [one for one in runs if one.arm == run.arm] for run in runs}
    baseline = baseline or runs[0].arm
    if baseline not in arms:
        raise ConfigError(f"baseline {baseline!r} is not among the arms {', '.join(arms)}; name one of them")

    if len({run.measure for run in runs}) > 1:
        raise ConfigError("some runs have accuracies and others mean rewards only; set one task.verdict for all")
    if len(ways := {run.sampling for run in runs}) > 1:
        raise ConfigError(
            f"answers of evaluations are {' in some runs and '.join(sorted(ways))} in others, so their accuracies do "
            f"not compare; set one evaluation.sampling for all"
        )

    not_collapsed = [run for run in runs if run.collapse is None] or list(runs)
    budget = min(spent_on(run.last, unit) for run in not_collapsed) if budget is None else budget
    _check_budget(runs, unit, budget)
    accuracy = _common_accuracy(not_collapsed) if accuracy is None else accuracy

    at = {arm: {run.seed: _at(run, unit, budget) for run in those} for arm, those in arms.items()}
    rows = tuple(
        _row(arm, those, unit, budget, accuracy, None if arm == baseline else at[baseline])
        for arm, those in arms.items()
    )
    best = max(rows, key=lambda row: row.after.mean).arm
    return Comparison(
        unit=unit,
        budget=budget,
        baseline=baseline,
        accuracy=accuracy,
        rows=rows,
        best=best,
        ahead={arm: _difference(at[best], of_arm) for arm, of_arm in at.items() if arm != best},
        measure=runs[0].measure,
        sampling=runs[0].sampling,
    )


def _common_accuracy(runs: Sequence[RunSummary]) -> float | None:
    """Return the lowest of the best accuracies of the runs that rose; None where none did.

    At an accuracy that some run began with, arms would have got there at no cost; so it must lie above all starts, by
    two standard errors of a difference: the best of many evaluations of a flat run is a little above its start.
    """
    start = max(run.points[0].policy_accuracy for run in runs)
    goal = start + max(_noise(run, start) for run in runs)
    best = [max(point.policy_accuracy for point in run.points) for run in runs]
    return min((accuracy for accuracy in best if accuracy > goal), default=None)


def _noise(run: RunSummary, start: float) -> float:
    """Return two standard errors of the difference between two evaluations of a run that began at `start`."""
    if run.measure == "accuracy":
        return two_errors(run.problems, start)
    return 2.0 * math.sqrt(2.0) * (run.points[0].policy_accuracy_stderr or 0.0)


def _check_budget(runs: Sequence[RunSummary], unit: str, budget: float) -> None:
    """Refuse a budget within which some run has no evaluation but that of the start."""
    at, arm = max((spent_on(run.points[min(1, len(run.points) - 1)], unit), run.arm) for run in runs)
    if budget < at:
        raise ConfigError(
            f"a budget of {budget:.4g} {UNITS[unit]} ends before the first evaluation after training of arm {arm!r}, "
            f"at {at:.4g}; raise it, or evaluate more often (evaluation.every)"
        )


def spent_on(point: EvaluationPoint, unit: str) -> float:
    """Return how much of a unit had been spent at an evaluation."""
    return getattr(point, unit)


def _at(run: RunSummary, unit: str, budget: float) -> EvaluationPoint:
    """Return the last evaluation within the budget, up to rounding."""
    return [point for point in run.points if spent_on(point, unit) <= budget * (1.0 + 1e-9)][-1]


def _row(
    arm: str,
    runs: Sequence[RunSummary],
    unit: str,
    budget: float,
    accuracy: float | None,
    base: Mapping[int, EvaluationPoint] | None,
) -> ArmRow:
    runs = sorted(runs, key=lambda run: run.seed)
    at = {run.seed: _at(run, unit, budget) for run in runs}
    accuracies = [one.rollout_model_accuracy for one in at.values() if one.rollout_model_accuracy is not None]

    return ArmRow(
        arm=arm,
        seeds=tuple(at),
        before=Sample(tuple(run.points[0].policy_accuracy for run in runs)),
        after=Sample(tuple(point.policy_accuracy for point in at.values())),
        rollout_model_after=Sample(tuple(accuracies)) if accuracies else None,
        difference=_difference(at, base or {}),
        cost=None if accuracy is None else _cost(runs, accuracy),
        collapsed=tuple(f"seed {run.seed}: {run.collapse.sentence}" for run in runs if run.collapse),
        short=sum(run.collapse is None and _is_short(run, unit, budget) for run in runs),
    )


def _difference(at: Mapping[int, EvaluationPoint], base: Mapping[int, EvaluationPoint]) -> Difference | None:
    """Subtract the baseline's accuracies from an arm's, by seed; None without a seed in common."""
    spread = paired_differences(
        *({seed: point.policy_accuracy for seed, point in points.items()} for points in (at, base))
    )
    if spread is None:
        return None

    both = [points[seed].policy_accuracy_stderr for seed in at if seed in base for points in (at, base)]
    errors = [error for error in both if error is not None]
    return Difference(
        spread=spread,
        higher=sum(value > 0 for value in spread.values),
        lower=sum(value < 0 for value in spread.values),
        noise=math.hypot(*errors) / len(spread.values) if len(errors) == len(both) else None,
    )


def _is_short(run: RunSummary, unit: str, budget: float) -> bool:
    """Return whether another iteration of the usual size would still have been within the budget."""
    spent, iterations = spent_on(run.last, unit), max(1, run.last.iteration)
    return spent * (1.0 + 1.0 / iterations) <= budget * (1.0 + 1e-9)


def _cost(runs: Sequence[RunSummary], accuracy: float) -> CostToAccuracy:
    spent = [run.spent_until(accuracy) for run in runs]

    def middle(name: str) -> float | None:
        value = statistics.median(getattr(costs, name) if costs else math.inf for costs in spent)
        return value if math.isfinite(value) else None

    return CostToAccuracy(
        reached=sum(costs is not None for costs in spent),
        of=len(runs),
        flops=middle("flops"),
        all_flops=middle("all_flops"),
        cpu_seconds=middle("cpu_seconds"),
        seconds=middle("seconds"),
    )
