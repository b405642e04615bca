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
from collections.abc import Callable, Sequence
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
        return GradCoefficients(*(None if tensor is None else tensor[rows] for tensor in self))

    @property
    def reads_other(self) -> bool:
        """True where the other head's probabilities are needed."""
        return not (self.on_other_log is None and self.on_other is None)


class TileReader(Protocol):
    """Reads tiles of logits. Raw ones are finished in place."""

    name: str

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        """Return the sums of a tile of each head.

        Args:
            tops: whether `block_max` is wanted.
            moments: whether `moment` and `gap` are wanted, which entropy and divergences are computed from.
        """

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        """Return sum_x min(q(x), p(x) / lam) over the tokens of a tile: [C]."""

    def differentiate(
        self,
        tiles: Sequence[Tile | None],
        logsumexps: Sequence[Tensor],
        coefficients: Sequence[GradCoefficients | None],
        places: Tensor,
        out: Sequence[Tensor | None],
    ) -> None:
        """Write the gradients of a tile's products.

        Args:
            tiles: None for a head that no gradient reads.
            logsumexps: [C] each, over the whole vocabulary.
            coefficients: [C] each; None for a head that gets no gradient.
            places: [C] the ids, counted from the tile's first token, which may lie outside the tile.
            out: [C, T] in the dtype of the products, perhaps the memory of `tiles`; None as in `coefficients`.
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
    found, both = [], []
    for own, masks in zip(logits, may_mask, strict=True):
        maxima = block_max(own) if tops else None
        row_max = (own if maxima is None else maxima).amax(-1).clamp(min=LOWEST)
        shifted = own - row_max[:, None]
        exps = _exp(shifted)
        if masks:
            shifted = shifted.clamp(min=LOWEST)
        moment = (shifted * exps).sum(-1) if moments else None
        found.append(TileSums(row_max, exps.sum(-1), moment, maxima, None, None))
        both.append((shifted, exps))
    if len(logits) == 1 or not moments:
        return found
    (shifted_p, exps_p), (shifted_q, exps_q) = both
    gap = shifted_p - shifted_q
    gaps = (gap * exps_p).sum(-1), -(gap * exps_q).sum(-1)
    masked = [
        torch.where(other.isneginf(), own, -torch.inf).amax(-1) if masks else None
        for own, other, masks in zip(logits, reversed(logits), reversed(may_mask), strict=True)
    ]
    return [one._replace(gap=gaps[i], max_at_masked=masked[i]) for i, one in enumerate(found)]


def tile_common_mass(logits: Sequence[Tensor], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
    """Return sum_x min(q(x), p(x) / lam) of logits [C, T]."""
    p, q = (_exp(own - logsumexp[:, None]) for own, logsumexp in zip(logits, logsumexps, strict=True))
    return torch.minimum(q, p / lam).sum(-1)


def tile_gradients(
    logits: Sequence[Tensor | None],
    logsumexps: Sequence[Tensor],
    may_mask: Sequence[bool],
    coefficients: Sequence[GradCoefficients | None],
    out: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Evaluate the formula of `GradCoefficients`, but for its first term, on logits [C, T].

    Args:
        out: memory for the gradients, perhaps that of `logits`; None where there is none.
    """
    log_probs, probs = [], []
    for own, logsumexp, masks in zip(logits, logsumexps, may_mask, strict=True):
        shifted = None if own is None else own - logsumexp[:, None]
        probs.append(None if own is None else _exp(shifted))
        log_probs.append(shifted.clamp(min=LOWEST) if masks and own is not None else shifted)
    gradients = []
    for i, of_head in enumerate(coefficients):
        if of_head is None:
            gradients.append(None)
            continue
        _, constant, on_log, on_other_log, on_other = (None if one is None else one[:, None] for one in of_head)
        factor = constant
        if on_log is not None:
            factor = log_probs[i] * on_log + factor
        if on_other_log is not None:
            factor = torch.addcmul(factor, log_probs[1 - i], on_other_log, value=-1.0)
        gradient = torch.mul(probs[i], factor, out=out[i])
        if on_other is not None:
            gradient = torch.addcmul(gradient, probs[1 - i], on_other, value=-1.0, out=out[i])
        gradients.append(gradient)
    return gradients


