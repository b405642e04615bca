"""The forward pass of one or two heads over a block of positions, tile by tile. Pure, torch only.

A block of C positions visits the tiles of the vocabulary in turn, as a block of queries visits the keys in
FlashAttention. Each tile's logits l [C, T] are formed once, and every output is updated from them: the logits at the
wanted ids, the running top K (with the rollout model's logits at the policy's top K), and the sums s, t and g of
`reader.py`, which are merged into the sums of the tiles before:

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
    """Add each head's sums over the next tile (`added`) to its sums over the tiles before (`before`); [C] each."""
    maxima = [torch.maximum(old.row_max, new.row_max) for old, new in zip(before, added, strict=True)]
    return [
        TileSums(
            row_max=old.row_max,  # now the larger maximum, as `new.row_max` is
            sum_exp=old.sum_exp + new.sum_exp,
            moment=_combined(torch.add, old.moment, new.moment),
            block_max=None,  # each tile's top K has been taken already
            gap=_combined(torch.add, old.gap, new.gap),
            max_at_masked=_combined(torch.maximum, old.max_at_masked, new.max_at_masked),
        )
        for old, new in zip(_rescaled(before, maxima), _rescaled(added, maxima), strict=True)
    ]


def _combined(combine: Callable[[Tensor, Tensor], Tensor], old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Return `combine(old, new)`, or None where one of the two tensors is None."""
    return None if old is None or new is None else combine(old, new)


def _rescaled(sums: Sequence[TileSums], maxima: Sequence[Tensor]) -> list[TileSums]:
    """Make each head's `sum_exp`, `moment` and `gap`, which are relative to `row_max`, relative to larger `maxima`.

    If the maximum rises by d, and that of the other head by d_o, sum_exp s, moment t and gap g become s e^-d,
    (t - d s) e^-d and (g + (d_o - d) s) e^-d. `maxima` are [C] of each head.
    """
    falls = [old.row_max - new_max for old, new_max in zip(sums, maxima, strict=True)]  # -d of each head, d the rise
    rescaled: list[TileSums] = []
    for i, (old, new_max, fall) in enumerate(zip(sums, maxima, falls, strict=True)):
        factor, old_sum_exp = fall.exp(), old.sum_exp
        moment = None if old.moment is None else (old.moment + old_sum_exp * fall) * factor
        # `falls[1 - i]` is -d_o, minus the rise of the other head's maximum.
        gap = None if old.gap is None else (old.gap + old_sum_exp * (fall - falls[1 - i])) * factor
        rescaled.append(old._replace(row_max=new_max, sum_exp=old_sum_exp * factor, moment=moment, gap=gap))
    return rescaled


class PositionBlock:
    """The outputs at C positions (log-probs, entropy, top K, KLs and Z), updated by one tile of tokens after another.

    Args:
        heads: one head, or the policy and the rollout model.
        reader: reader of the tiles.
        rows: the positions of this block.
        wanted: [C, G] ids whose log-probs are returned; the first column is the sampled ids.
        num_top: K.
        lam: OBRS's lam, at which Z is summed over the whole vocabulary, from two heads; None: no Z.
        moments: whether entropy and divergences are computed.
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
        """Start before the first tile; `wanted` [C, G] are the ids whose log-probs are returned; `lam` None: no Z."""
        self._heads, self._reader = heads, reader
        self._rows, self._wanted = rows, wanted  # the C positions, and the ids whose log-probs are returned
        self._num_top, self._lam = num_top, lam  # K of the top K, and OBRS's lam
        self._moments = moments  # whether entropy and KL divergences are computed
        self._picked: dict[int, Tensor] = {}  # logits [C, G] at the wanted ids, by the head's index
        self._tops = [RunningTopK(num_top) for _ in heads]
        self._sums: list[TileSums] = []  # sums of each head, over the tiles so far
        self._z: Tensor | None = None  # [C] the exact Z of the tiles so far

    def update(self, columns: slice) -> None:
        """Form the logits of the tokens `columns`, which the heads have selected; update every output with them."""
        tiles = [head.tile(self._rows) for head in self._heads]
        sums = self._reader.read(tiles, tops=self._num_top > 0, moments=self._moments)
        logits = [tile.logits for tile in tiles]

        for i, head_logits in enumerate(logits):
            self._pick(i, head_logits, columns)
            # The first head's top K also keeps the second head's logits at the same tokens.
            self._tops[i].add(head_logits, columns.start, sums[i].block_max, logits[i + 1 :])
        self._sums = merged(self._sums, sums) if self._sums else sums

        # After a tile of the whole vocabulary the logsumexps are final, so Z needs no second pass (`add_z`).
        is_whole = columns.stop - columns.start == len(self._heads[0].weight)
        if self._lam is not None and is_whole:
            finished = [tile._replace(is_raw=False) for tile in tiles]  # `read` has turned raw products into logits
            self._z = self._reader.common_mass(finished, self.logsumexps, self._lam)

    def _pick(self, i: int, logits: Tensor, columns: slice) -> None:
        """Store head i's logits at the wanted ids that are among this tile's tokens, `columns`; `logits` are [C, T]."""
        width = columns.stop - columns.start
        # `wanted` counts ids from the tile's first token: ids of other tiles are below 0, or not below `width`.
        wanted = self._wanted - columns.start if columns.start else self._wanted
        values = logits.gather(1, wanted.clamp(0, width - 1))
        # The first tile also stores some logit at the ids that it does not contain: the tiles that do overwrite it.
        if i in self._picked:
            values = torch.where((wanted >= 0) & (wanted < width), values, self._picked[i])
        self._picked[i] = values

    def add_z(self, lam: float) -> None:
        """Add the share of the heads' selected tokens to Z, OBRS's expected acceptance.

        This is for a second pass over the tiles, when the logsumexps are final.
        """
        tiles = [head.tile(self._rows) for head in self._heads]
        z = self._reader.common_mass(tiles, self.logsumexps, lam)
        self._z = z if self._z is None else self._z + z

    @property
    def logsumexps(self) -> list[Tensor]:
        """Return each head's log of the sum of e^logit over the tokens of the tiles so far: [C]."""
        return [sums.row_max + sums.sum_exp.log() for sums in self._sums]

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the final outputs of the block's C positions, once all tiles of the vocabulary were visited.

        Returns:
            The outputs with a gradient (log-probs of the sampled ids, entropy, KLs) and those without (top ids, the
            log-probs at top ids and at the other wanted ids, Z), both in the order of `autograd.tiled_heads`.
        """
        values: list[Tensor] = []
        constants: list[Tensor] = []
        logs = [sums.sum_exp.log() for sums in self._sums]  # logsumexp minus `row_max`, of each head: [C]

        def log_probs(i: int, logits: Tensor) -> Tensor:
            """Convert logits of head i, at any tokens, to log-probs: [C, any]."""
            return (logits - self._sums[i].row_max[:, None]).sub_(logs[i][:, None])

        for i, (sums, top) in enumerate(zip(self._sums, self._tops, strict=True)):
            at_wanted = log_probs(i, self._picked[i])  # at the sampled ids (column 0), and at `gather_ids`
            values.append(at_wanted[:, 0])  # log-probs of the sampled ids
            if sums.moment is not None:
                values.append(logs[i] - sums.moment / sums.sum_exp)  # entropy
            constants += [top.ids, log_probs(i, top.values), at_wanted[:, 1:]]

        for i, sums in enumerate(self._sums):
            if sums.gap is not None:
                values.append(_divergence(sums, sums.gap, logs[i], logs[1 - i]))
        if len(self._sums) == 2:
            constants.append(log_probs(1, self._tops[0].companions[0]))  # of the rollout model, at the policy's top K
        if self._z is not None:
            constants.append(self._z)
        return values, constants


def _divergence(sums: TileSums, gap: Tensor, log: Tensor, other_log: Tensor) -> Tensor:
    """Return KL(head || other head), [C] nats; inf where a token has probability 0 under the other head alone.

    Args:
        sums: sums of the head over the whole vocabulary.
        gap: `sums.gap`, which is not None.
        log, other_log: log of `TileSums.sum_exp` of the head and of the other head, [C].
    """
    value = gap / sums.sum_exp - (log - other_log)
    if sums.max_at_masked is None:
        return value
    # Whether the head's most probable token, among those with logit -inf under the other, has a probability above 0.
    has_mass = (sums.max_at_masked - sums.row_max - log).exp() > 0.0
    return value.masked_fill(has_mass, torch.inf)
