"""The largest K numbers of each row, exactly, without sorting the row. Pure, torch only.

A row is cut into blocks. The K blocks with the largest maxima hold the K largest numbers, so the rest of the row is
read once, for its maxima. Of a row that comes in parts (`RunningTop`) only numbers above the smallest of the K that are
known are looked at, which after a few parts are about none.

Equal numbers come in any order. A NaN counts as largest in `top_k`; `RunningTop` promises nothing about such a row but
ids that are in range and differ.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 64  # numbers
_WORTH_IT = 6  # a row needs this many blocks for each of its K before two levels are faster than one (measured on CPU)


def block_peaks(values: Tensor) -> Tensor:
    """The largest number of each block, the last one maybe shorter: [N, V] -> [N, ceil(V / BLOCK)]."""
    if values.shape[1] <= BLOCK:
        return values.amax(-1, keepdim=True)
    peaks, tail = _blocks(values).amax(-1), values[:, values.shape[1] // BLOCK * BLOCK :]
    return torch.cat((peaks, tail.amax(-1, keepdim=True)), dim=1) if tail.shape[1] else peaks


def _blocks(values: Tensor) -> Tensor:
    """The whole blocks [N, V // BLOCK, BLOCK], a view."""
    whole = values.shape[1] // BLOCK
    return values[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))


def top_k(values: Tensor, k: int, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `values.topk(k)` gives, which for long rows is five times slower: the largest first, [N, k] and int64 ids.

    Args:
        values: [N, V] with V at least k.
        peaks: `block_peaks(values)`, if known.
    """
    n, whole = len(values), values.shape[1] // BLOCK
    if k == 0 or whole < _WORTH_IT * k:
        return values.topk(k, dim=-1)
    peaks = block_peaks(values) if peaks is None else peaks
    rows = torch.arange(n, device=values.device)[:, None]
    blocks = peaks[:, :whole].topk(k, dim=-1, sorted=False).indices
    found = _blocks(values)[rows, blocks].flatten(1)
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)
    tail = torch.arange(whole * BLOCK, values.shape[1], device=values.device).expand(n, -1)
    best, order = torch.cat((found, values[:, whole * BLOCK :]), dim=1).topk(k, dim=-1)
    return best, torch.cat((ids, tail), dim=1).gather(1, order)


class RunningTop:
    """The largest K of rows that come in parts, and what other rows have at the same ids."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._parts: list[Tensor] = []  # [N, min(K, seen)]: values, largest first; ids; one more for each of `others`

    @property
    def values(self) -> Tensor:
        return self._parts[0]

    @property
    def ids(self) -> Tensor:
        return self._parts[1]

    @property
    def others(self) -> list[Tensor]:
        return self._parts[2:]

    def add(self, values: Tensor, start: int, peaks: Tensor | None, others: Sequence[Tensor] = ()) -> None:
        """Take in the next part.

        Args:
            values: [N, T], the numbers with the ids from `start` on.
            peaks: `block_peaks(values)`; None only with K = 0.
            others: more tensors [N, T], as many each time: what they hold at the top ids goes along.
        """
        is_full = self._parts and self.values.shape[1] == self._k > 0
        found = self._above_the_last(values, peaks) if is_full else None
        if found is None:
            best, ids = top_k(values, min(self._k, values.shape[1]), peaks)
            new = [best, ids + start, *(other.gather(1, ids) for other in others)]
        else:
            rows, columns = found
            if not len(rows):
                return
            places = _places(rows, len(values))
            new = [_spread(tensor[rows, columns], *places, -torch.inf) for tensor in (values, *others)]
            new.insert(1, _spread(columns + start, *places, 0))
        if not self._parts:
            self._parts = new
            return
        both = [torch.cat(pair, dim=1) for pair in zip(self._parts, new, strict=True)]
        best, order = both[0].topk(min(self._k, both[0].shape[1]), dim=-1)
        self._parts = [best, *(tensor.gather(1, order) for tensor in both[1:])]

    def _above_the_last(self, values: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows, ascending, and columns of the numbers above the smallest known.

        None where they are too many, or where a row has not yet K numbers above -inf, which fills up rectangles.
        """
        least = self.values[:, -1:]
        if least.isneginf().any():
            return None
        whole = values.shape[1] // BLOCK
        rows, blocks = (peaks[:, :whole] > least).nonzero(as_tuple=True)
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
    """Where each entry of a ragged list goes in a rectangle [n, longest row]: rows, columns, and its shape."""
    counts = torch.bincount(rows, minlength=n)
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return rows, columns, (n, int(counts.max()))


def _spread(entries: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int], fill: float) -> Tensor:
    """The entries in a rectangle, and `fill` elsewhere."""
    out = entries.new_full(shape, fill)
    out[rows, columns] = entries
    return out
