"""The matrix products of one head on one tile of logits, forward and backward. Torch only.

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
    """The hidden states, the weight and the bias of one head, or their gradients."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The output layer of one model and the hidden states of N positions; gradient flows into all three tensors.

    A bias of -inf gives a token the probability 0, though not with a soft cap, which turns -inf into -soft_cap.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # logits = cap * tanh(logits / cap) before the temperature
    is_fp32: bool = False  # hidden states and weight are multiplied in float32, whatever their dtype and autocast

    @property
    def tensors(self) -> HeadTensors:
        """Return hidden states, weight and bias."""
        return HeadTensors(self.hidden, self.weight, self.bias)


class Workspace:
    """Memory for tensors by name, used again and again. A tensor is valid until its name is taken the next time."""

    def __init__(self, device: torch.device) -> None:
        """Start without memory; `take` allocates it on `device`."""
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor in the memory that is kept under `name` and `dtype`.

        The memory is allocated at the first call, and again only for a larger tensor. It may hold an earlier tensor of
        that name, which is overwritten.
        """
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            self._flat[name, dtype] = flat = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(shape)


class Tile(NamedTuple):
    """The logits of one head at C positions and T tokens."""

    logits: Tensor  # [C, T]: products W h where `is_raw`, else soft-capped and divided by the temperature
    bias: Tensor | None  # [T]
    soft_cap: float | None
    temperature: float
    may_mask: bool  # whether a logit may be -inf
    is_raw: bool  # whether bias, soft cap and temperature are not applied yet; then the logits have the dtype of sums
    is_kept: bool  # whether backward reads these logits again, so that no gradient may overwrite them


KeptTiles = dict[tuple[int, int], Tensor]  # tiles of logits [C, T], by (first position, first token)


class HeadOperands:
    """One head as the matrix products of this file read it: with hidden states and weight in the dtype of the products.

    Select a slice of the vocabulary (`select`), then form the tile of logits of some positions (`tile`); in backward,
    add the tile's gradient to those of hidden states, weight and bias (`accumulate_grad`).
    """

    def __init__(
        self,
        name: str,
        tensors: HeadTensors,
        soft_cap: float | None,
        temperature: float,
        operand_dtype: torch.dtype,
        dtype: torch.dtype,
        workspace: Workspace,
        kept_tiles: KeptTiles | None,
    ) -> None:
        """Cast the hidden states; the rows of the weight are cast when they are multiplied.

        Args:
            name: name of the head, which tells its memory in the workspace from the other head's.
            operand_dtype: dtype to which hidden states and weight are cast before they are multiplied.
            dtype: dtype of the logits and of all sums.
            kept_tiles: tiles that `tile` returns and does not form again; `tile` adds those that it forms. None: no
                tile is kept.
        """
        hidden, self.weight, self.bias = tensors
        self.hidden = hidden.to(operand_dtype)
        self._name, self._workspace = name, workspace
        self._operand_dtype, self.dtype = operand_dtype, dtype
        self._soft_cap, self._temperature = soft_cap, temperature
        self._is_mixed = has_mixed_product(hidden.device)  # whether half-precision operands give float32 products
        self._kept_tiles = kept_tiles
        self._columns = slice(0, 0)  # the slice of the vocabulary that `select` has chosen; none at first
        # The weight's rows [T, H] at the selected tokens, in `operand_dtype`; None until a product first needs them.
        self._selected_rows: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Tell whether the products W h already are the logits: no bias, no soft cap, and a temperature of 1."""
        return self.bias is None and self._soft_cap is None and self._temperature == 1.0

    def select(self, columns: slice) -> None:
        """Select the tokens, a slice of the vocabulary, whose logits `tile` returns from now on."""
        self._columns, self._selected_rows = columns, None

    @property
    def _rows_of_weight(self) -> Tensor:
        """Return the weight's rows at the selected tokens, [T, H], cast to `operand_dtype` once for all positions."""
        if self._selected_rows is None:
            rows = self.weight[self._columns]
            if rows.dtype != self._operand_dtype:
                rows = self.buffer("weight", tuple(rows.shape), self._operand_dtype).copy_(rows)
            self._selected_rows = rows
        return self._selected_rows

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return the workspace tensor that this head has under `name`, by default in the logits' dtype."""
        return self._workspace.take(f"{self._name} {name}", shape, self.dtype if dtype is None else dtype)

    def tile(self, rows: slice) -> Tile:
        """Form the logits of the positions `rows` and the selected tokens, or return the logits that forward kept."""
        key = rows.start, self._columns.start  # the tile's first position and first token
        known_logits = None if self._kept_tiles is None else self._kept_tiles.get(key)
        logits = self._products(rows) if known_logits is None else known_logits
        if self._kept_tiles is not None:
            self._kept_tiles[key] = logits

        return Tile(
            logits=logits,
            bias=None if self.bias is None else self.bias[self._columns],
            soft_cap=self._soft_cap,
            temperature=self._temperature,
            may_mask=self.bias is not None or self._operand_dtype == torch.float16,  # -inf: in a bias, or by overflow
            is_raw=known_logits is None and not self.is_plain,  # logits that the forward pass kept are final
            is_kept=self._kept_tiles is not None,
        )

    def _products(self, rows: slice) -> Tensor:
        """Multiply the hidden states of the positions `rows` by the weight of the selected tokens: [C, T].

        The products have the logits' dtype. Only where the device cannot multiply half-precision matrices into float32
        (`has_mixed_product`), and the products already are the logits (`is_plain`), they keep the operands' dtype.
        """
        hidden, weight = self.hidden[rows], self._rows_of_weight.t()
        shape = hidden.shape[0], weight.shape[1]
        if self._is_mixed and hidden.dtype != self.dtype:  # the device widens half-precision products itself
            return torch.mm(hidden, weight, out_dtype=self.dtype, out=self._memory(shape, self.dtype))
        if hidden.dtype == self.dtype or self.is_plain:
            return torch.mm(hidden, weight, out=self._memory(shape, hidden.dtype))

        # Half-precision products, widened afterwards, so that bias, soft cap and temperature apply in the sums' dtype.
        products = torch.mm(hidden, weight, out=self.buffer("logits", shape, hidden.dtype))
        return self._memory(shape, self.dtype).copy_(products)

    def _memory(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return memory for logits: new memory if the logits are kept for backward, else the workspace's."""
        if self._kept_tiles is not None:
            return self.hidden.new_empty(shape, dtype=dtype)
        return self.buffer("logits", shape, dtype)

    def gradient_tile(self, tile: Tile) -> Tensor:
        """Return memory for the gradient with respect to a tile's products W h, [C, T] in the dtype of the operands.

        It is the logits' own memory where that has this dtype and backward does not read the logits again.
        """
        if tile.logits.dtype == self._operand_dtype and not tile.is_kept:
            return tile.logits
        return self.buffer("gradient", tuple(tile.logits.shape), self._operand_dtype)

    def accumulate_grad(self, rows: slice, grad: Tensor, grads: "HeadGrads") -> None:
        """Add a tile's share to the head's gradients: d bias += sum grad, d hidden += grad W, d weight += grad^T h.

        `grad` [C, T] is the loss's gradient with respect to W h + b, in the dtype of the operands.
        """
        if grads.bias is not None:
            grads.bias[self._columns] += grad.sum(0, dtype=self.dtype)
        if grads.hidden is not None:
            self._add(grads.hidden[rows], grad, self._rows_of_weight)
        if grads.tile is not None:  # the gradient of the weight's rows at the selected tokens
            self._add(grads.tile, grad.t(), self.hidden[rows])

    def _add(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a @ b to `total`; where `has_mixed_product` is False, the product is rounded to `a`'s dtype first."""
        if a.dtype == total.dtype:
            total.addmm_(a, b)
        elif self._is_mixed:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total += torch.mm(a, b, out=self._workspace.take("rounded", tuple(total.shape), a.dtype))


class HeadGrads:
    """The gradients of one head: hidden [N, H] and bias [V] in the logits' dtype, weight [V, H]; None if not needed.

    The weight's gradient is summed tile by tile in the logits' dtype, and a tile is rounded to the weight's dtype
    once, when its sum is complete.
    """

    def __init__(self, operands: HeadOperands, tensors: HeadTensors, needed: Sequence[bool]) -> None:
        """Allocate the gradients that are needed.

        Args:
            tensors: the head's hidden states, weight and bias.
            needed: whether the gradient of each of these three is needed, in this order.
        """
        self._operands, self._tensors = operands, tensors
        hidden, weight, bias = (tensor if need else None for tensor, need in zip(tensors, needed, strict=True))
        self.hidden = None if hidden is None else torch.zeros_like(hidden, dtype=operands.dtype)
        self.weight = None if weight is None else torch.empty_like(weight)  # `begin_tile` or `end_tile` fills it
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=operands.dtype)
        # [T, H], the sum of the weight's gradient for the selected tokens, from `begin_tile` on; None where not needed.
        self.tile: Tensor | None = None

    @property
    def is_needed(self) -> bool:
        """Tell whether the gradient of hidden, weight or bias is needed."""
        return any(total is not None for total in (self.hidden, self.weight, self.bias))

    def begin_tile(self, columns: slice) -> None:
        """Set the sum of the weight's gradient for the tokens `columns`, [T, H], to 0."""
        if self.weight is None:
            return
        rows = self.weight[columns]
        if rows.dtype != self._operands.dtype:
            rows = self._operands.buffer("weight gradient", tuple(rows.shape))
        self.tile = rows.zero_()

    def end_tile(self, columns: slice) -> None:
        """Store the finished sum for the tokens `columns` in the weight's gradient, rounded to that gradient's dtype.

        Where the sum already has that dtype, it was made in the weight's gradient itself, and nothing is to be done.
        """
        if self.weight is not None and self.tile is not None and self.tile.dtype != self.weight.dtype:
            self.weight[columns] = self.tile

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of hidden, weight and bias in the dtypes of those tensors."""
        pairs = zip((self.hidden, self.weight, self.bias), self._tensors, strict=True)
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
    """Tell whether the device can multiply half-precision matrices with a result in float32: CUDA can, ROCm cannot."""
    return device.type == "cuda" and torch.version.cuda is not None
