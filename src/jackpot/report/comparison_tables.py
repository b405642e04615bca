"""A comparison of arms as tables. Layer 6, pure."""

from jackpot.lab.comparison import UNITS, ArmRow, Comparison, Cost, Difference, Spread
from jackpot.report.charts import Table

_COSTS = ("got there", "rollout FLOPs", "training FLOPs", "processor seconds", "seconds")


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Accuracy at the budget, what an accuracy costs, and what went wrong, if anything did."""
    troubles = tuple((row.arm, sentence) for row in comparison.rows for sentence in _troubles(row))
    trouble = Table(title="What did not go to the end", columns=("arm", "what happened"), rows=troubles)
    return (_accuracies(comparison), _costs(comparison), *((trouble,) if troubles else ()))


def _accuracies(comparison: Comparison) -> Table:
    rows = tuple(
        (
            row.arm,
            str(len(row.seeds)),
            percent(row.before),
            percent(row.after),
            *difference_cells(row.difference),
            percent(row.rollout_model_after) if row.rollout_model_after else "-",
        )
        for row in comparison.rows
    )
    return Table(
        title=f"Percent of sampled answers that are right at {amount(comparison.budget)} {UNITS[comparison.unit]}",
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
        note="Mean ± standard deviation over seeds. Differences are paired by seed, mean ± standard error; beside them "
        "on how many seeds the arm is above.",
    )


def _costs(comparison: Comparison) -> Table:
    return Table(
        title=f"What it takes until {comparison.accuracy:.1%} of the policy's answers are right",
        columns=("arm", *_COSTS),
        rows=tuple((row.arm, *cost_cells(row.cost)) for row in comparison.rows),
        note="Medians over all seeds; - where half of them or more never got there. Training FLOPs are those of policy "
        "and rollout model.",
    )


def _troubles(row: ArmRow) -> list[str]:
    short = f"{row.short} of {len(row.seeds)} runs ended before the budget; raise iterations"
    return [f"collapsed, {sentence}" for sentence in row.collapsed] + ([short] if row.short else [])


def cost_cells(cost: Cost) -> tuple[str, ...]:
    """How many runs got there, and the medians."""
    numbers = (cost.flops, cost.training_flops, cost.cpu_seconds, cost.seconds)
    return (f"{cost.reached} of {cost.of}", *("-" if number is None else amount(number) for number in numbers))


def percent(spread: Spread) -> str:
    """`73.2 ± 1.1`, in percent."""
    deviation = f" ± {100 * spread.deviation:.1f}" if spread.deviation is not None else ""
    return f"{100 * spread.mean:.1f}{deviation}"


def difference_cells(difference: Difference | None) -> tuple[str, str]:
    """`+3.1 ± 0.9`, in points, and `5 of 5` seeds."""
    if difference is None:
        return "-", "-"
    error = f" ± {100 * difference.spread.error:.1f}" if difference.spread.error is not None else ""
    return f"{100 * difference.spread.mean:+.1f}{error}", f"{difference.higher} of {difference.seeds}"


def amount(number: float) -> str:
    """Three digits: 640, 12,800, 1.28e+09."""
    return f"{number:,.0f}" if 10 <= abs(number) < 1e6 else f"{number:.3g}"
