"""Metrics as sums that add up over tokens, micro-batches, optimizer steps and ranks. Torch only.

A metric is never averaged twice: it is carried as sums and becomes a number once, at the end. To add many metrics, to
send them to the other ranks and to copy them to the CPU, all are written into one row of numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jackpot.core.statistics import Estimate


class Metric(ABC):
    """A number that is stored as tensors, so that the metrics of parts of the data add up to the metric of the whole.

    Each subclass is a frozen dataclass of such tensors.
    """

    added_by: ClassVar[str]
    """A letter for each field, which says how two values of the field are combined: "h" adds the counts of histograms,
    "+" adds, "m" takes the maximum, "l" adds numbers that are stored as logs."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tensors of the metric, in the order in which its class defines them."""
        return iter(vars(self).values())

    def __add__(self, other: Self) -> Self:
        fields = zip(self.added_by, self, other, strict=True)
        return type(self)(*(_ADD[how](field, other_field) for how, field, other_field in fields))

    @property
    @abstractmethod
    def value(self) -> Tensor:
        """Return the number that the metric stands for, computed from its tensors: a scalar."""

    @classmethod
    def named(cls, sums: Mapping[str, "Metric"], name: str) -> Self:
        """Return the metric `name` of `sums`, after a check that it is an instance of this class.

        Raises:
            TypeError: the metric is of another class.
        """
        metric = sums[name]
        if not isinstance(metric, cls):
            raise TypeError(f"{name} is a {type(metric).__name__}; what reads it here needs a {cls.__name__}")
        return metric


_ADD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "h": torch.add,
    "+": torch.add,
    "m": torch.maximum,
    "l": torch.logaddexp,
}


@dataclass(frozen=True)
class Mean(Metric):
    """A mean, its variance and its standard error, stored as sums over the averaged values (scalars, float64)."""

    added_by = "+++"
    total: Tensor  # sum x
    squares: Tensor  # sum x^2
    count: Tensor  # number of values

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Mean":
        """Build the mean of the `values` at which `mask` is True; all other values are ignored, NaN included.

        Both tensors have one shape, which may be any.
        """
        values = torch.where(mask, values.detach().double(), 0.0)
        return cls(values.sum(), values.square().sum(), mask.double().sum())

    @classmethod
    def number(cls, value: float | Tensor) -> "Mean":
        """Build the mean of a single number, on the number's device if it is a tensor, else on the CPU."""
        entry = torch.as_tensor(value, dtype=torch.float64)
        return cls(entry, entry.square(), torch.ones_like(entry))

    @classmethod
    def numbers(cls, values: Sequence[float]) -> "Mean":
        """Build the mean of plain numbers."""
        entries = torch.tensor(values, dtype=torch.float64)
        return cls.of(entries, torch.ones_like(entries, dtype=torch.bool))

    @property
    def value(self) -> Tensor:
        """Return the mean of the values; NaN if there are none."""
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        """Return the population variance of the values; NaN if there are none."""
        return (self.squares / self.count - self.value.square()).clamp(min=0.0)

    @property
    def standard_error(self) -> Tensor:
        """Return the standard error of the mean, for values that are uncorrelated; NaN if there are no values."""
        return (self.variance / self.count).sqrt()

    @property
    def effective_share(self) -> Tensor:
        """Return the effective sample size of n values w that are weights, divided by n: (sum w)^2 / (n sum w^2).

        It is 1 if all weights are equal.
        """
        return self.total.square() / (self.squares * self.count)


@dataclass(frozen=True)
class ClusteredMean(Metric):
    """A mean over tokens whose standard error is clustered by response, as sums over responses (scalars, float64).

    The tokens of a response may depend on each other, so the responses are the independent samples.
    """

    added_by = "++++++"
    total: Tensor  # sum y, with y the sum of the values of a response's tokens
    count: Tensor  # sum n, with n the number of a response's tokens
    squares: Tensor  # sum y^2
    products: Tensor  # sum y n
    counts: Tensor  # sum n^2
    responses: Tensor  # number of responses with a token

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "ClusteredMean":
        """Build the mean of the `values` at which `mask` is True: both [B, T], or [T] for a single response."""
        y, n = torch.where(mask, values.detach().double(), 0.0).sum(-1), mask.sum(-1).double()
        return cls(y.sum(), n.sum(), y.square().sum(), (y * n).sum(), n.square().sum(), (n > 0).sum().double())

    @property
    def value(self) -> Tensor:
        """Return the mean over all tokens; NaN if there are none."""
        return self.total / self.count

    @property
    def standard_error(self) -> Tensor:
        """Return the standard error of the mean, valid however the tokens of a response depend on each other; 0 for a
        single response."""
        # The spread is the sum of (y - mean n)^2 over responses.
        mean = self.value
        spread = (self.squares - 2.0 * mean * self.products + mean.square() * self.counts).clamp(min=0.0)
        return (self.responses / (self.responses - 1.0).clamp(min=1.0) * spread).sqrt() / self.count

    @property
    def estimate(self) -> Estimate | None:
        """Return the mean with its standard error, which is None for a single response; return None without tokens."""
        if not self.count:
            return None
        return Estimate(float(self.value), float(self.standard_error) if self.responses > 1 else None)


