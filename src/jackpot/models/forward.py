"""The forward pass of a language model's backbone: from token ids to the hidden states that its head maps to logits.

Hidden states and head are separate so that logits [B, T, V] need not be in memory. Engine and learner call the same
functions: in fp32 their numbers agree up to rounding; in bf16 the engine rounds weights that the learner keeps in fp32.

Shapes: `U` unique prompts of `P` tokens, `B` sequences, `T` response tokens, `H` hidden size, `V` vocabulary.
"""

import dis
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from jackpot.core.errors import DataError, ModelError
from jackpot.core.types import PackedRow, TokenBatch
from jackpot.models.device import upload
from jackpot.models.packed_attention import AttentionPlan, AttentionSet, replaces_attention
from jackpot.models.quantization.attention import packed_implementation
from jackpot.objectives.kernels.linear_head import CutLinear, Fp32Linear

PaddingSide = Literal["left", "right"]


def _check_prompts(prompt_mask: Tensor) -> None:
    """Refuse prompts that are empty or padded on the right."""
    if not prompt_mask[:, -1].all():
        rows = (~prompt_mask[:, -1].bool()).nonzero().flatten().tolist()
        raise DataError(f"prompts {rows[:5]} are empty or padded on the right; pad prompts on the left, [U, P]")


def pad_tokens(rows: Sequence[Sequence[int]], side: PaddingSide, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids with zeros on one side: ids [B, S] int64, and a mask [B, S] bool, False on padding."""
    width = max(map(len, rows))
    gaps = [[0] * (width - len(row)) for row in rows]
    padded = [[*gap, *row] if side == "left" else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)]

    columns = torch.arange(width)
    lengths = torch.tensor([[len(row)] for row in rows])
    mask = columns >= width - lengths if side == "left" else columns < lengths
    return upload(torch.tensor(padded, dtype=torch.int64), device), upload(mask, device)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's position, counted without padding: [B, S] int64, 0 on the padding before the first token."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def response_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Return the hidden states that predict the sampled tokens of a batch, [N, H], as `token_hidden` does."""
    return token_hidden(model, batch, batch.response_index)


def token_hidden(model: PreTrainedModel, batch: TokenBatch, index: Tensor) -> Tensor:
    """Return the hidden states that predict some response tokens, after the final norm and before the head: [N, H].

    The tokens of tools are read as all others. Where the model allows it (`can_pack`), the backbone reads the batch
    without padding, in one pass; else `predicting_hidden` reads it with padding.

    Args:
        index: [N], positions in the flat `batch.attention_mask` [B * T], where that is True.
    """
    if batch.packed is None or not can_pack(model):
        hidden = predicting_hidden(
            model, batch.prompt_ids, batch.prompt_mask, batch.prompt_index, batch.response_ids, batch.attention_mask
        )
        return hidden.flatten(0, 1).index_select(0, index)
    states = read_row(backbone(model), batch.packed)
    # `predicting` [B, T] has the index in `states` of the state that predicts a token; `index` names N of the tokens.
    return states.index_select(0, batch.packed.predicting.flatten().index_select(0, index))


def response_values(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Return a critic's values of the states in which the tokens of a batch were sampled: [N].

    A critic is a model of token classification with one label (`load_value_model`).
    """
    if batch.packed is not None and can_pack(model):
        values = read_row(model, batch.packed)[:, 0]
        return values.index_select(0, batch.packed.predicting.flatten().index_select(0, batch.response_index))

    _check_prompts(batch.prompt_mask)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.attention_mask], dim=1).bool()  # [B, P + T]
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.response_ids], dim=1)
    output = model(
        input_ids=torch.where(mask, ids, 0), attention_mask=mask, position_ids=position_ids(mask), use_cache=False
    )

    # The state of a token is that of the position before it, as in `predicting_hidden`: take the last T + 1 positions
    # without the last one.
    values = output.logits[:, -batch.response_ids.shape[1] - 1 : -1, 0]
    return values.flatten().index_select(0, batch.response_index)


def read_row(module: PreTrainedModel, row: PackedRow) -> Tensor:
    """Run a module over a packed row, with the attention of packed rows instead of its own.

    Returns:
        A backbone's states, [S, H], or a critic's values, [S, 1].

    Raises:
        ModelError: as `packed_attention`.
    """
    config = module.config.get_text_config()
    with AttentionSet(config, packed_implementation(config)):
        output = module(
            input_ids=row.token_ids[None],
            position_ids=row.positions[None],
            use_cache=False,
            packed=AttentionPlan(row, module.config),
        )

    return output[0].squeeze(0)  # without the batch dimension


def predicting_hidden(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor | None,
    prompt_index: Tensor,
    response_ids: Tensor,
    response_mask: Tensor | None,
) -> Tensor:
    """Return the hidden states that predict each response token, after the final norm and before the head: [B, T, H].

    Entry t comes from the position before response token t, so entry 0 comes from the last token of the prompt. The
    states carry gradient. A prompt with several responses is read once where the model allows it (`can_share_prompts`),
    with the same result up to rounding as if it were read with each response.

    Args:
        prompt_ids, prompt_mask: [U, P], U distinct prompts, padded on the left; the mask is False on padding.
        prompt_index: [B], the row of the prompt of each response.
        response_ids, response_mask: [B, T], padded on the right. Both masks are None where nothing is padded.

    Raises:
        DataError: a prompt is empty or padded on the right, so that no token precedes the response.
    """
    if prompt_mask is None or response_mask is None:
        prompts, mask = prompt_ids, None
    else:
        _check_prompts(prompt_mask)
        prompt_mask, response_mask = prompt_mask.bool(), response_mask.bool()
        prompts, response_ids = torch.where(prompt_mask, prompt_ids, 0), torch.where(response_mask, response_ids, 0)
        mask = torch.cat([prompt_mask[prompt_index], response_mask[:, :-1]], dim=1)

    inputs = response_ids[:, :-1]  # the last token predicts nothing

    if len(prompt_ids) == len(prompt_index) or not can_share_prompts(model):
        states = _states(model, torch.cat([prompts[prompt_index], inputs], dim=1), mask, None)
        # From the prompt's last token on; the second slice leaves nothing where there are no response tokens.
        return states[:, prompt_ids.shape[1] - 1 :][:, : response_ids.shape[1]]

    # A cache made without the config keeps all tokens of a sliding layer too; the mask hides those outside the window.
    cache = DynamicCache()
    first = _states(model, prompts, prompt_mask, cache)[prompt_index, -1:]  # [B, 1, H], predicts the first token

    if not inputs.shape[1]:  # there is one response token, or none, so the prompts' states are all that is needed
        return first[:, : response_ids.shape[1]]
    cache.reorder_cache(prompt_index)  # pyright: ignore[reportArgumentType] (any int64 tensor); carries gradient
    return torch.cat([first, _states(model, inputs, mask, cache)], dim=1)


def _states(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: DynamicCache | None) -> Tensor:
    """Return the backbone's last hidden states at `ids`, [B, S, H], and extend the cache; None: no cache.
    `mask` covers cache and ids, False on padding; None: nothing is padded."""
    output = backbone(model)(
        input_ids=ids,
        attention_mask=mask,
        position_ids=None if mask is None else position_ids(mask)[:, -ids.shape[1] :],  # of the last tokens, `ids`
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return output.last_hidden_state


def keeps_plain_keys(config: PreTrainedConfig) -> bool:
    """Tell whether every layer caches keys and values of single tokens, with full attention or a sliding window.

    Models with linear attention, a state space, chunks, or layers that share keys do not.
    """
    layers, text = DynamicCache(config=config).layers, config.get_text_config(decoder=True)
    # Some configs have these two fields with the value None.
    is_chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ()) or bool(
        getattr(text, "attention_chunk_size", None)
    )
    is_plain = {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    return is_plain and not is_chunked and len(layers) == text.num_hidden_layers  # fewer where layers share keys


def can_pack(model: PreTrainedModel) -> bool:
    """Tell whether a model can read a micro-batch as one row without padding, each sequence as if it stood alone.

    A model cannot where a layer does more than attend to keys of single tokens (`keeps_plain_keys`), where its
    attention cannot be replaced (`replaces_attention`) or does not get the options of the forward pass, as in Nemotron
    and StableLM, or where the rotary angles depend on the sequence length.
    """
    layers = {type(module) for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    return _is_length_free(model) and replaces_attention(backbone(model)) and all(map(_passes_options_on, layers))


@cache
def _passes_options_on(layer_class: type[nn.Module]) -> bool:
    """Tell whether layers pass the options of a forward pass on to their attention: whether their code reads them."""
    function = inspect.unwrap(layer_class.forward)
    parameters = inspect.signature(function).parameters
    # The name of the parameter **options, if there is one, and all names that the bytecode of the forward reads.
    options = {name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD}
    # (`argrepr` has the one or two names that an instruction reads.)
    names_in_code = {name for step in dis.get_instructions(function) for name in step.argrepr.split(", ")}

    # A layer without a cache has no attention, and so nothing to pass on.
    return "past_key_values" not in parameters or bool(options & names_in_code)


_ROPES_BY_LENGTH = {"dynamic", "longrope"}  # rotary angles that depend on the longest sequence of a forward pass


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Tell whether a prompt's keys and values, computed once, serve all its responses exactly.

    They do not where a layer caches other things (`keeps_plain_keys`), where the rotary angles depend on the sequence
    length, or where activations are checkpointed: the second forward pass, in backward, would write to the cache again.
    Prompts are not shared where weights are sharded either: all ranks have to run the same number of passes, and a
    micro-batch takes two passes of the backbone only if a prompt has several responses.
    """
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return not model.is_gradient_checkpointing and _is_length_free(model) and not is_sharded


def _is_length_free(model: PreTrainedModel) -> bool:
    """Tell whether a model caches nothing but keys and values of single tokens (`keeps_plain_keys`), and these depend
    only on the tokens up to theirs, however long the sequence gets."""
    # The rotary settings are one dict, or a dict for each kind of layer; {} for a model without any.
    by_layer = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    ropes = [by_layer, *(entry for entry in by_layer.values() if isinstance(entry, dict))]
    return (
        not any(rope.get("rope_type") in _ROPES_BY_LENGTH for rope in ropes)
        and not getattr(model, "_is_stateful", False)  # a model with a state beside keys and values
        and keeps_plain_keys(model.config)
    )


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a causal language model below the head, final norm included.

    Raises:
        ModelError: the model has no base model.
    """
    body = model.base_model
    if body is model or not isinstance(body, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is no causal language model with a head over a base model")
    return body


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """Return the head: weight [V, H], possibly a bias [V].

    Raises:
        ModelError: the model has no linear head.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear output layer ({type(layer).__name__}); take a causal language model"
        )
    return layer


def widen_head(model: PreTrainedModel, rounded_to: torch.dtype | None = None) -> None:
    """Let the output layer multiply in float32, in place, whatever the weights' dtype and autocast; its weight stays
    the same parameter.

    Args:
        rounded_to: dtype to which weight and bias are rounded before they are widened; None: they are not rounded.

    Raises:
        ModelError: as `output_layer`; or the output layer cannot be replaced.
    """
    model.set_output_embeddings(Fp32Linear.of(output_layer(model), rounded_to))
    if not isinstance(output_layer(model), Fp32Linear):
        raise ModelError(f"the output layer of {type(model).__name__} cannot be replaced; leave head_dtype out")


def cut_head(model: PreTrainedModel, rows: int) -> None:
    """Let the model give logits to the first `rows` token ids only, in place; a model with fewer ids does not change.

    The output layer then uses only so many rows of its weight, which stays the same parameter, whole.

    Raises:
        ModelError: as `output_layer`.
    """
    layer = output_layer(model)
    if rows >= layer.out_features:
        return
    if not isinstance(layer, CutLinear):
        layer = CutLinear.of(layer)
        model.set_output_embeddings(layer)
    layer.out_features = rows


def logit_softcap(model: PreTrainedModel) -> float | None:
    """Return c of a model whose logits are c * tanh(head(hidden) / c), such as Gemma 2; None for other models."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute logits before the temperature, [..., H] -> [..., V] float32; they are large: pass few rows at a time."""
    logits = output_layer(model)(hidden).float()
    cap = logit_softcap(model)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Check on two tokens that `head_logits` of the backbone equals the model's own logits.

    Some architectures compute more: Granite and Cohere scale their logits, BERT transforms the hidden states.

    Raises:
        ModelError: the logits differ.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    from_hidden = head_logits(model, backbone(model)(input_ids=ids, use_cache=False).last_hidden_state)
    tolerance = 0.02 * logits.abs().max().item()  # more than bfloat16 rounds, less than a logit scale changes
    # NaN in both is no difference: it tells nothing of what lies between hidden states and logits.
    if not torch.allclose(from_hidden, logits, rtol=0.0, atol=tolerance, equal_nan=True):
        raise ModelError(
            f"{type(model).__name__} computes more than its output layer between hidden states and logits, which is "
            "not supported; take a model that does not, such as Qwen, Llama, Mistral or Gemma"
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only the input of every layer, and recompute its activations in backward.

    `gradient_checkpointing_enable` of transformers works in training mode only, which also turns dropout on. Here the
    model stays in eval mode, and the second pass is bit-equal to the first. The method is still called, so that
    `is_gradient_checkpointing` is True.

    Raises:
        ModelError: the model has no layers that transformers can checkpoint.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers whose activations can be checkpointed; set "
            f"activation_checkpointing: false, and lower batch.micro_batch_tokens to save memory"
        )

    model.gradient_checkpointing_enable()
    config = model.config.get_text_config()
    # The second forward pass, in backward, uses the attention of the first, though the config may name another by then.
    # `context_fn` gives a context for each of the two passes.
    for layer in layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), AttentionSet(config, config._attn_implementation)),
        )
