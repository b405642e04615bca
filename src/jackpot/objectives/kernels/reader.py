"""The sums and gradients that are computed from a tile of logits, behind one interface. Torch only.

A `TileReader` computes the sums of a tile in forward (`read`, `common_mass`) and the gradient of its logits in backward
(`differentiate`). Its results are of that tile alone: `forward.py` merges tiles. The formulas are pure functions of one
or two heads' logits [C, T]; `TorchReader` applies them to a few rows at a time, so that intermediate results stay in a
CPU's cache.

With m the largest logit of a row of the tile, at least LOWEST, and l its logits,

    s = sum exp(l - m)        t = sum exp(l - m) (l - m)        g = sum exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q))

Shapes: `C` positions, `T` tokens of a tile. Lists have one entry for each head: one, or policy p and rollout model q.
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

LOG2_E = 1.0 / math.log(2.0)  # for e^x = exp2(x log2 e): exp2 is up to three times as fast as exp on a CPU

MAX_CHUNK = {"cpu": 2**19, "cuda": 2**24}  # most logits that are read at a time: 2 MiB and 64 MiB in float32


class TileSums(NamedTuple):
    """The sums over a tile's tokens for one head's logsumexp, entropy, KL and top K; [C] each, but for `block_max`.

    l is a token's logit; `_o` marks the other head's l and m.
    """

    row_max: Tensor  # m, the largest logit l
    sum_exp: Tensor  # s, the sum of e^(l - m) over the logits l
    moment: Tensor | None  # t, the sum of e^(l - m) (l - m), l a logit, for the entropy; None if not needed
    block_max: Tensor | None  # [C, ceil(T / BLOCK)] largest logit of each block of tokens, for the top K
    # g, the sum of e^(l - m) ((l - m) - (l_o - m_o)), for KL(head || other head); None for one head, or if not needed.
    gap: Tensor | None
    # Largest logit of the tokens whose logit is -inf under the other head. None where `gap` is None, or where the
    # other head cannot have a logit of -inf.
    max_at_masked: Tensor | None


class GradCoefficients(NamedTuple):
    """The coefficients of the loss's gradient with respect to one head's logits, before the temperature divides them:

        on_id onehot(id) + p (constant + on_log log p - on_other_log log o) - on_other o

    with id the sampled token, p this head's probabilities and o the other head's. Each is [N], or None for 0.
    """

    on_id: Tensor | None
    constant: Tensor
    on_log: Tensor | None
    on_other_log: Tensor | None
    on_other: Tensor | None

    def at(self, rows: slice) -> "GradCoefficients":
        """Return the coefficients of the positions `rows` only; a coefficient that is None stays None."""
        return self._replace(**{name: column[rows] for name, column in self._asdict().items() if column is not None})


class TileGradient(NamedTuple):
    """The loss's gradient with respect to one head's products W h in a tile: its coefficients, and memory for it."""

    coefficients: GradCoefficients  # [C] each
    out: Tensor  # [C, T] in the dtype of the head's operands, perhaps the memory of the logits


class TileReader(Protocol):
    """The interface of a class that computes sums and gradients from tiles of logits.

    A raw tile holds products W h, weight by hidden state, instead of logits. `read` replaces them by logits (`finish`)
    in the memory of the tile; the other methods may do so too.
    """

    name: str

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        """Return for each head the sums over the tokens of its tile, as `TileSums` describes them.

        Args:
            tops: whether to compute `TileSums.block_max`, for the top K.
            moments: whether to compute `TileSums.moment` and `gap`, for entropy and KL divergences.
        """
        ...

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        """Return the share of a tile's tokens x in OBRS's expected acceptance Z: the sum of min(q(x), p(x) / lam), [C].

        The first tile is of the policy, with probabilities p, the second of the rollout model, with probabilities q.

        Args:
            logsumexps: [C] each, over the whole vocabulary.
        """
        ...

    def differentiate(
        self,
        tiles: Sequence[Tile],
        logsumexps: Sequence[Tensor],
        gradients: Sequence[TileGradient | None],
        columns: Tensor,
    ) -> None:
        """Write the loss's gradient with respect to each head's products W h in a tile to `TileGradient.out`.

        Args:
            tiles: of each head, its products for C positions and a slice of the vocabulary.
            logsumexps: [C] of each head, over the whole vocabulary.
            gradients: of each head, the coefficients of its gradient and the memory for it; None without gradient.
            columns: [C] the sampled ids, counted from the first id of the slice; they may lie outside of it.
        """


# The formulas


def finish(logits: Tensor, bias: Tensor | None, soft_cap: float | None, temperature: float) -> Tensor:
    """Compute logits from products W h, [C, T]: add the bias, apply the soft cap, divide by the temperature."""
    if bias is not None:
        logits = logits + bias
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return logits / temperature if temperature != 1.0 else logits


def tile_sums(logits: Sequence[Tensor], may_mask: Sequence[bool], tops: bool, moments: bool) -> list[TileSums]:
    """Return the `TileSums` of each head's logits [C, T]; `tops` and `moments` are as in `TileReader.read`.

    Args:
        may_mask: whether a logit may be -inf, for each head.
    """
    sums: list[TileSums] = []
    terms: list[tuple[Tensor, Tensor]] = []  # for each head, logits minus `row_max`, and e to that power: [C, T]
    for head_logits, masks in zip(logits, may_mask, strict=True):
        maxima = block_max(head_logits) if tops else None
        row_max = (head_logits if maxima is None else maxima).amax(-1).clamp(min=LOWEST)
        shifted = head_logits - row_max[:, None]
        exps = _exp(shifted)
        if masks:  # replaces -inf, whose product with e^-inf = 0 would be NaN below
            shifted = shifted.clamp(min=LOWEST)
        sums.append(
            TileSums(
                row_max=row_max,
                sum_exp=exps.sum(-1),
                moment=(shifted * exps).sum(-1) if moments else None,
                block_max=maxima,
                gap=None,
                max_at_masked=None,
            )
        )
        terms.append((shifted, exps))

    if len(logits) == 1 or not moments:
        return sums

    # With two heads p and q, add the fields that need both: `gap`, and each head's largest logit at the tokens whose
    # logit is -inf under the other head.
    (shifted_p, exps_p), (shifted_q, exps_q) = terms
    difference = shifted_p - shifted_q
    gaps = (difference * exps_p).sum(-1), -(difference * exps_q).sum(-1)
    masked = [
        torch.where(other_logits.isneginf(), head_logits, -torch.inf).amax(-1) if masks else None
        for head_logits, other_logits, masks in zip(logits, reversed(logits), reversed(may_mask), strict=True)
    ]
    return [
        head_sums._replace(gap=gap, max_at_masked=at_masked)
        for head_sums, gap, at_masked in zip(sums, gaps, masked, strict=True)
    ]


def tile_common_mass(logits: Sequence[Tensor], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
    """Return a tile's share of Z, OBRS's expected acceptance: sum_x min(q(x), p(x) / lam) over its tokens x, [C].

    `logits` are those of the policy p and of the rollout model q, [C, T] each.
    """
    p, q = (_exp(head_logits - logsumexp[:, None]) for head_logits, logsumexp in zip(logits, logsumexps, strict=True))
    return torch.minimum(q, p / lam).sum(-1)


def tile_gradients(
    logits: Sequence[Tensor],
    logsumexps: Sequence[Tensor],
    may_mask: Sequence[bool],
    coefficients: Sequence[GradCoefficients | None],
    out: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the loss's gradient with respect to each head's logits [C, T], but for the term `on_id`.

    The formula is that of `GradCoefficients`; the caller adds the term `on_id`, at the sampled ids. A head without
    coefficients (None) has no gradient (None).

    Args:
        may_mask: whether a logit may be -inf, for each head.
        out: memory for the gradients, perhaps that of `logits`; None where there is none.
    """
    log_probs: list[Tensor] = []  # of each head, [C, T]; at least LOWEST, so that a product with the probability 0 is 0
    probs: list[Tensor] = []
    for head_logits, logsumexp, masks in zip(logits, logsumexps, may_mask, strict=True):
        shifted = head_logits - logsumexp[:, None]
        probs.append(_exp(shifted))
        log_probs.append(shifted.clamp(min=LOWEST) if masks else shifted)

    gradients: list[Tensor | None] = []
    for i, (terms, memory) in enumerate(zip(coefficients, out, strict=True)):
        if terms is None:
            gradients.append(None)
            continue

        # p (constant + on_log log p - on_other_log log o) - on_other o, with p and the coefficients (`terms`) of head i
        # and o of head 1 - i.
        factor = terms.constant[:, None]
        if terms.on_log is not None:
            factor = log_probs[i] * terms.on_log[:, None] + factor
        if terms.on_other_log is not None:
            factor = torch.addcmul(factor, log_probs[1 - i], terms.on_other_log[:, None], value=-1.0)

        gradient = torch.mul(probs[i], factor, out=memory)
        if terms.on_other is not None:
            gradient = torch.addcmul(gradient, probs[1 - i], terms.on_other[:, None], value=-1.0, out=memory)
        gradients.append(gradient)
    return gradients


