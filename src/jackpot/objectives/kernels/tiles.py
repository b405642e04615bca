"""One model's last layer, a tile of logits at a time: forming them, and what their gradient does. Torch only.

A tile is C positions by T tokens of the vocabulary. Large tensors lie in a `Scratch` and are used again for the next
tile: fresh memory costs more in page faults than the arithmetic on it. The precision is in `linear_head`'s docstring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = -1e30
"""Where a log-probability of -inf meets a probability of 0 it is taken for this, and the product is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """One model's last layer on N positions. Gradient flows into all three tensors. A bias of -inf bans a token,
    though not with a soft cap, which takes it to -soft_cap."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # logits = cap * tanh(logits / cap) before the temperature


class Scratch:
    """Memory by name. A name's tensor is valid until the name is taken again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            self._flat[name, dtype] = flat = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(shape)


class Side:
    """One of one or two heads, ready to multiply. Logits are of `dtype`, the operands are cast to `operand`."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor | None],
        soft_cap: float | None,
        temperature: float,
        operand: torch.dtype,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        """`tensors` are hidden, weight and bias; `name` keeps this head's scratch from the other's."""
        hidden, self.weight, self.bias = tensors
        self.hidden = hidden.to(operand)
        self._name, self._soft_cap, self._temperature = name, soft_cap, temperature
        self._operand, self.dtype, self._scratch = operand, dtype, scratch
        self._tile = self.weight[:0]

    @property
    def has_bans(self) -> bool:
        """Whether a logit may be -inf."""
        return self.bias is not None or self._operand == torch.float16

    def banned(self) -> Tensor | None:
        """[V] bool, the tokens that the bias bans; None where there is none. Waits for the device."""
        if self.bias is None or self._soft_cap is not None:
            return None
        banned = (self.bias.to(self.dtype) / self._temperature).isneginf()
        return banned if banned.any() else None

    def load(self, columns: slice) -> None:
        """Make ready the weight's rows for the tiles of these tokens."""
        self._tile = self.weight[columns]
        if self._tile.dtype != self._operand:
            self._tile = self.buffer("weight", tuple(self._tile.shape), self._operand).copy_(self._tile)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._scratch.take(f"{self._name} {name}", shape, self.dtype if dtype is None else dtype)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """[C, T] of the loaded tokens, in this head's buffer `logits`."""
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

    def bend(self, logits: Tensor) -> Tensor | None:
        """d capped / d raw [C, T] of the soft cap, from logits as `logits` gives them; None without one."""
        if self._soft_cap is None:
            return None
        bend = torch.square(logits, out=self.buffer("bend", tuple(logits.shape)))
        return bend.mul_(-((self._temperature / self._soft_cap) ** 2)).add_(1.0)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right of operands that are not of `dtype`: in it, or where the device cannot, rounded to their own."""
        if has_mixed_product(left.device):
            return torch.mm(left, right, out_dtype=self.dtype)
        shape = (left.shape[0], right.shape[1])
        return torch.mm(left, right, out=self._scratch.take("rounded", shape, left.dtype))

    def pull_back(self, rows: slice, columns: slice, grad: Tensor, totals: "Totals") -> None:
        """Adds a tile's share to the totals, given the gradient of its logits times the temperature."""
        if totals.bias is not None:
            totals.bias[columns] += grad.sum(0)
        if grad.dtype != self._operand:
            grad = self._scratch.take("rounded gradient", tuple(grad.shape), self._operand).copy_(grad)
        if totals.hidden is not None:
            self._add(totals.hidden[rows], grad, self._tile)
        if totals.weight is not None:
            self._add(totals.tile, grad.t(), self.hidden[rows])

    def _add(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype == total.dtype:
            total.addmm_(left, right)
        else:
            total += self._product(left, right)


class Totals:
    """Where one head's gradients add up, in the logits' dtype: [N, H], [V, H] and [V]; None where nobody asks.

    The weight's gradient is a tile in that dtype while the positions add to it, and is rounded once, when it is whole.
    """

    def __init__(self, side: Side, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self._of = tensors
        self._side = side
        hidden, weight, bias = (tensor if need else None for tensor, need in zip(tensors, needed, strict=True))
        self.hidden = None if hidden is None else torch.zeros_like(hidden, dtype=side.dtype)
        self.weight = None if weight is None else torch.empty_like(weight)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=side.dtype)
        self.tile: Tensor | None = None  # [T, H]

    @property
    def is_wanted(self) -> bool:
        return any(total is not None for total in (self.hidden, self.weight, self.bias))

    def open(self, columns: slice) -> None:
        """Begin the weight's gradient at these tokens."""
        if self.weight is None:
            return
        part = self.weight[columns]
        own = part.dtype == self._side.dtype
        self.tile = (part if own else self._side.buffer("weight gradient", tuple(part.shape))).zero_()

    def close(self, columns: slice) -> None:
        """All positions have added to it."""
        if self.weight is not None and self.tile.dtype != self.weight.dtype:
            self.weight[columns] = self.tile

    def gradients(self) -> list[Tensor | None]:
        totals = (self.hidden, self.weight, self.bias)
        return [None if total is None else total.to(of.dtype) for total, of in zip(totals, self._of, strict=True)]


def operand_dtype(head: Head, dtype: torch.dtype) -> torch.dtype:
    """What a head's hidden states and weight are cast to before they are multiplied."""
    device = head.hidden.device
    if dtype == torch.float64:
        return dtype
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.promote_types(head.hidden.dtype, head.weight.dtype) if has_mixed_product(device) else dtype


def has_mixed_product(device: torch.device) -> bool:
    """True where a product of half-precision matrices can be returned in float32. ROCm is not asked to."""
    return device.type == "cuda" and torch.version.cuda is not None
