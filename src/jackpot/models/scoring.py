"""Log-probs of the tokens of given responses, from one forward pass over prompt and response.

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

MAX_LOGITS = 2**22  # logits in memory at once: 16 MiB in float32, 32 MiB in float64; several times that with top-p


class ResponseForward(NamedTuple):
    """The result of a model's forward pass over some responses."""

    hidden: Tensor  # [B, T, H], the state that predicts each token, as in `predicting_hidden`
    token_ids: Tensor  # [B, T] int64, padded on the right
    mask: Tensor  # [B, T] bool, False on padding


def forward_responses(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> ResponseForward:
    """Run the model over prompts with their responses, as token ids, and return the states that predict the responses.

    Equal prompts are read once where the model allows it.

    Raises:
        DataError: an empty prompt.
    """
    distinct, index = unique_rows(prompts)  # the distinct prompts, and which of them each response has
    prompt_ids, prompt_mask = pad_tokens(distinct, "left", model.device)
    ids, mask = pad_tokens(responses, "right", model.device)
    prompt_index = upload(torch.tensor(index), model.device)
    hidden = predicting_hidden(model, prompt_ids, prompt_mask, prompt_index, ids, mask)
    return ResponseForward(hidden=hidden, token_ids=ids, mask=mask)


def forward_rollouts(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> ResponseForward:
    """Run the model over prompts and responses of rollouts, tools' tokens too; return states, token ids and mask."""
    prompts = [rollout.prompt.token_ids for rollout in rollouts]
    return forward_responses(model, prompts, [rollout.token_ids.tolist() for rollout in rollouts])


def token_log_probs(
    model: PreTrainedModel, hidden: Tensor, token_ids: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Return the log-probs of given tokens at each position, in the distribution that is sampled from.

    They are computed as those of drawn tokens are (`sampling.log_probs_at`): float32, in the shape of `token_ids`.

    Args:
        hidden: [N, H] states that predict the tokens.
        token_ids: [N] or [N, G] int64, one token or G tokens at each position.
        temperature, top_k, top_p: as in `sampling_log_probs`.
    """
    chunks = [
        # The ids of n positions as [n, G], with G = 1 where `token_ids` is [N].
        log_probs_at(logits, ids.unsqueeze(-1).flatten(1), temperature=temperature, top_k=top_k, top_p=top_p)
        for logits, ids in logit_chunks(model, hidden, token_ids)
    ]
    return torch.cat(chunks).view_as(token_ids)


def list_log_probs(model: PreTrainedModel, batch: TokenBatch, sampling: Sampling) -> Tensor:
    """Return the model's log-probs of a batch's tokens, and of the engine's top-k lists at each token.

    Returns:
        [B, T, 1 + K] float32, 0 where padded; the first column is of the token itself.
    """
    token_lists = torch.cat([batch.response_ids[..., None], batch.top_ids], dim=-1)  # [B, T, 1 + K]
    present = batch.attention_mask.flatten().nonzero()[:, 0]  # the only wait for a GPU
    ids = token_lists.flatten(0, 1).index_select(0, present)  # [N, 1 + K]
    hidden = token_hidden(model, batch, present)
    log_probs = token_log_probs(model, hidden, ids, sampling.temperature, sampling.top_k, sampling.top_p)
    of_all = log_probs.new_zeros(token_lists.flatten(0, 1).shape)  # [B * T, 1 + K], 0 where padded
    return of_all.index_copy(0, present, log_probs).view(token_lists.shape)


def exact_log_probs(
    model: PreTrainedModel, temperature: float, hidden: Tensor, *columns: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield for n positions at a time the log-probs of all V tokens, [n, V] float64, and their rows of `columns`.

    The softmax of the float32 logits is taken in float64, so that its rounding does not show in divergences.

    Args:
        hidden: [N, H] states that predict the tokens.
        columns: [N, ...] each, in any number.
    """
    for logits, *rows in logit_chunks(model, hidden, *columns):
        yield torch.log_softmax(logits.double() / temperature, dim=-1), *rows


def logit_chunks(model: PreTrainedModel, hidden: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield for n positions at a time their logits before the temperature, [n, V] float32, and their rows of `columns`.

    Args:
        hidden: [N, H] states that predict the tokens.
        columns: [N, ...] each, in any number.
    """
    size = max(1, MAX_LOGITS // output_layer(model).out_features)
    for states, *rows in zip(*(tensor.split(size) for tensor in (hidden, *columns)), strict=True):
        yield head_logits(model, states), *rows
