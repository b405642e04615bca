"""A batch of responses written together, one token a step. Layer 3.

Shapes: `R` rows at the start, `N` of them still being written, `U` unique prompts of `P` tokens, `H` hidden size, `V`
vocabulary, `K` top log-probs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from jackpot.errors import EngineError
from jackpot.models.forward import backbone, head_logits, pad_tokens, position_ids
from jackpot.ops.sampling import sample_tokens, sampling_log_probs
from jackpot.ops.uniforms import key_tensor, stream_key, uniforms
from jackpot.types import Finish, Request, Rollout, Sampling, Version


class BatchSettings(NamedTuple):
    """What all rows of a batch share; lengths and stop tokens are each row's own."""

    temperature: float
    top_k: int
    top_p: float
    num_top_log_probs: int


def batch_settings(sampling: Sampling) -> BatchSettings:
    return BatchSettings(sampling.temperature, sampling.top_k, sampling.top_p, sampling.num_top_log_probs)


class DecodingBatch:
    """Requests with the same `batch_settings`, their cache, and what has been written so far.

    Each unique prompt is read once; a row that ends leaves the batch and the cache; of each step's distribution [N, V]
    only the drawn token and the top K are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        eos_token_ids: Sequence[int],
        context_length: int,
        version: Version,
    ) -> None:
        samplings = [request.sampling for request in requests]
        self._model, self._all, self._version = model, list(requests), version
        self._settings = batch_settings(samplings[0])
        self._rows = list(range(len(requests)))
        self._stops = [frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids) for sampling in samplings]
        self._limits = [
            min(request.sampling.max_new_tokens, context_length - len(request.prompt.token_ids)) for request in requests
        ]
        self._keys = key_tensor([stream_key("token", request.seed) for request in requests])  # [R]
        self._written = 0  # tokens in every row of `_rows`
        self._cache: DynamicCache | None = None
        # What was written, on the CPU; rows of `empty` cost no memory before they are written to.
        shape = (len(requests), max(self._limits))
        self._token_ids = torch.empty(shape, dtype=torch.int64)
        self._log_probs = torch.empty(shape)
        self._top_ids = torch.empty(*shape, self._settings.num_top_log_probs, dtype=torch.int64)
        self._top_log_probs = torch.empty(*shape, self._settings.num_top_log_probs)

    @property
    def requests(self) -> list[Request]:
        """Those not finished."""
        return [self._all[row] for row in self._rows]

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Write one token in every row; return the rows that this finished, which leave the batch."""
        hidden = self._read_prompts() if self._cache is None else self._read_last_token()
        settings, rows, t = self._settings, self._rows, self._written
        logits = head_logits(self._model, hidden)
        log_probs = sampling_log_probs(logits, settings.temperature, settings.top_k, settings.top_p)  # [N, V]
        draws = uniforms(self._keys[rows], [t]).to(log_probs.device)
        tokens = sample_tokens(log_probs.exp(), draws)
        top = log_probs.topk(settings.num_top_log_probs, dim=-1)
        self._token_ids[rows, t] = tokens.cpu()
        self._log_probs[rows, t] = log_probs.gather(1, tokens[:, None])[:, 0].cpu()
        self._top_ids[rows, t] = top.indices.cpu()
        self._top_log_probs[rows, t] = top.values.cpu()
        self._check_finite()
        self._written += 1
        return self._retire()

    def _read_prompts(self) -> Tensor:
        """Fill the cache. A prompt that several rows share is read once. Returns the last hidden states, [N, H]."""
        prompts = [request.prompt.token_ids for request in self._all]
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        device = self._model.device
        ids, mask = pad_tokens(list(unique), "left", device)  # [U, P]
        index = torch.tensor([unique[prompt] for prompt in prompts], device=device)
        cache = DynamicCache(config=self._model.config)
        output = self._forward(ids, mask, position_ids(mask), cache)
        cache.reorder_cache(index)
        self._cache, self._mask = cache, mask[index]
        self._num_read = self._mask.sum(dim=1)  # [N], of what each row has read
        return output[index, -1]

    def _read_last_token(self) -> Tensor:
        """Read the token written last in every row. Returns its hidden states, [N, H]."""
        tokens = self._token_ids[self._rows, self._written - 1].to(self._model.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        hidden = self._forward(tokens[:, None], self._mask, self._num_read[:, None], self._cache)
        self._num_read = self._num_read + 1
        return hidden[:, -1]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        return backbone(self._model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state

    def _check_finite(self) -> None:
        log_probs = self._log_probs[self._rows, self._written]
        if not log_probs.isfinite().all():
            row = self._rows[int((~log_probs.isfinite()).nonzero()[0, 0])]
            raise EngineError(
                f"the model gave no finite distribution for token {self._written} of {self._all[row].uid} at "
                f"{self._version}; look for NaN in the weights that were sent last"
            )

    def _retire(self) -> list[Rollout]:
        """Take the rows that have ended out of the batch and of the cache."""
        last = self._token_ids[self._rows, self._written - 1].tolist()
        ends: dict[int, Finish] = {}
        for row, token in zip(self._rows, last, strict=True):
            if token in self._stops[row]:
                ends[row] = "stop"
            elif self._written == self._limits[row]:
                ends[row] = "length"
        finished = [self._rollout(row, finish) for row, finish in ends.items()]
        kept = [place for place, row in enumerate(self._rows) if row not in ends]
        if ends and kept:
            index = torch.tensor(kept, device=self._mask.device)
            self._cache.reorder_cache(index)
            self._mask, self._num_read = self._mask[index], self._num_read[index]
        self._rows = [self._rows[place] for place in kept]
        return finished

    def _rollout(self, row: int, finish: Finish) -> Rollout:
        length, request = self._written, self._all[row]
        return Rollout(
            uid=request.uid,
            prompt=request.prompt,
            finish=finish,
            token_ids=self._token_ids[row, :length].clone(),
            rollout_log_probs=self._log_probs[row, :length].clone(),
            sampled_mask=torch.ones(length, dtype=torch.bool),
            top_ids=self._top_ids[row, :length].clone(),
            top_log_probs=self._top_log_probs[row, :length].clone(),
            versions=torch.tensor([self._version] * length),
        )
