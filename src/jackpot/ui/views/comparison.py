"""Turns a comparison of arms into tables and charts."""

import math
from collections.abc import Callable, Sequence

from jackpot.analysis.compare.comparison import FEW_SEEDS, UNITS, ArmRow, Comparison, Difference, spent_on
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.core.statistics import Sample, student_t
from jackpot.training.run_folder.folder import Measure
from jackpot.ui.charts import Chart, Guide, Section, Series, Table, arm_numbers
from jackpot.ui.error_bars import describe_error_bars, error_bars
from jackpot.ui.numbers import amount, measured, with_error

_MOST_PAIRS = 3  # of the highest arm with another, the baseline first; the table has all arms
_COSTS = ("reached", "rollout FLOPs", "all FLOPs", "CPU seconds", "seconds")


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return tables of the accuracy at the budget, the cost of an accuracy, and runs that did not end well, if any."""
    troubles = tuple((row.arm, sentence) for row in comparison.rows for sentence in _troubles(row))
    trouble = Table(title="Runs that ended early", columns=("arm", "what happened"), rows=troubles)
    costs = () if comparison.accuracy is None else (_costs(comparison, comparison.accuracy),)
    return (_accuracies(comparison), *costs, *((trouble,) if troubles else ()))


def comparison_verdict(comparison: Comparison) -> dict[str, str]:
    """Return lines by their labels: the highest arm, and whether it is surely above the baseline and the next ones."""
    rows = sorted(comparison.rows, key=lambda row: (row.arm != comparison.baseline, -row.after.mean))
    best = next(row for row in rows if row.arm == comparison.best)
    unit = " % right" if comparison.measure == "accuracy" else " mean reward"
    scale, form = (100.0, ".1f") if comparison.measure == "accuracy" else (1.0, ".3g")
    seeds = f"{len(best.seeds)} seed{'s' * (len(best.seeds) > 1)}"
    lines = {"Highest": f"{best.arm}, {scale * best.after.mean:{form}}{unit} ({seeds})"}
    for other in [row.arm for row in rows if row is not best][:_MOST_PAIRS]:
        difference = comparison.ahead[other]
        lines[f"Against {other}"] = _pair(best.arm, other, difference, scale, form) if difference else "no common seed"
    return lines | _cheapest(comparison)


def _cheapest(comparison: Comparison) -> dict[str, str]:
    """Say what the arm with the fewest FLOPs to the accuracy in common takes, beside the baseline or the next arm."""
    reached = {row.arm: row.cost for row in comparison.rows if row.cost and row.cost.all_flops and row.cost.cpu_seconds}
    arms = sorted(reached, key=lambda arm: reached[arm].all_flops or math.inf)
    if comparison.accuracy is None or len(arms) < 2:
        return {}

    arm, other = arms[0], comparison.baseline if comparison.baseline in arms[1:] else arms[1]
    flops, seconds = (
        (getattr(reached[arm], cost) or math.nan) / (getattr(reached[other], cost) or math.nan)
        for cost in ("all_flops", "cpu_seconds")
    )
    goal = measured(comparison.accuracy, comparison.measure)
    return {f"Cheapest to {goal}": f"{arm}, with {flops:.0%} of {other}'s FLOPs and {seconds:.0%} of its CPU seconds"}


def _pair(best: str, other: str, difference: Difference, scale: float, form: str) -> str:
    """Say how far an arm is from another, with a 95 % interval, and whether that is sure."""
    mean, count = scale * difference.spread.mean, difference.seeds
    by = f"{abs(mean):{form}}{' points' if scale > 1.0 else ''} {'lower' if mean < 0.0 else 'higher'}"
    text = f"{best} is {by} than {other}"
    if difference.error is None:
        return f"{text} (1 seed, no interval): cannot tell"
    half = scale * difference.error * (student_t(count - 1) if count > 1 else 2.0)  # of one seed: by the problems
    seeds = f"{count} seed{'s' * (count > 1)}"
    sure = f"significant, on {difference.higher} of {count}" if abs(mean) > half else "not significant"
    return f"{text} (95 % CI {mean - half:+{form}} to {mean + half:+{form}}, {seeds}): {sure}"


_NOTHING_ROSE = (
    " No run rose above all starts by more than two standard errors, so costs of an accuracy are not compared; "
    "--accuracy asks for one."
)


def _accuracies(comparison: Comparison) -> Table:
    measure = comparison.measure
    what = "Percent of answers that are right" if measure == "accuracy" else "Mean reward of responses"
    what = f"{what} ({comparison.sampling})"

    rows = tuple(
        (
            row.arm,
            str(len(row.seeds)),
            spread_text(row.before, measure),
            spread_text(row.after, measure),
            *difference_cells(row.difference, measure),
            spread_text(row.rollout_model_after, measure),
        )
        for row in comparison.rows
    )

    return Table(
        title=f"{what} at {amount(comparison.budget)} {UNITS[comparison.unit]}",
        columns=(
            "arm",
            "seeds",
            "policy before",
            "policy after",
            f"minus {comparison.baseline}",
            "above on",
            "rollout model after",
        ),
        rows=rows,
        note="Mean ± standard deviation over seeds. Differences are paired by seed, mean ± standard error, with fewer "
        f"than {FEW_SEEDS} seeds at least that of the problems; the next column counts the seeds on which the arm is "
        "above." + (_NOTHING_ROSE if comparison.accuracy is None else ""),
    )


def _costs(comparison: Comparison, accuracy: float) -> Table:
    goal, is_accuracy = measured(accuracy, comparison.measure), comparison.measure == "accuracy"
    costs = {row.arm: row.cost for row in comparison.rows if row.cost}

    return Table(
        title=f"Cost until {goal} of the policy's answers are right"
        if is_accuracy
        else f"Cost until the policy's mean reward is {goal}",
        columns=("arm", *_COSTS),
        rows=tuple(
            (
                arm,
                f"{cost.reached} of {cost.of}",
                *map(amount, (cost.flops, cost.all_flops, cost.cpu_seconds, cost.seconds)),
            )
            for arm, cost in costs.items()
        ),
        note="Medians over all seeds, on a line between evaluations; - if half of them or more never reach it. All "
        "FLOPs are those of rollouts and of training both models.",
    )


def _troubles(row: ArmRow) -> list[str]:
    short = f"{row.short} of {len(row.seeds)} runs ended before the budget; raise iterations"
    return [f"collapsed, {sentence}" for sentence in row.collapsed] + ([short] if row.short else [])


def spread_text(spread: Sample | None, measure: Measure = "accuracy") -> str:
    """Format a mean over seeds and its standard deviation."""
    return "-" if spread is None else with_error(spread.mean, spread.deviation, measure)


def difference_cells(difference: Difference | None, measure: Measure = "accuracy") -> tuple[str, str]:
    """Format a difference, in points `+3.1 ± 0.9` or of rewards, and the seeds with a higher arm, `5 of 5`."""
    if difference is None:
        return "-", "-"
    text = with_error(difference.spread.mean, difference.error, measure, "+")
    return text, f"{difference.higher} of {difference.seeds}"


_BY = {"sequences": UNITS["sequences"], "flops": UNITS["flops"], "cpu_seconds": "CPU seconds of training"}


_Read = Callable[[EvaluationPoint], float | None]


def comparison_charts(comparison: Comparison, runs: Sequence[RunSummary]) -> tuple[Chart, ...]:
    """Return charts of the policy's accuracy over each cost, then of the rollout model, the KL and the acceptance."""
    goal = comparison.accuracy
    guides = () if goal is None else (Guide(text=measured(goal, comparison.measure), y=goal),)
    shown = f"{'accuracy' if comparison.measure == 'accuracy' else 'mean reward'} ({comparison.sampling})"

    def policy(point: EvaluationPoint) -> float | None:
        return point.policy_accuracy

    others: tuple[tuple[str, str, _Read], ...] = (
        ("Rollout model", shown, lambda point: point.rollout_model_accuracy),
        ("KL(rollout model || policy)", "nats per token", lambda point: point.kl),
        ("Acceptance", "mean acceptance a(x)", lambda point: point.acceptance),
    )
    return (
        *(_chart("Policy", shown, policy, runs, spent, label, guides) for spent, label in _BY.items()),
        *(_chart(*other, runs, comparison.unit, UNITS[comparison.unit], ()) for other in others),
    )


