"""Tables, charts and the verdict of a comparison of arms, for `jackpot compare`."""

import math
from collections.abc import Callable, Sequence

from jackpot.analysis.compare.comparison import FEW_SEEDS, UNITS, ArmRow, Comparison, Difference, spent_on
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.core.statistics import Sample, student_t
from jackpot.training.run_folder.folder import Measure
from jackpot.ui.charts import Chart, Guide, Section, Series, Table, arm_color_indices
from jackpot.ui.error_bars import describe_error_bars, error_bars
from jackpot.ui.numbers import amount, measured, with_error

_MOST_PAIRS = 3  # most arms, the baseline first, that the verdict compares with the highest arm; the table has all arms


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return tables of the accuracies at the budget, of the cost of one accuracy, and of runs that ended early."""
    troubles = tuple((row.arm, sentence) for row in comparison.rows for sentence in _troubles(row))
    tables = [_accuracies(comparison)]
    if comparison.accuracy is not None:
        tables.append(_costs(comparison, comparison.accuracy))
    if troubles:
        tables.append(Table(title="Runs that ended early", columns=("arm", "what happened"), rows=troubles))
    return tuple(tables)


def comparison_verdict(comparison: Comparison) -> dict[str, str]:
    """Return lines by label: the highest arm, whether it leads the baseline and others significantly, the cheapest."""
    # The baseline, then the other arms from the highest to the lowest; the best arm is compared with the first few.
    rows = sorted(comparison.rows, key=lambda row: (row.arm != comparison.baseline, -row.after.mean))
    best = next(row for row in rows if row.arm == comparison.best)
    compared = [row.arm for row in rows if row is not best][:_MOST_PAIRS]

    unit = " % right" if comparison.measure == "accuracy" else " mean reward"
    # Accuracies are shown in percent.
    scale, form = (100.0, ".1f") if comparison.measure == "accuracy" else (1.0, ".3g")
    lines = {"Highest": f"{best.arm}, {scale * best.after.mean:{form}}{unit} ({_seeds(len(best.seeds))})"}
    for arm in compared:
        difference = comparison.ahead[arm]  # the best arm minus this one
        lines[f"Against {arm}"] = _distance(best.arm, arm, difference, scale, form) if difference else "no common seed"
    return lines | _cheapest(comparison)


def _seeds(count: int) -> str:
    """Format a number of seeds: 1 seed, 2 seeds."""
    return f"{count} seed{'s' * (count > 1)}"


def _cheapest(comparison: Comparison) -> dict[str, str]:
    """Return a sentence, by its label, on the arm that reaches the compared accuracy with the fewest FLOPs.

    It gives that arm's cost as a share of the baseline's, or of the next arm's where there is no baseline. The dict is
    empty if fewer than two arms reach the accuracy.
    """
    costs = {row.arm: row.cost for row in comparison.rows if row.cost and row.cost.all_flops and row.cost.cpu_seconds}
    arms = sorted(costs, key=lambda arm: costs[arm].all_flops or math.inf)  # `or`: for the type checker alone
    if comparison.accuracy is None or len(arms) < 2:
        return {}

    cheapest = arms[0]
    reference = comparison.baseline if comparison.baseline in arms[1:] else arms[1]

    def share(cost: str) -> float:
        """Return the cheapest arm's `cost` (an attribute of `ArmRow.cost`) as a share of the reference arm's."""
        return getattr(costs[cheapest], cost) / getattr(costs[reference], cost)

    goal = measured(comparison.accuracy, comparison.measure)
    flops = f"{share('all_flops'):.0%} of {reference}'s FLOPs"
    return {f"Cheapest to {goal}": f"{cheapest}, with {flops} and {share('cpu_seconds'):.0%} of its CPU seconds"}


def _distance(best: str, arm: str, difference: Difference, scale: float, form: str) -> str:
    """Say how far the best arm is from another one, with a 95 % interval, and whether the difference is significant.

    The numbers are multiplied by `scale`, 100 for accuracies, and formatted by `form`.
    """
    mean = scale * difference.spread.mean
    distance = f"{abs(mean):{form}}{' points' if scale > 1.0 else ''} {'lower' if mean < 0.0 else 'higher'}"
    text = f"{best} is {distance} than {arm}"
    if difference.error is None:
        return f"{text} (1 seed, no interval): cannot tell"

    count = difference.seeds
    # Half the interval, first in standard errors, then as a difference. The standard error of a single seed is that
    # over problems.
    num_errors = student_t(count - 1) if count > 1 else 2.0
    half = scale * difference.error * num_errors
    conclusion = f"significant, on {difference.higher} of {count}" if abs(mean) > half else "not significant"
    return f"{text} (95 % CI {mean - half:+{form}} to {mean + half:+{form}}, {_seeds(count)}): {conclusion}"


_NOTHING_ROSE = (
    " No run rose above all starts by more than two standard errors, so costs of an accuracy are not compared; "
    "--accuracy asks for one."
)


def _accuracies(comparison: Comparison) -> Table:
    """Return a table of each arm's accuracy or mean reward when it has spent the budget."""
    measure = comparison.measure
    quantity = "Percent of answers that are right" if measure == "accuracy" else "Mean reward of responses"

    return Table(
        title=f"{quantity} ({comparison.sampling}) at {amount(comparison.budget)} {UNITS[comparison.unit]}",
        columns=(
            "arm",
            "seeds",
            "policy before",
            "policy after",
            f"minus {comparison.baseline}",
            "above on",
            "rollout model after",
        ),
        rows=tuple(
            (
                row.arm,
                str(len(row.seeds)),
                spread_text(row.before, measure),
                spread_text(row.after, measure),
                *difference_cells(row.difference, measure),
                spread_text(row.rollout_model_after, measure),
            )
            for row in comparison.rows
        ),
        note=f"Models: mean ± standard deviation over seeds. minus {comparison.baseline}: mean ± standard error of the "
        f"difference on equal seeds; with fewer than {FEW_SEEDS} seeds, the error is at least that of the choice of "
        "problems. above on: seeds on which the arm is higher."
        + (_NOTHING_ROSE if comparison.accuracy is None else ""),
    )


