"""Keys and values of a decoding batch, written in place.

Transformers' own `DynamicCache` copies everything that was read at every step and at every row that ends. Here a step
writes what is new, and a row that ends costs one row moved into its place.

Shapes: `N` rows, `S` tokens that each has read, `D` size of a head.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from jackpot.models.forward import keeps_plain_keys

_STEP = 64  # tokens, the least that buffers grow by


class RowsLayer(DynamicLayer):
    """One layer's keys and values: [N, heads, S, D], the front of larger buffers.

    Buffers grow by half of what they hold, at least by `_STEP` and never beyond `longest` tokens, and by then shrink to
    the rows that are left.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest, self._length, self._rows = longest, 0, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write what was read last, [N, heads, 1, D] each; return all, as views that the next call overwrites."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self.keys is None:
            self.keys, self.values = key_states, value_states  # of the prompts; `reorder_cache` gives them to rows
            self._rows, self.is_initialized = len(key_states), True
        else:
            if self._length > self.keys.shape[-2]:
                self._move(slice(0, self._rows), start)
            self.keys[: self._rows, :, start : self._length] = key_states
            self.values[: self._rows, :, start : self._length] = value_states
        return self.keys[: self._rows, :, : self._length], self.values[: self._rows, :, : self._length]

    def reorder_cache(self, beam_idx: Tensor, moved: Tensor | None = None) -> None:
        """Row i becomes what row `beam_idx[i]` was. Rows that stay where they are cost nothing.

        Args:
            moved: the places i that do not stay; found here where it is not given.
        """
        if len(beam_idx) > len(self.keys):
            self._move(beam_idx, self._length)
        else:
            moved = _moved(beam_idx) if moved is None else moved
            for buffer in (self.keys, self.values) if len(moved) else ():
                buffer[moved, :, : self._length] = buffer[beam_idx[moved], :, : self._length]
        self._rows = len(beam_idx)

    def get_seq_length(self) -> int:
        return self._length

    def _move(self, rows: Tensor | slice, length: int) -> None:
        """Give the first `length` tokens of some rows to new buffers with room for more."""
        self.keys = self._larger(self.keys[rows, :, :length])
        self.values = self._larger(self.values[rows, :, :length])

    def _larger(self, states: Tensor) -> Tensor:
        rows, heads, length, size = states.shape
        buffer = states.new_empty(rows, heads, min(self._longest, length + max(_STEP, length // 2)), size)
        buffer[:, :, :length] = states
        return buffer


class RowsCache(Cache):
    """A `RowsLayer` for every layer. One with a sliding window keeps all tokens too: the mask has to hide the old.

    It takes 2 x layers x rows x key heads x D x tokens of room numbers, with room for at most 1.5 times what was read
    or `_STEP` more. While it grows, one layer exists twice.
    """

    def __init__(self, num_layers: int, longest: int, window: int | None) -> None:
        super().__init__(layers=[RowsLayer(longest) for _ in range(num_layers)])
        self.window = window  # tokens, the smallest of all layers; None where no layer has one

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As of every layer; what moves is asked of the device once."""
        moved = _moved(beam_idx)
        for layer in self.layers:
            layer.reorder_cache(beam_idx, moved)


def make_cache(config: PreTrainedConfig, longest: int) -> RowsCache | DynamicCache:
    """An empty cache for rows of at most `longest` tokens, prompts included.

    A `RowsCache` where every layer keeps keys and values of full attention or of a sliding window; otherwise (linear
    attention, chunks, layers that share their keys) the cache that transformers makes for such a model.
    """
    cache = DynamicCache(config=config)
    if not keeps_plain_keys(config):
        return cache
    windows = [layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    return RowsCache(len(cache.layers), longest, min(windows, default=None))


def _moved(order: Tensor) -> Tensor:
    return (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