def _exp(values: Tensor) -> Tensor:
    """Return e^values, by the faster exp2."""
    return torch.exp2(values * LOG2_E)


# The reader of torch alone


class TorchReader:
    """The tile reader that computes with torch's operators, a few rows of logits at a time."""

    name = "eager"

    def __init__(self, device_type: str | None = None) -> None:
        """
        Args:
            device_type: "cpu" or "cuda", which decides how many logits are read at a time (`MAX_CHUNK`). None: the type
                of the logits' device. To plan a GPU's memory without a GPU, "cuda" is passed with logits elsewhere.
        """
        self._device_type = device_type

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        """Return the sums that `TileReader.read` describes, computed from chunks of each tile's rows."""
        results: list[TileSums] = []
        for rows in self._chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            chunk_results = tile_sums(logits, [tile.may_mask for tile in tiles], tops, moments)
            # Write each head's sums of this chunk to its rows in the head's sums of the whole tile; None stays None.
            results = results or [_memory(sums, tiles[0]) for sums in chunk_results]
            for result, chunk_result in zip(results, chunk_results, strict=True):
                for whole, part in zip(result, chunk_result, strict=True):
                    if whole is not None and part is not None:
                        whole[rows] = part
        return results

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        """Return the share of Z that `TileReader.common_mass` describes, computed from chunks of the tiles' rows."""
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
        """Write the gradients that `TileReader.differentiate` describes, one chunk of the tiles' rows after another."""
        for rows in self._chunks(tiles):
            logits = [_finished(tile, rows) for tile in tiles]
            # The derivative of each head's soft cap, 1 - (capped / soft_cap)^2, capped = logits times temperature; None
            # without a cap or a gradient. It is computed first, because the gradients may overwrite the logits.
            cap_derivatives = [
                1.0 - torch.square(head_logits * (tile.temperature / tile.soft_cap))
                if head_gradient and tile.soft_cap
                else None
                for head_logits, tile, head_gradient in zip(logits, tiles, gradients, strict=True)
            ]

            # Each head's coefficients and memory, cut to these rows; None stays None. Where the memory has the dtype of
            # the sums, the gradient with respect to the logits is computed in it, else copied to it afterwards.
            chunks = [
                head_gradient
                and TileGradient(coefficients=head_gradient.coefficients.at(rows), out=head_gradient.out[rows])
                for head_gradient in gradients
            ]
            logit_gradients = tile_gradients(
                logits,
                [logsumexp[rows] for logsumexp in logsumexps],
                [tile.may_mask for tile in tiles],
                [chunk and chunk.coefficients for chunk in chunks],
                [chunk.out if chunk and chunk.out.dtype == logsumexps[0].dtype else None for chunk in chunks],
            )

            for chunk, logit_gradient, cap_derivative in zip(chunks, logit_gradients, cap_derivatives, strict=True):
                if chunk is None or logit_gradient is None:
                    continue
                if chunk.coefficients.on_id is not None:  # the term of the sampled ids, which are `columns`
                    _add_at(logit_gradient, columns[rows], chunk.coefficients.on_id)
                if cap_derivative is not None:
                    logit_gradient *= cap_derivative
                if logit_gradient is not chunk.out:
                    chunk.out.copy_(logit_gradient)

    def _chunks(self, tiles: Sequence[Tile]) -> list[slice]:
        """Cut the positions of a tile into slices with at most MAX_CHUNK logits, which are read one after the other."""
        c, t = tiles[0].logits.shape
        device_type = self._device_type or tiles[0].logits.device.type
        size = max(1, min(c, MAX_CHUNK["cuda" if device_type == "cuda" else "cpu"] // t))
        return [slice(start, min(start + size, c)) for start in range(0, c or 1, size)]


EAGER = TorchReader()


def _finished(tile: Tile, rows: slice) -> Tensor:
    """Return a tile's logits at the positions `rows` in the dtype of the sums.

    The memory of a raw tile holds products W h: they are replaced by logits (`finish`). So call this once for each
    position of a raw tile, since a second call would apply bias, soft cap and temperature again.
    """
    logits = tile.logits[rows]
    if tile.is_raw:
        return logits.copy_(finish(logits, tile.bias, tile.soft_cap, tile.temperature))
    return logits if logits.dtype == torch.float64 else logits.float()


def _memory(chunk_sums: TileSums, tile: Tile) -> TileSums:
    """Return uninitialized memory for the sums of a whole tile; fields that are None in the sums of a chunk stay None.

    It is allocated before the second chunk. Otherwise the small sums of each chunk, allocated among its large tensors
    and kept longer, would fragment the memory that the large tensors free, and the next chunk would take more.
    """
    known = {name: column for name, column in chunk_sums._asdict().items() if column is not None}
    n = len(tile.logits)
    return chunk_sums._replace(**{name: column.new_empty((n, *column.shape[1:])) for name, column in known.items()})


def _add_at(gradient: Tensor, columns: Tensor, terms: Tensor) -> None:
    """Add terms[i] to gradient[i, columns[i]] for each row i whose column is inside the tile.

    Shapes: gradient [C, T], columns and terms [C].
    """
    width = gradient.shape[1]
    terms_inside = torch.where((columns >= 0) & (columns < width), terms, 0.0)
    gradient.scatter_add_(1, columns.clamp(0, width - 1)[:, None], terms_inside[:, None])
