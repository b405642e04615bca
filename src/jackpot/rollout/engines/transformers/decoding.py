"""A batch of responses written together, one token a step.

Shapes: `R` rows at the start, `N` of them still being written, `V` vocabulary, `K` top log-probs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.run import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.prng import key_tensor, stream_key, uniforms
from jackpot.core.types import Finish, Rollout, Version
from jackpot.models.forward import backbone, head_logits, pad_tokens, position_ids
from jackpot.models.sampling import Draw, draw_tokens
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.attention import TAKE_MASKS
from jackpot.rollout.engines.transformers.kv_cache import RowsCache, make_cache

# Architectures that do nothing with an attention mask but hand it to attention, so that one that is ready serves them.
_TAKE_READY_MASKS = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)


class Reading:
    """One forward pass a call. Prompts are padded on the left, so that every row writes to the same column."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], num_new: int) -> None:
        """
        Args:
            prompts: of each row. One that several rows share is read once.
            num_new: tokens, the most that any row will read after its prompt.
        """
        self._model, self._prompts = model, prompts
        self._longest = max(map(len, prompts)) + num_new
        self._cache = make_cache(model.config, self._longest)

    def read_prompts(self) -> Tensor:
        """Comes first. The hidden states that predict the first tokens: [R, H]."""
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(self._prompts))}
        device = self._model.device
        ids, mask = pad_tokens(list(unique), "left", device)  # [U, P]
        hidden = self._forward(ids, mask, position_ids(mask))[:, -1]
        index = torch.tensor([unique[prompt] for prompt in self._prompts], device=device)
        self._cache.reorder_cache(index)
        self._length = ids.shape[1]
        self._positions = mask.sum(dim=1)[index]  # [N], of the token that is read next
        self._exists = torch.ones(len(index), self._longest, dtype=torch.bool, device=device)
        self._exists[:, : self._length] = mask[index]
        self._is_padded = not mask.all()
        self._bias = self._ready_mask() if self._is_padded else None
        return hidden[index]

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token in every row, [N]. The hidden states that predict the next: [N, H]."""
        self._length += 1
        hidden = self._forward(tokens[:, None], self._mask(), self._positions[:, None])
        self._positions = self._positions + 1
        return hidden[:, -1]

    def keep(self, order: Tensor) -> None:
        """Row i becomes what row `order[i]` was; rows not named leave. [N] int64, on the device of the model."""
        self._cache.reorder_cache(order)
        self._positions, self._exists = self._positions[order], self._exists[order]
        self._bias = None if self._bias is None else self._bias[order]

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        return backbone(self._model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state

    def _mask(self) -> Tensor | None:
        """What the new token of each row sees; None is everything, up to a window.

        Of one with two dimensions transformers makes its own, at every step, and knows where windows end. It takes one
        with four as it is.
        """
        if not isinstance(self._cache, RowsCache):
            return self._exists[:, : self._length]
        if not self._is_padded:
            return None
        window = self._cache.window
        if self._bias is None or (window is not None and self._length > window):
            return self._exists[:, : self._length]
        return self._bias[..., : self._length]

    def _ready_mask(self) -> Tensor | None:
        """What attention adds to its scores, [N, 1, 1, S]: 0 or the lowest number; None where it must not be given."""
        config, dtype = self._model.config, self._model.dtype
        if config.model_type not in _TAKE_READY_MASKS or config._attn_implementation not in TAKE_MASKS:
            return None
        bias = torch.zeros(self._exists.shape, dtype=dtype, device=self._exists.device)
        return bias.masked_fill_(~self._exists, torch.finfo(dtype).min)[:, None, None]


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
        samplings, prompts = [request.sampling for request in requests], [request.prompt for request in requests]
        self._model, self._all, self._version = model, list(requests), version
        self._settings = batch_settings(samplings[0])
        self._rows = torch.arange(len(requests))  # [N], those not finished, in the order in which the model has them
        self._stops = _stop_table([{*eos_token_ids, *sampling.stop_token_ids} for sampling in samplings])
        self._limits = torch.tensor(
            [
                min(sampling.max_new_tokens, context_length - len(prompt.token_ids))
                for sampling, prompt in zip(samplings, prompts, strict=True)
            ]
        )  # [R]
        longest = int(self._limits.max())
        self._reading = Reading(model, [prompt.token_ids for prompt in prompts], longest)
        self._keys = key_tensor([stream_key("token", request.seed) for request in requests]).to(model.device)  # [N]
        self._written = 0  # tokens in every row of `_rows`
        # What was written, on the CPU; rows of `empty` cost no memory before they are written to.
        self._records = torch.empty(len(requests), longest, 2 + 2 * self._settings.num_top_log_probs, dtype=torch.int32)

    @property
    def requests(self) -> list[Request]:
        """Those not finished, in the order in which they came."""
        return [self._all[row] for row in sorted(self._rows.tolist())]

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Write one token in every row; return the rows that this finished, which leave the batch."""
        hidden = self._reading.read(self._last) if self._written else self._reading.read_prompts()
        draws = uniforms(self._keys, [self._written])
        draw = draw_tokens(head_logits(self._model, hidden), draws, **self._settings._asdict())
        records = _pack(draw).cpu()  # the one transfer of a step
        self._check_finite(records)
        self._records[self._rows, self._written] = records
        self._last = draw.tokens  # [N]
        self._written += 1
        return self._retire(records[:, 0])

    def _check_finite(self, records: Tensor) -> None:
        is_finite = records[:, 1].view(torch.float32).isfinite()
        if not is_finite.all():
            row = int(self._rows[~is_finite].min())
            raise EngineError(
                f"the model gave no finite distribution for token {self._written} of {self._all[row].uid} at "
                f"{self._version}; look for NaN in the weights that were sent last"
            )

    def _retire(self, tokens: Tensor) -> list[Rollout]:
        """Take the rows that have ended with `tokens` [N] out of the batch and of the cache."""
        stopped = (self._stops[self._rows] == tokens[:, None]).any(dim=1)
        ended = stopped | (self._limits[self._rows] == self._written)  # [N]
        if not ended.any():
            return []
        finished = [
            self._rollout(row, "stop" if is_stop else "length")
            for row, is_stop in zip(self._rows[ended].tolist(), stopped[ended].tolist(), strict=True)
        ]
        order = _close_ranks(~ended)
        if len(order):
            places = order.to(self._last.device)
            self._reading.keep(places)
            self._last, self._keys = self._last[places], self._keys[places]
        self._rows = self._rows[order]  # last: until here an error leaves the rows that ended in `requests`
        return finished

    def _rollout(self, row: int, finish: Finish) -> Rollout:
        length, request = self._written, self._all[row]
        draw = _unpack(self._records[row, :length])
        return Rollout(
            uid=request.uid,
            prompt=request.prompt,
            finish=finish,
            token_ids=draw.tokens,
            rollout_log_probs=draw.log_probs,
            sampled_mask=torch.ones(length, dtype=torch.bool),
            top_ids=draw.top_ids,
            top_log_probs=draw.top_log_probs,
            versions=torch.tensor([self._version] * length),
        )