@dataclass(frozen=True)
class Sum(Metric):
    """A sum of numbers, or a count such as that of tokens, which adds up over parts of the data (scalar, float64)."""

    added_by = "+"
    total: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Sum":
        """Count the places where `mask`, of any shape, is True, and return the count as a sum."""
        return cls(mask.double().sum())

    @classmethod
    def number(cls, value: float | Tensor) -> "Sum":
        """Build a sum from its value, on the value's device if it is a tensor, else on the CPU."""
        return cls(torch.as_tensor(value, dtype=torch.float64))

    @property
    def value(self) -> Tensor:
        """Return the sum itself."""
        return self.total


@dataclass(frozen=True)
class Max(Metric):
    """The largest of some values (scalar, float64); -inf if there are no values."""

    added_by = "m"
    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Max":
        """Take the largest of the `values` at which `mask` is True; both tensors have one shape, which may be any."""
        entries = torch.where(mask, values.detach().double(), -torch.inf)
        return cls(entries.max() if entries.numel() else entries.new_tensor(-torch.inf))

    @classmethod
    def number(cls, value: float) -> "Max":
        """Build the maximum of a single number."""
        return cls(torch.tensor(value, dtype=torch.float64))

    @property
    def value(self) -> Tensor:
        """Return the largest value; -inf if there are no values."""
        return self.largest


@dataclass(frozen=True)
class EffectiveSampleSize(Metric):
    """The effective sample size of weights, as sums of their logarithms, since weights may overflow (scalars, float64).

    The effective sample size is (sum w)^2 / sum w^2; see docs/faq.md.
    """

    added_by = "ll+"
    log_total: Tensor  # log sum w
    log_squares: Tensor  # log sum w^2
    count: Tensor  # number of weights

    @classmethod
    def of(cls, log_weights: Tensor, mask: Tensor) -> "EffectiveSampleSize":
        """Sum the weights e^`log_weights` at which `mask` is True; both tensors have one shape, which may be any."""
        return cls.of_each(log_weights, {"": mask})[""]

    @classmethod
    def of_each(cls, log_weights: Tensor, masks: Mapping[str, Tensor]) -> dict[str, "EffectiveSampleSize"]:
        """Sum the weights e^`log_weights` at which a mask is True, for each of `masks`; return the sums by mask name.

        All tensors have one shape, which may be any.
        """
        members = torch.stack(list(masks.values()))
        rows = torch.where(members, log_weights.detach().double(), -torch.inf).flatten(1)  # [G, N] for G masks
        totals, squares, counts = rows.logsumexp(1), (2.0 * rows).logsumexp(1), members.flatten(1).sum(1).double()
        return {
            name: cls(log_total=total, log_squares=square, count=count)
            for name, total, square, count in zip(masks, totals, squares, counts, strict=True)
        }

    @property
    def value(self) -> Tensor:
        """Return the effective sample size of n weights w, over n: (sum w)^2 / (n sum w^2), in (0, 1]; NaN if n = 0."""
        return (2.0 * self.log_total - self.log_squares).exp() / self.count


