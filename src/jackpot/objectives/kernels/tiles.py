"""The products of one head on one tile of logits: the logits themselves, and what their gradient adds to the head's
gradients. Torch only.

A tile is C positions by T tokens of the vocabulary. Large tensors live in a `Workspace` and are overwritten by the next
tile: fresh memory costs more in page faults than the arithmetic on it. `linear_head` states the precision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class HeadTensors(NamedTuple):
    """Holds what one head multiplies, or the gradients of it."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Holds one model's last layer and the hidden states of N positions; gradient flows into all three tensors.

    A bias of -inf masks a token out, though not with a soft cap, which takes it to -soft_cap.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # logits = cap * tanh(logits / cap) before the temperature
    is_fp32: bool = False  # hidden states and weight are multiplied in float32, whatever their dtype and autocast

    @property
    def tensors(self) -> HeadTensors:
        """Hidden states, weight and bias."""
        return HeadTensors(self.hidden, self.weight, self.bias)


class Workspace:
    """Hands out memory by name. A tensor is valid until its name is taken again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor of the memory with that name."""
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            self._flat[name, dtype] = flat = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(shape)


class Tile(NamedTuple):
    """Holds one head's logits of C positions and T tokens."""

    logits: Tensor  # [C, T]: W h where `is_raw`, else soft-capped and over the temperature
    bias: Tensor | None  # [T]
    soft_cap: float | None
    temperature: float
    may_mask: bool  # whether a logit may be -inf
    is_raw: bool  # whether bias, soft cap and temperature are still to come: then the logits have the dtype of the sums
    is_kept: bool  # whether these logits are read again after this tile, so that no gradient may take their memory


KeptTiles = dict[tuple[int, int], Tensor]  # tiles of logits [C, T] by their first position and token


