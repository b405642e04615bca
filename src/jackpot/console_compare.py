"""What `jackpot compare` shows: how the runs go, and the tables at the end. Layer 7."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jackpot.lab.comparison import UNITS, Comparison, Cost, Difference, Spread
from jackpot.launch.arms import Job, Lines, Listener


def arms_progress(console: Console) -> Listener:
    """A listener that prints a line for every evaluation, and for every run that ends."""
    shown: dict[str, int] = {}

    def listen(job: Job, lines: Lines, end: str) -> None:
        evaluated = [line for line in lines if line.get("eval/policy_accuracy") is not None]
        newest = evaluated[-1]["iteration"] if evaluated else -1
        if end or newest > shown.get(job.name, -1):
            shown[job.name] = newest
            accuracy = f"policy {evaluated[-1]['eval/policy_accuracy']:.1%}" if evaluated else ""
            console.print(
                f"{job.name}  iteration {newest}/{job.iterations}  {accuracy}  {end}", highlight=False, soft_wrap=True
            )

    return listen


def show_comparison(console: Console, comparison: Comparison, folder: Path) -> None:
    """Accuracy at the budget, then what an accuracy costs, and where everything is."""
    console.print(_accuracies(comparison))
    console.print(_costs(comparison))
    for row in comparison.rows:
        for sentence in row.collapsed:
            console.print(Text(f"{row.arm} has collapsed, {sentence}"), style="red", highlight=False)
        if row.short:
            console.print(
                Text(f"{row.arm}: {row.short} of {len(row.seeds)} runs ended before the budget; raise iterations"),
                style="yellow",
                highlight=False,
            )
    console.print(f"comparison.html, comparison.png, comparison.json, summaries.jsonl in {folder}", soft_wrap=True)


def _accuracies(comparison: Comparison) -> Table:
    table = Table(
        title=f"Sampled accuracy at {amount(comparison.budget)} {UNITS[comparison.unit]}, mean ± sd over seeds",
        caption="Differences are paired by seed, mean ± standard error; in brackets on how many seeds above.",
        title_justify="left",
        caption_justify="left",
    )
    columns = ("arm", "seeds", "policy before", "policy after", f"minus {comparison.baseline}", "rollout model after")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in comparison.rows:
        table.add_row(
            row.arm,
            str(len(row.seeds)),
            percent(row.before),
            percent(row.after),
            difference(row.difference),
            percent(row.rollout_model_after),
        )
    return table


def _costs(comparison: Comparison) -> Table:
    table = Table(
        title=f"What it takes until {comparison.accuracy:.1%} of the policy's answers are right",
        caption="Medians over all seeds; - where more than half of them never got there.",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("arm", "got there", "rollout FLOPs", "training FLOPs", "processor seconds", "seconds"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in comparison.rows:
        table.add_row(row.arm, *cost_cells(row.cost))
    return table


def cost_cells(cost: Cost) -> tuple[str, ...]:
    numbers = (cost.flops, cost.training_flops, cost.cpu_seconds, cost.seconds)
    return (f"{cost.reached} of {cost.of}", *("-" if number is None else amount(number) for number in numbers))


def percent(spread: Spread) -> str:
    """`73.2 ± 1.1`, in percent."""
    deviation = f" ± {100 * spread.deviation:.1f}" if spread.deviation is not None else ""
    return f"{100 * spread.mean:.1f}{deviation}"


def difference(difference: Difference | None) -> str:
    """`+3.1 ± 0.9 (5 of 5)`, in points."""
    if difference is None:
        return "-"
    error = f" ± {100 * difference.spread.error:.1f}" if difference.spread.error is not None else ""
    return f"{100 * difference.spread.mean:+.1f}{error} ({difference.higher} of {difference.seeds})"


def amount(number: float) -> str:
    """Three digits: 640, 12,800, 1.28e+09."""
    return f"{number:,.0f}" if 10 <= abs(number) < 1e6 else f"{number:.3g}"
