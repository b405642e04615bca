"""Everything that is read from a tile of logits, behind one interface. Torch only.

A `TileReader` gives the sums of a tile in forward (`read`, `common_mass`) and the gradient of its logits in backward
(`differentiate`). What it returns is of that tile alone: `forward.py` merges tiles. The formulas are pure functions of
one or two heads' logits [C, T]; `TorchReader` applies them to a few rows at a time, so that what they make on the way
stays in a CPU's cache.

With m the largest logit of a row of the tile, at least LOWEST, and l its logits,

    s = sum exp(l - m)        t = sum exp(l - m) (l - m)        g = sum exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q))

Shapes: `C` positions, `T` tokens of a tile. The lists have one entry for one head, or two: policy p, rollout model q.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jackpot.objectives.kernels.tiles import Tile
from jackpot.objectives.kernels.topk import block_max

LOWEST = -1e30
"""Replaces a log-probability of -inf where it is multiplied by a probability of 0, so that the product is 0."""

LOG2_E = 1.0 / math.log(2.0)  # exp2 is up to three times as fast as exp on a CPU

MAX_CHUNK = {"cpu": 2**19, "cuda": 2**24}  # most logits that are read at a time: 2 MiB and 64 MiB in float32


class TileSums(NamedTuple):
    """Holds the sums of one head over a tile; [C] each."""

    row_max: Tensor  # m
    sum_exp: Tensor  # s
    moment: Tensor | None  # t
    block_max: Tensor | None  # [C, ceil(T / BLOCK)] largest logit of each block of tokens, for the top K
    gap: Tensor | None  # g of this head's distribution against the other's; None for one head
    max_at_masked: Tensor | None  # largest logit at tokens that the other head masks; None where it masks none


class GradCoefficients(NamedTuple):
    """Holds the coefficients of the gradient of one head's logits; [N] each, None for 0:

        on_id onehot(id) + p (constant + on_log log p - on_other_log log o) - on_other o

    with p its own probabilities and o those of the other head.
    """

    on_id: Tensor | None
    constant: Tensor
    on_log: Tensor | None
    on_other_log: Tensor | None
    on_other: Tensor | None

    def at(self, rows: slice) -> "GradCoefficients":
        """Select the coefficients of some positions."""
        return self._replace(**{name: column[rows] for name, column in self._asdict().items() if column is not None})

    @property
    def reads_other(self) -> bool:
        """True where the other head's probabilities are needed."""
        return not (self.on_other_log is None and self.on_other is None)


class TileGradient(NamedTuple):
    """Holds what the gradient of a tile's products is computed from and written to."""

    coefficients: GradCoefficients  # [C] each
    out: Tensor  # [C, T] in the dtype of the products, perhaps the memory of the logits


class TileReader(Protocol):
    """Reads tiles of logits. Raw ones are finished in place."""

    name: str

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        """Return the sums of a tile of each head.

        Args:
            tops: whether `block_max` is wanted.
            moments: whether `moment` and `gap` are wanted, which entropy and divergences are computed from.
        """
        ...

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        """Return sum_x min(q(x), p(x) / lam) over the tokens of a tile: [C]."""
        ...

    def differentiate(
        self,
        tiles: Sequence[Tile],
        logsumexps: Sequence[Tensor],
        gradients: Sequence[TileGradient | None],
        columns: Tensor,
    ) -> None:
        """Write the gradients of a tile's products.

        Args:
            logsumexps: [C] each, over the whole vocabulary.
            gradients: None for a head that gets none.
            columns: [C] the ids, counted from the tile's first token, which may lie outside the tile.
        """


# The formulas


def finish(logits: Tensor, bias: Tensor | None, soft_cap: float | None, temperature: float) -> Tensor:
    """Turn products W h into logits: [C, T]."""
    if bias is not None:
        logits = logits + bias
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return logits / temperature if temperature != 1.0 else logits


def tile_sums(logits: Sequence[Tensor], may_mask: Sequence[bool], tops: bool, moments: bool) -> list[TileSums]:
    """Return the sums of logits [C, T]."""
    sums: list[TileSums] = []
    terms: list[tuple[Tensor, Tensor]] = []  # of each head, l - m and its exponential
    for of_head, masks in zip(logits, may_mask, strict=True):
        maxima = block_max(of_head) if tops else None
        row_max = (of_head if maxima is None else maxima).amax(-1).clamp(min=LOWEST)
        shifted = of_head - row_max[:, None]
        exps = _exp(shifted)
        if masks:
            shifted = shifted.clamp(min=LOWEST)
        moment = (shifted * exps).sum(-1) if moments else None
        sums.append(TileSums(row_max, exps.sum(-1), moment, maxima, None, None))
        terms.append((shifted, exps))
    if len(logits) == 1 or not moments:
        return sums

    (shifted_p, exps_p), (shifted_q, exps_q) = terms
    gap = shifted_p - shifted_q
    gaps = (gap * exps_p).sum(-1), -(gap * exps_q).sum(-1)
    masked = [
        torch.where(other.isneginf(), of_head, -torch.inf).amax(-1) if masks else None
        for of_head, other, masks in zip(logits, reversed(logits), reversed(may_mask), strict=True)
    ]
    return [TileSums(*of_head[:4], gap, at_masked) for of_head, gap, at_masked in zip(sums, gaps, masked, strict=True)]


