"""The exact top K of each row in two levels, without sorting the row. Pure, torch only.

A row is cut into blocks. The K blocks with the largest maxima hold the K largest numbers, so the rest of the row is
read once, for its block maxima. The shape of every tensor follows from those of the arguments, so a GPU is never waited
for.

Equal numbers come in any order. A NaN counts as largest in `top_k`; for a row with a NaN `RunningTopK` promises only
ids that are in range and distinct.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

BLOCK = 64  # numbers in a block
_BLOCKS_PER_K = 3  # a row of fewer than _BLOCKS_PER_K * K blocks is faster in one level than in two (measured on CPU)


def block_max(values: Tensor) -> Tensor:
    """Return the largest number of each block of BLOCK columns: [N, V] -> [N, ceil(V / BLOCK)]."""
    if values.shape[1] <= BLOCK:
        return values.amax(-1, keepdim=True)
    maxima, tail = _blocks(values).amax(-1), values[:, values.shape[1] // BLOCK * BLOCK :]
    return torch.cat((maxima, tail.amax(-1, keepdim=True)), dim=1) if tail.shape[1] else maxima


def _blocks(values: Tensor) -> Tensor:
    """View rows [N, V] as whole blocks, [N, V // BLOCK, BLOCK], without the columns after the last whole block."""
    whole = values.shape[1] // BLOCK
    return values[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))


def top_k(values: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row, largest first, and their int64 ids: [N, k] each.

    As `values.topk(k)`, which is five times slower for long rows.

    Args:
        values: [N, V] with V at least k.
        maxima: `block_max(values)`, if known.
    """
    if k == 0 or values.shape[1] // BLOCK < _BLOCKS_PER_K * k:  # for such short rows one level is faster than two
        return values.topk(k, dim=-1)

    candidates, block_indices = _candidates(values, k, block_max(values) if maxima is None else maxima)
    largest, columns = candidates.topk(k, dim=-1)
    return largest, _ids(block_indices, columns)


def _candidates(values: Tensor, k: int, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates for the k largest numbers of each row: k blocks, and the columns after the whole blocks.

    The k blocks with the largest maxima are enough: no number of another block is above any of these k maxima.

    Returns:
        The numbers [N, M] of the M candidates, and the indices of their blocks [N, ceil(M / BLOCK)], for `_ids`.
    """
    n, num_whole = len(values), values.shape[1] // BLOCK  # rows, and whole blocks of a row
    block_indices = maxima[:, :num_whole].topk(k, dim=-1, sorted=False).indices
    rows = torch.arange(n, device=values.device)[:, None]

    # Where rows are made of whole blocks, one index over the blocks of all rows takes the candidates: ten times faster
    # than an index by row and block (measured on CPU).
    if values.is_contiguous() and values.shape[1] == num_whole * BLOCK:
        candidates = values.view(-1, BLOCK).index_select(0, (rows * num_whole + block_indices).flatten())
        return candidates.view(n, k * BLOCK), block_indices

    candidates = torch.cat((_blocks(values)[rows, block_indices].flatten(1), values[:, num_whole * BLOCK :]), dim=1)
    # The columns after the whole blocks count as the block of index `num_whole`.
    return candidates, torch.cat((block_indices, torch.full_like(rows, num_whole)), dim=1)


def _ids(block_indices: Tensor, columns: Tensor) -> Tensor:
    """Convert `columns` [N, k] of the tensor of candidates to ids, the columns of the whole rows.

    `block_indices` [N, ceil(M / BLOCK)] are the blocks that the candidates were taken from, from `_candidates`.
    """
    return block_indices.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK


class RunningTopK:
    """The K largest numbers of rows that come piece by piece, and the numbers of further tensors at the same places."""

    def __init__(self, k: int) -> None:
        """Start before the first piece; `k` is K."""
        self._k = k
        # Values, largest first; ids; then the `companions`. Each is [N, min(K, numbers of a row so far)].
        self._columns: list[Tensor] = []

    @property
    def values(self) -> Tensor:
        """Return the K largest numbers of each row so far, largest first: [N, K], or fewer if fewer have come."""
        return self._columns[0]

    @property
    def ids(self) -> Tensor:
        """Return the ids of `values` (their places in the whole rows): int64, of the shape of `values`."""
        return self._columns[1]

    @property
    def companions(self) -> list[Tensor]:
        """Return for each further tensor that `add` was given its numbers at `ids`, in the shape of `values`."""
        return self._columns[2:]

    def add(self, values: Tensor, start: int, maxima: Tensor | None, companions: Sequence[Tensor] = ()) -> None:
        """Merge the next piece of the rows.

        Args:
            values: [N, T], the numbers with the ids from `start` on.
            maxima: `block_max(values)`; None only with K = 0.
            companions: further tensors [N, T], as many in each call, whose numbers at the top ids are kept too.
        """
        # `_columns`: the largest numbers so far, their ids, and the companions' numbers at these ids.
        if not self._columns:
            largest, ids = top_k(values, min(self._k, values.shape[1]), maxima)
            self._columns = [largest, ids + start, *(companion.gather(1, ids) for companion in companions)]
            return

        # The candidates of this piece: its largest numbers, or the blocks that hold them. `ids_at` converts columns of
        # the candidates to columns of the piece. Blocks are taken only where they have fewer numbers than the piece.
        if maxima is not None and values.shape[1] > self._k * BLOCK > 0:
            candidates, block_indices = _candidates(values, self._k, maxima)  # the merge below sorts the candidates
            ids_at = partial(_ids, block_indices)
        else:
            candidates, ids = top_k(values, min(self._k, values.shape[1]), maxima)
            ids_at = partial(ids.gather, 1)

        num_old = self.values.shape[1]
        pool = torch.cat((self.values, candidates), dim=1)  # the numbers kept so far, then the candidates
        largest, columns = pool.topk(min(self._k, pool.shape[1]), dim=-1)
        is_old, old_columns = columns < num_old, columns.clamp(max=num_old - 1)
        ids = ids_at((columns - num_old).clamp(min=0))  # those where `is_old` is True are not used

        # For each of the `largest`, its id and companions come from the numbers kept before or from this piece.
        new_columns = [ids + start, *(companion.gather(1, ids) for companion in companions)]
        pairs = zip(self._columns[1:], new_columns, strict=True)
        self._columns = [largest, *(torch.where(is_old, old.gather(1, old_columns), new) for old, new in pairs)]
