"""Attention over a packed row, as an attention function of transformers' interface.

A CPU attends in blocks; flash and flex attention have run on one H200.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jackpot.core.errors import ModelError
from jackpot.core.types import PackedRow
from jackpot.models.packed_flex import Flex, block_mask, flex_kernel

# Value of `config._attn_implementation`. transformers has no mask function under this name, and so makes no mask.
PACKED = "jackpot_packed"
SHORT = 64  # largest number of keys in a block at which plain products beat torch's fused kernel on a CPU
# Options of a forward pass that do not change what attention computes.
_HARMLESS = {"position_ids", "past_key_values", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return each layer's sliding window: how many tokens a query sees, with itself; None: full causal attention."""
    layers = DynamicCache(config=config).layers
    return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


class AttentionPlan:
    """How one forward pass attends over a packed row: the row, each layer's window, and masks that layers share."""

    def __init__(self, row: PackedRow, config: PreTrainedConfig) -> None:
        """Read each layer's window from `config`; a mask is made when the first layer asks for it."""
        self.row = row
        self._windows = layer_windows(config)
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor | None]] = {}  # by window and dtype
        self._block_masks: dict[int | None, BlockMask] = {}  # by window

    def window(self, layer: int, passed_window: int | None) -> int | None:
        """Return a layer's sliding window: how many tokens a query sees, with itself; None: full causal attention.

        Args:
            layer: the index of the layer.
            passed_window: the window that the layer passes to its attention; None where it passes none.

        Raises:
            ModelError: the layer passes another window than the config has.
        """
        window = self._windows[layer]
        if passed_window not in (None, window):
            raise ModelError(
                f"layer {layer} has a sliding window of {passed_window}, but the model's config one of {window}"
            )
        return window

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """Return for every block of the row the mask that is added to attention scores, [1 or sequences, 1, queries,
        keys], or None for plain causal attention. Masks are made once for all layers."""
        if (window, dtype) not in self._masks:
            # For each block, the last key that each of its queries sees, once for each different mask of the block.
            last_keys = self.row.block_positions.split([block.masks * block.queries for block in self.row.blocks])
            # A mask is None where each query sees all keys up to it: no prompt is shared, and no window hides a key.
            self._masks[window, dtype] = [
                None
                if block.is_square and (window is None or window >= block.keys)
                else _mask(last.view(block.masks, 1, block.queries, 1), block.keys, window, dtype)
                for block, last in zip(self.row.blocks, last_keys, strict=True)
            ]
        return self._masks[window, dtype]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the mask of the whole row for flex attention, made once for all layers."""
        if window not in self._block_masks:
            self._block_masks[window] = block_mask(self.row, window)
        return self._block_masks[window]


def _mask(last: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query sees a key and -inf elsewhere, [masks, 1, queries, keys].

    `last` [masks, 1, queries, 1] is the last key that each query sees, counted from 0.
    """
    columns = torch.arange(keys, device=last.device)
    hidden = columns > last
    if window is not None:
        hidden = hidden | (columns <= last - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=last.device).masked_fill_(hidden, -torch.inf)


class AttentionLayer(Protocol):
    """An attention module of transformers, as attention functions get it."""

    layer_idx: int


