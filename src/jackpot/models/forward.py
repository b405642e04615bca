"""From token ids to the hidden states that the head turns into log-probs. Layer 3.

Hidden states and head are taken apart here so that nobody above needs logits [B, T, V] in memory. Engine and learner
use the same parts; in fp32 their numbers agree to rounding, in bf16 the engine rounds what the learner keeps.

Shapes: `U` unique prompts of `P` tokens, `B` sequences, `T` response tokens, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from jackpot.errors import DataError, ModelError
from jackpot.types import TokenBatch

Side = Literal["left", "right"]


class Sequences(NamedTuple):
    """Prompts and responses side by side, as a model takes them."""

    input_ids: Tensor  # [B, P + T] int64, 0 where nothing is
    attention_mask: Tensor  # [B, P + T] bool
    position_ids: Tensor  # [B, P + T] int64, counted from the first token that exists


def full_sequences(
    prompt_ids: Tensor, prompt_mask: Tensor, prompt_index: Tensor, response_ids: Tensor, response_mask: Tensor
) -> Sequences:
    """Put each response behind its prompt.

    Args:
        prompt_ids, prompt_mask: [U, P], padded on the left.
        prompt_index: [B], the row of the prompt of each response.
        response_ids, response_mask: [B, T], padded on the right; the mask tells which tokens exist.

    Raises:
        DataError: a prompt that is empty or padded on the right, so that no token precedes the response.
    """
    if not prompt_mask[:, -1].all():
        rows = (~prompt_mask[:, -1].bool()).nonzero().flatten().tolist()
        raise DataError(f"prompts {rows[:5]} are empty or padded on the right; pad prompts on the left, [U, P]")
    mask = torch.cat([prompt_mask[prompt_index], response_mask], dim=1).bool()
    ids = torch.cat([prompt_ids[prompt_index], response_ids], dim=1)
    return Sequences(torch.where(mask, ids, 0), mask, position_ids(mask))


def pad_tokens(rows: Sequence[Sequence[int]], side: Side, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] int64 with zeros as padding on one side, and the mask [B, S] bool of those that exist."""
    width = max(map(len, rows))
    gaps = [[0] * (width - len(row)) for row in rows]
    padded = [[*gap, *row] if side == "left" else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)]
    lengths, columns = torch.tensor([[len(row)] for row in rows]), torch.arange(width)
    mask = columns >= width - lengths if side == "left" else columns < lengths
    return torch.tensor(padded, dtype=torch.int64).to(device), mask.to(device)


def position_ids(attention_mask: Tensor) -> Tensor:
    """The position of every token among those that exist, [B, S] int64; 0 on the padding before the first."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def response_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """The hidden states that predict each response token: after the final norm, before the head. [B, T, H]

    Entry t comes from the position before response token t, so entry 0 comes from the last token of the prompt. Values
    where `batch.attention_mask` is False mean nothing. Carries gradient.
    """
    return last_hidden(model, batch_sequences(batch), batch.response_ids.shape[1])


def batch_sequences(batch: TokenBatch) -> Sequences:
    """Every prompt with its response, a tool's tokens too."""
    return full_sequences(
        batch.prompt_ids, batch.prompt_mask, batch.prompt_index, batch.response_ids, batch.attention_mask
    )


def last_hidden(model: PreTrainedModel, sequences: Sequences, num_response: int) -> Tensor:
    """The hidden states that predict the last `num_response` columns of `sequences`: [B, T, H]."""
    output = backbone(model)(
        input_ids=sequences.input_ids,
        attention_mask=sequences.attention_mask,
        position_ids=sequences.position_ids,
        use_cache=False,
    )
    return output.last_hidden_state[:, -num_response - 1 : -1]


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model below the head, final norm included.

    Raises:
        ModelError: the model has no such part of its own.
    """
    if model.base_model is model:
        raise ModelError(f"{type(model).__name__} is no causal language model with a head over a base model")
    return model.base_model


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The head: weight [V, H], perhaps a bias [V].

    Raises:
        ModelError: the model has no linear head.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear output layer ({type(layer).__name__}); take a causal language model"
        )
    return layer


def logit_softcap(model: PreTrainedModel) -> float | None:
    """`c` where the model computes logits as c * tanh(head(hidden) / c), as Gemma 2 does; None where it does not."""
    return getattr(_text_config(model), "final_logit_softcapping", None)


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of some hidden states, [..., H] -> [..., V] float32, before the temperature. Mind the memory: few rows."""
    logits = output_layer(model)(hidden).float()
    cap = logit_softcap(model)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Make sure that `head_logits` of the backbone is what the model itself computes, on two tokens.

    Some architectures do more: Granite and Cohere scale their logits, BERT transforms the hidden states.

    Raises:
        ModelError: it is not.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    ours = head_logits(model, backbone(model)(input_ids=ids, use_cache=False).last_hidden_state)
    tolerance = 0.02 * logits.abs().max().item()  # above the rounding of bfloat16, below any scale in use
    if not torch.allclose(ours, logits, rtol=0.0, atol=tolerance, equal_nan=True):
        raise ModelError(
            f"{type(model).__name__} computes more than its output layer between hidden states and logits, which is "
            "not supported; take a model that does not, such as Qwen, Llama, Mistral or Gemma"
        )


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config()
