"""Decode a batch of responses together, one token per step.

Shapes: `R` rows at the start, `N` of them unfinished, `U` unique prompts of at most `P` tokens, `S` cached tokens of a
row, `H` hidden size, `V` vocabulary, `K` top log-probs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in, key_tensor, uniforms
from jackpot.core.types import Rollout, Version
from jackpot.models.device import upload
from jackpot.models.forward import backbone, head_logits, pad_tokens, position_ids
from jackpot.models.sampling import Draw, draw_tokens
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.attention import ACCEPT_4D_MASKS
from jackpot.rollout.engines.transformers.kv_cache import BatchKVCache, make_cache, reorder_rows

# Architectures whose code only passes the attention mask on to attention, so that a mask [N, 1, 1, S] can be given.
_PASS_MASKS_ON = frozenset(
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


# A decoding step of fewer multiplications, such as that of the quickstart's models, is faster with one thread than with
# several.
ONE_THREAD_BELOW = 2**26


class ModelRunner:
    """A batch's KV cache and forward passes: one over the prompts (prefill), then one for each decoding step.

    Prompts are padded on the left, so that all rows write to the same column of the cache.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> None:
        """Make an empty KV cache for the batch.

        Args:
            prompts: token ids of each row's prompt. A prompt that several rows share is prefilled once.
            max_new_tokens: largest number of tokens that any row reads after its prompt.
        """
        self._model, self._prompts = model, prompts
        self.max_length = max(map(len, prompts)) + max_new_tokens  # largest number of cached tokens of a row
        self.cache = make_cache(model.config, self.max_length)

    def prefill(self) -> Tensor:
        """Run the model on the prompts of the R rows, before any step; return the hidden states of their ends, [R, H].

        These states predict each row's first token.
        """
        # Read each different prompt once, and give every row a copy of the cache of its prompt.
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(self._prompts))}  # U prompts
        device = self._model.device

        ids, mask = pad_tokens(list(unique), "left", device)  # [U, longest prompt]
        hidden = self._forward(ids, mask, position_ids(mask))[:, -1]
        # [R], for each row the index of its prompt among the unique ones
        prompt_of_row = upload(torch.tensor([unique[prompt] for prompt in self._prompts]), device)
        reorder_rows(self.cache, prompt_of_row)

        self.length = ids.shape[1]  # number of cached tokens of a row, padding included
        self.positions = mask.sum(dim=1)[prompt_of_row]  # position of each row's next token: [R], later [N]
        # `_is_token` is [R, largest number of cached tokens], False at padding.
        self._is_token = torch.ones(len(prompt_of_row), self.max_length, dtype=torch.bool, device=device)
        self._is_token[:, : self.length] = mask[prompt_of_row]
        self._is_padded = not mask.all()
        self._padding_mask = self._additive_mask() if self._is_padded else None
        return hidden[prompt_of_row]

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Run the model on each row's newest token, [N]; return the hidden states that predict the next, [N, H]."""
        self.length += 1
        hidden = self._forward(tokens[:, None], self._mask(), self.positions[:, None])
        self.positions = self.positions + 1
        return hidden[:, -1]

    def reorder(self, order: Tensor) -> None:
        """Replace row i of cache, positions and masks by the old row `order[i]`; rows not in `order` leave the batch.

        Args:
            order: [N] int64, on the device of the model.
        """
        reorder_rows(self.cache, order)
        self.positions, self._is_token = self.positions[order], self._is_token[order]
        self._padding_mask = None if self._padding_mask is None else self._padding_mask[order]

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Run the model on new tokens [N, T], and append them to the cache; return hidden states [N, T, H]."""
        return backbone(self._model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).last_hidden_state

    def _mask(self) -> Tensor | None:
        """Return the attention mask of the newest tokens; None: each sees all cached tokens in its sliding window.

        S is the number of cached tokens. A mask [N, 1, 1, S] is returned where the model takes it, since transformers
        uses it unchanged. A mask [N, S], False at padding, costs more, since transformers makes a larger mask, with
        sliding windows, from it at every step.
        """
        if not isinstance(self.cache, BatchKVCache):  # transformers' own cache: the model makes its masks from this
            return self._is_token[:, : self.length]
        if not self._is_padded:  # nothing to hide but what a sliding window hides
            return None

        # `_padding_mask`, [N, 1, 1, S], hides padding alone. It does not serve once a sliding window hides tokens too.
        window = self.cache.sliding_window
        if self._padding_mask is None or (window is not None and self.length > window):
            return self._is_token[:, : self.length]
        return self._padding_mask[..., : self.length]

    def _additive_mask(self) -> Tensor | None:
        """Return the numbers that attention adds to its scores, [N, 1, 1, S]: 0, or the lowest number for padding.

        S is the largest number of cached tokens. Return None for models that do not take such a mask.
        """
        config, dtype = self._model.config, self._model.dtype
        if config.model_type not in _PASS_MASKS_ON or config._attn_implementation not in ACCEPT_4D_MASKS:
            return None
        bias = torch.zeros(self._is_token.shape, dtype=dtype, device=self._is_token.device)
        return bias.masked_fill_(~self._is_token, torch.finfo(dtype).min)[:, None, None]


class BatchSettings(NamedTuple):
    """The sampling settings that all rows of a batch share; lengths and stop tokens may differ between rows."""

    temperature: float
    top_k: int
    top_p: float
    num_top_log_probs: int


def batch_settings(sampling: Sampling) -> BatchSettings:
    """Return the sampling settings of a request that must be equal within a batch."""
    return BatchSettings(sampling.temperature, sampling.top_k, sampling.top_p, sampling.num_top_log_probs)


class DecodingBatch:
    """A batch of requests with equal `batch_settings`, decoded together, one token of each response per step.

    Each unfinished response has a row, which leaves the batch and the KV cache when the response is finished. Of each
    step's distribution [N, V] only the log-probs of the sampled token and of the top K are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        eos_token_ids: Sequence[int],
        max_model_len: int,
        version: Version,
    ) -> None:
        """Prepare a batch; the first step reads the prompts.

        Args:
            requests: requests with equal `batch_settings`.
            eos_token_ids: tokens that end every response, besides `Sampling.stop_token_ids`.
            max_model_len: largest length of a prompt and its response together, tokens.
            version: version of the model's weights, which every token carries.
        """
        samplings = [request.sampling for request in requests]
        prompts = [request.prompt.token_ids for request in requests]
        self._model, self._version = model, version
        self._all_requests = list(requests)
        self._settings = batch_settings(samplings[0])
        self._rows = torch.arange(len(requests))  # [N], index of each unfinished request, in the order of rows
        self._stops = _stop_table([{*eos_token_ids, *sampling.stop_token_ids} for sampling in samplings])
        self._max_position = max_model_len - 1  # position of the last token that fits into the context

        limits = [
            min(sampling.max_new_tokens, max_model_len - len(prompt))
            for sampling, prompt in zip(samplings, prompts, strict=True)
        ]
        self._limits = torch.tensor(limits)  # [R], largest length of each response, tokens

        self._runner = ModelRunner(model, prompts, max(limits))
        keys = key_tensor([fold_in("token", request.seed) for request in requests])
        self._keys = upload(keys, model.device)  # [N], random key of each row
        self._num_generated = 0  # number of tokens generated so far, equal in all unfinished rows

        # [R, tokens, 2 + 2K], the draw of every token of R requests, on the CPU, as `pack_draw` lays it out: the token,
        # its log-prob, and K ids and K log-probs. Parts of `torch.empty` that are not written take no memory.
        record_size = 2 + 2 * self._settings.num_top_log_probs
        self._records = torch.empty(len(requests), max(limits), record_size, dtype=torch.int32)

    @property
    def requests(self) -> list[Request]:
        """Return the unfinished requests, in the order in which the batch was given them."""
        return [self._all_requests[row] for row in sorted(self._rows.tolist())]

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Generate one token in every row; remove the rows that finish and return their rollouts."""
        with threads_for(len(self._rows) * self._model.num_parameters()):
            hidden = self._runner.decode_step(self._last_tokens) if self._num_generated else self._runner.prefill()
            # [N], a uniform number for each row, from the row's key and the token's index in the response
            random = uniforms(self._keys, self._keys.new_full((1,), self._num_generated))
            draw = draw_tokens(head_logits(self._model, hidden), random, **self._settings._asdict())

        records = pack_draw(draw).cpu()  # the only transfer of a step to the CPU
        self._check_finite(records[None])
        self._last_tokens = draw.tokens  # [N]
        return self._take(records)

    def _check_finite(self, records: Tensor) -> None:
        """Raise EngineError if a sampled token's log-prob is not finite.

        `records` [steps, N, 2 + 2K] are the packed draws (`pack_draw`) of one or more steps.
        """
        is_finite = records[..., 1].view(torch.float32).isfinite()  # [steps, N]; index 1 of a draw is its log-prob
        if not is_finite.all():
            # The first step with a log-prob that is not finite, and the first request that has one in this step.
            step = int(is_finite.all(dim=1).int().argmin())
            row = int(self._rows[~is_finite[step]].min())
            raise self._no_distribution(row, self._num_generated + step)

    def _no_distribution(self, row: int, token: int) -> EngineError:
        """Return the error that token number `token` of the response to request number `row` has no finite log-prob."""
        return EngineError(
            f"the model gave no finite distribution for token {token} of {self._all_requests[row].uid} at "
            f"{self._version}; look for NaN in the weights that were sent last"
        )

    def _take(self, records: Tensor) -> list[Rollout]:
        """Store the packed draws of a step, [N, 2 + 2K]; remove the rows that finish and return their rollouts."""
        self._records[self._rows, self._num_generated] = records
        self._num_generated += 1

        tokens = records[:, 0]  # index 0 of a draw is its token
        is_stop = (self._stops[self._rows] == tokens[:, None]).any(dim=1)
        is_finished = is_stop | (self._limits[self._rows] == self._num_generated)  # [N]
        if not is_finished.any():
            return []

        finished = self._rollouts(self._rows[is_finished], self._num_generated, is_stop[is_finished])
        self._remove(is_finished)
        return finished

    def _remove(self, is_finished: Tensor) -> None:
        """Remove the rows where `is_finished` [N] is True, once their rollouts are made."""
        order = _compaction(is_finished)
        self._reorder(order)
        self._rows = self._rows[order]  # last: if a line above fails, `requests` still has the finished rows

    def _reorder(self, order: Tensor) -> None:
        """Replace row i of cache, last tokens and random keys by the old row `order[i]`; rows not in `order` leave."""
        if len(order):
            on_device = upload(order, self._last_tokens.device)
            self._runner.reorder(on_device)
            self._last_tokens, self._keys = self._last_tokens[on_device], self._keys[on_device]

    def _rollouts(self, rows: Tensor, length: int, is_stop: Tensor) -> list[Rollout]:
        """Return the rollouts of rows that end after `length` tokens.

        Args:
            rows: [F], for each finished row the index of its request.
            is_stop: [F] bool, True where the last token is a stop token, False where the length limit was reached.
        """
        draw = _unpack(self._records[rows, :length])  # [F, length] each
        sampled = torch.ones_like(draw.tokens, dtype=torch.bool)
        versions = torch.tensor(self._version).expand(*draw.tokens.shape, 2).contiguous()

        return [
            Rollout(
                uid=self._all_requests[row].uid,
                prompt=self._all_requests[row].prompt,
                finish="stop" if is_stop[index] else "length",
                token_ids=draw.tokens[index],
                rollout_log_probs=draw.log_probs[index],
                sampled_mask=sampled[index],
                top_ids=draw.top_ids[index],
                top_log_probs=draw.top_log_probs[index],
                versions=versions[index],
            )
            for index, row in enumerate(rows.tolist())
        ]


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Run the `with` block with one thread of torch if the work is too small for several.

    Args:
        multiplications: number of multiplications of one step.
    """
    threads = torch.get_num_threads()
    if threads == 1 or multiplications >= ONE_THREAD_BELOW:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stop_table(stops: Sequence[set[int]]) -> Tensor:
    """Return the stop tokens of each response as a table [R, 1 or more] int64, padded with -1, which is no token id."""
    width = max(1, *map(len, stops))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in stops])