def _costs(comparison: Comparison, accuracy: float) -> Table:
    """Return a table of each arm's cost until its policy reaches an accuracy or mean reward."""
    goal = measured(accuracy, comparison.measure)
    is_accuracy = comparison.measure == "accuracy"

    return Table(
        title=f"Cost until {goal} of the policy's answers are right"
        if is_accuracy
        else f"Cost until the policy's mean reward is {goal}",
        columns=("arm", "reached", "rollout FLOPs", "all FLOPs", "CPU seconds", "seconds"),
        rows=tuple(
            (
                row.arm,
                f"{cost.reached} of {cost.of}",
                *map(amount, (cost.flops, cost.all_flops, cost.cpu_seconds, cost.seconds)),
            )
            for row in comparison.rows
            if (cost := row.cost)
        ),
        note="Medians over all seeds, on a line between evaluations; - if half of them or more never reach it. All "
        "FLOPs are those of rollouts and of training both models.",
    )


def _troubles(row: ArmRow) -> list[str]:
    """Return sentences about the runs of an arm that collapsed or ended before the budget."""
    short = f"{row.short} of {len(row.seeds)} runs ended before the budget; raise iterations"
    return [f"collapsed, {sentence}" for sentence in row.collapsed] + ([short] if row.short else [])


def spread_text(spread: Sample | None, measure: Measure = "accuracy") -> str:
    """Format a mean over seeds and its standard deviation."""
    return "-" if spread is None else with_error(spread.mean, spread.deviation, measure)


def difference_cells(difference: Difference | None, measure: Measure = "accuracy") -> tuple[str, str]:
    """Format a difference in points or rewards, `+3.1 ± 0.9`, and the seeds on which the arm is higher, `5 of 5`."""
    if difference is None:
        return "-", "-"
    text = with_error(difference.spread.mean, difference.error, measure, "+")
    return text, f"{difference.higher} of {difference.seeds}"


# The costs that charts have on their x axis, with the axis label; a cost is an attribute of EvaluationPoint.
_COST_AXES = {"sequences": UNITS["sequences"], "flops": UNITS["flops"], "cpu_seconds": "CPU seconds of training"}
_Quantity = Callable[[EvaluationPoint], float | None]  # reads from an evaluation what a chart has on its y axis


