"""Attention of one new token to everything before it, without copying keys and values for each query head. Layer 3.

Transformers repeats the keys and values of grouped-query attention wherever there is a mask, at every step. The query
heads that share a key head can as well stand where several query tokens would: the kernel is the same, and so are the
numbers to float rounding.
"""

import sys
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jackpot.errors import EngineError
from jackpot.models.forward import backbone

AttentionKernel = Literal["sdpa", "eager"]
GROUPED = "jackpot_grouped"  # as `config._attn_implementation` names it


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


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_attention(model: PreTrainedModel, kernel: AttentionKernel | None) -> None:
    """Let a model use a kernel: eager where that is asked for, else grouped in place of transformers' `sdpa`.

    Args:
        kernel: with `sdpa` or None the model keeps what it was made with; an architecture may have no `sdpa`.

    Raises:
        EngineError: eager attention for a model that cannot change to it.
    """
    if kernel == "eager" and model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
        if model.config._attn_implementation != "eager":
            raise EngineError(f"{type(model).__name__} cannot change to eager attention; set engine.attention=sdpa")
    functions = getattr(sys.modules[type(backbone(model)).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if model.config._attn_implementation == "sdpa" and functions is ALL_ATTENTION_FUNCTIONS:
        model.set_attn_implementation(GROUPED)
