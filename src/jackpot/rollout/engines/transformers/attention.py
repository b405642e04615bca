"""Attention for decoding: grouped-query attention without repeated keys, and attention on FP8 keys and values.

Where there is a mask, transformers repeats the keys and values of grouped-query attention for each query head at every
step. `grouped_attention` instead passes the query heads that share a key head to the kernel as if they were several
query tokens of one head; the results are equal up to float rounding.
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

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import EngineError
from jackpot.models.forward import backbone
from jackpot.models.quantization.attention import Attention, in_float64, reads_what_it_caches
from jackpot.models.quantization.linear import round_to_fp8
from jackpot.models.quantization.quantizer import SCHEMES

# Values of `config._attn_implementation`. Those with `fp8` round keys and values to FP8.
GROUPED, EXACT = "jackpot_grouped", "jackpot_exact"
GROUPED_FP8, EXACT_FP8 = "jackpot_grouped_fp8", "jackpot_exact_fp8"
EAGER_FP8 = "jackpot_eager_fp8"
# Implementations to which transformers passes a mask [N, 1, T, S] unchanged.
ACCEPT_4D_MASKS = frozenset({"sdpa", "eager", GROUPED, EXACT, GROUPED_FP8, EAGER_FP8, EXACT_FP8})
_FP8_VARIANTS = {"sdpa": GROUPED_FP8, "eager": EAGER_FP8}  # variant for an FP8 cache, by implementation


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
    """Compute attention as transformers' `sdpa` does, but for one query token do not repeat keys that heads share.

    With several query tokens, or without shared keys, transformers' `sdpa` is called.

    Args:
        query: [N, heads, T, D].
        key, value: [N, key heads, S, D].
        attention_mask: [N, 1, T, S], boolean (True: visible) or additive; None: all tokens are visible.

    Returns:
        Output [N, T, heads, D], and None in place of attention weights.
    """
    num_rows, num_heads, length, size = query.shape
    # `special` is true with an option that only transformers' own function implements.
    special = dropout or options.get("position_bias") is not None or options.get("cache") is not None
    if length > 1 or num_heads == key.shape[1] or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)

    grouped = query.reshape(num_rows, key.shape[1], -1, size)  # neighboring heads share a key: they become its queries
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(num_rows, 1, num_heads, value.shape[-1]), None


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the eager attention of the transformers file that defines the model. Shapes as in `grouped_attention`."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    return attend(module, query, key, value, attention_mask, **options)


def with_rounded_kv(attend: Attention, rounding: Callable[[Tensor], Tensor]) -> Attention:
    """Return an attention function that calls `attend` with keys and values rounded as in a low-precision cache.

    Keys and values of new tokens come last. They are rounded once, in place, so that the cache holds rounded numbers
    too, and a prompt's tokens see each other's keys rounded, as in vLLM.

    Args:
        rounding: function that rounds keys or values [N, key heads, T, D].
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Round new tokens' keys and values in place, and call the attention function given to `with_rounded_kv`."""
        for states in (key, value):
            new = states[:, :, -query.shape[2] :]
            new.copy_(rounding(new))
        return attend(module, query, key, value, attention_mask, **options)

    return attention


for _name, _attend, _mask in (
    (GROUPED, grouped_attention, sdpa_mask),
    (EXACT, in_float64(grouped_attention), sdpa_mask),
    (EXACT_FP8, with_rounded_kv(in_float64(grouped_attention), round_to_fp8), sdpa_mask),
    (GROUPED_FP8, with_rounded_kv(grouped_attention, round_to_fp8), sdpa_mask),
    (EAGER_FP8, with_rounded_kv(eager_attention, round_to_fp8), eager_mask),
):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, _mask)


def set_engine_attention(model: PreTrainedModel, settings: TransformersEngineConfig) -> None:
    """Set the attention implementation of a model as an engine's settings say.

    On a CPU, attention is computed in float64 (`exact` of `set_attention`) where the settings quantize activations, so
    that numbers do not depend on the batch, and have no draft, whose rows of different lengths need other attention.

    Raises:
        EngineError: as `set_attention`.
    """
    quantizes_activations = settings.quantization is not None and SCHEMES[settings.quantization].activations is not None
    exact = quantizes_activations and settings.draft is None and model.device.type == "cpu"
    set_attention(model, settings.attn_implementation, fp8_cache=settings.kv_cache_dtype == "fp8", exact=exact)


def set_attention(
    model: PreTrainedModel, implementation: Literal["sdpa", "eager"], fp8_cache: bool = False, exact: bool = False
) -> None:
    """Set the attention implementation of a model, with `grouped_attention` in place of transformers' `sdpa`.

    Args:
        implementation: eager, or sdpa, for which a model without sdpa keeps its default attention.
        fp8_cache: round keys and values to FP8 (`round_to_fp8`). Such a model must not be differentiated.
        exact: compute sdpa in float64, so that a token's result does not depend on batch and cache; without effect on
            eager attention, and on an attention that cannot be replaced.

    Raises:
        EngineError: eager attention or an FP8 cache for a model whose attention cannot be replaced, or an FP8 cache for
            a model that does not read back the keys and values it caches.
    """
    if implementation == "eager" and model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
        if model.config._attn_implementation != "eager":
            raise EngineError(
                f"{type(model).__name__} cannot change to eager attention; set engine.attn_implementation=sdpa"
            )

    functions = getattr(sys.modules[type(backbone(model)).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    is_replaceable = functions is ALL_ATTENTION_FUNCTIONS  # False: the model's code calls an attention of its own
    current = model.config._attn_implementation or ""  # transformers' attribute may be None

    if fp8_cache and not (is_replaceable and current in _FP8_VARIANTS):
        raise EngineError(
            f"{type(model).__name__} has an attention of its own ({current}), whose keys and values cannot be rounded "
            f"here; leave engine.kv_cache_dtype out"
        )
    if fp8_cache and not reads_what_it_caches(model):
        raise EngineError(
            f"{type(model).__name__} caches other keys and values than its attention reads, so its cache cannot be "
            f"rounded here; leave engine.kv_cache_dtype out"
        )

    if exact and current == "sdpa" and is_replaceable:
        model.set_attn_implementation(EXACT_FP8 if fp8_cache else EXACT)
    elif fp8_cache:
        model.set_attn_implementation(_FP8_VARIANTS[current])
    elif current == "sdpa" and is_replaceable:
        model.set_attn_implementation(GROUPED)
