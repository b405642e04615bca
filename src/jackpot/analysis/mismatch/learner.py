"""The learner's side of a comparison: the scores that a transformers model gives to an engine's responses.

The model reads whole responses in one forward pass, as in training, with any settings of the transformers engine:
dtype, attention, quantized linear layers, an FP8 cache. Log-probs are taken in float64 from float32 logits.

Shapes: `T` response tokens, `K` tokens whose sampler's probability is known.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.types import Rollout
from jackpot.models.forward import cut_head
from jackpot.models.load import DTYPES, load_model
from jackpot.models.packing import FORWARD_TOKENS, pack, rollout_lengths
from jackpot.models.routing import expert_layers, recorded_experts
from jackpot.models.scoring import exact_log_probs, forward_rollouts
from jackpot.rollout.engines.transformers.attention import set_engine_attention
from jackpot.rollout.engines.transformers.weights import ModelWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerScores:
    """The scores that the learner gives to one response, from its distribution q of each next token.

    A learner whose engine scores single tokens only has `log_probs` alone, and its other fields are None. Log-probs and
    entropy are in nats.
    """

    log_probs: Tensor  # [T] log q of the response's tokens
    top_log_probs: Tensor | None = None  # [T, K] log q at the sampler's `top_ids`
    lowest: Tensor | None = None  # [T] smallest log q outside of `top_ids`; inf where no token is outside
    entropy: Tensor | None = None  # [T] entropy of q over the whole vocabulary
    most_probable: Tensor | None = None  # [T] int64, the token of the largest q
    experts: Tensor | None = None  # [T, layers, experts of a token] int64, ids; None: no experts, or not known


def learner_model(
    settings: TransformersEngineConfig, path: str, device: torch.device, rows: int | None = None
) -> PreTrainedModel:
    """Load a model just as the transformers engine with these settings holds it.

    Args:
        settings: settings of the engine.
        path: path of the model.
        device: device that the model is loaded to.
        rows: the model is read over the token ids below `rows` only; None: over all ids.

    Raises:
        ModelError, EngineError: as `load_model`, `set_engine_attention`, `ModelWeights`.
    """
    model = load_model(path, DTYPES[settings.dtype], device)
    if rows is not None:
        cut_head(model, rows)
    set_engine_attention(model, settings)
    ModelWeights(model, settings)  # quantizes the model in place
    return model.eval()


@torch.no_grad()
def learner_scores(
    model: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float, autocast: torch.dtype | None = None
) -> Iterator[LearnerScores]:
    """Yield the model's scores of each rollout, in their order; `top_log_probs` are those at the rollout's `top_ids`.

    A mixture of experts runs over one rollout at a time, so that its experts are recorded token by token.

    Args:
        model: the learner.
        rollouts: responses with the sampler's top-k lists.
        temperature: temperature of the learner's log-probs.
        autocast: dtype of backbone and head, as with `precision` in training; None: the weights' own dtype.
    """
    is_dense = not expert_layers(model)
    batches = pack(rollouts, FORWARD_TOKENS, rollout_lengths) if is_dense else ([rollout] for rollout in rollouts)
    with recorded_experts(model) as newest_experts:
        for batch in batches:
            with nullcontext() if autocast is None else torch.autocast(model.device.type, autocast):
                hidden, ids, mask = forward_rollouts(model, batch)
                top_ids = torch.cat([rollout.top_ids for rollout in batch]).to(model.device)
                chunks = exact_log_probs(model, temperature, hidden[mask], ids[mask], top_ids)
                # The fields of `LearnerScores` but `experts`, in their order, each for all tokens of the batch.
                columns = [torch.cat(pieces).cpu() for pieces in zip(*starmap(_columns, chunks), strict=True)]

            # Every field is cut into the responses of the batch. Experts are recorded for prompt and response of a
            # single rollout, of which the last rows are the response.
            experts = newest_experts()
            lengths = [len(rollout.token_ids) for rollout in batch]
            for log_probs, top_log_probs, lowest, entropy, most_probable in zip(
                *(column.split(lengths) for column in columns), strict=True
            ):
                yield LearnerScores(
                    log_probs=log_probs,
                    top_log_probs=top_log_probs,
                    lowest=lowest,
                    entropy=entropy,
                    most_probable=most_probable,
                    experts=None if experts is None else experts[-len(log_probs) :].cpu(),
                )


def _columns(log_probs: Tensor, ids: Tensor, top_ids: Tensor) -> tuple[Tensor, ...]:
    """Compute all fields of `LearnerScores` but `experts` from the learner's whole distributions at n tokens.

    Args:
        log_probs: [n, V] log q.
        ids: [n] ids of the response's tokens.
        top_ids: [n, K] tokens of the sampler's list.

    Returns:
        The fields in their order: log q of the tokens [n], log q at the top ids [n, K], the smallest log q elsewhere
        [n], the entropy [n], and the most probable token [n].
    """
    entropy = -torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0).sum(-1)
    lowest = log_probs.scatter(1, top_ids, torch.inf).amin(-1)  # inf, so that no token of the list is the smallest
    at_ids = log_probs.gather(1, ids[:, None])[:, 0]
    return at_ids, log_probs.gather(1, top_ids), lowest, entropy, log_probs.argmax(-1)