@dataclass(frozen=True)
class Histogram(Metric):
    """Counts of values in fixed bins, fine around 0 and coarse far out.

    The edges of the bins are _SCALE sinh(u) for evenly spaced numbers u, from -_LIMIT to _LIMIT. So a quantile is
    within about 1.5 % of the true one, or within 2e-6 near 0. Values further out are counted in the outermost bins.
    """

    added_by = "h"
    counts: Tensor  # [_BINS] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Histogram":
        """Count the `values` at which `mask` is True, except NaN; both tensors have one shape, which may be any."""
        counted = mask & ~values.isnan()
        entries = torch.where(counted, values.detach().double(), 0.0)
        bins = ((entries / _SCALE).asinh() / _WIDTH).floor() + _BINS // 2
        counts = entries.new_zeros(_BINS)  # filled in place: `bincount` would wait for the device
        return cls(counts.index_add_(0, bins.clamp(0, _BINS - 1).long().flatten(), counted.double().flatten()))

    def quantile(self, share: float) -> Tensor:
        """Return, as a scalar, a number below which about this share (0 to 1) of all counted values lies.

        The exact number is known only by its bin, so the middle of that bin is returned.
        """
        # The first bin at which the running count reaches the share of all values, in a vector of one entry.
        running = self.counts.cumsum(0)
        index = torch.searchsorted(running, share * running[-1:])[0].clamp(max=_BINS - 1)
        # The middle of bin number `index` among the evenly spaced numbers u (`Histogram`), turned back into a value.
        return _SCALE * ((index - _BINS // 2 + 0.5) * _WIDTH).sinh()

    @property
    def value(self) -> Tensor:
        """Return the median of the counted values; NaN if there are none."""
        return torch.where(self.counts.sum() > 0, self.quantile(0.5), torch.nan)


_BINS = 2048
_SCALE, _LIMIT = 1e-4, 40.0
_WIDTH = math.asinh(_LIMIT / _SCALE) / (_BINS // 2)  # width of a bin, in the numbers u of `Histogram`

Kind = TypeVar("Kind", bound=Metric)
# Metrics by their names.
Means = dict[str, Mean]
Sums = dict[str, Metric]


# For each letter of `Metric.added_by`: the number that changes nothing when it is added in this way.
_NOTHING = {"h": 0.0, "+": 0.0, "m": -math.inf, "l": -math.inf}


def means(columns: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Means:
    """Average every tensor of `columns` over the places where a mask is True, for every mask, in two matrix products.

    All tensors have one shape.

    Returns:
        A `Mean` for each pair of a column and a mask, by the column's name followed by the mask's. Values that no mask
        selects are ignored, NaN included; a NaN that one mask selects makes the column's means over all masks NaN.
    """
    # G masks and C columns of N values each.
    members = torch.stack([mask.flatten() for mask in masks.values()])  # [G, N]
    values = torch.stack([column.detach().double().flatten() for column in columns.values()])  # [C, N]
    values = torch.where(members.any(0), values, 0.0)

    weights = members.double()
    totals, squares = values @ weights.T, values.square() @ weights.T  # [C, G] each
    counts = weights.sum(-1).unbind()
    return {
        column + name: Mean(total=total, squares=square, count=count)
        for column, column_totals, column_squares in zip(columns, totals, squares, strict=True)
        for name, total, square, count in zip(
            masks, column_totals.unbind(), column_squares.unbind(), counts, strict=True
        )
    }


def add_sums(*metric_sets: Mapping[str, Kind]) -> dict[str, Kind]:
    """Add sets of metrics name by name; a name that only some sets have is kept. All metrics are on one device."""
    by_name: dict[str, list[Kind]] = {}
    for name, metric in (item for metrics in metric_sets for item in metrics.items()):
        by_name.setdefault(name, []).append(metric)

    # rounds[0] has the first metric of every name, rounds[1] the second of every name that has two, and so on.
    most = max(map(len, by_name.values()), default=0)
    rounds = [{name: found[i] for name, found in by_name.items() if i < len(found)} for i in range(most)]
    if len(rounds) < 2:
        return rounds[0] if rounds else {}

    layout = _layout(rounds[0])
    return _added([_packed(metrics, layout) for metrics in rounds], layout)


def all_reduce_sums(sums: dict[str, Kind]) -> dict[str, Kind]:
    """Add up the metrics `sums` of all ranks, in one message; without torch.distributed return `sums` itself.

    Every rank must hold the same names, on the same type of device. Where the ranks have NCCL alone, metrics on the CPU
    are sent by way of this rank's GPU.
    """
    if not sums or not _has_ranks():
        return sums
    layout = _layout(sums)
    return _added(_of_every_rank(_packed(sums, layout)), layout)  # one row of numbers from each rank


def all_gather(values: Tensor) -> Tensor:
    """Concatenate the vectors [N] of all ranks, each filled up with zeros to the longest; return `values` itself
    without torch.distributed."""
    if not _has_ranks():
        return values
    padding = max_over_ranks(len(values)) - len(values)
    return torch.cat(_of_every_rank(torch.nn.functional.pad(values, (0, padding))))


def _has_ranks() -> bool:
    """Tell whether this process has joined other ranks by torch.distributed."""
    return dist.is_available() and dist.is_initialized()


def _of_every_rank(row: Tensor) -> list[Tensor]:
    """Gather the tensors `row` of all ranks, which have one shape, on the device of this rank's `row`."""
    message = row.cuda() if dist.get_backend() == "nccl" else row
    rows = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, message)
    return [received.to(row.device) for received in rows]


def max_over_ranks(count: int) -> int:
    """Return the largest of the counts that the ranks pass; `count` itself without torch.distributed."""
    return int(all_reduce_sums({"largest": Max.number(count)})["largest"].value) if _has_ranks() else count


def to_host(sums: Mapping[str, Kind]) -> dict[str, Kind]:
    """Copy metrics of one device to the CPU in one transfer, so that reading them waits for the device only once."""
    layout = _layout(sums)
    return _unpacked(tensors_to_host([_packed(sums, layout)])[0], layout) if sums else {}


def tensors_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device, of any shapes and dtypes, to the CPU in one transfer."""
    # Tensors with the widest elements come first, so that each begins at a multiple of its element's size.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    if not order:
        return []

    raw = [tensors[index].contiguous().flatten().view(torch.uint8) for index in order]
    together = torch.cat(raw) if len(raw) > 1 else raw[0]
    pieces = together.cpu().split([len(tensor) for tensor in raw])
    copies = dict(zip(order, pieces, strict=True))
    # Return the copies in the order of `tensors`.
    return [copies[index].view(tensor.dtype).view(tensor.shape) for index, tensor in enumerate(tensors)]


class _Layout(NamedTuple, Generic[Kind]):
    """The order of several metrics' tensors in one row of L numbers: histograms, then sums, maxima, logs of sums."""

    classes: dict[str, type[Kind]]  # class of each metric, by the metric's name
    fields: list[tuple[str, int]]  # (a metric's name, index of a field in it) of every field, in the order of the row
    sizes: list[int]  # numbers of the row that are sums (`_BINS` for a histogram), maxima, and logs of sums
    histograms: int  # number of fields that are histograms


def _layout(sums: Mapping[str, Kind]) -> _Layout[Kind]:
    """Plan where each metric's tensors stand in one row of numbers.

    Only the metrics' names and classes decide, so that all ranks with the same metrics make the same plan.
    """
    # A field is (name of its metric, index in the metric), and `how` is its letter in `Metric.added_by`: "h" for counts
    # of a histogram, "+" for a sum, "m" for a maximum, "l" for the log of a sum.
    classes = {name: type(sums[name]) for name in sorted(sums)}
    all_fields = [(how, (name, index)) for name, cls in classes.items() for index, how in enumerate(cls.added_by)]
    by_how = {how: [field for added_by, field in all_fields if added_by == how] for how in _NOTHING}
    # The numbers of the row are counts and sums, which are added alike, then maxima, then logs of sums.
    return _Layout(
        classes=classes,
        fields=[field for fields in by_how.values() for field in fields],
        sizes=[_BINS * len(by_how["h"]) + len(by_how["+"]), len(by_how["m"]), len(by_how["l"])],
        histograms=len(by_how["h"]),
    )


def _packed(sums: Mapping[str, Kind], layout: _Layout[Kind]) -> Tensor:
    """Write the tensors of all metrics of a layout into one row of L numbers.

    A metric that `sums` lacks gets numbers that change nothing when they are added.
    """
    tensors_of = {name: tuple(metric) for name, metric in sums.items()}
    any_field = next(iter(tensors_of.values()))[0]  # any tensor of the metrics, for its device

    def nothing(metric_class: type[Kind], index: int) -> Tensor:
        """Return tensor number `index` of a metric that `sums` lacks: it changes nothing when it is added."""
        how = metric_class.added_by[index]  # "h" for the counts of a histogram, another letter for a scalar
        return any_field.new_full((_BINS,) if how == "h" else (), _NOTHING[how], dtype=torch.float64)

    # One tensor for each field, in the order of the row: the counts of the histograms, then scalars.
    tensors = [
        tensors_of[name][index] if name in tensors_of else nothing(layout.classes[name], index)
        for name, index in layout.fields
    ]
    histograms, scalars = tensors[: layout.histograms], tensors[layout.histograms :]
    return torch.cat([*histograms, *([torch.stack(scalars)] if scalars else [])])


def _unpacked(row: Tensor, layout: _Layout[Kind]) -> dict[str, Kind]:
    """Build the metrics that `_packed` has written into one row of L numbers; their tensors are views of the row."""
    end = _BINS * layout.histograms  # where the histograms' counts end and the scalars begin
    tensors = (*row[:end].view(-1, _BINS).unbind(), *row[end:].unbind())
    by_field = dict(zip(layout.fields, tensors, strict=True))  # by (name of the metric, index of the tensor in it)
    return {
        name: cls(*(by_field[name, index] for index in range(len(cls.added_by))))
        for name, cls in layout.classes.items()
    }


def _added(rows: list[Tensor], layout: _Layout[Kind]) -> dict[str, Kind]:
    """Add up the metrics in several rows of L numbers, each written by `_packed` with this layout."""
    sums, largest, logs = torch.stack(rows).split(layout.sizes, dim=1)
    return _unpacked(torch.cat([sums.sum(0), largest.amax(0), logs.logsumexp(0)]), layout)
