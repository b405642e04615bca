"""Turns a comparison of arms into tables and charts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jackpot.analysis.compare.comparison import (
    FEW_SEEDS,
    UNITS,
    ArmRow,
    Comparison,
    CostToAccuracy,
    Difference,
    spent_on,
)
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.core.statistics import Sample, student_t
from jackpot.training.run.folder import Measure
from jackpot.ui.charts import Chart, Guide, Section, Series, Table, arm_numbers
from jackpot.ui.error_bars import describe_error_bars, error_bars
from jackpot.ui.results import measured

_COSTS = ("reached", "rollout FLOPs", "training FLOPs", "CPU seconds", "seconds")


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return tables of the accuracy at the budget, the cost of an accuracy, and runs that did not end well, if any."""
    troubles = tuple((row.arm, sentence) for row in comparison.rows for sentence in _troubles(row))
    trouble = Table(title="Runs that ended early", columns=("arm", "what happened"), rows=troubles)
    costs = () if comparison.accuracy is None else (_costs(comparison),)
    return (_accuracies(comparison), *costs, *((trouble,) if troubles else ()))


def comparison_verdict(comparison: Comparison) -> str:
    """Say which arm is highest at the budget, and how far it is from the baseline, or from the next arm if it is it."""
    shown = percent if comparison.measure == "accuracy" else _rewards
    unit = " percent" if comparison.measure == "accuracy" else ""
    rows = sorted(comparison.rows, key=lambda row: -row.after.mean)
    best, others = rows[0], rows[1:]
    said = f"Highest: {best.arm}, {shown(best.after)}{unit}"
    other = best if best.difference else next((row for row in others if row.difference), None)
    if other is None:
        return f"{said}."
    difference, (text, _) = other.difference, difference_cells(other.difference, comparison.measure)
    error, count = difference.error, difference.higher if other is best else difference.lower
    said += f"; {other.arm} minus {comparison.baseline}: {text}"
    sure = student_t(difference.seeds - 1) if difference.seeds > 1 else 2.0  # of one seed: the error by the problems
    if error is None or abs(difference.spread.mean) <= sure * error:
        return f"{said}, which {'one seed' if error is None else 'chance alone'} can make."
    return f"{said}, on {count} of {difference.seeds} seeds."


_NOTHING_ROSE = (
    " No run rose above all starts by more than two standard errors, so costs of an accuracy are not compared; "
    "--accuracy asks for one."
)


