"""The comparison of arms at equal budget, computed from the summaries of their runs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.core.errors import ConfigError
from jackpot.core.statistics import Sample, paired_differences
from jackpot.training.limits import two_errors
from jackpot.training.run_folder.folder import Measure

FEW_SEEDS = 3  # fewest seeds whose spread is relied on; with fewer the spread may be small by chance
_ROUNDING = 1e-9  # share of the budget by which rounding alone may put a run's costs above the budget
UNITS = {  # unit of a budget -> text that says what the unit measures
    "sequences": "sequences generated",
    "tokens": "response tokens generated",
    "flops": "rollout FLOPs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The accuracy of one arm minus that of another, seed by seed, which cancels the chance that both arms share."""

    spread: Sample  # the difference of every seed
    higher: int  # number of seeds on which the arm is above the baseline
    lower: int  # number of seeds on which the arm is below the baseline
    noise: float | None  # standard error of the mean difference by the choice of problems alone; None: unknown

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean difference, from its spread over the seeds.

        With fewer than `FEW_SEEDS` seeds it is at least `noise`, the error by the choice of evaluation problems; None
        where neither is known and above 0.
        """
        if self.seeds >= FEW_SEEDS:
            return self.spread.error
        return max(filter(None, (self.spread.error, self.noise)), default=None)

    @property
    def seeds(self) -> int:
        """Return the number of seeds that arm and baseline share."""
        return len(self.spread.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostToAccuracy:
    """The costs of an arm's runs until their policy reached an accuracy, as medians over the runs.

    A run that never reaches the accuracy counts as infinite (`RunSummary.spent_until`); an infinite median is None.
    """

    reached: int  # number of runs that reach the accuracy
    of: int  # number of all runs
    flops: float | None  # FLOPs of generating the rollouts
    all_flops: float | None  # FLOPs of rollouts and training
    cpu_seconds: float | None  # processor time, seconds
    seconds: float | None  # wall-clock time, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRow:
    """The results of one arm. Accuracies at the budget are those of the last evaluation within the budget.

    All accuracies are mean rewards where `Comparison.measure` is reward.
    """

    arm: str
    seeds: tuple[int, ...]
    before: Sample  # the policy's accuracy before training, of every seed
    after: Sample  # the policy's accuracy at the budget, of every seed
    rollout_model_after: Sample | None  # the rollout model's accuracy at the budget; None where there is no such model
    difference: Difference | None  # this arm minus the baseline; None for the baseline, or without a seed in common
    cost: CostToAccuracy | None  # costs until `Comparison.accuracy`; None where there is no such accuracy
    collapsed: tuple[str, ...]  # a sentence for each seed whose run collapsed
    short: int  # number of runs that ended before the budget without a collapse


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The results of all arms: the accuracy that each reaches within a budget, and what each spends to reach one."""

    unit: str  # one of UNITS
    budget: float  # budget of each run, in `unit`
    baseline: str  # name of the arm that others are compared with
    accuracy: float | None  # accuracy up to which costs are counted; None where no run rose above the starts
    rows: tuple[ArmRow, ...]
    best: str  # arm with the highest mean accuracy at the budget
    ahead: Mapping[str, Difference | None]  # other arm -> the best arm minus this arm; None without a seed in common
    measure: Measure = "accuracy"  # reward: the task has no verdict, and mean rewards stand in place of accuracies
    sampling: str = "sampled"  # how the answers were sampled


def compare(
    runs: Sequence[RunSummary],
    unit: str = "sequences",
    budget: float | None = None,
    accuracy: float | None = None,
    baseline: str | None = None,
) -> Comparison:
    """Compare the arms of a recipe at equal budget, from the summaries of their runs.

    Args:
        runs: summaries of at least one run; arms keep the order in which they come.
        unit: unit of the budget, one of UNITS.
        budget: budget of each run; None: the most that every run has spent, without those that collapsed.
        accuracy: accuracy up to which costs are counted; None: the highest that all runs reached, of those that did
            not collapse and that rose above every run's start by more than the noise of two evaluations.
        baseline: name of the arm that others are compared with, the arm of some run; None: the first.

    Raises:
        ConfigError: a budget below what the first evaluation after training needs, accuracies of some runs and mean
            rewards of others, or answers that were sampled in different ways.
    """
    baseline = baseline or runs[0].arm
    arms: dict[str, list[RunSummary]] = {run.arm: [] for run in runs}  # of each arm the runs, in order of their seeds
    for run in sorted(runs, key=lambda run: run.seed):
        arms[run.arm].append(run)

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

    # The last evaluation within the budget, by arm and seed.
    points = {arm: _points_at(arm_runs, unit, budget) for arm, arm_runs in arms.items()}
    rows = tuple(
        _row(arm_runs, points[arm], {} if arm == baseline else points[baseline], unit, budget, accuracy)
        for arm, arm_runs in arms.items()
    )
    best = max(rows, key=lambda row: row.after.mean).arm

    return Comparison(
        unit=unit,
        budget=budget,
        baseline=baseline,
        accuracy=accuracy,
        rows=rows,
        best=best,
        ahead={arm: _difference(points[best], arm_points) for arm, arm_points in points.items() if arm != best},
        measure=runs[0].measure,
        sampling=runs[0].sampling,
    )


