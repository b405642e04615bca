"""Attention for training with an engine's codes: independent of the batch on a CPU, with an FP8 cache's rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from jackpot.core.errors import ModelError
from jackpot.models.packed_attention import PACKED, AttentionSet, packed_attention, replaces_attention
from jackpot.models.quantization.linear import round_to_fp8

# transformers' signature: (module, query, key, value, attention_mask, **options) -> (output, attention weights)
Attention = Callable[..., tuple[Tensor, Tensor | None]]


def in_float64(attend: Attention) -> Attention:
    """Return the attention function `attend` with products and sums in float64, rounded once to the queries' dtype.

    A quantized layer turns a difference in the last bit of its input into one of several percent wherever a code flips.
    So float32 attention, whose sums depend on padding, cache and batch, would undo what exact products of codes gain.
    In float64 such differences are far below the final rounding to float32. So training, which reads whole sequences,
    has the bits of an engine that decodes token by token.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute as `attend`, in float64, and return no attention weights."""
        mask = attention_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.double()
        output, _ = attend(module, query.double(), key.double(), value.double(), mask, **options)
        return output.to(query.dtype), None

    return attention


class _Rounded(torch.autograd.Function):
    """The rounding of keys or values to FP8, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        """Return keys or values rounded to FP8, in their own dtype."""
        return round_to_fp8(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return grad


def with_trained_kv(attend: Attention) -> Attention:
    """Return the attention function `attend` on keys and values rounded as in an FP8 cache, with gradient."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `attend` returns for keys and values rounded to FP8."""
        return attend(module, query, _Rounded.apply(key), _Rounded.apply(value), attention_mask, **options)

    return attention


_PROBE = "jackpot_probe"  # value of `config._attn_implementation` while `reads_what_it_caches` tries a model


@torch.no_grad()
def reads_what_it_caches(model: PreTrainedModel) -> bool:
    """Tell whether the attention of a model reads keys and values as they are cached.

    If not, rounding the cache differs from rounding what attention reads. DeepSeek's attention caches latents and
    computes keys and values from them; DiffLlama's repeats values. The model is tried on a token, whatever its weights
    are. On the meta device, where tensors have no address, the answer is True.
    """
    if model.device.type == "meta":
        return True
    cache = DynamicCache(config=model.config)
    attended: list[Tensor] = []

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Note the keys and values that attention gets, and return zeros for its output."""
        attended.extend((key, value))
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_PROBE, attention)
    AttentionMaskInterface.register(_PROBE, eager_mask)  # makes a mask even where none is needed: some models read it
    with AttentionSet(model.config.get_text_config(), _PROBE):
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)

    # Attention reads what is cached if its keys and values lie in the memory of the cache.
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    cached = {tensor.untyped_storage().data_ptr() for tensor in states if tensor is not None}
    return {tensor.untyped_storage().data_ptr() for tensor in attended} <= cached


# Values of `config._attn_implementation` in training: _SDPA for padded rows or PACKED, then one or both suffixes,
# _EXACT for float64 and _FP8 for keys and values rounded to FP8.
_SDPA = "jackpot_trained"
_EXACT, _FP8 = "_exact", "_fp8"

for _base, _plain in ((_SDPA, sdpa_attention_forward), (PACKED, packed_attention)):
    AttentionInterface.register(_base + _EXACT, in_float64(_plain))
    AttentionInterface.register(_base + _FP8, with_trained_kv(_plain))
    AttentionInterface.register(_base + _EXACT + _FP8, with_trained_kv(in_float64(_plain)))
for _suffix in (_EXACT, _FP8, _EXACT + _FP8):
    AttentionMaskInterface.register(_SDPA + _suffix, sdpa_mask)


def packed_implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention for packed rows that computes as a model's own attention does."""
    name = config._attn_implementation or ""
    return name.replace(_SDPA, PACKED) if name.startswith(_SDPA) else PACKED  # with the same suffixes


def attend_as_engine(model: PreTrainedModel, fp8_cache: bool, exact: bool) -> None:
    """Let a model in training attend as a quantized engine does, in place; change nothing if both flags are False.

    Args:
        fp8_cache: round keys and values as the engine's cache does, with the gradient of the identity.
        exact: compute in float64, as the engine does on a CPU.

    Raises:
        ModelError: the model's attention cannot be replaced.
    """
    if not (exact or fp8_cache):
        return
    body = model.base_model
    if not (isinstance(body, PreTrainedModel) and replaces_attention(body)):
        raise ModelError(
            f"{type(model).__name__} has an attention of its own ({model.config._attn_implementation}), which cannot "
            f"compute as the quantized engine's does; take precision fp32 or bf16, or a model such as Qwen or Llama"
        )
    model.set_attn_implementation(_SDPA + _EXACT * exact + _FP8 * fp8_cache)  # the name of a registered function
