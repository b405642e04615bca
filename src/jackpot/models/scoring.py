"""Score given responses: log-probs of their tokens from one forward pass over prompt and response.

The head sees a few positions at a time, so that logits [N, V] of all of them are never in memory at once.

Shapes: `B` responses of up to `T` tokens, `N` of their tokens, `H` hidden size, `V` vocabulary. Log-probs are in nats.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.sampling import Sampling
from jackpot.core.types import Rollout, TokenBatch, unique_rows
from jackpot.models.device import upload
from jackpot.models.forward import head_logits, output_layer, pad_tokens, predicting_hidden, token_hidden
from jackpot.models.sampling import log_probs_at

MAX_LOGITS = 2**22  # logits in memory at once: 16 MiB in float32, 32 MiB in float64, several times that with filters


class ResponseForward(NamedTuple):
    """The forward pass of a model over some responses."""

    hidden: Tensor  # [B, T, H], the states that predict each token, as in `predicting_hidden`
    token_ids: Tensor  # [B, T] int64, padded on the right
    mask: Tensor  # [B, T] bool, False on padding


def forward_responses(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> ResponseForward:
    """Run the model over responses behind their prompts, given as token ids; equal prompts are read once if possible.

    Raises:
        DataError: an empty prompt.
    """
    rows, index = unique_rows(prompts)
    prompt_ids, prompt_mask = pad_tokens(rows, "left", model.device)
    ids, mask = pad_tokens(responses, "right", model.device)
    prompt_index = upload(torch.tensor(index), model.device)
    return ResponseForward(predicting_hidden(model, prompt_ids, prompt_mask, prompt_index, ids, mask), ids, mask)


def forward_rollouts(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> ResponseForward:
    """Run the model over rollouts, a tool's tokens included."""
    prompts = [rollout.prompt.token_ids for rollout in rollouts]
    return forward_responses(model, prompts, [rollout.token_ids.tolist() for rollout in rollouts])


def token_log_probs(
    model: PreTrainedModel, hidden: Tensor, token_ids: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Return the log-probs of given tokens at each position, in the distribution that is sampled from, by the formula
    of a draw (`sampling.log_probs_at`).

    They are float32, in the shape of `token_ids`.

    Args:
        hidden: [N, H] states that predict the tokens.
        token_ids: [N] or [N, G] int64.
        temperature, top_k, top_p: as in `sampling_log_probs`.
    """
    parts = [
        log_probs_at(logits, ids.unsqueeze(-1).flatten(1), temperature=temperature, top_k=top_k, top_p=top_p)
        for logits, ids in logit_chunks(model, hidden, token_ids)
    ]
    return torch.cat(parts).view_as(token_ids)


def list_log_probs(model: PreTrainedModel, batch: TokenBatch, sampling: Sampling) -> Tensor:
    """Return what the model says of the tokens and of the engine's lists of a batch: [B, T, 1 + K] float32, 0 where
    padded; the sampled token first. Arguments as in `token_log_probs`."""
    every = torch.cat([batch.response_ids[..., None], batch.top_ids], dim=-1)  # [B, T, 1 + K]
    exist = batch.attention_mask.flatten().nonzero()[:, 0]  # the only wait for a GPU
    ids = every.flatten(0, 1).index_select(0, exist)  # [N, 1 + K]
    hidden = token_hidden(model, batch, exist)
    log_probs = token_log_probs(model, hidden, ids, sampling.temperature, sampling.top_k, sampling.top_p)
    return log_probs.new_zeros(every.flatten(0, 1).shape).index_copy(0, exist, log_probs).view(every.shape)


def exact_log_probs(
    model: PreTrainedModel, temperature: float, hidden: Tensor, *columns: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield whole distributions of a few positions at a time, [n, V] float64, each with those rows of every column.

    The softmax of the float32 logits is taken in float64, so that its rounding does not show in divergences.

    Args:
        hidden: [N, H] states that predict the tokens.
        columns: [N, ...] each.
    """
    for logits, *rows in logit_chunks(model, hidden, *columns):
        yield torch.log_softmax(logits.double() / temperature, dim=-1), *rows


def logit_chunks(model: PreTrainedModel, hidden: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield logits of a few positions at a time, [n, V] float32 before the temperature, each with those rows of every
    column.

    Args:
        hidden: [N, H].
        columns: [N, ...] each.
    """
    size = max(1, MAX_LOGITS // output_layer(model).out_features)
    for states, *rows in zip(*(tensor.split(size) for tensor in (hidden, *columns)), strict=True):
        yield head_logits(model, states), *rows