class HeadOperands:
    """Holds one head's operands in the dtype of its products, and forms tiles of its logits."""

    def __init__(
        self,
        name: str,
        tensors: HeadTensors,
        soft_cap: float | None,
        temperature: float,
        operand_dtype: torch.dtype,
        dtype: torch.dtype,
        workspace: Workspace,
        kept: KeptTiles | None,
    ) -> None:
        """
        Args:
            name: keeps this head's memory in the workspace apart from the other head's.
            operand_dtype: what hidden states and weight are cast to before they are multiplied.
            dtype: of the logits and of all sums.
            kept: every tile that is formed is added to it; None to keep none.
        """
        hidden, self.weight, self.bias = tensors
        self.hidden = hidden.to(operand_dtype)
        self._name, self._operand_dtype, self.dtype, self._workspace = name, operand_dtype, dtype, workspace
        self._soft_cap, self._temperature = soft_cap, temperature
        self._mixed = has_mixed_product(hidden.device)
        self._kept = kept
        self._columns = slice(0, 0)
        self._loaded: Tensor | None = None

    @property
    def may_mask(self) -> bool:
        """True where a logit may be -inf: by its bias, or since float16 overflows."""
        return self.bias is not None or self._operand_dtype == torch.float16

    @property
    def is_plain(self) -> bool:
        """True where the products are the logits: no bias, no soft cap, no temperature."""
        return self.bias is None and self._soft_cap is None and self._temperature == 1.0

    def select(self, columns: slice) -> None:
        """Take these tokens' rows of the weight from now on."""
        self._columns, self._loaded = columns, None

    @property
    def _rows_of_weight(self) -> Tensor:
        """[T, H], cast once for the tiles of all positions."""
        if self._loaded is None:
            part = self.weight[self._columns]
            if part.dtype != self._operand_dtype:
                part = self.buffer("weight", tuple(part.shape), self._operand_dtype).copy_(part)
            self._loaded = part
        return self._loaded

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return this head's own workspace tensor of that name, by default in the logits' dtype."""
        return self._workspace.take(f"{self._name} {name}", shape, self.dtype if dtype is None else dtype)

    def tile(self, rows: slice) -> Tile:
        """Form the logits of these positions and the selected tokens, or take those that were kept."""
        key = rows.start, self._columns.start
        known = None if self._kept is None else self._kept.get(key)
        logits = self._products(rows) if known is None else known
        if self._kept is not None:
            self._kept[key] = logits
        return Tile(
            logits,
            None if self.bias is None else self.bias[self._columns],
            self._soft_cap,
            self._temperature,
            may_mask=self.may_mask,
            is_raw=known is None and not self.is_plain,
            is_kept=self._kept is not None,
        )

    def _products(self, rows: slice) -> Tensor:
        """Multiply the hidden states of these positions by the selected rows of the weight: [C, T].

        In the logits' dtype; products that are the logits stay in the operands' where the device has no mixed product.
        """
        left, right = self.hidden[rows], self._rows_of_weight.t()
        shape = left.shape[0], right.shape[1]
        if self._mixed and left.dtype != self.dtype:
            return torch.mm(left, right, out_dtype=self.dtype, out=self._memory(shape, self.dtype))
        if left.dtype == self.dtype or self.is_plain:
            return torch.mm(left, right, out=self._memory(shape, left.dtype))
        products = torch.mm(left, right, out=self.buffer("logits", shape, left.dtype))
        return self._memory(shape, self.dtype).copy_(products)

    def _memory(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return memory for logits, of their own where they are kept."""
        if self._kept is not None:
            return self.hidden.new_empty(shape, dtype=dtype)
        return self.buffer("logits", shape, dtype)

    def gradient_tile(self, tile: Tile) -> Tensor:
        """Return memory for the gradient of a tile's logits, [C, T] in the dtype of the products: the logits' own where
        these are not read again."""
        if tile.logits.dtype == self._operand_dtype and not tile.is_kept:
            return tile.logits
        return self.buffer("gradient", tuple(tile.logits.shape), self._operand_dtype)

    def accumulate_grad(self, rows: slice, grad: Tensor, grads: "HeadGrads") -> None:
        """Add a tile's share to the head's gradients: d bias += sum grad, d hidden += grad W, d weight += grad^T h.

        `grad` [C, T] is the gradient of W h + b, before soft cap and temperature, in the dtype of the products.
        """
        if grads.bias is not None:
            grads.bias[self._columns] += grad.sum(0, dtype=self.dtype)
        if grads.hidden is not None:
            self._add(grads.hidden[rows], grad, self._rows_of_weight)
        if grads.tile is not None:
            self._add(grads.tile, grad.t(), self.hidden[rows])

    def _add(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ right to `total`: in its dtype, or rounded to theirs where the device has no mixed product."""
        if left.dtype == total.dtype:
            total.addmm_(left, right)
        elif self._mixed:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:
            total += torch.mm(left, right, out=self._workspace.take("rounded", tuple(total.shape), left.dtype))


class HeadGrads:
    """Accumulates one head's gradients in the logits' dtype: [N, H], [V, H] and [V]; None for one that is not needed.

    The weight's gradient is a tile in that dtype while the positions add to it, and is rounded once, when it is whole.
    """

    def __init__(self, operands: HeadOperands, tensors: HeadTensors, needed: Sequence[bool]) -> None:
        self._operands, self._tensors = operands, tensors
        hidden, weight, bias = (tensor if need else None for tensor, need in zip(tensors, needed, strict=True))
        self.hidden = None if hidden is None else torch.zeros_like(hidden, dtype=operands.dtype)
        self.weight = None if weight is None else torch.empty_like(weight)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=operands.dtype)
        self.tile: Tensor | None = None  # [T, H], of the weight's gradient

    @property
    def is_needed(self) -> bool:
        """True where at least one of the three gradients is needed."""
        return any(total is not None for total in (self.hidden, self.weight, self.bias))

    def begin_tile(self, columns: slice) -> None:
        """Zero the tile of the weight's gradient for these tokens."""
        if self.weight is None:
            return
        part = self.weight[columns]
        if part.dtype != self._operands.dtype:
            part = self._operands.buffer("weight gradient", tuple(part.shape))
        self.tile = part.zero_()

    def end_tile(self, columns: slice) -> None:
        """Round the tile of the weight's gradient into its place; every position has added to it."""
        if self.weight is not None and self.tile is not None and self.tile.dtype != self.weight.dtype:
            self.weight[columns] = self.tile

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of hidden, weight and bias in the dtypes of those tensors."""
        grads = (self.hidden, self.weight, self.bias)
        pairs = zip(grads, self._tensors, strict=True)
        return [None if grad is None or tensor is None else grad.to(tensor.dtype) for grad, tensor in pairs]


def sum_dtype(heads: Sequence[Head]) -> torch.dtype:
    """Return the dtype of logits and sums: float64 where any tensor has it, else float32."""
    dtypes = {tensor.dtype for head in heads for tensor in head.tensors if tensor is not None}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def operand_dtype(head: Head, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype that a head's hidden states and weight are cast to before they are multiplied."""
    device = head.hidden.device
    if dtype == torch.float64 or head.is_fp32:
        return dtype
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.promote_types(head.hidden.dtype, head.weight.dtype) if has_mixed_product(device) else dtype


def has_mixed_product(device: torch.device) -> bool:
    """Return True where a product of half-precision matrices can be returned in float32: on CUDA, not on ROCm."""
    return device.type == "cuda" and torch.version.cuda is not None
