"""The forward pass of one or two heads over a block of positions, tile by tile. Pure, torch only.

A block of C positions visits the tiles of the vocabulary in turn, as a block of queries visits the keys in
FlashAttention. Each tile's logits l [C, T] are formed once, and everything is taken from them: the logits at the wanted
ids, the running top K (the rollout model's logits at the policy's top K are carried along), and the sums s, t and g of
`reader.py`, which are merged into those of the tiles before:

    logsumexp = m + log s        log p(x) = l(x) - logsumexp        entropy = log s - t / s
    KL(p || q) = g / s_p - (log s_p - log s_q)

If the largest logit m rises by d, the sums become s exp(-d), (t - d s) exp(-d), and, for rises d_p and d_q of the two
heads, (g + s_p (d_q - d_p)) exp(-d_p).

Shapes: `C` positions, `T` tokens of a tile, `G` wanted ids, `K` top-k.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jackpot.objectives.kernels.reader import TileReader, TileSums
from jackpot.objectives.kernels.tiles import HeadOperands
from jackpot.objectives.kernels.topk import RunningTopK


def merged(before: Sequence[TileSums], added: Sequence[TileSums]) -> list[TileSums]:
    """Add the sums of a further tile to those of the tiles before, of each head; [C] each."""
    maxima = [torch.maximum(first.row_max, other.row_max) for first, other in zip(before, added, strict=True)]
    return [
        TileSums(
            row_max=first.row_max,
            sum_exp=first.sum_exp + other.sum_exp,
            moment=_both(torch.add, first.moment, other.moment),
            block_max=None,
            gap=_both(torch.add, first.gap, other.gap),
            max_at_masked=_both(torch.maximum, first.max_at_masked, other.max_at_masked),
        )
        for first, other in zip(_rescaled(before, maxima), _rescaled(added, maxima), strict=True)
    ]


def _both(combine: Callable[[Tensor, Tensor], Tensor], first: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Combine two tensors; None where they are not computed."""
    return None if first is None or other is None else combine(first, other)


def _rescaled(sums: Sequence[TileSums], maxima: Sequence[Tensor]) -> list[TileSums]:
    """Take the sums of each head relative to a maximum that is no smaller than their own."""
    shifts = [of_head.row_max - row_max for of_head, row_max in zip(sums, maxima, strict=True)]  # -d
    rescaled: list[TileSums] = []
    for i, (of_head, row_max, shift) in enumerate(zip(sums, maxima, shifts, strict=True)):
        factor, sum_exp = shift.exp(), of_head.sum_exp
        moment = None if of_head.moment is None else (of_head.moment + sum_exp * shift) * factor
        gap = None if of_head.gap is None else (of_head.gap + sum_exp * (shift - shifts[1 - i])) * factor
        rescaled.append(of_head._replace(row_max=row_max, sum_exp=sum_exp * factor, moment=moment, gap=gap))
    return rescaled


class PositionBlock:
    """Accumulates the outputs of C positions while they visit the tiles of the vocabulary.

    Args:
        heads: one head, or the policy and the rollout model.
        reader: reads the tiles.
        rows: the positions of this block.
        wanted: [C, G] ids whose log-probs are returned.
        num_top: K.
        lam: at which the exact Z of two heads is taken; None leaves it out.
        moments: whether entropy and divergences are wanted.
    """

    def __init__(
        self,
        heads: Sequence[HeadOperands],
        reader: TileReader,
        rows: slice,
        wanted: Tensor,
        num_top: int,
        lam: float | None,
        moments: bool,
    ) -> None:
        self._heads, self._reader, self._rows = heads, reader, rows
        self._wanted, self._num_top, self._lam, self._moments = wanted, num_top, lam, moments
        self._picked: dict[int, Tensor] = {}  # [C, G] each head's logits at the wanted ids
        self._tops = [RunningTopK(num_top) for _ in heads]
        self._sums: list[TileSums] = []
        self._z: Tensor | None = None  # [C] the exact Z of the tiles so far

    def update(self, columns: slice) -> None:
        """Form the logits of this tile, whose tokens the heads have selected, and update every output from them."""
        tiles = [head.tile(self._rows) for head in self._heads]
        sums = self._reader.read(tiles, self._num_top > 0, self._moments)
        logits = [tile.logits for tile in tiles]
        for i, of_head in enumerate(logits):
            self._pick(i, of_head, columns)
            self._tops[i].add(of_head, columns.start, sums[i].block_max, logits[i + 1 :])
        self._sums = merged(self._sums, sums) if self._sums else sums

        is_whole = columns.stop - columns.start == len(self._heads[0].weight)
        if self._lam is not None and is_whole:  # no second sweep: the logsumexps are known
            finished = [tile._replace(is_raw=False) for tile in tiles]
            self._z = self._reader.common_mass(finished, self.logsumexps, self._lam)

    def _pick(self, i: int, logits: Tensor, columns: slice) -> None:
        """Take head i's logits [C, T] at the wanted ids that are in this tile."""
        width = columns.stop - columns.start
        wanted = self._wanted - columns.start if columns.start else self._wanted
        before = self._picked.get(i)
        if before is None:
            self._picked[i] = logits.gather(1, wanted.clamp(max=width - 1))
        else:
            values = logits.gather(1, wanted.clamp(0, width - 1))
            self._picked[i] = torch.where((wanted >= 0) & (wanted < width), values, before)

    def add_z(self, lam: float) -> None:
        """Add the share of the selected tokens in the exact Z, in a second sweep, when both logsumexps are known."""
        tiles = [head.tile(self._rows) for head in self._heads]
        z = self._reader.common_mass(tiles, self.logsumexps, lam)
        self._z = z if self._z is None else self._z + z

    @property
    def logsumexps(self) -> list[Tensor]:
        """m + log s of each head, over the tiles so far: [C]."""
        return [sums.row_max + sums.sum_exp.log() for sums in self._sums]

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of these positions in the order of `autograd.tiled_heads`: those with a gradient, and the
        others."""
        values: list[Tensor] = []
        constants: list[Tensor] = []
        logs = [sums.sum_exp.log() for sums in self._sums]

        def log_probs(i: int, logits: Tensor) -> Tensor:
            return (logits - self._sums[i].row_max[:, None]).sub_(logs[i][:, None])

        for i, (sums, top) in enumerate(zip(self._sums, self._tops, strict=True)):
            of_wanted = log_probs(i, self._picked[i])
            values.append(of_wanted[:, 0])
            if sums.moment is not None:
                values.append(logs[i] - sums.moment / sums.sum_exp)
            constants += [top.ids, log_probs(i, top.values), of_wanted[:, 1:]]

        for i, sums in enumerate(self._sums):
            if sums.gap is not None:
                values.append(_divergence(sums, sums.gap, logs[i], logs[1 - i]))
        if len(self._sums) == 2:
            constants.append(log_probs(1, self._tops[0].others[0]))
        if self._z is not None:
            constants.append(self._z)
        return values, constants


def _divergence(sums: TileSums, gap: Tensor, log: Tensor, other_log: Tensor) -> Tensor:
    """KL of a head against the other, [C] nats; inf where it has mass on a token that the other masks."""
    value = gap / sums.sum_exp - (log - other_log)
    if sums.max_at_masked is None:
        return value
    has_mass = (sums.max_at_masked - sums.row_max - log).exp() > 0.0
    return value.masked_fill(has_mass, torch.inf)
