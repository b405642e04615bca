"""Metrics as sums that add up over tokens, micro-batches, optimizer steps and ranks. Torch only.

A metric is never averaged twice: it is carried as sums and becomes a number once, at the end. Every kind has `+`,
`value` and `over_ranks` (all_reduce of several entries in one message).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the entries where `mask` is True: a scalar in float64. Entries outside it are ignored, NaN included."""
    return torch.where(mask, values.double(), 0.0).sum()


class Mean(NamedTuple):
    """Carries a mean, its variance and its standard error as sums over the entries (scalars, float64)."""

    total: Tensor  # sum x
    squares: Tensor  # sum x^2
    count: Tensor  # number of entries

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Mean":
        """Sum the entries of `values` where `mask` is True; both of one shape, any."""
        values = values.detach().double()
        return cls(masked_sum(values, mask), masked_sum(values.square(), mask), mask.double().sum())

    @classmethod
    def number(cls, value: float) -> "Mean":
        """Build the mean of one entry."""
        entry = torch.tensor(value, dtype=torch.float64)
        return cls(entry, entry.square(), torch.ones_like(entry))

    @classmethod
    def numbers(cls, values: Sequence[float]) -> "Mean":
        """Build the mean of plain numbers."""
        entries = torch.tensor(values, dtype=torch.float64)
        return cls.of(entries, torch.ones_like(entries, dtype=torch.bool))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def value(self) -> Tensor:
        """Mean of the entries; NaN where nothing was counted."""
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        """Population variance of the entries; NaN where nothing was counted."""
        return (self.squares / self.count - self.value.square()).clamp(min=0.0)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of the mean for uncorrelated entries; NaN where nothing was counted."""
        return (self.variance / self.count).sqrt()

    @property
    def effective_share(self) -> Tensor:
        """Effective sample size over n, for entries that are weights: (sum w)^2 / (n sum w^2); 1 for equal weights."""
        return self.total.square() / (self.squares * self.count)

    @classmethod
    def over_ranks(cls, entries: Sequence["Mean"]) -> list["Mean"]:
        """Add each entry over all ranks, in one message."""
        packed = torch.stack([torch.stack(entry) for entry in entries])
        dist.all_reduce(packed)
        return [cls(*row.unbind()) for row in packed]


class ClusteredMean(NamedTuple):
    """Carries a mean over tokens whose standard error is clustered by response, as sums (scalars, float64)."""

    total: Tensor  # sum y, of the sum y of a response over its tokens
    count: Tensor  # sum n, of the number n of its tokens
    squares: Tensor  # sum y^2
    products: Tensor  # sum y n
    counts: Tensor  # sum n^2
    responses: Tensor  # number of responses with a token

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "ClusteredMean":
        """Sum the entries of `values` where `mask` is True; both [B, T], a response in each row."""
        y, n = torch.where(mask, values.detach().double(), 0.0).sum(-1), mask.sum(-1).double()
        return cls(y.sum(), n.sum(), y.square().sum(), (y * n).sum(), n.square().sum(), (n > 0).sum().double())

    def __add__(self, other: "ClusteredMean") -> "ClusteredMean":
        return ClusteredMean(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def value(self) -> Tensor:
        """Mean of the entries; NaN where nothing was counted."""
        return self.total / self.count

    @property
    def standard_error(self) -> Tensor:
        """Standard error of the mean, however the tokens of a response depend on each other; 0 for one response."""
        mean = self.value
        spread = (self.squares - 2.0 * mean * self.products + mean.square() * self.counts).clamp(min=0.0)
        return (self.responses / (self.responses - 1.0).clamp(min=1.0) * spread).sqrt() / self.count

    @classmethod
    def over_ranks(cls, entries: Sequence["ClusteredMean"]) -> list["ClusteredMean"]:
        """Add each entry over all ranks, in one message."""
        packed = torch.stack([torch.stack(entry) for entry in entries])
        dist.all_reduce(packed)
        return [cls(*row.unbind()) for row in packed]


class Sum(NamedTuple):
    """Carries a count or a sum (scalar, float64)."""

    total: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Sum":
        """Count the True entries."""
        return cls(mask.double().sum())

    @classmethod
    def number(cls, value: float) -> "Sum":
        """Build the sum of one entry."""
        return cls(torch.tensor(value, dtype=torch.float64))

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    @property
    def value(self) -> Tensor:
        """The sum itself."""
        return self.total

    @classmethod
    def over_ranks(cls, entries: Sequence["Sum"]) -> list["Sum"]:
        """Add each entry over all ranks, in one message."""
        packed = torch.stack([entry.total for entry in entries])
        dist.all_reduce(packed)
        return [cls(total) for total in packed]


class Max(NamedTuple):
    """Carries a largest value (scalar, float64); -inf where nothing was counted."""

    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Max":
        """Take the largest of `values` where `mask` is True; both of one shape, any."""
        entries = torch.where(mask, values.detach().double(), -torch.inf)
        return cls(entries.max() if entries.numel() else entries.new_tensor(-torch.inf))

    @classmethod
    def number(cls, value: float) -> "Max":
        """Build the maximum of one entry."""
        return cls(torch.tensor(value, dtype=torch.float64))

    def __add__(self, other: "Max") -> "Max":
        return Max(torch.maximum(self.largest, other.largest))

    @property
    def value(self) -> Tensor:
        """Largest entry; -inf where nothing was counted."""
        return self.largest

    @classmethod
    def over_ranks(cls, entries: Sequence["Max"]) -> list["Max"]:
        """Take the largest of each entry over all ranks, in one message."""
        packed = torch.stack([entry.largest for entry in entries])
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        return [cls(largest) for largest in packed]


class EffectiveSampleSize(NamedTuple):
    """Carries the effective sample size of weights given by their logarithms, which may overflow (scalars, float64)."""

    log_total: Tensor  # log sum w
    log_squares: Tensor  # log sum w^2
    count: Tensor  # number of weights

    @classmethod
    def of(cls, log_weights: Tensor, mask: Tensor) -> "EffectiveSampleSize":
        """Sum the weights, nats, where `mask` is True."""
        log_weights = torch.where(mask, log_weights.detach().double(), -torch.inf).flatten()
        return cls(log_weights.logsumexp(0), (2.0 * log_weights).logsumexp(0), mask.double().sum())

    def __add__(self, other: "EffectiveSampleSize") -> "EffectiveSampleSize":
        return EffectiveSampleSize(
            torch.logaddexp(self.log_total, other.log_total),
            torch.logaddexp(self.log_squares, other.log_squares),
            self.count + other.count,
        )

    @property
    def value(self) -> Tensor:
        """Effective sample size over n, (sum w)^2 / (n sum w^2), in (0, 1]; NaN where nothing was counted."""
        return (2.0 * self.log_total - self.log_squares).exp() / self.count

    @classmethod
    def over_ranks(cls, entries: Sequence["EffectiveSampleSize"]) -> list["EffectiveSampleSize"]:
        """Add each entry over all ranks, in one message."""
        packed = torch.stack([torch.stack(entry) for entry in entries])
        everywhere = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, packed)
        every = torch.stack(everywhere)
        logs, counts = every[..., :2].logsumexp(0), every[..., 2].sum(0)
        return [cls(*pair.unbind(), count) for pair, count in zip(logs, counts, strict=True)]


class Histogram(NamedTuple):
    """Counts values in fixed bins, fine around 0 and coarse far out.

    Bin edges are SCALE sinh(u) for evenly spaced u, out to +-LIMIT: a quantile is within about 1.5 % of itself, or
    within 2e-6 of 0. Values further out are counted in the outermost bins.
    """

    counts: Tensor  # [BINS] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Histogram":
        """Count the entries of `values` where `mask` is True, without NaN."""
        entries = values.detach().double()[mask & ~values.isnan()]
        places = ((entries / _SCALE).asinh() / _WIDTH).floor() + _BINS // 2
        return cls(torch.bincount(places.clamp(0, _BINS - 1).long(), minlength=_BINS).double())

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(self.counts + other.counts)

    def quantile(self, share: float) -> Tensor:
        """Return the value that `share` of all entries lie below, a scalar: the middle, in u, of its bin."""
        running = self.counts.cumsum(0)
        place = torch.searchsorted(running, share * running[-1:])[0].clamp(max=_BINS - 1)
        return _SCALE * ((place - _BINS // 2 + 0.5) * _WIDTH).sinh()

    @property
    def value(self) -> Tensor:
        """Median of the entries; NaN where nothing was counted."""
        return torch.where(self.counts.sum() > 0, self.quantile(0.5), torch.nan)

    @classmethod
    def over_ranks(cls, entries: Sequence["Histogram"]) -> list["Histogram"]:
        """Add each entry over all ranks, in one message."""
        packed = torch.stack([entry.counts for entry in entries])
        dist.all_reduce(packed)
        return [cls(counts) for counts in packed]


_SCALE, _LIMIT, _BINS = 1e-4, 40.0, 2048
_WIDTH = math.asinh(_LIMIT / _SCALE) / (_BINS // 2)

Metric = Mean | ClusteredMean | Sum | Max | EffectiveSampleSize | Histogram
Sums = dict[str, Metric]


def add_sums(first: Mapping[str, Metric], second: Mapping[str, Metric]) -> Sums:
    """Add two sets of metrics name by name; a name that only one of them has is kept."""
    merged = dict(first)
    for name, entry in second.items():
        merged[name] = merged[name] + entry if name in merged else entry
    return merged


def all_reduce_sums(sums: Sums) -> Sums:
    """Return the sums over all ranks, in one message for each kind; `sums` itself without torch.distributed.

    Every rank must hold the same names.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return sums
    reduced: Sums = {}
    for kind in (Mean, ClusteredMean, Sum, Max, EffectiveSampleSize, Histogram):
        names = sorted(name for name, entry in sums.items() if isinstance(entry, kind))
        if names:
            reduced |= zip(names, kind.over_ranks([sums[name] for name in names]), strict=True)
    return reduced
