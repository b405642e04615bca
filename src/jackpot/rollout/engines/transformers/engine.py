"""The engine that needs nothing but transformers: it runs anywhere, in the trainer's own process.

Requests wait in a queue and are decoded in batches. The draw for token t of a request depends on (seed, t) and on the
distribution alone, not on the batch. The distribution itself moves by float rounding with the shape of the batch, so a
response can change where a uniform falls within that rounding of a boundary between two tokens: about once in a million
tokens in float32, far more often in bfloat16.
"""

import time
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.models.forward import output_layer
from jackpot.models.packing import pack, rollout_lengths
from jackpot.models.scoring import forward_rollouts, token_log_probs
from jackpot.rollout.engines.base import Capabilities, Engine, Request
from jackpot.rollout.engines.checks import check_request, check_scores
from jackpot.rollout.engines.ledger import Ledger
from jackpot.rollout.engines.transformers.attention import AttentionKernel, use_attention
from jackpot.rollout.engines.transformers.decoding import DecodingBatch, batch_settings
from jackpot.rollout.engines.transformers.weights import HeldWeights

_SCORE_TOKENS = 16_384  # in one forward pass of `score`, padding included


class TransformersEngine(Engine):
    """Decodes with a model that it owns, in batches of requests that share temperature, filters and top log-probs.

    Nothing happens between calls: `collect` is where tokens are written. It returns as soon as it has enough, and rows
    still being written go on at the next call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        version: Version,
        max_num_seqs: int,
        attention: AttentionKernel | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
    ) -> None:
        """
        Args:
            model: owned by the engine from now on: put in eval mode and given an attention kernel; its weights are
                overwritten by updates.
            eos_token_ids: end every response, beside `Sampling.stop_token_ids`; `eos_token_ids(model)` finds them.
            max_num_seqs: rows decoded at once; the cache holds this many times the longest prompt and half more than
                what has been written in the longest response.
            attention: as in `use_attention`.
            quantization: a key of `SCHEMES`: what linear layers compute with, those of `score` too.
            kv_cache_dtype: fp8 rounds keys and values (`round_to_fp8`), those of `score` too.

        Raises:
            EngineError: weights of several dtypes, no context length in the config, max_num_seqs below 1, or a model
                that cannot be quantised like that.
            ModelError: a head that is not supported.
        """
        if max_num_seqs < 1:
            raise EngineError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not context:
            raise EngineError(f"the config of {type(model).__name__} has no max_position_embeddings; set it")
        if kv_cache_dtype not in (None, "fp8"):
            raise EngineError(f"there is no cache of {kv_cache_dtype!r}; kv_cache_dtype is fp8 or None")
        use_attention(model, attention, fp8_cache=kv_cache_dtype == "fp8")
        self._weights: HeldWeights | None = HeldWeights(model, quantization)
        self._model: PreTrainedModel | None = model.eval()
        self._context_length = int(context)
        self._vocab_size = output_layer(model).out_features
        self._dtype = self._weights.dtype
        self._quantised = quantization is not None or kv_cache_dtype is not None
        self._events = _quantisation_events(self._weights, quantization)
        self._eos_token_ids = tuple(eos_token_ids)
        self._version = version
        self._max_batch_size = max_num_seqs
        self._ledger = Ledger()
        self._queue: deque[Request] = deque()
        self._batch: DecodingBatch | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            vocab_size=self._vocab_size,
            num_top_log_probs=self._vocab_size,
            context_length=self._context_length,
            quantised=self._quantised,
            streaming=True,
            updates_in_flight=False,
            dtype=self._dtype,
        )

    @property
    def version(self) -> Version:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        self._open()
        self._ledger.check(requests)
        for request in requests:
            check_request(request, self.capabilities)
        self._ledger.admit(requests)
        self._queue.extend(requests)

    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """As `Engine.collect`. At least one token is written before the time is looked at, so polling gets on."""
        self._open()
        if n < 0:
            raise EngineError(f"collect takes a number of rollouts, got {n}")
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(self._ledger.finished(uids)) < n and (self._batch or self._queue):
            self._step()
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._ledger.take(n, uids)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        model = self._open()
        check_scores(rollouts, temperature, self.capabilities)
        scores: dict[int, Tensor] = {}
        by_length = sorted(range(len(rollouts)), key=lambda row: len(rollouts[row].token_ids))
        for rows in pack(by_length, _SCORE_TOKENS, lambda row: rollout_lengths(rollouts[row])):
            hidden, ids, mask = forward_rollouts(model, [rollouts[row] for row in rows])
            log_probs = token_log_probs(model, hidden[mask], ids[mask], temperature).cpu()
            lengths = [len(rollouts[row].token_ids) for row in rows]
            scores |= zip(rows, (part.clone() for part in log_probs.split(lengths)), strict=True)
        return [scores[row] for row in range(len(rollouts))]

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """As `Engine.update_weights` and `HeldWeights.replace`. Takes the names of the model's `named_parameters()`."""
        self._open()
        self._ledger.check_empty()
        digest = self._weights.replace(named_tensors)
        self._version = version
        return digest

    def take_events(self) -> list[dict[str, Any]]:
        """Once, what was quantised."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._model = self._weights = self._batch = None
        self._queue.clear()
        self._ledger.clear()

    def _open(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError("the engine is closed; make a new one")
        return self._model

    def _step(self) -> None:
        """Write one token in every row of the batch. On any error its rows return to the queue and start again."""
        if self._batch is None:
            self._batch = self._next_batch()
        try:
            self._ledger.finish(self._batch.step())
        except BaseException:
            self._queue.extendleft(reversed(self._batch.requests))
            self._batch = None
            raise
        if not self._batch.requests:
            self._batch = None

    def _next_batch(self) -> DecodingBatch:
        """The requests at the head of the queue that can be decoded together, up to the largest batch."""
        settings = batch_settings(self._queue[0].sampling)
        alike = takewhile(lambda request: batch_settings(request.sampling) == settings, self._queue)
        requests = list(islice(alike, self._max_batch_size))
        batch = DecodingBatch(self._open(), requests, self._eos_token_ids, self._context_length, self._version)
        for _ in requests:
            self._queue.popleft()
        return batch


def _quantisation_events(weights: HeldWeights, quantization: str | None) -> list[dict[str, Any]]:
    if quantization is None:
        return []
    kept = Counter(weights.conversion.kept.values())
    return [{"event": "quantised", "to": quantization, "share": weights.quantised_share, "kept": dict(kept)}]
