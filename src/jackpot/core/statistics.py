"""Means with their errors and intervals, as plain numbers. Standard library only.

A mean over tokens is carried as sums of tensors (`metrics.ClusteredMean`) and becomes an `Estimate` at the end.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import acos, cos, isfinite, pi, sqrt, tan
from statistics import NormalDist, fmean, stdev
from typing import TypeVar

CONFIDENCE = 0.95  # coverage of confidence intervals

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, or a function of means, with its standard error, which is None where there are too few values."""

    value: float
    error: float | None

    @property
    def text(self) -> str:
        """Return the estimate for people to read: `0.91 ± 0.02`, or `0.91` where the error is unknown."""
        is_known = self.error is not None and isfinite(self.error)
        return f"{self.value:.2f}" + (f" ± {self.error:.2f}" if is_known else "")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds of its confidence interval, which are None where there are too few values."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Independent values of one quantity, at least one, such as the results of several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean of the values."""
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation; None for a single value."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean; None for a single value."""
        deviation = self.deviation
        return None if deviation is None else deviation / sqrt(len(self.values))

    @property
    def estimate(self) -> Estimate:
        """Return the mean with its standard error."""
        return Estimate(self.mean, self.error)


def paired_differences(first: Mapping[Key, float], second: Mapping[Key, float]) -> Sample | None:
    """Subtract the values of `second` from those of `first`, key by key; None without a key in common.

    An effect that is equal on both values of a key, such as that of a lucky seed, cancels.
    """
    differences = tuple(value - second[key] for key, value in first.items() if key in second)
    return Sample(differences) if differences else None


def student_t(degrees: int) -> float:
    """Return the two-sided quantile of Student's t at `CONFIDENCE`, within 0.13 %.

    It is computed in closed form for 1, 2 and 4 degrees of freedom, else by its expansion in 1 / degrees (Abramowitz
    and Stegun 26.7.5).
    """
    outside = sqrt(1.0 - CONFIDENCE**2)  # read by the closed forms for 2 and 4 degrees
    if degrees == 1:
        return tan(0.5 * pi * CONFIDENCE)
    if degrees == 2:
        return sqrt(2.0) * CONFIDENCE / outside
    if degrees == 4:
        return 2.0 * sqrt(cos(acos(outside) / 3.0) / outside - 1.0)

    # The normal quantile, and the terms of the expansion in 1 / degrees, 1 / degrees^2, ...
    z = NormalDist().inv_cdf(0.5 + 0.5 * CONFIDENCE)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
