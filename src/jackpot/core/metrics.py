"""Metrics as sums that add up over tokens, micro-batches, optimizer steps and ranks. Torch only.

A metric is never averaged twice: it is carried as sums and becomes a number once, at the end. Every kind has `+` and
`value`. Many of them are added, sent to the other ranks and read by the host as one row of numbers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jackpot.core.statistics import Estimate


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
    def number(cls, value: float | Tensor) -> "Mean":
        """Build the mean of one entry, on its device or the CPU."""
        entry = torch.as_tensor(value, dtype=torch.float64)
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
        """Sum the entries where `mask` is True; both [B, T], a response in each row, or [T], a single response."""
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

    @property
    def estimate(self) -> Estimate | None:
        """The mean with its standard error, unknown from one response; None where nothing was counted."""
        if not self.count:
            return None
        return Estimate(float(self.value), float(self.standard_error) if self.responses > 1 else None)


class Sum(NamedTuple):
    """Carries a count or a sum (scalar, float64)."""

    total: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Sum":
        """Count the True entries."""
        return cls(mask.double().sum())

    @classmethod
    def number(cls, value: float | Tensor) -> "Sum":
        """Build the sum of one entry, on its device or the CPU."""
        return cls(torch.as_tensor(value, dtype=torch.float64))

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    @property
    def value(self) -> Tensor:
        """The sum itself."""
        return self.total


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


class EffectiveSampleSize(NamedTuple):
    """Carries the effective sample size of weights given by their logarithms, which may overflow (scalars, float64)."""

    log_total: Tensor  # log sum w
    log_squares: Tensor  # log sum w^2
    count: Tensor  # number of weights

    @classmethod
    def of(cls, log_weights: Tensor, mask: Tensor) -> "EffectiveSampleSize":
        """Sum the weights, nats, where `mask` is True."""
        return cls.of_each(log_weights, {"": mask})[""]

    @classmethod
    def of_each(cls, log_weights: Tensor, masks: Mapping[str, Tensor]) -> dict[str, "EffectiveSampleSize"]:
        """Sum the weights, nats, where each mask is True; by name of the mask."""
        members = torch.stack(list(masks.values()))
        rows = torch.where(members, log_weights.detach().double(), -torch.inf).flatten(1)  # [G, N]
        fields = rows.logsumexp(1), (2.0 * rows).logsumexp(1), members.flatten(1).sum(1).double()
        return {name: cls(*entry) for name, *entry in zip(masks, *(field.unbind() for field in fields), strict=True)}

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


class Histogram(NamedTuple):
    """Counts values in fixed bins, fine around 0 and coarse far out.

    Bin edges are SCALE sinh(u) for evenly spaced u, out to +-LIMIT: a quantile is within about 1.5 % of itself, or
    within 2e-6 of 0. Values further out are counted in the outermost bins.
    """

    counts: Tensor  # [BINS] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Histogram":
        """Count the entries of `values` where `mask` is True, without NaN."""
        counted = mask & ~values.isnan()
        entries = torch.where(counted, values.detach().double(), 0.0)
        places = ((entries / _SCALE).asinh() / _WIDTH).floor() + _BINS // 2
        counts = entries.new_zeros(_BINS)  # filled in place: `bincount` would wait for the device
        return cls(counts.index_add_(0, places.clamp(0, _BINS - 1).long().flatten(), counted.double().flatten()))

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


_SCALE, _LIMIT, _BINS = 1e-4, 40.0, 2048
_WIDTH = math.asinh(_LIMIT / _SCALE) / (_BINS // 2)

Metric = Mean | ClusteredMean | Sum | Max | EffectiveSampleSize | Histogram
Sums = dict[str, Metric]
EntryKind = TypeVar("EntryKind", bound=Metric)


def mean_of(sums: Mapping[str, Metric], name: str) -> Mean:
    """Return the entry of a name that stands for a mean."""
    entry = sums[name]
    assert isinstance(entry, Mean)  # a name has one kind
    return entry


# how each field of a kind adds up: "h" the sum of a histogram's counts, "+" a sum, "m" a maximum, "l" the log of a sum
_FIELDS: dict[type, str] = {
    Mean: "+++",
    ClusteredMean: "++++++",
    Sum: "+",
    Max: "m",
    EffectiveSampleSize: "ll+",
    Histogram: "h",
}
_NOTHING = {"h": 0.0, "+": 0.0, "m": -math.inf, "l": -math.inf}  # what adds nothing


def means(columns: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Sums:
    """Average every column over the True entries of every mask, all of one shape, in two matrix products.

    Returns:
        A `Mean` for each pair, named by the column's name and then the mask's. Entries in no mask are ignored, NaN
        included; NaN in one mask is in the means of all.
    """
    members = torch.stack([mask.flatten() for mask in masks.values()])  # [G, N]
    values = torch.stack([column.detach().double().flatten() for column in columns.values()])  # [C, N]
    values = torch.where(members.any(0), values, 0.0)
    weights = members.double()
    totals, squares, counts = values @ weights.T, values.square() @ weights.T, weights.sum(-1).unbind()
    return {
        column + name: Mean(total, square, count)
        for column, of_total, of_square in zip(columns, totals, squares, strict=True)
        for name, total, square, count in zip(masks, of_total.unbind(), of_square.unbind(), counts, strict=True)
    }


def add_sums(*parts: Mapping[str, Metric]) -> Sums:
    """Add sets of metrics name by name; a name that only some of them have is kept. All are on one device."""
    rows: list[Sums] = []  # the first entry of every name, the second one, and so on
    found: Counter[str] = Counter()
    for name, entry in (item for part in parts for item in part.items()):
        if found[name] == len(rows):
            rows.append({})
        rows[found[name]][name] = entry
        found[name] += 1
    if len(rows) < 2:
        return rows[0] if rows else {}
    layout = _layout(rows[0])
    return _unpacked(_added(torch.stack([_packed(row, layout) for row in rows]), layout), layout)


def all_reduce_sums(sums: Sums) -> Sums:
    """Return the sums over all ranks, in one message; `sums` itself without torch.distributed.

    Every rank must hold the same names, on the same kind of device. A group with NCCL alone sends over this rank's GPU
    what is on the CPU.
    """
    if not sums or not _has_ranks():
        return sums
    layout = _layout(sums)
    return _unpacked(_added(torch.stack(_of_every_rank(_packed(sums, layout))), layout), layout)


def all_gather(values: Tensor) -> Tensor:
    """Concatenate the vectors [N] of all ranks, filled up with zeros to the longest; `values` itself without
    torch.distributed."""
    if not _has_ranks():
        return values
    missing = max_over_ranks(len(values)) - len(values)
    return torch.cat(_of_every_rank(torch.nn.functional.pad(values, (0, missing))))


def entry_of(sums: Mapping[str, Metric], name: str, kind: type[EntryKind]) -> EntryKind:
    """Return the entry of a name, which is of this kind."""
    entry = sums[name]
    assert isinstance(entry, kind), f"{name} is a {type(entry).__name__}, and no {kind.__name__}"
    return entry


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _of_every_rank(row: Tensor) -> list[Tensor]:
    """Return the tensors of one shape that the ranks hold, on the device of this rank's."""
    sent = row.cuda() if dist.get_backend() == "nccl" else row
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sent)
    return [one.to(row.device) for one in rows]


