"""The KV cache of a decoding batch, whose keys and values are written in place.

Transformers' own `DynamicCache` copies all keys and values at every step and whenever a row ends. Here a step writes
only the keys and values of its tokens, and when a row ends one other row is copied into its slot.

Shapes: `N` rows, `S` cached tokens of each row, `D` size of a head.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from jackpot.models.forward import keeps_plain_keys
from jackpot.models.packed_attention import layer_windows

_MIN_GROWTH = 64  # smallest growth of a buffer, tokens


def grown_length(length: int, max_length: int) -> int:
    """Return for how many tokens each row gets room where a cache is full at `length` tokens: at most `max_length`."""
    return min(max_length, length + max(_MIN_GROWTH, length // 2))


class BatchKVLayer(DynamicLayer):
    """The keys and values of one layer, [N, heads, S, D], at the front of larger buffers.

    Buffers grow by half of their tokens, by at least `_MIN_GROWTH` and never beyond `max_length` tokens. When they grow
    they keep only the rows that are left in the batch.
    """

    keys: Tensor  # None before the first `update`
    values: Tensor

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length  # largest number of tokens of a row
        self._length, self._rows = 0, 0  # part of the buffers in use: tokens of each row, and rows

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append keys and values [N, heads, T, D]; return all keys and values, as views that the next call changes."""
        # `_rows` rows and `_length` tokens of each are the part of the buffers in use.
        start, self._length = self._length, self._length + key_states.shape[-2]
        if not self.is_initialized:
            self.keys, self.values = key_states, value_states  # one row per unique prompt, until `reorder_cache`
            self._rows, self.is_initialized = len(key_states), True
        else:
            if self._length > self.keys.shape[-2]:
                self._reallocate(torch.arange(self._rows, device=self.keys.device), start)
            self.keys[: self._rows, :, start : self._length] = key_states
            self.values[: self._rows, :, start : self._length] = value_states
        return self.keys[: self._rows, :, : self._length], self.values[: self._rows, :, : self._length]

    def reorder_cache(self, beam_idx: Tensor, moved: Tensor | None = None) -> None:
        """Replace row i by the old row `beam_idx[i]`; rows that stay in place cost nothing.

        Args:
            moved: the indices i with `beam_idx[i] != i`; None: computed here, which waits for the device.
        """
        if len(beam_idx) > len(self.keys):  # after the prefill: each row gets a copy of its prompt's keys and values
            self._reallocate(beam_idx, self._length)
        else:
            moved = _moved_rows(beam_idx) if moved is None else moved
            if len(moved):
                for buffer in (self.keys, self.values):
                    buffer[moved, :, : self._length] = buffer[beam_idx[moved], :, : self._length]
        self._rows = len(beam_idx)

    def get_seq_length(self) -> int:
        return self._length

    def _reallocate(self, rows: Tensor, length: int) -> None:
        """Copy the first `length` tokens of the rows `rows` to new buffers with room for more tokens."""
        self.keys = self._grown(self.keys[:, :, :length], rows)
        self.values = self._grown(self.values[:, :, :length], rows)

    def _grown(self, states: Tensor, rows: Tensor) -> Tensor:
        """Return a larger buffer that begins with the rows `rows` of `states`: keys or values, [N, heads, S, D]."""
        _, heads, length, size = states.shape
        buffer = states.new_empty(len(rows), heads, grown_length(length, self._max_length), size)
        torch.index_select(states, 0, rows, out=buffer[:, :, :length])  # straight into the buffer, without a copy
        return buffer


class BatchKVCache(Cache):
    """A cache of a `BatchKVLayer` for each layer. Layers with a sliding window keep all tokens; a mask hides old ones.

    The cache holds 2 x layers x rows x slots x key heads x D numbers, where a slot is the room for a token. A row has
    at most 1.5 times as many slots as tokens, or `_MIN_GROWTH` more. While the cache grows, one layer exists twice.
    """

    layers: list[BatchKVLayer]

    def __init__(self, num_layers: int, max_length: int, sliding_window: int | None) -> None:
        super().__init__(layers=[BatchKVLayer(max_length) for _ in range(num_layers)])
        self.sliding_window = sliding_window  # smallest window of all layers, tokens; None where no layer has one

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder all layers; the rows that move are found once for all layers, since that waits for the device."""
        moved = _moved_rows(beam_idx)
        for layer in self.layers:
            layer.reorder_cache(beam_idx, moved)


class RaggedKVLayer(BatchKVLayer):
    """The keys and values of rows of different lengths in one layer, each token in the column of its position.

    Columns behind the last token of a row hold rejected tokens or 0; a mask hides these columns.
    """

    def __init__(self, keys: Tensor, values: Tensor, max_length: int) -> None:
        """Take over the keys and values of earlier tokens, [N, heads, S, D] each, as the layer's buffers."""
        super().__init__(max_length)
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._rows, self._length = len(keys), keys.shape[2]

    def write_at(self, columns: Tensor, length: int) -> None:
        """Set the columns that the next call of `update` writes.

        Args:
            columns: [N, T] int64, the column of each new token of each row.
            length: number of columns that attention reads from now on; at least 1 + the last column of any row.
        """
        if length > self.keys.shape[2]:  # the buffers are too small: keep the columns in use so far
            self._reallocate(torch.arange(self._rows, device=self.keys.device), self._length)
        self._columns, self._length = columns, length

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values, [N, heads, T, D], to the columns that `write_at` has set.

        Return all keys and values of the layer, as views that the next call changes.
        """
        # `_rows` rows and `_length` columns are the part of the buffers in use.
        columns = self._columns[:, None, :, None]
        self.keys[: self._rows].scatter_(2, columns.expand_as(key_states), key_states)
        self.values[: self._rows].scatter_(2, columns.expand_as(value_states), value_states)
        return self.keys[: self._rows, :, : self._length], self.values[: self._rows, :, : self._length]

    def _grown(self, states: Tensor, rows: Tensor) -> Tensor:
        """Return a larger buffer that begins with the rows `rows` of `states`, with 0 in its new columns."""
        buffer = super()._grown(states, rows)
        buffer[:, :, states.shape[2] :] = 0.0  # finite, since attention multiplies hidden columns by 0
        return buffer


def make_cache(config: PreTrainedConfig, max_length: int) -> BatchKVCache | DynamicCache:
    """Return an empty cache for rows of at most `max_length` tokens, prompts included.

    The cache is a `BatchKVCache` where every layer keeps keys and values of full or sliding-window attention. For other
    models (linear attention, chunked attention, layers that share keys) it is transformers' own cache.
    """
    if not keeps_plain_keys(config):
        return DynamicCache(config=config)
    windows = layer_windows(config)  # None for a layer without a window; the cache is told the smallest window
    return BatchKVCache(len(windows), max_length, sliding_window=min(filter(None, windows), default=None))


def reorder_rows(cache: BatchKVCache | DynamicCache, order: Tensor) -> None:
    """Replace row i of a cache by the old row `order[i]`; rows not in `order` are dropped."""
    cache.reorder_cache(order)  # pyright: ignore[reportArgumentType]  transformers declares an old type, LongTensor


def _moved_rows(order: Tensor) -> Tensor:
    """Return the indices of the rows that `order` replaces by another row: all i with `order[i] != i`."""
    return (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
