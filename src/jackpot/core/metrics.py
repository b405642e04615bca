"""Sums that add up: over tokens, micro-batches, optimizer steps and ranks. Torch only.

A metric is never averaged twice. It travels as sums and becomes a number once, at the end. Every kind of sum has `+`,
`value` and `over_ranks`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the masked entries in float64, a scalar. What stands outside the mask cannot leak in, NaN included."""
    return torch.where(mask, values.double(), 0.0).sum()


class Mean(NamedTuple):
    """A mean, its variance and standard error, as sums over the entries (scalars, float64)."""

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Mean":
        """Over the masked entries of `values`, any shape."""
        values = values.detach().double()
        return cls(masked_sum(values, mask), masked_sum(values.square(), mask), mask.double().sum())

    @classmethod
    def number(cls, value: float) -> "Mean":
        """One entry."""
        entry = torch.tensor(value, dtype=torch.float64)
        return cls(entry, entry.square(), torch.ones_like(entry))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def value(self) -> Tensor:
        """The mean; NaN where nothing was counted."""
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        """Of the entries; NaN where nothing was counted."""
        return (self.squares / self.count - self.value.square()).clamp(min=0.0)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, if the entries are uncorrelated; NaN where nothing was counted."""
        return (self.variance / self.count).sqrt()

    @property
    def effective_share(self) -> Tensor:
        """Of entries that are weights: (sum w)^2 / (n sum w^2), the effective sample size over n; 1 for equal ones."""
        return self.total.square() / (self.squares * self.count)

    @classmethod
    def over_ranks(cls, entries: Sequence["Mean"]) -> list["Mean"]:
        packed = torch.stack([torch.stack(entry) for entry in entries])
        dist.all_reduce(packed)
        return [cls(*row.unbind()) for row in packed]


class Total(NamedTuple):
    """A count or a sum (scalar, float64)."""

    total: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Total":
        """How many entries are True."""
        return cls(mask.double().sum())

    @classmethod
    def number(cls, value: float) -> "Total":
        return cls(torch.tensor(value, dtype=torch.float64))

    def __add__(self, other: "Total") -> "Total":
        return Total(self.total + other.total)

    @property
    def value(self) -> Tensor:
        return self.total

    @classmethod
    def over_ranks(cls, entries: Sequence["Total"]) -> list["Total"]:
        packed = torch.stack([entry.total for entry in entries])
        dist.all_reduce(packed)
        return [cls(total) for total in packed]


class Max(NamedTuple):
    """A largest value (scalar, float64); -inf where nothing was counted."""

    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Max":
        entries = torch.where(mask, values.detach().double(), -torch.inf)
        return cls(entries.max() if entries.numel() else entries.new_tensor(-torch.inf))

    @classmethod
    def number(cls, value: float) -> "Max":
        return cls(torch.tensor(value, dtype=torch.float64))

    def __add__(self, other: "Max") -> "Max":
        return Max(torch.maximum(self.largest, other.largest))

    @property
    def value(self) -> Tensor:
        return self.largest

    @classmethod
    def over_ranks(cls, entries: Sequence["Max"]) -> list["Max"]:
        packed = torch.stack([entry.largest for entry in entries])
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        return [cls(largest) for largest in packed]


class Effective(NamedTuple):
    """The effective sample size of weights too large to be added as they are (scalars, float64, logarithms)."""

    log_total: Tensor  # log sum w
    log_squares: Tensor  # log sum w^2
    count: Tensor

    @classmethod
    def of(cls, log_weights: Tensor, mask: Tensor) -> "Effective":
        log_weights = torch.where(mask, log_weights.detach().double(), -torch.inf).flatten()
        return cls(log_weights.logsumexp(0), (2.0 * log_weights).logsumexp(0), mask.double().sum())

    def __add__(self, other: "Effective") -> "Effective":
        return Effective(
            torch.logaddexp(self.log_total, other.log_total),
            torch.logaddexp(self.log_squares, other.log_squares),
            self.count + other.count,
        )

    @property
    def value(self) -> Tensor:
        """(sum w)^2 / (n sum w^2), in (0, 1]; NaN where nothing was counted."""
        return (2.0 * self.log_total - self.log_squares).exp() / self.count

    @classmethod
    def over_ranks(cls, entries: Sequence["Effective"]) -> list["Effective"]:
        packed = torch.stack([torch.stack(entry) for entry in entries])
        everywhere = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, packed)
        every = torch.stack(everywhere)
        logs, counts = every[..., :2].logsumexp(0), every[..., 2].sum(0)
        return [cls(*pair.unbind(), count) for pair, count in zip(logs, counts, strict=True)]


class Histogram(NamedTuple):
    """How values are distributed: counts in fixed bins, fine around 0 and coarse far out.

    Bin edges are SCALE sinh(u) for evenly spaced u, out to +-LIMIT: a quantile is within about 1.5 % of itself, or
    within 2e-6 of 0. What lies further out is counted in the outermost bins.
    """

    counts: Tensor  # [BINS] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Histogram":
        entries = values.detach().double()[mask & ~values.isnan()]
        places = ((entries / _SCALE).asinh() / _WIDTH).floor() + _BINS // 2
        return cls(torch.bincount(places.clamp(0, _BINS - 1).long(), minlength=_BINS).double())

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(self.counts + other.counts)

    def quantile(self, share: float) -> Tensor:
        """The value that `share` of all entries lie below: the middle of the bin where it falls, in u; a scalar."""
        running = self.counts.cumsum(0)
        place = torch.searchsorted(running, share * running[-1:])[0].clamp(max=_BINS - 1)
        return _SCALE * ((place - _BINS // 2 + 0.5) * _WIDTH).sinh()

    @property
    def value(self) -> Tensor:
        """The median; NaN where nothing was counted."""
        return torch.where(self.counts.sum() > 0, self.quantile(0.5), torch.nan)

    @classmethod
    def over_ranks(cls, entries: Sequence["Histogram"]) -> list["Histogram"]:
        packed = torch.stack([entry.counts for entry in entries])
        dist.all_reduce(packed)
        return [cls(counts) for counts in packed]


_SCALE, _LIMIT, _BINS = 1e-4, 40.0, 2048
_WIDTH = math.asinh(_LIMIT / _SCALE) / (_BINS // 2)

Sum = Mean | Total | Max | Effective | Histogram
Sums = dict[str, Sum]


def add_sums(first: Mapping[str, Sum], second: Mapping[str, Sum]) -> Sums:
    """Entry by entry; a name that only one side has is kept."""
    merged = dict(first)
    for name, entry in second.items():
        merged[name] = merged[name] + entry if name in merged else entry
    return merged


def all_reduce_sums(sums: Sums) -> Sums:
    """Over all ranks, in place of the local sums; the identity where torch.distributed is not initialised.

    Every rank must hold the same names. One message for each kind of sum.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return sums
    reduced: Sums = {}
    for kind in (Mean, Total, Max, Effective, Histogram):
        names = sorted(name for name, entry in sums.items() if isinstance(entry, kind))
        if names:
            reduced |= zip(names, kind.over_ranks([sums[name] for name in names]), strict=True)
    return reduced