def comparison_sections(comparison: Comparison, runs: Sequence[RunSummary]) -> dict[str, Section]:
    """Return the sections of the page by their names."""
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
    read: _Read,
    runs: Sequence[RunSummary],
    spent: str,
    label: str,
    guides: tuple[Guide, ...],
) -> Chart:
    arms = list(dict.fromkeys(run.arm for run in runs))
    numbers = arm_numbers(arms)
    series = (_series(arm, numbers[arm], [run for run in runs if run.arm == arm], read, spent) for arm in arms)
    return Chart(title=f"{title} by {label}", x_label=label, y_label=y_label, series=tuple(series), guides=guides)


def _series(arm: str, number: int, runs: Sequence[RunSummary], read: _Read, spent: str) -> Series:
    """Draw at every evaluation the mean over the runs of a quantity, above the mean of what they had spent."""
    going = [run.last.iteration for run in runs if run.collapse is None]
    end = min(going) if going else max(run.last.iteration for run in runs)  # beyond it some seed is missing
    iterations = sorted({point.iteration for run in runs for point in run.points if point.iteration <= end})

    points = [[_at(run, iteration) for iteration in iterations] for run in runs]
    x, _, _ = error_bars([_spent(run, iterations, spent) for run in runs])
    mean, low, high = error_bars([[point and read(point) for point in of_run] for of_run in points])
    return Series(name=arm, x=x, y=mean, low=low, high=high, number=number)


def _spent(run: RunSummary, iterations: Sequence[int], spent: str) -> list[float | None]:
    """Return what a run had spent at each iteration; None after a stopped run's end."""
    own = {point.iteration: spent_on(point, spent) for point in run.points}
    return [own.get(iteration) for iteration in iterations]


def _at(run: RunSummary, iteration: int) -> EvaluationPoint | None:
    """Return the evaluation at an iteration; for a collapsed run its last one, since it does not recover."""
    here = [point for point in run.points if point.iteration <= iteration]
    exact = here and here[-1].iteration == iteration
    return here[-1] if exact or (here and run.collapse) else None
