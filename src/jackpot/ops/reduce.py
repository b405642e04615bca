"""Sums that add up: over tokens, micro-batches, optimizer steps and ranks. Layer 1: torch only.

A metric is never averaged twice. It travels as sums and becomes a number once, at the end.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the masked entries in float64, a scalar. What stands outside the mask cannot leak in, NaN included."""
    return torch.where(mask, values.double(), 0.0).sum()


class Mean(NamedTuple):
    """A mean and its standard error, as sums over the entries (scalars, float64)."""

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Mean":
        """Over the masked entries of `values`, any shape."""
        values = values.detach().double()
        return cls(masked_sum(values, mask), masked_sum(values.square(), mask), mask.double().sum())

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def value(self) -> Tensor:
        """The mean; NaN where nothing was counted."""
        return self.total / self.count

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, if the entries are uncorrelated; NaN where nothing was counted."""
        variance = (self.squares / self.count - self.value.square()).clamp(min=0.0)
        return (variance / self.count).sqrt()


class Max(NamedTuple):
    """A largest value (scalar, float64); -inf where nothing was counted."""

    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Max":
        entries = torch.where(mask, values.detach().double(), -torch.inf)
        return cls(entries.max() if entries.numel() else entries.new_tensor(-torch.inf))

    def __add__(self, other: "Max") -> "Max":
        return Max(torch.maximum(self.largest, other.largest))

    @property
    def value(self) -> Tensor:
        return self.largest


Sums = dict[str, Mean | Max]


def add_sums(first: Mapping[str, Mean | Max], second: Mapping[str, Mean | Max]) -> Sums:
    """Entry by entry; a name that only one side has is kept."""
    merged = dict(first)
    for name, entry in second.items():
        merged[name] = merged[name] + entry if name in merged else entry
    return merged


def all_reduce_sums(sums: Sums) -> Sums:
    """Over all ranks, in place of the local sums; the identity where torch.distributed is not initialised.

    Every rank must hold the same names.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return sums
    names = sorted(sums)
    means = [name for name in names if isinstance(sums[name], Mean)]
    largest = [name for name in names if isinstance(sums[name], Max)]
    reduced: Sums = {}
    if means:
        packed = torch.stack([torch.stack(tuple(sums[name])) for name in means])
        dist.all_reduce(packed)
        reduced.update({name: Mean(*row.unbind()) for name, row in zip(means, packed, strict=True)})
    if largest:
        packed = torch.stack([sums[name].value for name in largest])
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        reduced.update({name: Max(value) for name, value in zip(largest, packed, strict=True)})
    return reduced
