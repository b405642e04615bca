"""Combines the numbers of several seeds into one line with error bars, short enough to draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jackpot.core.statistics import Sample

FEW_SEEDS = 5  # with fewer seeds, error bars reach from the smallest to the largest value
MOST_POINTS = 800  # of a line on the page

Number = float | None


def mean_and_bar(values: Sequence[float], seeds: int) -> tuple[Number, Number, Number]:
    """Return mean, low and high of the values at an x, or three None without values.

    The bar reaches from the smallest to the largest value of fewer than `FEW_SEEDS` seeds, else one standard deviation
    of the sample to both sides.

    Args:
        values: of those seeds that have a number at it.
        seeds: number of all seeds.
    """
    if not values:
        return None, None, None
    sample = Sample(tuple(values))
    middle, deviation = sample.mean, sample.deviation
    if seeds < FEW_SEEDS or deviation is None:
        return middle, min(values), max(values)
    return middle, middle - deviation, middle + deviation


def error_bars(columns: Sequence[Sequence[Number]]) -> tuple[tuple[Number, ...], ...]:
    """Return mean, low and high at each x of values [seed][x]; a seed without a value at an x is left out there."""
    rows = [[value for value in values if value is not None] for values in zip(*columns, strict=True)]
    return tuple(zip(*(mean_and_bar(row, len(columns)) for row in rows), strict=True))


def describe_error_bars(seeds: int) -> str:
    """Say in words how far the error bars of so many seeds reach."""
    return "from the smallest to the largest value" if seeds < FEW_SEEDS else "one standard deviation to both sides"


@dataclass(frozen=True, slots=True)
class MeanLine:
    """Holds one metric of an arm over its iterations."""

    x: list[int]  # iterations
    y: list[Number]  # mean over the runs; None where no run has a number
    low: list[Number] | None = None  # lower end of the error bar; None for a single run
    high: list[Number] | None = None  # upper end of the error bar; None for a single run

    @property
    def numbers(self) -> list[float]:
        """Return the means that exist."""
        return [value for value in self.y if value is not None]


def mean_line(runs: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> MeanLine:
    """Return the mean of a metric at every iteration where a run has it.

    Args:
        runs: the lines of metrics.jsonl of each run.
    """
    at: dict[int, list[float]] = {}
    members = 0
    for lines in runs:
        values = {line["iteration"]: line[metric] for line in lines if metric in line}
        members += bool(values)
        for iteration, value in values.items():
            at.setdefault(iteration, []).extend([] if value is None else [value])
    x = sorted(at)
    found = [mean_and_bar(at[iteration], members) for iteration in x]
    y, low, high = ([bar[part] for bar in found] for part in range(3))
    return MeanLine(x, y) if members < 2 else MeanLine(x, y, low, high)


def downsample(line: MeanLine, most: int = MOST_POINTS) -> MeanLine:
    """Return at most `most` points: the smallest and the largest of each stretch, or a gap where it has no number."""
    if len(line.x) <= most:
        return line

    stretches = most // 2
    edges = [round(number * len(line.x) / stretches) for number in range(stretches + 1)]
    kept: list[int] = []
    for begin, end in pairwise(edges):
        known = [(value, index) for index in range(begin, end) if (value := line.y[index]) is not None]
        kept += sorted({min(known)[1], max(known)[1]} if known else {begin})

    def thinned(column: list[Number]) -> list[Number]:
        return [column[index] for index in kept]

    low, high = line.low and thinned(line.low), line.high and thinned(line.high)
    return MeanLine([line.x[index] for index in kept], thinned(line.y), low, high)


def rounded(value: Number) -> Number:
    """Round to five significant digits; return None for a value that is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
