"""Bands (ranges) of a number, such as a token's position in its response: names of bands, and the entries in each.

A band goes from its start up to the start of the next band; the last band has no end.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

# Where the bands of token positions and response lengths start, in tokens; the same in metrics, `replay`, `mismatch`.
POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096)


def band_names(starts: Sequence[float]) -> list[str]:
    """Return the names of the bands with the given starts: `4-15`, both included, for ints; else `0.1-1`.

    >>> band_names((0, 1, 4, 16))
    ['0', '1-3', '4-15', '16-up']
    >>> band_names((0.0, 0.1, 1.0))
    ['0-0.1', '0.1-1', '1-up']
    """
    if all(isinstance(start, int) for start in starts):
        names = [str(start) if end == start + 1 else f"{start}-{end - 1}" for start, end in pairwise(starts)]
    else:
        names = [f"{start:g}-{end:g}" for start, end in pairwise(starts)]
    return [*names, f"{starts[-1]:g}-up"]


def band_masks(values: Tensor, starts: Sequence[float]) -> dict[str, Tensor]:
    """Return, by the name of each band, the bool mask of the entries of `values` in that band; shaped like `values`."""
    ends = (*starts[1:], math.inf)
    return {
        name: (values >= start) & (values < end)
        for name, start, end in zip(band_names(starts), starts, ends, strict=True)
    }
