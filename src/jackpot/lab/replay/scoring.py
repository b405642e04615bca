"""A policy that reads saved responses: its log-probs where the file has none, or those of another model. Layer 6."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.errors import DataError
from jackpot.lab.replay.responses import Response, batches
from jackpot.models.forward import head_logits, output_layer, pad_tokens, predicting_hidden
from jackpot.models.load import load_model, load_tokenizer

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
        return [scored for part in batches(responses, with_prompts=True) for scored in self._score(part)]

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