def tile_common_mass(logits: Sequence[Tensor], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
    """Return sum_x min(q(x), p(x) / lam) of logits [C, T]."""
    p, q = (_exp(of_head - logsumexp[:, None]) for of_head, logsumexp in zip(logits, logsumexps, strict=True))
    return torch.minimum(q, p / lam).sum(-1)


def tile_gradients(
    logits: Sequence[Tensor],
    logsumexps: Sequence[Tensor],
    may_mask: Sequence[bool],
    coefficients: Sequence[GradCoefficients | None],
    out: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Evaluate the formula of `GradCoefficients`, but for its first term, on logits [C, T].

    Args:
        out: memory for the gradients, perhaps that of `logits`; None where there is none.
    """
    log_probs: list[Tensor] = []
    probs: list[Tensor] = []
    for of_head, logsumexp, masks in zip(logits, logsumexps, may_mask, strict=True):
        shifted = of_head - logsumexp[:, None]
        probs.append(_exp(shifted))
        log_probs.append(shifted.clamp(min=LOWEST) if masks else shifted)

    gradients: list[Tensor | None] = []
    for i, (of_head, into) in enumerate(zip(coefficients, out, strict=True)):
        if of_head is None:
            gradients.append(None)
            continue
        factor = of_head.constant[:, None]
        if of_head.on_log is not None:
            factor = log_probs[i] * of_head.on_log[:, None] + factor
        if of_head.on_other_log is not None:
            factor = torch.addcmul(factor, log_probs[1 - i], of_head.on_other_log[:, None], value=-1.0)
        gradient = torch.mul(probs[i], factor, out=into)
        if of_head.on_other is not None:
            gradient = torch.addcmul(gradient, probs[1 - i], of_head.on_other[:, None], value=-1.0, out=into)
        gradients.append(gradient)
    return gradients


def _exp(values: Tensor) -> Tensor:
    return torch.exp2(values * LOG2_E)


# The reader of torch alone


class TorchReader:
    """Applies the formulas with torch's operators, to as many logits at a time as suit a type of device; None: that of
    the logits, which in a plan of a GPU are not there."""

    name = "eager"

    def __init__(self, device_type: str | None = None) -> None:
        self._device_type = device_type

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        whole: list[TileSums] = []
        for rows in self._chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            parts = tile_sums(logits, [tile.may_mask for tile in tiles], tops, moments)
            whole = whole or [_memory(part, tiles[0]) for part in parts]
            for into, part in zip(whole, parts, strict=True):
                for target, column in zip(into, part, strict=True):
                    if target is not None and column is not None:
                        target[rows] = column
        return whole

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        mass = torch.empty_like(logsumexps[0])
        for rows in self._chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            mass[rows] = tile_common_mass(logits, [logsumexp[rows] for logsumexp in logsumexps], lam)
        return mass

    def differentiate(
        self,
        tiles: Sequence[Tile],
        logsumexps: Sequence[Tensor],
        gradients: Sequence[TileGradient | None],
        columns: Tensor,
    ) -> None:
        for rows in self._chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            derivatives = [
                _softcap_derivative(of_head, tile.soft_cap, tile.temperature) if wanted and tile.soft_cap else None
                for of_head, tile, wanted in zip(logits, tiles, gradients, strict=True)
            ]

            of_rows = [wanted and TileGradient(wanted.coefficients.at(rows), wanted.out[rows]) for wanted in gradients]
            computed = tile_gradients(
                logits,
                [logsumexp[rows] for logsumexp in logsumexps],
                [tile.may_mask for tile in tiles],
                [wanted and wanted.coefficients for wanted in of_rows],
                [wanted.out if wanted and wanted.out.dtype == logsumexps[0].dtype else None for wanted in of_rows],
            )

            for wanted, gradient, derivative in zip(of_rows, computed, derivatives, strict=True):
                if wanted is None or gradient is None:
                    continue
                if wanted.coefficients.on_id is not None:
                    _add_at(gradient, columns[rows], wanted.coefficients.on_id)
                if derivative is not None:
                    gradient *= derivative
                if gradient is not wanted.out:
                    wanted.out.copy_(gradient)

    def _chunks(self, tiles: Sequence[Tile]) -> list[slice]:
        """Cut the positions of tiles into runs that are read at a time."""
        c, t = tiles[0].logits.shape
        kind = self._device_type or tiles[0].logits.device.type
        size = max(1, min(c, MAX_CHUNK["cuda" if kind == "cuda" else "cpu"] // t))
        return [slice(start, min(start + size, c)) for start in range(0, c or 1, size)]


EAGER = TorchReader()


def _finished(tile: Tile, rows: slice) -> Tensor:
    """Return the logits of some positions in the dtype of the sums; those of a raw tile are written back."""
    logits = tile.logits[rows]
    if tile.is_raw:
        return logits.copy_(finish(logits, tile.bias, tile.soft_cap, tile.temperature))
    return logits if logits.dtype == torch.float64 else logits.float()


def _memory(part: TileSums, tile: Tile) -> TileSums:
    """Return memory for the rows of all chunks.

    It is taken once: small tensors that are made between a chunk's large ones and outlive them would split the memory
    that these leave, and the next chunk would take more.
    """
    columns = {name: column for name, column in part._asdict().items() if column is not None}
    n = len(tile.logits)
    return part._replace(**{name: column.new_empty((n, *column.shape[1:])) for name, column in columns.items()})


def _add_at(gradient: Tensor, columns: Tensor, added: Tensor) -> None:
    """Add a number to each row of the gradient in its column, where that is inside the tile."""
    width = gradient.shape[1]
    inside = torch.where((columns >= 0) & (columns < width), added, 0.0)
    gradient.scatter_add_(1, columns.clamp(0, width - 1)[:, None], inside[:, None])


def _softcap_derivative(logits: Tensor, soft_cap: float, temperature: float) -> Tensor:
    """Return d logits / d raw times the temperature, 1 - (capped / soft_cap)^2: [C, T]."""
    return 1.0 - torch.square(logits * (temperature / soft_cap))
