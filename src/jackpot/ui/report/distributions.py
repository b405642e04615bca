"""Shows how ratios and weights of the saved tokens are distributed, iteration by iteration.

All saved tokens that the model sampled count, including those for which the inspector has no room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jackpot.training.run.rollouts import RolloutFile, UnreadableRollouts, flat_column, read_columns
from jackpot.ui.charts import Heatmap
from jackpot.ui.report.runs import Arm


def _ratio(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.exp(columns["old_log_probs"] - columns["rollout_log_probs"])


def _weight(columns: dict[str, np.ndarray]) -> np.ndarray:
    return columns["weights"] * columns["accept_mask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenQuantity:
    """Defines a quantity of each token and the bins in which it is counted."""

    needs: tuple[str, ...]  # columns of the rollout files
    values: Callable[[dict[str, np.ndarray]], np.ndarray]  # the quantity of each token, from those columns
    low: int  # exponent of two of the lowest bin
    high: int  # exponent of two of the highest bin
    steps: int  # number of bins for each doubling
    label: str  # title of the axis

    @property
    def centers(self) -> np.ndarray:
        """Return [bins] the centers as exponents of two."""
        return np.arange(self.low * self.steps, self.high * self.steps + 1) / self.steps


QUANTITIES = {
    "ratio": TokenQuantity(
        needs=("old_log_probs", "rollout_log_probs"),
        values=_ratio,
        low=-10,
        high=6,
        steps=2,
        label="p_policy / p_rollout_model",
    ),
    "weight": TokenQuantity(
        needs=("weights", "accept_mask"),
        values=_weight,
        low=-4,
        high=3,
        steps=4,
        label="final weight, 0 where rejected",
    ),
}


def distributions(
    arms: Sequence[Arm], files: Sequence[tuple[str, RolloutFile]]
) -> tuple[dict[str, list[Heatmap]], list[str]]:
    """Return for each of `QUANTITIES` a heatmap of each arm with saved rollouts, and an error text for each bad file.

    Args:
        files: pairs of a run's name and one of its files.
    """
    wanted = sorted({"sampled_mask"} | {name for column in QUANTITIES.values() for name in column.needs})
    counts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    unreadable = []
    arm_of = {run.name: arm.name for arm in arms for run in arm.runs}
    for run, saved in files:
        try:
            table = read_columns(saved, wanted)
        except UnreadableRollouts as error:
            unreadable.append(str(error))
            continue
        columns = {name: flat_column(table, name) for name in wanted}
        sampled = columns["sampled_mask"].astype(bool)
        of_model = {name: values[sampled] for name, values in columns.items()}
        for key, column in QUANTITIES.items():
            at = counts.setdefault((key, arm_of[run]), {})
            at[saved.iteration] = at.get(saved.iteration, 0) + _counts(column, _values(column, of_model))
    suffixes = {arm.name: f": {arm.name}" if len(arms) > 1 else "" for arm in arms}
    heatmaps = {
        key: [_heatmap(key, counts[key, arm], suffix) for arm, suffix in suffixes.items() if (key, arm) in counts]
        for key in QUANTITIES
    }
    return heatmaps, unreadable


def _values(column: TokenQuantity, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Return the quantity of each token [tokens]; a value beyond the largest float is infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return column.values(columns)


def _counts(column: TokenQuantity, values: np.ndarray) -> np.ndarray:
    """Return [1 + bins + 1] counts: values that are 0, values nearest to each center, values that are not finite.

    A value beyond the outermost centers counts in the outermost bin.
    """
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0.0]
    edges = np.concatenate(([-np.inf], (column.centers[1:] + column.centers[:-1]) / 2.0, [np.inf]))
    histogram, _ = np.histogram(np.log2(positive), edges)
    return np.concatenate(([finite.size - positive.size], histogram, [values.size - finite.size])).astype(float)


def _heatmap(key: str, counts: dict[int, np.ndarray], suffix: str) -> Heatmap:
    """Make a heatmap of each iteration's shares of finite values, without the empty bins below and above them."""
    column, iterations = QUANTITIES[key], sorted(counts)
    whole = np.stack([counts[i] for i in iterations], axis=1)  # [1 + bins + 1, iterations]
    shares = whole[:-1] / np.maximum(whole[:-1].sum(axis=0), 1.0)
    strange = int(whole[-1].sum())
    centers = [f"{2.0**center:.3g}" for center in column.centers]
    names = ["0", f"{centers[0]} and less", *centers[1:-1], f"{centers[-1]} and more"]
    used = np.flatnonzero(shares[1:].any(axis=1)) + 1
    rows = ([0] if shares[0].any() else []) + list(range(used.min(initial=len(names)), used.max(initial=-1) + 1))
    return Heatmap(
        title=f"Distribution of the {key} over saved tokens{suffix}",
        x_label="iteration",
        y_label=column.label,
        x=iterations,
        y=[names[row] for row in rows],
        values=[[float(f"{share:.3g}") or None for share in shares[row]] for row in rows],
        value_label="share of tokens",
        note="All tokens of the saved rollouts, all seeds together."
        + (f" {strange:,} of {int(whole.sum()):,} tokens are left out: their {key} is not finite." if strange else ""),
        log_values=True,
    )
