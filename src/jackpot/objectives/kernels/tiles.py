"""The products of one head on one tile of logits: the logits themselves, and what their gradient adds to the head's
gradients. Torch only.

A tile is C positions by T tokens of the vocabulary. Large tensors live in a `Workspace` and are overwritten by the next
tile: fresh memory costs more in page faults than the arithmetic on it. `linear_head` states the precision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = -1e30
"""Replaces a log-probability of -inf where it is multiplied by a probability of 0, so that the product is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Holds one model's last layer and the hidden states of N positions; gradient flows into all three tensors.

    A bias of -inf masks a token out, though not with a soft cap, which takes it to -soft_cap.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # logits = cap * tanh(logits / cap) before the temperature


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


class HeadOperands:
    """Holds one head's operands in the dtype of its products, and forms tiles of its logits in `dtype`."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor | None],
        soft_cap: float | None,
        temperature: float,
        operand: torch.dtype,
        dtype: torch.dtype,
        workspace: Workspace,
    ) -> None:
        """
        Args:
            name: keeps this head's memory in the workspace apart from the other head's.
            tensors: hidden [N, H], weight [V, H] and bias [V] or None.
            operand: dtype that hidden states and weight are cast to before they are multiplied.
            dtype: of the logits and of all sums.
        """
        hidden, self.weight, self.bias = tensors
        self.hidden = hidden.to(operand)
        self._name, self._soft_cap, self._temperature = name, soft_cap, temperature
        self._operand, self.dtype, self._workspace = operand, dtype, workspace
        self._tile = self.weight[:0]

    @property
    def may_mask(self) -> bool:
        """True where a logit may be -inf."""
        return self.bias is not None or self._operand == torch.float16

    def masked_tokens(self) -> Tensor | None:
        """[V] bool, True for the tokens that the bias masks out; None without a bias, which masks none."""
        if self.bias is None or self._soft_cap is not None:
            return None
        return (self.bias.to(self.dtype) / self._temperature).isneginf()

    def load_weight(self, columns: slice) -> None:
        """Cast the weight's rows of these tokens, once for the tiles of all positions."""
        self._tile = self.weight[columns]
        if self._tile.dtype != self._operand:
            self._tile = self.buffer("weight", tuple(self._tile.shape), self._operand).copy_(self._tile)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return this head's own workspace tensor of that name, by default in the logits' dtype."""
        return self._workspace.take(f"{self._name} {name}", shape, self.dtype if dtype is None else dtype)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Form the logits [C, T] of these positions and the loaded tokens, in this head's buffer `logits`."""
        hidden = self.hidden[rows]
        logits = self.buffer("logits", (len(hidden), len(self._tile)))
        if hidden.dtype == self.dtype:
            torch.mm(hidden, self._tile.t(), out=logits)
        else:
            logits.copy_(self._product(hidden, self._tile.t()))
        if self.bias is not None:
            logits += self.bias[columns]
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        if self._temperature != 1.0:
            logits /= self._temperature
        return logits

    def softcap_derivative(self, logits: Tensor) -> Tensor | None:
        """d capped / d raw = 1 - (capped / soft_cap)^2 at the logits of `logits`: [C, T]; None without a cap."""
        if self._soft_cap is None:
            return None
        square = torch.square(logits, out=self.buffer("softcap derivative", tuple(logits.shape)))
        return square.mul_(-((self._temperature / self._soft_cap) ** 2)).add_(1.0)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right of operands that are not of `dtype`: in it, or rounded to theirs where the device has no mixed
        product."""
        if has_mixed_product(left.device):
            return torch.mm(left, right, out_dtype=self.dtype)
        shape = (left.shape[0], right.shape[1])
        return torch.mm(left, right, out=self._workspace.take("rounded", shape, left.dtype))

    def accumulate_grad(self, rows: slice, columns: slice, grad: Tensor, grads: "HeadGrads") -> None:
        """Add a tile's share to the head's gradients: d bias += sum grad, d hidden += grad W, d weight += grad^T h.

        `grad` [C, T] is the gradient of W h + b, before soft cap and temperature.
        """
        if grads.bias is not None:
            grads.bias[columns] += grad.sum(0)
        if grad.dtype != self._operand:
            grad = self._workspace.take("rounded gradient", tuple(grad.shape), self._operand).copy_(grad)
        if grads.hidden is not None:
            self._add(grads.hidden[rows], grad, self._tile)
        if grads.weight is not None:
            self._add(grads.tile, grad.t(), self.hidden[rows])

    def _add(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype == total.dtype:
            total.addmm_(left, right)
        else:
            total += self._product(left, right)


class HeadGrads:
    """Accumulates one head's gradients in the logits' dtype: [N, H], [V, H] and [V]; None for one that is not needed.

    The weight's gradient is a tile in that dtype while the positions add to it, and is rounded once, when it is whole.
    """

    def __init__(self, operands: HeadOperands, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self._of = tensors
        self._operands = operands
        hidden, weight, bias = (tensor if need else None for tensor, need in zip(tensors, needed, strict=True))
        self.hidden = None if hidden is None else torch.zeros_like(hidden, dtype=operands.dtype)
        self.weight = None if weight is None else torch.empty_like(weight)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=operands.dtype)
        self.tile: Tensor | None = None  # [T, H]

    @property
    def is_needed(self) -> bool:
        """True where at least one of the three gradients is needed."""
        return any(total is not None for total in (self.hidden, self.weight, self.bias))

    def begin_tile(self, columns: slice) -> None:
        """Zero the tile of the weight's gradient for these tokens."""
        if self.weight is None:
            return
        part = self.weight[columns]
        own = part.dtype == self._operands.dtype
        self.tile = (part if own else self._operands.buffer("weight gradient", tuple(part.shape))).zero_()

    def end_tile(self, columns: slice) -> None:
        """Round the tile of the weight's gradient into its place; every position has added to it."""
        if self.weight is not None and self.tile.dtype != self.weight.dtype:
            self.weight[columns] = self.tile

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of hidden, weight and bias in the dtypes of those tensors."""
        grads = (self.hidden, self.weight, self.bias)
        return [None if grad is None else grad.to(of.dtype) for grad, of in zip(grads, self._of, strict=True)]


def operand_dtype(head: Head, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype that a head's hidden states and weight are cast to before they are multiplied."""
    device = head.hidden.device
    if dtype == torch.float64:
        return dtype
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.promote_types(head.hidden.dtype, head.weight.dtype) if has_mixed_product(device) else dtype


def has_mixed_product(device: torch.device) -> bool:
    """Return True where a product of half-precision matrices can be returned in float32: on CUDA, not on ROCm."""
    return device.type == "cuda" and torch.version.cuda is not None