def _accuracies(comparison: Comparison) -> Table:
    is_accuracy = comparison.measure == "accuracy"
    shown = percent if is_accuracy else _rewards
    what = "Percent of sampled answers that are right" if is_accuracy else "Mean reward of sampled responses"
    rows = tuple(
        (
            row.arm,
            str(len(row.seeds)),
            shown(row.before),
            shown(row.after),
            *difference_cells(row.difference, comparison.measure),
            shown(row.rollout_model_after) if row.rollout_model_after else "-",
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


def _costs(comparison: Comparison) -> Table:
    goal, is_accuracy = measured(comparison.accuracy, comparison.measure), comparison.measure == "accuracy"
    return Table(
        title=f"Cost until {goal} of the policy's answers are right"
        if is_accuracy
        else f"Cost until the policy's mean reward is {goal}",
        columns=("arm", *_COSTS),
        rows=tuple((row.arm, *cost_cells(row.cost)) for row in comparison.rows),
        note="Medians over all seeds; - if half of them or more never reach it. Training FLOPs are those of policy and "
        "rollout model.",
    )


def _troubles(row: ArmRow) -> list[str]:
    short = f"{row.short} of {len(row.seeds)} runs ended before the budget; raise iterations"
    return [f"collapsed, {sentence}" for sentence in row.collapsed] + ([short] if row.short else [])


def cost_cells(cost: CostToAccuracy) -> tuple[str, ...]:
    """Format how many runs reached the accuracy, and the median costs."""
    numbers = (cost.flops, cost.training_flops, cost.cpu_seconds, cost.seconds)
    return (f"{cost.reached} of {cost.of}", *("-" if number is None else amount(number) for number in numbers))


def percent(spread: Sample) -> str:
    """Format a mean and its standard deviation in percent: `73.2 ± 1.1`."""
    deviation = f" ± {100 * spread.deviation:.1f}" if spread.deviation is not None else ""
    return f"{100 * spread.mean:.1f}{deviation}"


def _rewards(spread: Sample) -> str:
    """Format a mean reward and its standard deviation: `0.732 ± 0.011`."""
    return f"{spread.mean:.4g}" + (f" ± {spread.deviation:.2g}" if spread.deviation is not None else "")


def difference_cells(difference: Difference | None, measure: Measure = "accuracy") -> tuple[str, str]:
    """Format a difference, in points `+3.1 ± 0.9` or of rewards, and the seeds with a higher arm, `5 of 5`."""
    if difference is None:
        return "-", "-"
    mean, error = difference.spread.mean, difference.error
    if measure == "accuracy":
        texts = f"{100 * mean:+.1f}", None if error is None else f"{100 * error:.1f}"
    else:
        texts = f"{mean:+.4g}", None if error is None else f"{error:.2g}"
    return " ± ".join(filter(None, texts)), f"{difference.higher} of {difference.seeds}"


def amount(number: float) -> str:
    """Format a cost with three digits: 640, 12,800, 1.28e+09."""
    return f"{number:,.0f}" if 10 <= abs(number) < 1e6 else f"{number:.3g}"


_BY = {"sequences": UNITS["sequences"], "flops": UNITS["flops"], "cpu_seconds": "CPU seconds of training"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """Names one quantity of an evaluation that is drawn over the budget."""

    title: str
    label: str
    value: Callable[[EvaluationPoint], float | None]
    note: str = ""


_LABELS: dict[Measure, str] = {"accuracy": "sampled accuracy", "reward": "mean reward"}
_OTHERS = (
    _View(title="KL(rollout model || policy)", label="nats per token", value=lambda point: point.kl),
    _View(title="Acceptance", label="mean acceptance a(x)", value=lambda point: point.acceptance),
)


def comparison_charts(comparison: Comparison, runs: Sequence[RunSummary]) -> tuple[Chart, ...]:
    """Return charts of the policy's accuracy over each cost, then of the rollout model, the KL and the acceptance."""
    goal = comparison.accuracy
    guides = () if goal is None else (Guide(text=measured(goal, comparison.measure), y=goal),)
    shown = _LABELS[comparison.measure]
    policy = _View(title="Policy", label=shown, value=lambda point: point.policy_accuracy)
    rollout_model = _View(title="Rollout model", label=shown, value=lambda point: point.rollout_model_accuracy)
    accuracy = [_chart(policy, runs, spent, label, guides) for spent, label in _BY.items()]
    others = [_chart(view, runs, comparison.unit, UNITS[comparison.unit], ()) for view in (rollout_model, *_OTHERS)]
    return (*accuracy, *others)


def comparison_sections(comparison: Comparison, runs: Sequence[RunSummary]) -> dict[str, Section]:
    """Return the sections of the page by the names of their pictures."""
    seeds = max(len(row.seeds) for row in comparison.rows)
    intro = (
        f"Lines are means over seeds, bands go {describe_error_bars(seeds)}. "
        "A run that was stopped because it collapsed keeps its last accuracy."
    )
    return {
        "numbers": Section(title="The arms", intro="", items=comparison_tables(comparison)),
        "comparison": Section(title="Over training", intro=intro, items=comparison_charts(comparison, runs)),
    }


def _chart(view: _View, runs: Sequence[RunSummary], spent: str, label: str, guides: tuple[Guide, ...]) -> Chart:
    arms = list(dict.fromkeys(run.arm for run in runs))
    numbers = arm_numbers(arms)
    series = [_series(arm, numbers[arm], [run for run in runs if run.arm == arm], view, spent) for arm in arms]
    return Chart(
        title=f"{view.title} by {label}",
        x_label=label,
        y_label=view.label,
        series=tuple(series),
        note=view.note,
        guides=guides,
    )


def _series(arm: str, number: int, runs: Sequence[RunSummary], view: _View, spent: str) -> Series:
    """Draw at every evaluation the mean over the runs of a quantity, above the mean of what they had spent."""
    going = [run.last.iteration for run in runs if run.collapse is None]
    end = min(going) if going else max(run.last.iteration for run in runs)  # beyond it some seed is missing
    iterations = sorted({point.iteration for run in runs for point in run.points if point.iteration <= end})
    columns = [[_at(run, iteration) for iteration in iterations] for run in runs]
    x, _, _ = error_bars([_spent(run, iterations, spent) for run in runs])
    mean, low, high = error_bars([[view.value(point) if point else None for point in column] for column in columns])
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