def softcap_derivative(logits: Tensor, tile: Tile) -> Tensor:
    """Return d logits / d raw times the temperature, 1 - (capped / soft_cap)^2: [C, T]."""
    return 1.0 - torch.square(logits * (tile.temperature / tile.soft_cap))


def _exp(values: Tensor) -> Tensor:
    return torch.exp2(values * LOG2_E)


# The reader of torch alone


class TorchReader:
    """Applies the formulas with torch's operators.

    Args:
        name: of the kernel, as in the settings.
        wrap: what the formulas go through first, such as torch.compile.
    """

    def __init__(self, name: str, wrap: Callable[[Callable], Callable] = lambda formula: formula) -> None:
        self.name = name
        self._sums, self._mass, self._gradients = map(wrap, (tile_sums, tile_common_mass, tile_gradients))

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        whole: list[list[Tensor | None]] = []
        for rows in _chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            part = self._sums(logits, [tile.may_mask for tile in tiles], tops, moments)
            whole = whole or [[_like(one, tiles[0]) for one in of_head] for of_head in part]
            for into, of_head in zip(whole, part, strict=True):
                for target, one in zip(into, of_head, strict=True):
                    if one is not None:
                        target[rows] = one
        return [TileSums(*of_head) for of_head in whole]

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        mass = torch.empty_like(logsumexps[0])
        for rows in _chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            mass[rows] = self._mass(logits, [logsumexp[rows] for logsumexp in logsumexps], lam)
        return mass

    def differentiate(
        self,
        tiles: Sequence[Tile | None],
        logsumexps: Sequence[Tensor],
        coefficients: Sequence[GradCoefficients | None],
        places: Tensor,
        out: Sequence[Tensor | None],
    ) -> None:
        for rows in _chunks(tiles):
            logits = [None if tile is None else _finished(tile, rows) for tile in tiles]
            derivatives = [
                softcap_derivative(own, tile) if into is not None and tile.soft_cap else None
                for own, tile, into in zip(logits, tiles, out, strict=True)
            ]
            targets = [None if into is None else into[rows] for into in out]
            of_rows = [None if of_head is None else of_head.at(rows) for of_head in coefficients]
            gradients = self._gradients(
                logits,
                [logsumexp[rows] for logsumexp in logsumexps],
                [tile is not None and tile.may_mask for tile in tiles],
                of_rows,
                [own if own is not None and own.dtype == logsumexps[0].dtype else None for own in targets],
            )
            for of_head, gradient, derivative, target in zip(of_rows, gradients, derivatives, targets, strict=True):
                if gradient is None:
                    continue
                if of_head.on_id is not None:
                    _add_at(gradient, places[rows], of_head.on_id)
                if derivative is not None:
                    gradient *= derivative
                if gradient is not target:
                    target.copy_(gradient)


EAGER = TorchReader("eager")


def _chunks(tiles: Sequence[Tile | None]) -> list[slice]:
    """Cut the positions of tiles into runs that are read at a time."""
    logits = next(tile.logits for tile in tiles if tile is not None)
    c, t = logits.shape
    size = max(1, min(c, MAX_CHUNK["cuda" if logits.is_cuda else "cpu"] // t))
    return [slice(start, min(start + size, c)) for start in range(0, c or 1, size)]


def _finished(tile: Tile, rows: slice) -> Tensor:
    """Return the logits of some positions in the dtype of the sums; those of a raw tile are written back."""
    logits = tile.logits[rows]
    if tile.is_raw:
        return logits.copy_(finish(logits, tile.bias, tile.soft_cap, tile.temperature))
    return logits if logits.dtype == torch.float64 else logits.float()


def _like(part: Tensor | None, tile: Tile) -> Tensor | None:
    """Return memory for the rows of all chunks.

    It is taken once: small tensors that are made between a chunk's large ones and outlive them would split the memory
    that these leave, and the next chunk would take more.
    """
    return None if part is None else part.new_empty((len(tile.logits), *part.shape[1:]))


def _add_at(gradient: Tensor, places: Tensor, added: Tensor) -> None:
    """Add a number to each row of the gradient at its place, where that is inside the tile."""
    width = gradient.shape[1]
    here = torch.where((places >= 0) & (places < width), added, 0.0)
    gradient.scatter_add_(1, places.clamp(0, width - 1)[:, None], here[:, None])