def packed_attention(
    module: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: AttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention over a packed row, in transformers' signature.

    `AttentionSet` puts this function in the place of a model's own attention for one forward pass. The plan of the row
    is an argument of the forward pass, so a layer that is run again in backward gets the plan again.

    Args:
        query: [1, heads, S, D].
        key: [1, key heads, S, D].
        value: [1, key heads, S, D'].
        packed: the plan of the row; None where the model does not pass it on.

    Returns:
        Output [1, S, heads, D'], and None in place of attention weights.

    Raises:
        ModelError: the model asks for more than is computed here, such as a soft cap, or does not pass the plan on.
    """
    # What the model asks of its attention and this function does not compute.
    unsupported = sorted(name for name, value in options.items() if value is not None and name not in _HARMLESS)
    unsupported += ["an attention mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    if packed is None or unsupported or not getattr(module, "is_causal", True):
        other_reason = "is not causal, or is not given the arguments of the model"
        reason = f"takes {', '.join(unsupported)}" if unsupported else other_reason
        raise ModelError(f"the attention of {type(module).__name__} {reason}, so it cannot read rows without padding")

    window = packed.window(module.layer_idx, sliding_window)

    if query.is_cuda and torch.is_autocast_enabled("cuda"):  # after a norm, states are float32: flash refuses them
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    queries, keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [S, heads, D]
    factor = float(query.shape[-1]) ** -0.5 if scaling is None else scaling

    if (kernel := _varlen_kernel()) and _suits_flash(queries, keys, values):
        return _by_sequence(kernel, packed.row, queries, keys, values, factor, window)[None], None
    if flex := _flex_kernel(query, key, value):
        mask, shares_keys = packed.block_mask(window), query.shape[1] > key.shape[1]
        output = flex(query, key, value, block_mask=mask, scale=factor, enable_gqa=shares_keys)
        return output.transpose(1, 2), None
    return _by_block(packed, queries, keys, values, factor, window)[None], None


def _by_block(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Return the output [S, heads, D'] of attention, which is computed one block of the plan after the other.

    Shapes: query [S, heads, D], key [S, key heads, D], value [S, key heads, D'].
    """
    row = plan.row
    sharing = query.shape[1] // key.shape[1]  # query heads that share a key head
    if query.is_cuda and sharing > 1:  # CUDA's kernels take shared heads only without a mask
        key, value = (states.repeat_interleave(sharing, dim=1) for states in (key, value))

    # A tensor [rows, heads, length, D] for each block, with a sequence in each row.
    queries = _rows(query, row.block_queries, [(block.rows, block.queries) for block in row.blocks])
    shapes = [(block.rows, block.keys) for block in row.blocks]
    keys, values = (_rows(states, row.block_keys, shapes) for states in (key, value))

    suits_products = (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )
    outputs = []
    for q, k, v, mask in zip(queries, keys, values, plan.masks(window, query.dtype), strict=True):
        if suits_products and k.shape[2] <= SHORT:
            output = _by_products(q, k, v, mask, scaling)
        else:
            shares_keys = q.shape[1] != k.shape[1]
            output = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=shares_keys
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, row.block_outputs)  # in the order of the row, without padding


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return softmax(scaling query key^T + mask) value, [rows, heads, queries, D'], as `scaled_dot_product_attention`.

    Query heads that share a key head are joined in the dimension of queries. Attention weights are kept for backward.
    """
    rows, heads, queries, _ = query.shape
    key_heads, length = key.shape[1:3]
    if mask is None:  # plain causal attention
        mask = query.new_full((queries, length), -torch.inf).triu_(1)

    scores = query.reshape(rows, key_heads, -1, query.shape[-1]) @ key.mT
    weights = torch.add(mask, scores.view(rows, heads, queries, length), alpha=scaling).softmax(-1)
    return (weights.view(rows, key_heads, -1, length) @ value).view(rows, heads, queries, -1)


def _rows(states: Tensor, positions: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Select the states [S, heads, D] at `positions`, and cut them into one tensor [rows, heads, length, D] for each
    block; `shapes` has the rows and the length of each block."""
    blocks = states.index_select(0, positions).split([rows * length for rows, length in shapes])
    return [block.unflatten(0, shape).transpose(1, 2) for block, shape in zip(blocks, shapes, strict=True)]


def _by_sequence(
    kernel: Callable[..., Tensor],
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Return the output [S, heads, D] of flash attention over sequences of different lengths.

    The last query of a sequence is aligned with its last key.
    """
    # Sequence by sequence: each has its own copy of a prompt that several responses share.
    keys, values = (states.index_select(0, row.sequence_keys) for states in (key, value))
    tokens_before = -1 if window is None else window - 1  # keys that a query sees to its left; -1: all
    return kernel(
        query.contiguous(),
        keys,
        values,
        row.cu_queries,
        row.cu_keys,
        *row.longest,  # most queries and most keys of a sequence
        scale=scaling,
        window_size=(tokens_before, 0),
    )


@cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """Return torch's attention over sequences of different lengths; None where this torch has none with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= names.keys():
        return None
    kernel: Callable[..., Any] = partial(varlen_attn, enable_gqa=True) if "enable_gqa" in names else varlen_attn
    return kernel


def _suits_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether flash attention takes states [S, heads, D]: dtypes, head sizes, and the GPU."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and key.dtype == value.dtype == query.dtype
        and size == value.shape[-1]
        and size <= 256
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _flex_kernel(query: Tensor, key: Tensor, value: Tensor) -> Flex | None:
    """Return flex attention for states [1, heads, S, D]; None on a CPU, for mixed dtypes, or if it does not compile."""
    if not (query.is_cuda and query.dtype == key.dtype == value.dtype):
        return None
    return flex_kernel(query.dtype, query.shape[-1], value.shape[-1], query.shape[1] // key.shape[1])


AttentionInterface.register(PACKED, packed_attention)


def replaces_attention(model: PreTrainedModel) -> bool:
    """Tell whether a model can run with the attention function of this file, `packed_attention`, in place of its own.

    It can if its layers look up their attention function in transformers' `ALL_ATTENTION_FUNCTIONS`, and if its
    attention has neither a soft cap nor attention sinks.
    """
    config = model.config.get_text_config(decoder=True)
    functions = getattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    return (
        functions is ALL_ATTENTION_FUNCTIONS
        and bool(getattr(model, "_supports_attention_backend", False))
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(name.endswith("sinks") for name, _ in model.named_parameters())
    )


class AttentionSet(AbstractContextManager):
    """A context in which the config of a model names another attention function, and afterwards the former one again.

    A context may be entered many times, one after the other.
    """

    def __init__(self, config: PreTrainedConfig, implementation: str | None) -> None:
        """Note a model's config, and the name of the attention function that it gets in the context."""
        self._config, self._implementation = config, implementation

    def __enter__(self) -> None:
        """Put the new name into the config, and remember the former one."""
        self._before = self._config._attn_implementation
        self._config._attn_implementation = self._implementation

    def __exit__(self, *_: object) -> None:
        """Put the former name back into the config."""
        self._config._attn_implementation = self._before
