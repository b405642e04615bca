"""The engine that needs nothing but transformers: it runs anywhere, in the trainer's own process.

Requests wait in a queue and are decoded in batches. The draw of token t of a request depends on (seed, t) and on the
token's distribution alone, not on the batch. The distribution itself changes by float rounding with the shape of the
batch, so a response can change where a uniform lies within that rounding of the boundary between two tokens: about once
in a million tokens in float32, far more often in bfloat16.

Status: supported.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import groupby, islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import DraftConfig, TransformersEngineConfig, is_quantized, number_formats, sleeps
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.models.forward import output_layer
from jackpot.models.packing import pack, rollout_lengths
from jackpot.models.scoring import forward_rollouts, token_log_probs
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.in_flight import QueuedEngine
from jackpot.rollout.engines.transformers.attention import EXACT, EXACT_FP8, set_engine_attention
from jackpot.rollout.engines.transformers.decoding import DecodingBatch, batch_settings
from jackpot.rollout.engines.transformers.drafting import DraftedBatch
from jackpot.rollout.engines.transformers.static_decoding import (
    GraphCapture,
    StaticBatch,
    decodes_statically,
    decoding_event,
)
from jackpot.rollout.engines.transformers.weights import ModelWeights

_SCORE_TOKENS = 16_384  # most tokens in one forward pass of `score`, padding included


class TransformersEngine(QueuedEngine):
    """An engine that decodes with transformers, in batches of requests whose `batch_settings` are equal.

    Tokens are generated inside `collect` alone, which returns as soon as it has enough rollouts; unfinished rows
    continue at the next call.

    Its events are `quantized`, where the settings quantize, and `decoding`, where `enforce_eager` is off. `decoding`
    says how tokens are decoded, and comes once more if a step could not be captured as a CUDA graph.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TransformersEngineConfig,
        *,
        eos_token_ids: Sequence[int],
        version: Version,
        drafter: "TransformersEngine | None" = None,
    ) -> None:
        """Take over a loaded model and prepare it as the settings say.

        Args:
            model: model in the dtype of the settings. The engine owns the model from now on: it sets eval mode and the
                attention implementation, quantizes linear layers and overwrites weights.
            settings: up to `max_num_seqs` responses are decoded at once. With L tokens in the longest prompt and
                response so far, the KV cache has room for at most 1.5 L or L + 64 tokens of each of them, whichever
                is more (and up to 15 more with fixed shapes). Quantization and the FP8 cache hold for `score` too.
            eos_token_ids: tokens that end every response, as `eos_token_ids(model)` finds them.
            version: version of the model's weights.
            drafter: the engine whose model proposes tokens as `settings.draft` says; None: nothing drafts.

        Raises:
            EngineError: weights of several dtypes, no context length in the config, a model that cannot be quantized as
                the settings say, or a drafter whose model or attention does not allow drafts.
            ModelError: an output layer that is not supported.
        """
        if not (context := getattr(model.config.get_text_config(), "max_position_embeddings", None)):
            raise EngineError(f"the config of {type(model).__name__} has no max_position_embeddings; set it")

        super().__init__(version)
        set_engine_attention(model.eval(), settings)
        self._settings = settings

        self._weights = weights = ModelWeights(model, settings)
        self._draft = drafter and _draft_model(model, drafter)  # model that proposes tokens; None: nothing drafts

        # Relaxed drafts change the distribution of the tokens, as quantization does. Training can compute an engine's
        # numbers again only if they do not depend on the batch, as with attention in float64.
        is_relaxed = drafter is not None and settings.draft is not None and settings.draft.lam < 1.0
        attends_exactly = model.config._attn_implementation in (EXACT, EXACT_FP8)

        self._capabilities = Capabilities(
            vocab_size=output_layer(model).out_features,
            num_top_log_probs=output_layer(model).out_features,
            max_model_len=min(int(context), drafter.capabilities.max_model_len) if drafter else int(context),
            quantized=is_quantized(settings) or is_relaxed,
            number_formats=number_formats(settings) if attends_exactly else None,
            coded_weights=weights.coded_weights,
            dtype=weights.dtype,
            device=model.device.type,
            sleeps=sleeps(settings),
        )

        self._events += weights.events
        is_eager = model.device.type == "cpu" if settings.enforce_eager == "auto" else settings.enforce_eager
        self._capture = None if is_eager else self._make_capture(model)  # None: `StaticBatch` is not used

        self._eos_token_ids = tuple(eos_token_ids)
        self._queue: deque[Request] = deque()
        self._batch: DecodingBatch | None = None

    def _make_capture(self, model: PreTrainedModel) -> GraphCapture | None:
        """Return the object that captures decoding steps as CUDA graphs, or None where fixed shapes are impossible.

        In either case the engine's events get a `decoding` event: how tokens are decoded and, with None, why so.
        """
        if self._draft is None and decodes_statically(model):
            return GraphCapture(model.device.type, self._events)

        # Only steps of `StaticBatch` can be captured; the tensors of other batches grow.
        obstacle = (
            f"{type(model).__name__} with these settings has no attention for it"
            if self._draft is None
            else "rows accept different numbers of drafts"
        )
        self._events.append(decoding_event("growing", cuda_graphs=False, obstacle=obstacle))
        return None

    def _begin(self, requests: Sequence[Request]) -> None:
        """Append requests to the queue; `collect` decodes them."""
        self._queue.extend(requests)

    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """Generate until `n` rollouts are finished, and return them as `Engine.collect` says.

        At least one step is taken before the time is checked, so that polling with `timeout=0` makes progress.
        """
        self._check_open()
        deadline = None if timeout is None else time.monotonic() + timeout

        while len(self._in_flight.completed(uids)) < n and (self._batch or self._queue):
            self._step()
            if deadline is not None and time.monotonic() >= deadline:
                break

        return self._in_flight.pop(n, uids)

    @torch.no_grad()
    def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says, from forward passes over several rollouts each."""
        model = self._weights.model
        scores: dict[int, Tensor] = {}  # by index in `rollouts`
        # Rollouts of similar length share a forward pass, so that it has little padding. `pack` cuts the sorted
        # rollouts into runs of at most `_SCORE_TOKENS` tokens.
        by_length = sorted(range(len(rollouts)), key=lambda index: len(rollouts[index].token_ids))

        for indices in pack(by_length, _SCORE_TOKENS, lambda index: rollout_lengths(rollouts[index])):
            hidden, ids, mask = forward_rollouts(model, [rollouts[index] for index in indices])
            log_probs = token_log_probs(model, hidden[mask], ids[mask], temperature, top_k=0, top_p=1.0).cpu()
            lengths = [len(rollouts[index].token_ids) for index in indices]
            scores |= zip(indices, (score.clone() for score in log_probs.split(lengths)), strict=True)

        return [scores[index] for index in range(len(rollouts))]

    def _take_weights(self, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights as `Engine.update_weights` says; names are those of the model's `named_parameters()`."""
        return self._weights.load(weights)

    def _release(self) -> None:
        """Release the memory of the weights; on a GPU other processes can then use it. Not yet tried on a GPU."""
        self._weights.release()
        if self.capabilities.device == "cuda":
            torch.cuda.empty_cache()

    def _end(self) -> None:
        """Let go of the models, and forget the requests that are queued or being decoded."""
        del self._weights, self._draft
        self._batch = None
        self._queue.clear()

    def _step(self) -> None:
        """Take one decoding step of the batch, made here if there is none; after an error queue its requests again."""
        if self._batch is None:
            self._batch = self._next_batch()
        try:
            self._in_flight.complete(self._batch.step())
        except BaseException:
            self._queue.extendleft(reversed(self._batch.requests))  # to the front, in their order
            self._batch = None
            raise
        if not self._batch.requests:
            self._batch = None

    def _next_batch(self) -> DecodingBatch:
        """Make a batch of up to `max_num_seqs` requests from the front of the queue.

        The requests of a batch have equal `batch_settings` and `exact_drafts`.
        """
        # `alike` has the requests at the front of the queue whose settings are equal.
        groups = groupby(self._queue, lambda request: (batch_settings(request.sampling), request.exact_drafts))
        (_, is_exact), alike = next(groups)
        requests = list(islice(alike, self._settings.max_num_seqs))
        max_model_len = self.capabilities.max_model_len

        make: Callable[..., DecodingBatch] = DecodingBatch
        if self._draft is not None:
            settings, counts = self._settings.draft or DraftConfig(), self._draft_counts
            # Requests may ask for exact drafts (lam of 1), which change no distribution.
            settings = settings.model_copy(update={"lam": 1.0} if is_exact else {})
            make = partial(DraftedBatch, draft=self._draft, settings=settings, counts=counts)
        elif self._capture is not None:
            make = partial(StaticBatch, capture=self._capture)

        batch = make(self._weights.model, requests, self._eos_token_ids, max_model_len, self._version)
        # The requests leave the queue only now, so that they are not lost if the batch cannot be made.
        for _ in requests:
            self._queue.popleft()
        return batch