def max_over_ranks(number: int) -> int:
    """Return the largest of the numbers that the ranks have; `number` itself, unread, without torch.distributed."""
    sums: Sums = {"number": Max.number(number)}
    reduced = all_reduce_sums(sums)
    return number if reduced is sums else int(reduced["number"].value)


def to_host(sums: Sums) -> Sums:
    """Copy entries of one device to the CPU in one transfer, the only wait for the device in reading them."""
    layout = _layout(sums)
    return _unpacked(*tensors_to_host([_packed(sums, layout)]), layout) if sums else {}


def tensors_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device, of any shapes and dtypes, to the CPU in one transfer."""
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())  # so that each is aligned
    if not order:
        return []
    raw = [tensors[place].contiguous().flatten().view(torch.uint8) for place in order]
    copy = (torch.cat(raw) if len(raw) > 1 else raw[0]).cpu().split([len(part) for part in raw])
    parts = dict(zip(order, copy, strict=True))
    return [parts[place].view(tensor.dtype).view(tensor.shape) for place, tensor in enumerate(tensors)]


class _Layout(NamedTuple):
    """Says where the fields of metrics stand in a row of L numbers: histograms, then sums, maxima, and logs of sums."""

    kinds: dict[str, type]  # of each metric
    fields: list[tuple[str, int]]  # the metric, and which of its fields, in the order of the row
    sizes: list[int]  # numbers that add up by a sum (a histogram's are `_BINS`), by a maximum, and as logs of sums


def _layout(sums: Mapping[str, Metric]) -> _Layout:
    """Lay out metrics by name and kind alone, so that all ranks with the same ones agree."""
    kinds = {name: type(sums[name]) for name in sorted(sums)}
    places = {
        how: [(name, index) for name, kind in kinds.items() for index, one in enumerate(_FIELDS[kind]) if one == how]
        for how in _NOTHING
    }
    sizes = [_BINS * len(places["h"]) + len(places["+"]), len(places["m"]), len(places["l"])]
    return _Layout(kinds, [field for how in places.values() for field in how], sizes)


def _packed(sums: Mapping[str, Metric], layout: _Layout) -> Tensor:
    """Write all fields into one row [L]; a metric that `sums` lacks is one that adds nothing."""
    like = next(iter(sums.values()))[0]
    fields = [
        sums[name][index] if name in sums else _nothing(layout.kinds[name], index, like)
        for name, index in layout.fields
    ]
    histograms = sum(kind is Histogram for kind in layout.kinds.values())
    numbers = [torch.stack(fields[histograms:])] if len(fields) > histograms else []
    return torch.cat([*fields[:histograms], *numbers])


def _nothing(kind: type, index: int, like: Tensor) -> Tensor:
    size = (_BINS,) if kind is Histogram else ()
    return like.new_full(size, _NOTHING[_FIELDS[kind][index]], dtype=torch.float64)


def _unpacked(row: Tensor, layout: _Layout) -> Sums:
    """Build the metrics of a row; their fields are views of it."""
    counts = _BINS * sum(kind is Histogram for kind in layout.kinds.values())
    parts = (*row[:counts].view(-1, _BINS).unbind(), *row[counts:].unbind())
    fields = dict(zip(layout.fields, parts, strict=True))
    return {
        name: kind(*(fields[name, index] for index in range(len(_FIELDS[kind])))) for name, kind in layout.kinds.items()
    }


def _added(rows: Tensor, layout: _Layout) -> Tensor:
    """Add rows of numbers, [R, L] -> [L]."""
    sums, largest, logs = rows.split(layout.sizes, dim=1)
    return torch.cat([sums.sum(0), largest.amax(0), logs.logsumexp(0)])