def _compaction(is_removed: Tensor) -> Tensor:
    """Return the old index of each row that stays, where the last such rows move into the slots of removed rows.

    Args:
        is_removed: [N] bool.

    Returns:
        [number of rows that stay] int64; rows before the first removed row keep their index.
    """
    # Where row 1 of 4 rows is removed, the order is [0, 3, 2].
    count = int((~is_removed).sum())  # number of rows that stay; those behind the first `count` slots move into them
    order = torch.arange(count)
    order[is_removed[:count]] = count + (~is_removed[count:]).nonzero()[:, 0]
    return order


def pack_draw(draw: Draw) -> Tensor:
    """Pack a draw with K top tokens into one tensor, [N, 2 + 2K] int32; log-probs become the bits of a float32."""
    columns = [
        draw.tokens[:, None].int(),
        draw.log_probs[:, None].view(torch.int32),
        draw.top_ids.int(),
        draw.top_log_probs.view(torch.int32),
    ]
    return torch.cat(columns, dim=1)


def _unpack(records: Tensor) -> Draw:
    """Undo `pack_draw` for records [..., 2 + 2K]; the tensors of the draw do not share memory with the records."""
    num_top = (records.shape[-1] - 2) // 2
    tokens, log_probs, top_ids, top_log_probs = records.split([1, 1, num_top, num_top], dim=-1)
    return Draw(
        tokens[..., 0].long(),
        log_probs[..., 0].clone().view(torch.float32),
        top_ids.long(),
        top_log_probs.clone(memory_format=torch.contiguous_format).view(torch.float32),
    )