def _draft_model(model: PreTrainedModel, drafter: TransformersEngine) -> PreTrainedModel:
    """Return the model of the engine `drafter`, or raise EngineError where it cannot draft for `model`."""
    drafter._check_open()
    draft, settings = drafter._weights.model, drafter._settings

    if draft.config._attn_implementation in (EXACT, EXACT_FP8):
        raise EngineError(
            f"the engine of the rollout model has engine.quantization={settings.quantization} and no draft, so its "
            f"attention is exact, and not for rows of different lengths, which drafts need; set engine.draft={{}} too "
            f"and engine.kv_cache_dtype=null, or engine.quantization=null, or leave evaluation.engine.draft out"
        )

    for role, role_model in {"policy": model, "rollout model": draft}.items():
        if not decodes_statically(role_model):
            raise EngineError(
                f"the {role} {type(role_model).__name__} has no attention for rows of different lengths, which drafts "
                f"need; set engine.attn_implementation=sdpa and engine.kv_cache_dtype=null, or leave engine.draft out"
            )

    num_ids, num_draft_ids = output_layer(model).out_features, output_layer(draft).out_features
    if num_ids != num_draft_ids:
        raise EngineError(
            f"the output layers of policy and rollout model differ in size, {num_ids} and {num_draft_ids}; drafts need "
            f"one vocabulary"
        )

    return draft
