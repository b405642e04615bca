"""The numbers of several runs as one line with a band, thin enough to draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

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


MOST_POINTS = 800  # of a line on the page


@dataclass(frozen=True, slots=True)
class Line:
    """`y` is the mean over runs, None where nothing was counted. `low` and `high` are None for a single run."""

    x: list[int]
    y: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None

    @property
    def numbers(self) -> list[float]:
        return [value for value in self.y if value is not None]


def mean_line(runs: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> Line:
    """At every iteration where a run has the metric: the mean over the runs that have a number there.

    Args:
        runs: the lines of metrics.jsonl of each.
    """
    at: dict[int, list[float]] = {}
    members = 0
    for lines in runs:
        values = {line["iteration"]: line[metric] for line in lines if metric in line}
        members += bool(values)
        for iteration, value in values.items():
            at.setdefault(iteration, []).extend([] if value is None else [value])
    x = sorted(at)
    found = [middle_and_band(at[iteration], members) for iteration in x]
    y, low, high = ([one[part] for one in found] for part in range(3))
    return Line(x, y) if members < 2 else Line(x, y, low, high)


def thin(line: Line, most: int = MOST_POINTS) -> Line:
    """At most `most` points: of each stretch the least and the greatest, and the whole width of its band."""
    if len(line.x) <= most:
        return line
    stretches = most // 2
    edges = [round(number * len(line.x) / stretches) for number in range(stretches + 1)]
    kept: list[tuple[int, Number, Number, Number]] = []
    for begin, end in pairwise(edges):
        here = [number for number in range(begin, end) if line.y[number] is not None]
        if not here:
            kept.append((line.x[begin], None, None, None))
            continue
        low = _extreme(min, line.low, here)
        high = _extreme(max, line.high, here)
        least, greatest = min(here, key=line.y.__getitem__), max(here, key=line.y.__getitem__)
        kept += [(line.x[number], line.y[number], low, high) for number in sorted({least, greatest})]
    x, y, low, high = (list(column) for column in zip(*kept, strict=True))
    return Line(x, y, low if line.low else None, high if line.high else None)


def _extreme(choose: Any, column: Sequence[Number] | None, numbers: Sequence[int]) -> Number:
    values = [column[number] for number in numbers if column[number] is not None] if column else []
    return choose(values) if values else None


def rounded(value: Number) -> Number:
    """To five significant digits: what a screen can show."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
