"""A model of transformers reads what somebody wrote, in one forward pass over whole responses.

That is what training does. Any settings of the transformers engine serve: dtype, attention, quantised linear layers, an
FP8 cache. Log-probs are taken in float64 from float32 logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.analysis.responses import Response
from jackpot.analysis.responses import batches as response_batches
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import DataError
from jackpot.core.types import Rollout
from jackpot.launch.engines import DTYPES
from jackpot.models.forward import head_logits, output_layer, pad_tokens, predicting_hidden, read_rollouts
from jackpot.models.load import load_model, load_tokenizer
from jackpot.rollout.engines.transformers.attention import use_attention
from jackpot.rollout.engines.transformers.weights import HeldWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The learner's side of one response; a learner that only scores gives log-probs alone."""

    log_probs: Tensor  # [T] log q of the same tokens
    top_log_probs: Tensor | None = None  # [T, K] log q at the sampler's `top_ids`
    lowest: Tensor | None = None  # [T] the smallest log q outside `top_ids`; inf where nothing is outside
    entropy: Tensor | None = None  # [T] of q over the whole vocabulary, nats


_FORWARD_TOKENS = 8_192  # in one forward pass, padding included


def batches(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    """In their order, at most `_FORWARD_TOKENS` tokens with padding, one rollout at least."""
    batch: list[Rollout] = []
    prompt = response = 0
    for rollout in rollouts:
        prompt = max(prompt, len(rollout.prompt.token_ids))
        response = max(response, len(rollout.token_ids))
        if batch and (len(batch) + 1) * (prompt + response) > _FORWARD_TOKENS:
            yield batch
            batch, prompt, response = [], len(rollout.prompt.token_ids), len(rollout.token_ids)
        batch.append(rollout)
    if batch:
        yield batch


_CHUNK_ELEMENTS = 2**21  # of [tokens, V] in float64: 16 MiB a tensor


def reading_model(settings: TransformersEngineConfig, path: str, device: torch.device) -> PreTrainedModel:
    """The model as the engine with these settings would hold it.

    Raises:
        ModelError, EngineError: as `load_model`, `use_attention`, `HeldWeights`.
    """
    model = load_model(path, DTYPES[settings.dtype], device)
    use_attention(model, settings.attn_implementation, fp8_cache=settings.kv_cache_dtype is not None)
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


_LOGITS = 2**22  # in memory at once


class Scorer:
    """Log-probs of one model.

    Args:
        path: as `load_model` takes it.
        temperature: of the sampling.

    Raises:
        ModelError, DataError: a model or tokenizer that cannot be read.
    """

    def __init__(self, path: str | Path, temperature: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: PreTrainedModel = load_model(path, torch.float32, device)
        self._vocabulary = output_layer(self._model).out_features
        self._tokenizer = load_tokenizer(path)
        self._temperature = temperature

    def score(self, responses: Sequence[Response]) -> list[Response]:
        """The same responses with this model as the policy, old and new: at sampled tokens and at the engine's lists.

        Raises:
            DataError: no prompt, or token ids that the model does not have.
        """
        for response in responses:
            self._check(response)
        return [scored for part in response_batches(responses, with_prompts=True) for scored in self._score(part)]

    @torch.no_grad()
    def _score(self, responses: Sequence[Response]) -> list[Response]:
        """Of so many as are read at once."""
        rows: dict[tuple[int, ...], int] = {}
        index = [rows.setdefault(tuple(one.prompt_ids.tolist()), len(rows)) for one in responses]
        device = self._model.device
        prompts, prompt_mask = pad_tokens(list(rows), "left", device)
        ids, mask = pad_tokens([one.token_ids.tolist() for one in responses], "right", device)
        hidden = predicting_hidden(self._model, prompts, prompt_mask, torch.tensor(index, device=device), ids, mask)
        lists = [self._wanted(one) for one in responses]
        width = max(wanted.shape[1] for wanted in lists)
        wanted = pad_sequence([_widened(one, width) for one in lists], batch_first=True).to(device)[mask]
        step = max(1, _LOGITS // self._vocabulary)
        parts = zip(hidden[mask].split(step), wanted.split(step), strict=True)
        found = torch.cat([self._log_probs(states).gather(1, some) for states, some in parts]).cpu()
        lengths = [len(one.token_ids) for one in responses]
        return [self._scored(one, row) for one, row in zip(responses, found.split(lengths), strict=True)]

    def _scored(self, response: Response, found: Tensor) -> Response:
        """found: [T, 1 + K], and more where another response's list is longer."""
        lists = None if response.rollout_top_ids is None else found[:, 1 : 1 + response.rollout_top_ids.shape[1]]
        return replace(
            response,
            old_log_probs=found[:, 0],
            log_probs=found[:, 0],
            policy_top_ids=response.rollout_top_ids,
            policy_top_log_probs=lists,
            tokens=response.tokens or tuple(self._tokenizer.decode([token]) for token in response.token_ids.tolist()),
        )

    def _wanted(self, response: Response) -> Tensor:
        """[T, 1 + K]: the sampled token, and the engine's list."""
        sampled = response.token_ids[:, None]
        if response.rollout_top_ids is None:
            return sampled
        return torch.cat([sampled, response.rollout_top_ids], dim=1)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(head_logits(self._model, hidden).double() / self._temperature, dim=-1)

    def _check(self, response: Response) -> None:
        if response.prompt_ids is None or not len(response.prompt_ids):
            raise DataError(
                f"{response.where} has no prompt_ids, without which a model cannot read the response {response.uid}; "
                f"write them too, or write old_log_probs and leave out --model"
            )
        lists = [] if response.rollout_top_ids is None else [response.rollout_top_ids.flatten()]
        ids = torch.cat([response.token_ids, response.prompt_ids, *lists])
        outside = ids[(ids < 0) | (ids >= self._vocabulary)]
        if len(outside):
            raise DataError(
                f"{response.where}: token id {int(outside[0])} in {response.uid} or its lists, but --model has "
                f"{self._vocabulary} tokens, from 0; give the model that was trained, with its tokenizer"
            )


def _widened(ids: Tensor, width: int) -> Tensor:
    """[T, width], with zeros that nobody reads."""
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
