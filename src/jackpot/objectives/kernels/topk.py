"""Exact top K of each row in two levels, without sorting the row. Pure, torch only.

A row is cut into blocks. The K blocks with the largest maxima hold the K largest numbers, so the rest of the row is
read once, for its block maxima. Where a row comes in parts (`RunningTopK`), only the numbers above the K-th largest so
far are looked at, which after a few parts are about none.

Equal numbers come in any order. A NaN counts as largest in `top_k`; for a row with a NaN `RunningTopK` promises only
ids that are in range and differ.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 64  # numbers
_WORTH_IT = 6  # a row needs this many blocks for each of its K before two levels are faster than one (measured on CPU)


def block_max(values: Tensor) -> Tensor:
    """Return the largest number of each block of BLOCK columns: [N, V] -> [N, ceil(V / BLOCK)]."""
    if values.shape[1] <= BLOCK:
        return values.amax(-1, keepdim=True)
    maxima, tail = _blocks(values).amax(-1), values[:, values.shape[1] // BLOCK * BLOCK :]
    return torch.cat((maxima, tail.amax(-1, keepdim=True)), dim=1) if tail.shape[1] else maxima


def _blocks(values: Tensor) -> Tensor:
    """View the whole blocks as [N, V // BLOCK, BLOCK], without the columns after the last whole one."""
    whole = values.shape[1] // BLOCK
    return values[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))


def top_k(values: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row, largest first, and their int64 ids: [N, k] each.

    As `values.topk(k)`, which is five times slower for long rows.

    Args:
        values: [N, V] with V at least k.
        maxima: `block_max(values)`, if known.
    """
    n, whole = len(values), values.shape[1] // BLOCK
    if k == 0 or whole < _WORTH_IT * k:
        return values.topk(k, dim=-1)
    maxima = block_max(values) if maxima is None else maxima
    rows = torch.arange(n, device=values.device)[:, None]
    blocks = maxima[:, :whole].topk(k, dim=-1, sorted=False).indices
    found = _blocks(values)[rows, blocks].flatten(1)
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)
    tail = torch.arange(whole * BLOCK, values.shape[1], device=values.device).expand(n, -1)
    best, order = torch.cat((found, values[:, whole * BLOCK :]), dim=1).topk(k, dim=-1)
    return best, torch.cat((ids, tail), dim=1).gather(1, order)


class RunningTopK:
    """Keeps the K largest numbers of rows that come in parts, and the numbers of other rows at the same ids."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._parts: list[Tensor] = []  # [N, min(K, seen)]: values, largest first; ids; one more for each of `others`

    @property
    def values(self) -> Tensor:
        """[N, min(K, seen)] the largest numbers so far, largest first."""
        return self._parts[0]

    @property
    def ids(self) -> Tensor:
        """[N, min(K, seen)] int64, the ids of `values`."""
        return self._parts[1]

    @property
    def others(self) -> list[Tensor]:
        """The numbers of each further tensor at `ids`."""
        return self._parts[2:]

    def add(self, values: Tensor, start: int, maxima: Tensor | None, others: Sequence[Tensor] = ()) -> None:
        """Merge the next part.

        Args:
            values: [N, T], the numbers with the ids from `start` on.
            maxima: `block_max(values)`; None only with K = 0.
            others: further tensors [N, T], as many each time, whose numbers at the top ids are kept too.
        """
        is_full = self._parts and self.values.shape[1] == self._k > 0
        found = self._candidates(values, maxima) if is_full else None
        if found is None:
            best, ids = top_k(values, min(self._k, values.shape[1]), maxima)
            new = [best, ids + start, *(other.gather(1, ids) for other in others)]
        else:
            rows, columns = found
            if not len(rows):
                return
            places = _places(rows, len(values))
            new = [_in_rectangle(tensor[rows, columns], *places, -torch.inf) for tensor in (values, *others)]
            new.insert(1, _in_rectangle(columns + start, *places, 0))
        if not self._parts:
            self._parts = new
            return
        both = [torch.cat(pair, dim=1) for pair in zip(self._parts, new, strict=True)]
        best, order = both[0].topk(min(self._k, both[0].shape[1]), dim=-1)
        self._parts = [best, *(tensor.gather(1, order) for tensor in both[1:])]

    def _candidates(self, values: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor] | None:
        """Find the numbers above the K-th largest so far: their rows, ascending, and their columns.

        None where a full top K is cheaper: the candidates are too many, or a row has fewer than K numbers above -inf.
        """
        least = self.values[:, -1:]
        if least.isneginf().any():
            return None
        whole = values.shape[1] // BLOCK
        rows, blocks = (maxima[:, :whole] > least).nonzero(as_tuple=True)
        if len(rows) * BLOCK > values.numel() // 4:
            return None
        pairs, inside = (_blocks(values)[rows, blocks] > least[rows]).nonzero(as_tuple=True)
        tail_rows, tail_columns = (values[:, whole * BLOCK :] > least).nonzero(as_tuple=True)
        columns = torch.cat((blocks[pairs] * BLOCK + inside, tail_columns + whole * BLOCK))
        rows, order = torch.cat((rows[pairs], tail_rows)).sort(stable=True)
        if len(rows) and torch.bincount(rows).max() > max(self._k, BLOCK):
            return None
        return rows, columns[order]


def _places(rows: Tensor, n: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Place each entry of a ragged list in a rectangle [n, longest row]: rows, columns, and the rectangle's shape."""
    counts = torch.bincount(rows, minlength=n)
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return rows, columns, (n, int(counts.max()))


def _in_rectangle(entries: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int], fill: float) -> Tensor:
    """Scatter the entries into a rectangle that holds `fill` elsewhere."""
    out = entries.new_full(shape, fill)
    out[rows, columns] = entries
    return out
