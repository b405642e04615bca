"""Score saved responses with a model: its log-probs take the policy's place in a replay."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.analysis.replay.responses import SavedResponse, response_batches
from jackpot.core.errors import DataError
from jackpot.models.forward import output_layer
from jackpot.models.load import load_model, load_tokenizer
from jackpot.models.scoring import exact_log_probs, forward_responses


class PolicyScorer:
    """Computes log-probs of saved responses with one model, in float32 with the softmax in float64.

    Args:
        path: of the model, as `load_model` takes it.
        temperature: that the responses were sampled at.

    Raises:
        ModelError, DataError: a model or tokenizer that cannot be read.
    """

    def __init__(self, path: str | Path, temperature: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: PreTrainedModel = load_model(path, torch.float32, device)
        self._vocabulary = output_layer(self._model).out_features
        self._tokenizer = load_tokenizer(path)
        self._temperature = temperature

    def score(self, responses: Sequence[SavedResponse]) -> list[SavedResponse]:
        """Return the responses with this model as old and new policy, at their tokens and at the engine's top-k lists.

        Raises:
            DataError: no prompt, or token ids that the model does not have.
        """
        for response in responses:
            self._check(response)
        return [scored for part in response_batches(responses, with_prompts=True) for scored in self._score(part)]

    @torch.no_grad()
    def _score(self, responses: Sequence[SavedResponse]) -> list[SavedResponse]:
        """Score the responses of one forward pass."""
        prompts = [one.prompt_ids.tolist() for one in responses]
        hidden, _, mask = forward_responses(self._model, prompts, [one.token_ids.tolist() for one in responses])
        lists = [self._wanted(one) for one in responses]
        width = max(wanted.shape[1] for wanted in lists)
        padded = [torch.nn.functional.pad(wanted, (0, width - wanted.shape[1])) for wanted in lists]
        ids = pad_sequence(padded, batch_first=True).to(mask.device)[mask]
        parts = exact_log_probs(self._model, self._temperature, hidden[mask], ids)
        found = torch.cat([log_probs.gather(1, wanted) for log_probs, wanted in parts]).cpu()
        lengths = [len(one.token_ids) for one in responses]
        return [self._scored(one, row) for one, row in zip(responses, found.split(lengths), strict=True)]

    def _scored(self, response: SavedResponse, found: Tensor) -> SavedResponse:
        """Put the log-probs `found` [T, 1 + K] into the response; columns beyond its own K are padding."""
        lists = None if response.rollout_top_ids is None else found[:, 1 : 1 + response.rollout_top_ids.shape[1]]
        return replace(
            response,
            old_log_probs=found[:, 0],
            log_probs=found[:, 0],
            policy_top_ids=response.rollout_top_ids,
            policy_top_log_probs=lists,
            tokens=response.tokens or tuple(self._tokenizer.decode([token]) for token in response.token_ids.tolist()),
        )

    def _wanted(self, response: SavedResponse) -> Tensor:
        """Return the ids that are scored, [T, 1 + K]: the sampled token and the engine's top-k list."""
        sampled = response.token_ids[:, None]
        if response.rollout_top_ids is None:
            return sampled
        return torch.cat([sampled, response.rollout_top_ids], dim=1)

    def _check(self, response: SavedResponse) -> None:
        if response.prompt_ids is None or not len(response.prompt_ids):
            raise DataError(
                f"{response.where} has no prompt_ids, which a model needs to score the response {response.uid}; "
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
