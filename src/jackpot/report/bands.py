"""Several seeds of one arm as a line with a band. Layer 6, pure."""

import statistics
from collections.abc import Sequence

FEW = 5  # seeds; fewer have no standard deviation worth drawing

BAND = f"Lines are means over seeds; bands are from the lowest to the highest, with {FEW} seeds and more ± 1 sd."


def band(columns: Sequence[Sequence[float | None]]) -> tuple[list[float | None], ...]:
    """Mean, low and high of values [seed][x], at each x over the seeds that have one there."""
    means, lows, highs = [], [], []
    for values in zip(*columns, strict=True):
        known = [value for value in values if value is not None]
        mean = statistics.fmean(known) if known else None
        spread = statistics.stdev(known) if len(known) >= FEW else None
        means.append(mean)
        lows.append(mean - spread if spread is not None else min(known, default=None))
        highs.append(mean + spread if spread is not None else max(known, default=None))
    return means, lows, highs
