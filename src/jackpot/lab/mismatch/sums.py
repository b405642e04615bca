"""Means over tokens whose errors are those of whole responses. Layer 6, pure.

Tokens of one response are not independent: a response that goes astray is wrong at many tokens. So the standard error
of a mean over tokens is clustered by response: with y_i the sum and n_i the number of tokens of response i and
r = sum y / sum n,

    error^2 = G / (G - 1) * sum_i (y_i - r n_i)^2 / (sum n)^2        over G responses

which needs five sums that add up, and no token twice.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean and its standard error; None where there is only one response."""

    value: float
    error: float | None


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent numbers, one at least."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(value=statistics.fmean(values), error=error)


class Clustered(NamedTuple):
    """A mean over tokens, as sums over responses; float64."""

    total: float = 0.0  # sum y
    count: float = 0.0  # sum n
    squares: float = 0.0  # sum y^2
    products: float = 0.0  # sum y n
    counts: float = 0.0  # sum n^2
    responses: int = 0

    @classmethod
    def of(cls, values: Tensor) -> "Clustered":
        """The tokens of one response, [N]; nothing where N is 0."""
        if not (n := len(values)):
            return cls()
        total = float(values.double().sum())
        return cls(total, n, total * total, total * n, n * n, 1)

    def __add__(self, other: "Clustered") -> "Clustered":
        return Clustered(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def estimate(self) -> Estimate | None:
        """None where nothing was counted."""
        if not self.count:
            return None
        mean = self.total / self.count
        if self.responses < 2:
            return Estimate(value=mean, error=None)
        spread = max(0.0, self.squares - 2.0 * mean * self.products + mean * mean * self.counts)
        scale = self.responses / (self.responses - 1)
        return Estimate(value=mean, error=math.sqrt(scale * spread) / self.count)
