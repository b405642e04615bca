"""Functions that treat tensors sharded over ranks (DTensors) and plain tensors alike. Torch only."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jackpot.core.metrics import Sum, all_reduce_sums

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> "TypeIs[DTensor]":
    """Tell whether every rank holds only a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, as a view; a plain tensor is returned as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; all ranks have to call it. A plain tensor is returned as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part_like(source: Any, like: Tensor) -> Tensor:
    """Copy a whole tensor to the device of `like`, a tensor of the same shape, and shard the copy as `like` is.

    Args:
        source: the whole tensor, or a slice of a safetensors file, of which only this rank's part is read.

    Raises:
        ValueError: the two have different shapes.
    """
    # Where this rank's part, a single chunk, begins in the whole tensor, and how long it is, in each dimension.
    (chunk,) = like.__create_chunk_list__() if is_sharded(like) else (None,)
    offsets, sizes = (chunk.offsets, chunk.sizes) if chunk else ([0] * like.dim(), like.shape)
    shape = list(source.shape if isinstance(source, Tensor) else source.get_shape())
    if shape != list(like.shape):
        raise ValueError(f"it has the shape {shape}, {list(like.shape)} is wanted")

    slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    shard = source[slices].to(local(like).device, copy=True)  # a view would keep the whole source in memory
    if not is_sharded(like):
        return shard

    mesh, placements = like.device_mesh, like.placements
    return type(like).from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor; a plain tensor is returned as it is."""
    return [local(tensor) for tensor in tensors]


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the Euclidean norm of all numbers in several tensors together: a float64 scalar.

    Either all tensors are sharded, or none. Of sharded tensors the shards of all ranks count. Sums are float64, so that
    the norm is the same up to 1e-16 however the tensors are sharded.
    """
    # Torch has no public function for the norms of many tensors at once.
    norms = torch._foreach_norm(locals_of(tensors), 2, torch.float64)  # pyright: ignore[reportPrivateUsage]
    squares = torch.stack(norms).square().sum()
    if is_sharded(tensors[0]):
        squares = all_reduce_sums({"squares": Sum(squares)})["squares"].total
    return squares.sqrt()
