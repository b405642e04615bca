"""Bands of a number, such as a token's position in its response: the names of the bands, and which entries lie in each.

A band goes from its start up to the start of the next band; the last band has no end.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

# The starts of the bands of token positions and of response lengths, the same in metrics, `replay` and `mismatch`.
POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096)


def band_names(starts: Sequence[float]) -> list[str]:
    """Name each band: where all starts are ints, by its first and last number (`4-15`), else by its ends (`0.1-1`).

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
    """Map each band's name to a bool mask of the entries of `values` that lie in it. Shapes: any, kept."""
    ends = (*starts[1:], math.inf)
    return {
        name: (values >= start) & (values < end)
        for name, start, end in zip(band_names(starts), starts, ends, strict=True)
    }