def _stop_table(stops: Sequence[set[int]]) -> Tensor:
    """The tokens that end each row, [R, 1 or more] int64, filled up with -1, which no token is."""
    width = max(1, *map(len, stops))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in stops])


def _close_ranks(kept: Tensor) -> Tensor:
    """Where each row that is kept [N] comes from: rows from the end take the places of those that left."""
    left = int(kept.sum())
    order = torch.arange(left)
    order[~kept[:left]] = left + kept[left:].nonzero()[:, 0]
    return order


def _pack(draw: Draw) -> Tensor:
    """A draw as one tensor, [N, 2 + 2K] int32: ids as they are, log-probs by their bits."""
    columns = [
        draw.tokens[:, None].int(),
        draw.log_probs[:, None].view(torch.int32),
        draw.top_ids.int(),
        draw.top_log_probs.view(torch.int32),
    ]
    return torch.cat(columns, dim=1)


def _unpack(records: Tensor) -> Draw:
    """What `_pack` packed, in memory of its own."""
    num_top = (records.shape[1] - 2) // 2
    tokens, log_probs, top_ids, top_log_probs = records.split([1, 1, num_top, num_top], dim=1)
    return Draw(
        tokens[:, 0].long(),
        log_probs[:, 0].clone().view(torch.float32),
        top_ids.long(),
        top_log_probs.contiguous().clone().view(torch.float32),
    )
