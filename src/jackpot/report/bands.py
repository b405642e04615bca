"""Several seeds of one arm as a line with a band. Layer 6, pure."""

from collections.abc import Sequence
from statistics import fmean, stdev

FEW = 5  # below so many seeds the band is from the least to the greatest

Number = float | None


def middle_and_band(values: Sequence[float], members: int) -> tuple[Number, Number, Number]:
    """Mean, low and high of the values that some of so many seeds have at one place: from least to greatest of a few
    seeds, else one standard deviation of the sample to both sides. None where there are none."""
    if not values:
        return None, None, None
    middle = fmean(values)
    if members < FEW or len(values) < 2:
        return middle, min(values), max(values)
    spread = stdev(values)
    return middle, middle - spread, middle + spread


def band(columns: Sequence[Sequence[Number]]) -> tuple[tuple[Number, ...], ...]:
    """Mean, low and high of values [seed][x], at each x over the seeds that have one there."""
    rows = [[value for value in values if value is not None] for values in zip(*columns, strict=True)]
    return tuple(zip(*(middle_and_band(row, len(columns)) for row in rows), strict=True))


def band_words(members: int) -> str:
    """What the band is around the mean of so many seeds."""
    return "from the least to the greatest" if members < FEW else "one standard deviation to both sides"
