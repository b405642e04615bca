"""A policy that reads saved responses: its log-probs where the file has none, or those of another model. Layer 6."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.errors import DataError
from jackpot.lab.replay.responses import Response
from jackpot.models.forward import head_logits, output_layer, predicting_hidden
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
        self._model: PreTrainedModel = load_model(path, torch.float32)
        self._tokenizer = load_tokenizer(path)
        self._temperature = temperature

    @torch.no_grad()
    def score(self, response: Response) -> Response:
        """The same response with this model as the policy, old and new: sampled tokens, and those of the engine's list.

        Raises:
            DataError: no prompt, or token ids that the model does not have.
        """
        if response.prompt_ids is None or not len(response.prompt_ids):
            raise DataError(
                f"{response.where} has no prompt_ids, without which a model cannot read the response {response.uid}; "
                f"write them too, or write old_log_probs and leave out --model"
            )
        ids = response.token_ids
        vocabulary = output_layer(self._model).out_features
        largest = max(int(ids.max()), int(response.prompt_ids.max()))
        if largest >= vocabulary:
            raise DataError(
                f"{response.where}: token id {largest} in {response.uid}, but --model has {vocabulary} tokens; give "
                f"the model that was trained, with its tokenizer"
            )
        index = torch.zeros(1, dtype=torch.int64)
        hidden = predicting_hidden(self._model, response.prompt_ids[None], None, index, ids[None], None)[0]
        wanted = (
            ids[:, None]
            if response.rollout_top_ids is None
            else torch.cat([ids[:, None], response.rollout_top_ids.clamp(0, vocabulary - 1)], dim=1)
        )
        rows = max(1, _LOGITS // vocabulary)
        parts = zip(hidden.split(rows), wanted.split(rows), strict=True)
        found = torch.cat([self._log_probs(states).gather(1, some) for states, some in parts])
        has_lists = response.rollout_top_ids is not None
        return replace(
            response,
            old_log_probs=found[:, 0],
            log_probs=found[:, 0],
            policy_top_ids=response.rollout_top_ids,
            policy_top_log_probs=found[:, 1:] if has_lists else None,
            tokens=response.tokens or tuple(self._texts(ids.tolist())),
        )

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(head_logits(self._model, hidden).double() / self._temperature, dim=-1)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([number]) for number in ids]
