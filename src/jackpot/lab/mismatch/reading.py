"""A model of transformers reads what somebody wrote, in one forward pass over whole responses. Layer 6.

That is what training does. Any settings of the transformers engine serve: dtype, attention, quantised linear layers, an
FP8 cache. Log-probs are taken in float64 from float32 logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config_engines import TransformersEngineConfig
from jackpot.engines.attention import use_attention
from jackpot.engines.held_weights import HeldWeights
from jackpot.lab.mismatch.tokens import Reading
from jackpot.lab.simulate.pairs import batches
from jackpot.launch.engines import DTYPES
from jackpot.models.forward import head_logits, output_layer, read_rollouts
from jackpot.models.load import load_model
from jackpot.types import Rollout

_CHUNK_ELEMENTS = 2**21  # of [tokens, V] in float64: 16 MiB a tensor


def reading_model(settings: TransformersEngineConfig, path: str, device: torch.device) -> PreTrainedModel:
    """The model as the engine with these settings would hold it.

    Raises:
        ModelError, EngineError: as `load_model`, `use_attention`, `HeldWeights`.
    """
    model = load_model(path, DTYPES[settings.dtype], device)
    use_attention(model, settings.attention, fp8_cache=settings.kv_cache_dtype is not None)
    HeldWeights(model, settings.quantization)  # which quantises it
    return model.eval()


@torch.no_grad()
def read(
    model: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float, autocast: torch.dtype | None = None
) -> Iterator[Reading]:
    """What the model says of each rollout, in their order, at the `top_ids` that the rollout has.

    Args:
        autocast: of the backbone and the head, as `precision` in training; None: the weights' own dtype.
    """
    rows = max(1, _CHUNK_ELEMENTS // output_layer(model).out_features)
    for batch in batches(rollouts):
        casting = nullcontext() if autocast is None else torch.autocast(model.device.type, autocast)
        with casting:
            hidden, ids, mask = read_rollouts(model, batch)
            flat, targets = hidden[mask], ids[mask]
            tops = torch.cat([rollout.top_ids for rollout in batch]).to(model.device)
            parts = [
                _read(head_logits(model, states), tokens, top, temperature)
                for states, tokens, top in zip(flat.split(rows), targets.split(rows), tops.split(rows), strict=True)
            ]
        lengths = [len(rollout.token_ids) for rollout in batch]
        columns = [torch.cat(column).cpu().split(lengths) for column in zip(*parts, strict=True)]
        for log_probs, top, lowest, entropy in zip(*columns, strict=True):
            yield Reading(log_probs=log_probs, top_log_probs=top, lowest=lowest, entropy=entropy)


def _read(logits: Tensor, tokens: Tensor, top_ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Of logits [n, V]: log-probs of the tokens [n], at the top ids [n, K], the smallest elsewhere [n], entropy [n]."""
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    entropy = -torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0).sum(-1)
    lowest = log_probs.scatter(1, top_ids, torch.inf).amin(-1)
    return log_probs.gather(1, tokens[:, None])[:, 0], log_probs.gather(1, top_ids), lowest, entropy