def _common_accuracy(runs: Sequence[RunSummary]) -> float | None:
    """Return the highest accuracy reached by every run that rose above the starts of all runs; None if no run rose.

    An accuracy that some run began with would cost that run nothing, so the result lies above all starts. The margin is
    two standard errors of a difference, since the best of many evaluations of a flat run is a little above its start.
    """
    start = max(run.points[0].policy_accuracy for run in runs)
    goal = start + max(_noise(run, start) for run in runs)
    best = [max(point.policy_accuracy for point in run.points) for run in runs]
    return min((accuracy for accuracy in best if accuracy > goal), default=None)


def _noise(run: RunSummary, start: float) -> float:
    """Return two standard errors of the difference between two evaluations of a run near the accuracy `start`."""
    if run.measure == "accuracy":
        return two_errors(run.problems, start)
    return 2.0 * math.sqrt(2.0) * (run.points[0].policy_accuracy_stderr or 0.0)


def _check_budget(runs: Sequence[RunSummary], unit: str, budget: float) -> None:
    """Refuse a budget within which some run has no other evaluation than the one before training."""
    # points[0] is the evaluation before training, and the only one of a run that has just begun.
    first, arm = max((spent_on(run.points[min(1, len(run.points) - 1)], unit), run.arm) for run in runs)
    if budget < first:
        raise ConfigError(
            f"a budget of {budget:.4g} {UNITS[unit]} ends before the first evaluation after training of arm {arm!r}, "
            f"at {first:.4g}; raise it, or evaluate more often (evaluation.every)"
        )


def spent_on(point: EvaluationPoint, unit: str) -> float:
    """Return the costs of a run up to an evaluation, in one of UNITS."""
    return getattr(point, unit)


def _points_at(runs: Sequence[RunSummary], unit: str, budget: float) -> dict[int, EvaluationPoint]:
    """Return the last evaluation of each run within the budget, by the run's seed."""
    points = {}
    for run in runs:
        within = [point for point in run.points if spent_on(point, unit) <= budget * (1.0 + _ROUNDING)]
        points[run.seed] = within[-1]
    return points


def _row(
    runs: Sequence[RunSummary],
    points: Mapping[int, EvaluationPoint],
    base: Mapping[int, EvaluationPoint],
    unit: str,
    budget: float,
    accuracy: float | None,
) -> ArmRow:
    """Return the results of the runs of one arm.

    Args:
        runs: runs of the arm.
        points: evaluations of these runs at the budget, by seed.
        base: the baseline's evaluations at the budget, by seed; empty for the baseline itself.
        unit: unit of the budget.
        budget: budget of each run.
        accuracy: accuracy up to which costs are counted; None: costs are not counted.
    """
    accuracies = [point.rollout_model_accuracy for point in points.values() if point.rollout_model_accuracy is not None]

    return ArmRow(
        arm=runs[0].arm,
        seeds=tuple(points),
        before=Sample(tuple(run.points[0].policy_accuracy for run in runs)),
        after=Sample(tuple(point.policy_accuracy for point in points.values())),
        rollout_model_after=Sample(tuple(accuracies)) if accuracies else None,
        difference=_difference(points, base),
        cost=None if accuracy is None else _cost(runs, accuracy),
        collapsed=tuple(f"seed {run.seed}: {run.collapse.sentence}" for run in runs if run.collapse),
        # Runs that ended before the budget without a collapse.
        short=sum(run.collapse is None and _is_short(run, unit, budget) for run in runs),
    )


def _difference(arm: Mapping[int, EvaluationPoint], base: Mapping[int, EvaluationPoint]) -> Difference | None:
    """Subtract the baseline's accuracies from an arm's, by seed; return None without a seed in common."""
    spread = paired_differences(
        {seed: point.policy_accuracy for seed, point in arm.items()},
        {seed: point.policy_accuracy for seed, point in base.items()},
    )
    if spread is None:
        return None

    # Standard errors of both arms at every common seed; a run of an old version has None in their place.
    paired = [points[seed].policy_accuracy_stderr for seed in arm if seed in base for points in (arm, base)]
    errors = [error for error in paired if error is not None]  # if one is missing, the noise is not known

    return Difference(
        spread=spread,
        higher=sum(value > 0 for value in spread.values),
        lower=sum(value < 0 for value in spread.values),
        noise=math.hypot(*errors) / len(spread.values) if len(errors) == len(paired) else None,
    )


def _is_short(run: RunSummary, unit: str, budget: float) -> bool:
    """Return whether a run ended so early that one more iteration of its usual size would have fit the budget."""
    spent, iterations = spent_on(run.last, unit), max(1, run.last.iteration)
    return spent * (1.0 + 1.0 / iterations) <= budget * (1.0 + _ROUNDING)


def _cost(runs: Sequence[RunSummary], accuracy: float) -> CostToAccuracy:
    """Return the median costs of an arm's runs until they reached an accuracy."""
    spent = [run.spent_until(accuracy) for run in runs]

    def median(name: str) -> float | None:
        """Return the median of one cost over the runs; None unless more than half of them reach the accuracy."""
        value = statistics.median(getattr(costs, name) if costs else math.inf for costs in spent)
        return value if math.isfinite(value) else None

    return CostToAccuracy(
        reached=sum(costs is not None for costs in spent),
        of=len(runs),
        flops=median("flops"),
        all_flops=median("all_flops"),
        cpu_seconds=median("cpu_seconds"),
        seconds=median("seconds"),
    )
