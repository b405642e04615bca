"""Computes the lines of charts: means over seeds with error bars, thinned to as many points as a page can draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jackpot.core.statistics import Sample

FEW_SEEDS = 5  # with fewer seeds, error bars reach from the smallest to the largest value
MOST_POINTS = 800  # most points of a line on the page

Number = float | None


def mean_and_bar(values: Sequence[float], seeds: int) -> tuple[Number, Number, Number]:
    """Return the mean of seeds' values at one x, and the low and high end of its error bar; three None without values.

    With fewer than `FEW_SEEDS` seeds the bar reaches from the smallest to the largest value, else one standard
    deviation of the sample to both sides of the mean.

    Args:
        values: values of the seeds that have a number at this x.
        seeds: number of all seeds, with or without a number at this x.
    """
    if not values:
        return None, None, None

    sample = Sample(tuple(values))
    if seeds < FEW_SEEDS or sample.deviation is None:  # a single value has no deviation
        return sample.mean, min(values), max(values)
    return sample.mean, sample.mean - sample.deviation, sample.mean + sample.deviation


def error_bars(columns: Sequence[Sequence[Number]]) -> tuple[tuple[Number, ...], ...]:
    """Return three columns over x: the mean over seeds, and the lower and the upper end of its error bar.

    Args:
        columns: values [seed][x]; a seed whose value is None at an x is left out there.
    """
    bars = []
    for values in zip(*columns, strict=True):
        known = [value for value in values if value is not None]
        bars.append(mean_and_bar(known, len(columns)))
    return tuple(zip(*bars, strict=True))


def describe_error_bars(seeds: int) -> str:
    """Say in words how far error bars reach if there are this many seeds."""
    return "from the smallest to the largest value" if seeds < FEW_SEEDS else "one standard deviation to both sides"


@dataclass(frozen=True, slots=True)
class MeanLine:
    """A line of a chart: one metric of an arm over iterations, as the mean of the arm's runs with error bars."""

    x: list[int]  # iterations
    y: list[Number]  # mean over the runs; None where no run has a number
    low: list[Number] | None = None  # lower end of the error bar; None for a single run
    high: list[Number] | None = None  # upper end of the error bar; None for a single run

    @property
    def numbers(self) -> list[float]:
        """Return the means over the runs, without the iterations where no run has a number."""
        return [value for value in self.y if value is not None]


def mean_line(runs: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> MeanLine:
    """Return the line of a metric: its mean over runs at every iteration where at least one run has the metric.

    Args:
        runs: the lines of metrics.jsonl of each run.
    """
    columns: list[dict[int, Number]] = []  # for each run that has the metric, its value by iteration
    for lines in runs:
        if column := {line["iteration"]: line[metric] for line in lines if metric in line}:
            columns.append(column)
    if not columns:
        return MeanLine(x=[], y=[])

    x = sorted(set[int]().union(*columns))
    # The mean at every x is over the runs; a run without a value there has None and is left out.
    mean, low, high = map(list, error_bars([list(map(column.get, x)) for column in columns]))
    return MeanLine(x=x, y=mean) if len(columns) < 2 else MeanLine(x=x, y=mean, low=low, high=high)


def downsample(line: MeanLine, most: int = MOST_POINTS) -> MeanLine:
    """Thin a line to `most` points at most: the smallest and the largest value of each of `most` / 2 stretches.

    A stretch without any number becomes one point without a number, a gap.
    """
    if len(line.x) <= most:
        return line

    stretches = most // 2
    edges = [round(edge * len(line.x) / stretches) for edge in range(stretches + 1)]
    indices: list[int] = []
    for begin, end in pairwise(edges):
        # (value, index) of every number in this stretch
        known = [(value, index) for index in range(begin, end) if (value := line.y[index]) is not None]
        indices += sorted({min(known)[1], max(known)[1]} if known else {begin})

    def thinned(column: list[Number]) -> list[Number]:
        """Return the values of a column at `indices`, the points that the thinned line keeps."""
        return [column[index] for index in indices]

    return MeanLine(
        x=[line.x[index] for index in indices],
        y=thinned(line.y),
        low=line.low and thinned(line.low),  # None for a single run, as `high`
        high=line.high and thinned(line.high),
    )


def rounded(value: Number) -> Number:
    """Round to five significant digits; return None for a value that is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