def comparison_charts(comparison: Comparison, runs: Sequence[RunSummary]) -> tuple[Chart, ...]:
    """Return charts of the policy's accuracy over each cost, then of the rollout model, the KL and the acceptance."""
    goal = comparison.accuracy
    guides = () if goal is None else (Guide(text=measured(goal, comparison.measure), y=goal),)
    y_label = f"{'accuracy' if comparison.measure == 'accuracy' else 'mean reward'} ({comparison.sampling})"

    # Each with the chart's title, the label of its y axis, and what it reads from an evaluation.
    quantities: tuple[tuple[str, str, _Quantity], ...] = (
        ("Rollout model", y_label, lambda point: point.rollout_model_accuracy),
        ("KL(rollout model || policy)", "nats per token", lambda point: point.kl),
        ("Acceptance", "mean acceptance a(x)", lambda point: point.acceptance),
    )
    return (
        *(
            _chart("Policy", y_label, lambda point: point.policy_accuracy, runs, cost=cost, label=label, guides=guides)
            for cost, label in _COST_AXES.items()
        ),
        *(
            _chart(title, unit, quantity, runs, cost=comparison.unit, label=UNITS[comparison.unit], guides=())
            for title, unit, quantity in quantities
        ),
    )


def comparison_sections(comparison: Comparison, runs: Sequence[RunSummary]) -> dict[str, Section]:
    """Return the sections of the page of `jackpot compare`, by name: `numbers` and, with charts, `comparison`."""
    seeds = max(len(row.seeds) for row in comparison.rows)
    intro = (
        f"Lines are means over seeds, bands go {describe_error_bars(seeds)}. "
        "A run that was stopped because it collapsed keeps its last accuracy."
    )
    return {
        "numbers": Section(title="The arms", intro="", items=comparison_tables(comparison)),
        "comparison": Section(title="Over training", intro=intro, items=comparison_charts(comparison, runs)),
    }


def _chart(
    title: str,
    y_label: str,
    quantity: _Quantity,
    runs: Sequence[RunSummary],
    cost: str,
    label: str,
    guides: tuple[Guide, ...],
) -> Chart:
    """Return a chart with a line for each arm: y is a quantity of its evaluations, x the cost named `cost`.

    The x axis has the label `label`.
    """
    runs_of: dict[str, list[RunSummary]] = {}
    for run in runs:
        runs_of.setdefault(run.arm, []).append(run)

    indices = arm_color_indices(runs_of)
    series = tuple(_series(arm, indices[arm], arm_runs, quantity, cost) for arm, arm_runs in runs_of.items())
    return Chart(title=f"{title} by {label}", x_label=label, y_label=y_label, series=series, guides=guides)


def _series(arm: str, color_index: int, runs: Sequence[RunSummary], quantity: _Quantity, cost: str) -> Series:
    """Return an arm's line: for each evaluation, y is the runs' mean of a quantity, and x the mean of their costs."""
    # The line ends with the first run that ended without a collapse: after it some seed is missing.
    completed = [run.last.iteration for run in runs if run.collapse is None]
    end = min(completed) if completed else max(run.last.iteration for run in runs)
    iterations = sorted({point.iteration for run in runs for point in run.points if point.iteration <= end})

    def costs(run: RunSummary) -> list[float | None]:
        """Return a run's cost up to each iteration; None where it has no evaluation, as after its collapse."""
        spent = {point.iteration: spent_on(point, cost) for point in run.points}
        return [spent.get(iteration) for iteration in iterations]

    def values(run: RunSummary) -> list[float | None]:
        """Return the quantity of a run at each iteration, after a collapse the newest; None without evaluation."""
        points = (_point_at(run, iteration) for iteration in iterations)
        return [point and quantity(point) for point in points]

    x, _, _ = error_bars([costs(run) for run in runs])
    mean, low, high = error_bars([values(run) for run in runs])
    return Series(name=arm, x=x, y=mean, low=low, high=high, color_index=color_index)


def _point_at(run: RunSummary, iteration: int) -> EvaluationPoint | None:
    """Return a run's evaluation at an iteration or, after a collapse, its newest one; None where there is neither."""
    past = [point for point in run.points if point.iteration <= iteration]
    is_exact = past and past[-1].iteration == iteration
    return past[-1] if is_exact or (past and run.collapse) else None
