"""A model that scores saved responses; its log-probs take the place of the policy's saved ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from jackpot.analysis.replay.responses import BATCH_TOKENS, SavedResponse
from jackpot.core.errors import DataError
from jackpot.models.device import pick_device
from jackpot.models.forward import output_layer
from jackpot.models.load import load_model
from jackpot.models.packing import pack
from jackpot.models.scoring import exact_log_probs, forward_responses


class PolicyScorer:
    """A model that computes log-probs of saved responses, in float32 with the softmax in float64.

    Args:
        path: path of the model, as `load_model` takes it.
        temperature: temperature at which the responses were sampled.

    Raises:
        ModelError: the model cannot be read.
    """

    def __init__(self, path: str | Path, temperature: float) -> None:
        self._model = load_model(path, torch.float32, pick_device("auto"))
        self._vocabulary = output_layer(self._model).out_features
        self.path, self.temperature = path, temperature

    def score(self, responses: Sequence[SavedResponse]) -> list[SavedResponse]:
        """Return the responses with this model's log-probs in place of those of the old and of the updated policy.

        The model scores the responses' tokens and, for the policy's top-k list, the tokens of the engine's list.

        Raises:
            DataError: a response without a prompt, or with token ids that the model does not have.
        """
        pairs = [(self._checked_prompt(response), response) for response in responses]
        # A pair's numbers of prompt and response tokens decide which pairs share a forward pass.
        batches = pack(pairs, BATCH_TOKENS, lambda pair: (len(pair[0]), len(pair[1].token_ids)))
        return [scored for batch in batches for scored in self._score(batch)]

    def _checked_prompt(self, response: SavedResponse) -> list[int]:
        """Return the token ids of a response's prompt; raise DataError for a response that the model cannot score."""
        if response.prompt_ids is None or not len(response.prompt_ids):
            raise DataError(
                f"{response.where} has no prompt_ids, which a model needs to score the response {response.uid}; "
                f"write them too, or write old_log_probs and leave out --model"
            )

        ids = torch.cat([response.prompt_ids, _ids_to_score(response).flatten()])
        outside = ids[(ids < 0) | (ids >= self._vocabulary)]
        if len(outside):
            raise DataError(
                f"{response.where}: token id {int(outside[0])} in {response.uid} or its lists, but --model has "
                f"{self._vocabulary} tokens, from 0; give the model that was trained, with its tokenizer"
            )
        return response.prompt_ids.tolist()

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], SavedResponse]]) -> list[SavedResponse]:
        """Score the responses of some pairs (token ids of the prompt, response) in one forward pass."""
        tokens = [response.token_ids.tolist() for _, response in pairs]
        prompts = [prompt for prompt, _ in pairs]
        hidden, _, mask = forward_responses(self._model, prompts, tokens)  # the mask is False on padding

        # The ids to score at each token, [tokens, 1 + K], where shorter lists are padded to the longest list.
        lists = [_ids_to_score(response) for _, response in pairs]
        width = max(ids.shape[1] for ids in lists)
        padded = [pad(ids, (0, width - ids.shape[1])) for ids in lists]
        ids = pad_sequence(padded, batch_first=True).to(mask.device)[mask]

        # Chunks of n tokens: log-probs of the whole vocabulary [n, V], of which those of the ids [n, 1 + K] are taken.
        chunks = exact_log_probs(self._model, self.temperature, hidden[mask], ids)
        log_probs = torch.cat([log_probs.gather(1, chunk_ids) for log_probs, chunk_ids in chunks]).cpu()
        by_response = log_probs.split([len(response_tokens) for response_tokens in tokens])

        # Column 0 is of the response's own tokens, the next of the engine's list, and those beyond are padding.
        return [
            replace(
                response,
                old_log_probs=scores[:, 0],
                log_probs=scores[:, 0],
                policy_top_ids=response.rollout_top_ids,
                policy_top_log_probs=None if response.rollout_top_ids is None else scores[:, 1 : own_ids.shape[1]],
            )
            for (_, response), own_ids, scores in zip(pairs, lists, by_response, strict=True)
        ]


def _ids_to_score(response: SavedResponse) -> Tensor:
    """Return the token ids to score at each token of a response, [T, 1 + K]: the token, and the engine's top-k list."""
    lists = [] if response.rollout_top_ids is None else [response.rollout_top_ids]
    return torch.cat([response.token_ids[:, None], *lists], dim=1)
