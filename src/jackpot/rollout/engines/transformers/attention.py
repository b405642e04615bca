"""Attention of one new token to everything before it, without copying keys and values for each query head.

Transformers repeats the keys and values of grouped-query attention wherever there is a mask, at every step. The query
heads that share a key head can as well stand where several query tokens would: the kernel is the same, and so are the
numbers to float rounding.

Here too: attention on keys and values of 8 bits.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jackpot.core.errors import EngineError
from jackpot.models.forward import backbone
from jackpot.models.quantization.linear import round_to_fp8

AttentionKernel = Literal["sdpa", "eager"]
Attention = Callable[..., tuple[Tensor, Tensor | None]]  # as transformers calls it: module, query, key, value, mask
GROUPED = "jackpot_grouped"  # as `config._attn_implementation` names it
GROUPED_FP8, EAGER_FP8 = "jackpot_grouped_fp8", "jackpot_eager_fp8"
TAKE_MASKS = frozenset({"sdpa", "eager", GROUPED, GROUPED_FP8, EAGER_FP8})  # that are ready, [N, 1, T, S]
_ON_FP8 = {"sdpa": GROUPED_FP8, "eager": EAGER_FP8}


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' `sdpa`, which it calls for everything but one query token of grouped heads.

    Args:
        query: [N, heads, T, D].
        key, value: [N, key heads, S, D].
        attention_mask: [N, 1, T, S], True or 0 where a token is seen; None where all are.

    Returns:
        [N, T, heads, D]; no weights.
    """
    rows, heads, length, size = query.shape
    special = dropout or options.get("position_bias") is not None or options.get("cache") is not None
    if length > 1 or heads == key.shape[1] or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    grouped = query.reshape(rows, key.shape[1], -1, size)  # heads that share a key stand next to each other
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What the model's own file has for attention in single steps. Shapes as in `grouped_attention`."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    return attend(module, query, key, value, attention_mask, **options)


def on_rounded(attend: Attention, rounding: Callable[[Tensor], Tensor]) -> Attention:
    """The same on keys and values as a cache of fewer bits has them.

    Those of the tokens that are read now stand last, and are rounded where they are: in what the cache holds too, and
    once. So a prompt sees its own keys rounded, as in vLLM, and a cache need not know of it.

    Args:
        rounding: of keys or values [N, key heads, T, D].
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        for states in (key, value):
            fresh = states[:, :, -query.shape[2] :]
            fresh.copy_(rounding(fresh))
        return attend(module, query, key, value, attention_mask, **options)

    return attention


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
AttentionInterface.register(GROUPED_FP8, on_rounded(grouped_attention, round_to_fp8))
AttentionMaskInterface.register(GROUPED_FP8, sdpa_mask)
AttentionInterface.register(EAGER_FP8, on_rounded(eager_attention, round_to_fp8))
AttentionMaskInterface.register(EAGER_FP8, eager_mask)


def use_attention(model: PreTrainedModel, kernel: AttentionKernel | None, fp8_cache: bool = False) -> None:
    """Let a model use a kernel: eager where that is asked for, else grouped in place of transformers' `sdpa`.

    Args:
        kernel: with `sdpa` or None the model keeps what it was made with; an architecture may have no `sdpa`.
        fp8_cache: it sees keys and values as an FP8 cache has them (`precision.kv.round_to_fp8`). Without gradient.

    Raises:
        EngineError: eager attention or an FP8 cache for a model whose attention cannot be changed.
    """
    if kernel == "eager" and model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
        if model.config._attn_implementation != "eager":
            raise EngineError(
                f"{type(model).__name__} cannot change to eager attention; set engine.attn_implementation=sdpa"
            )
    functions = getattr(sys.modules[type(backbone(model)).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    current, replaceable = model.config._attn_implementation, functions is ALL_ATTENTION_FUNCTIONS
    if fp8_cache and not (replaceable and current in _ON_FP8):
        raise EngineError(
            f"{type(model).__name__} has an attention of its own ({current}), whose keys and values cannot be rounded "
            f"here; leave engine.kv_cache_dtype out"
        )
    if fp8_cache:
        model.set_attn_implementation(_ON_FP8[current])
    elif current == "sdpa" and replaceable:
        model.set_attn_implementation(GROUPED)
