"""The engine that runs vLLM in this process. vLLM is imported when an engine is made, not before.

Two threads take part (see `background.py`):

- vLLM's thread owns vLLM. It does posted calls (new requests, weights, sleep) and has vLLM take steps between them. It
  waits for calls only while vLLM has no unfinished request. It hands rollouts over by `_complete`; results of calls and
  log-probs for `score` are futures.
- The caller's thread posts those calls. It waits in `score`, `update_weights` and `sleep` for futures, and in `collect`
  for rollouts, until the result comes or vLLM's thread fails.

Status: experimental. Tested with vLLM 0.32 on a CPU; not yet run on a GPU.
"""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import VLLMEngineConfig, is_quantized, sleeps
from jackpot.core.digest import WeightsDigest, weights_digest
from jackpot.core.errors import ConfigError, EngineError
from jackpot.core.types import Rollout, Version
from jackpot.models.hub import resolve_path
from jackpot.models.load import DTYPES, eos_token_ids, load_meta_model, load_model
from jackpot.rollout.engines.background import ThreadEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.checks import check_request, check_weights
from jackpot.rollout.engines.servers.protocol import LogProbRequest, make_rollout, score_by_requests
from jackpot.rollout.engines.vllm.drafts import count_drafts, draft_arguments, repair_sampling
from jackpot.rollout.engines.vllm.library import (
    SECOND_RUNNER,
    check_device,
    import_vllm,
    in_one_process,
    keep_process_groups,
    keep_scales,
    mask_rows,
    pack_tied_head,
    register_loader,
    reload_draft,
)
from jackpot.rollout.engines.vllm.protocol import check_temperature, log_prob_params, to_sampling_params
from jackpot.rollout.engines.vllm.weight_format import WeightFormat

_TURNS = threading.Lock()  # engines of one process step in turn: two at once crash in vLLM's kernels for CPUs
_LOADED: "weakref.WeakSet[VLLMEngine]" = weakref.WeakSet()  # engines of this process whose vLLM has not been shut down
_CPU_CACHE_BYTES = 2**30  # size of the KV cache on a CPU if `kv_cache_memory_bytes` is null


class VLLMEngine(ThreadEngine):
    """An engine that decodes with vLLM in this process; vLLM owns a copy of the model.

    Of the events that engines report to the run (`take_events`), this engine has only `quantized`, reported where its
    settings quantize the model.
    """

    def __init__(
        self,
        path: str,
        settings: VLLMEngineConfig,
        *,
        device: torch.device,
        version: Version,
        drafter: "VLLMEngine | None" = None,
        rows: int | None = None,
    ) -> None:
        """Start vLLM with the model in `path` and the weights stored there.

        Args:
            path: path of the model as `load_model` takes it.
            device: the learner's device. vLLM runs on the same kind of device, by default on the same GPU.
            version: version of the stored weights.
            drafter: the engine whose model proposes tokens as `settings.draft` says. vLLM holds a copy of that model,
                which gets all new weights of `drafter`; None: this engine's model generates alone.
            rows: only token ids below this number are sampled; None: all rows of the output layer.

        Raises:
            ConfigError: vLLM does not support a setting on this kind of device.
            ModelError: the model cannot be loaded.
            EngineError: vLLM is not installed, is for another kind of device, or cannot serve the model.
        """
        _check_settings(settings, device)
        self._settings, self._device = settings, device
        self._rows = rows
        self._dtype = DTYPES[settings.dtype]

        # Weights that are to be quantized are handed to vLLM at its start; others it reads from the model's folder.
        model = load_model(path, self._dtype) if settings.quantization else load_meta_model(path)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._eos_token_ids, self._folder = tuple(eos_token_ids(model)), resolve_path(path)

        # Number of tokens that a draft model proposes at once (0 without drafts), and vLLM's arguments for lengths and
        # drafts.
        self._num_drafts, self._length_and_draft_arguments = _lengths_and_drafts(model, settings, drafter)
        self._followers: list[VLLMEngine] = []  # engines for which this engine's model drafts

        self._weight_format = WeightFormat.of_model(model, settings.quantization)
        self._llm: Any = None  # vLLM's own engine, made by `_load`; None before that, and after `_shut_down`
        self._handlers: dict[str, Callable[[Any], None]] = {}  # by vLLM's request id, what takes the output
        self._request_ids = count()  # numbers by which vLLM is given its requests

        super().__init__(version, thread_name="vLLM")  # starts vLLM's thread, on which `_call` below runs `_load`
        self._events += self._weight_format.events
        # Weights to start vLLM with; if there are none, vLLM reads those in the model's folder.
        named_weights = model.named_parameters() if settings.quantization else ()
        weights = [(name, weight.detach()) for name, weight in named_weights]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", category=FutureWarning)  # from torch, about vLLM's own calls
                self._capabilities = self._call(lambda: self._load(weights))
        except BaseException:
            self.close()
            raise
        if drafter is not None:
            drafter._followers.append(self)

    def _check(self, request: Request) -> None:
        check_request(request, self.capabilities)
        check_temperature(request.sampling.temperature, request.uid)

    def _begin(self, requests: Sequence[Request]) -> None:
        self._post(partial(self._add_all, requests, self._version, torch.get_num_threads()))

    def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says; at temperatures other than 1 each token takes one vLLM request.

        The call waits until no response is unfinished, because in one step vLLM returns either the top log-probs of all
        requests or the log-probs of tokens that are asked for.
        """
        with self._changed:  # a condition that is notified when a response ends or generation fails
            self._changed.wait_for(lambda: not self._in_flight.num_unfinished or self._failure is not None)
        self._check_open()  # raises the failure, if there is one

        for rollout in rollouts:
            check_temperature(temperature, f"the score of {rollout.uid}")

        return score_by_requests(rollouts, temperature, self._log_probs)

    def _log_probs(self, requests: Sequence[tuple[str, LogProbRequest]]) -> list[list[float]]:
        """Send requests for log-probs of given tokens to vLLM, and wait for the results: a list of log-probs each.

        This is the function `answers` of `score_by_requests`.

        Args:
            requests: pairs of a rollout's uid, which is not used here, and a request.
        """
        futures: list[Future[list[float]]] = [Future() for _ in requests]

        def add_all() -> None:
            """Give vLLM all requests, each with a handler that sets the request's future."""
            for (_, request), future in zip(requests, futures, strict=True):
                handler = partial(_set_log_probs, future, request.num_prompt_log_probs)
                self._add(request.prompt, log_prob_params(request), handler)

        self._post(add_all)  # vLLM's thread runs it; `_wait` raises EngineError if that thread ends without results
        return [self._wait(future) for future in futures]

    def _take_weights(self, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights as `Engine.update_weights` says.

        vLLM holds some weights fused or packed, so the digest is computed from the tensors that vLLM is given: codes
        and scales where these are sent. Engines for which this engine's model drafts get the new weights too.
        """
        followers = [engine for engine in self._followers if not engine._is_closed]
        for engine in followers:
            engine._check_idle()  # raises EngineError if requests are in flight there
        check_weights(weights, self._shapes, self.capabilities.coded_weights)

        self._synchronize()  # until the learner's stream has written the tensors that vLLM's stream will read
        digest = self._call(lambda: self._replace_weights(weights))
        for engine in followers:
            engine._call(partial(engine._replace_draft_weights, weights))
        self._synchronize()  # until vLLM's stream has read the tensors that the learner's stream will overwrite
        return digest

    def _synchronize(self) -> None:
        """Wait until the GPU, if there is one, has done the work of all streams."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _release(self) -> None:
        """Release the memory of weights and cache."""
        self._call(lambda: self._llm.sleep(level=2))  # level 2 drops the weights, which are replaced at wake-up

    # Methods that run on vLLM's thread

    @property
    def _is_busy(self) -> bool:
        return self._llm is not None and self._llm.has_unfinished_requests()

    def _shut_down(self) -> None:
        """Shut down vLLM, if it was started; process groups that other engines of this process use stay."""
        if self._llm is None:
            return
        with _TURNS:
            _LOADED.discard(self)
            with keep_process_groups() if _LOADED else nullcontext():
                self._llm.engine_core.shutdown()
        self._llm = None

    def _load(self, weights: Sequence[tuple[str, Tensor]]) -> Capabilities:
        """Start vLLM on this thread and return the engine's capabilities; raise EngineError if vLLM cannot be used.

        Args:
            weights: weights to start with, in the engine's dtype; if empty, vLLM reads them from the model's folder.
        """
        on_cpu = self._device.type == "cpu"
        enforce_eager = on_cpu if self._settings.enforce_eager == "auto" else self._settings.enforce_eager
        vllm = import_vllm(compiles=not enforce_eager)
        check_device(on_gpu=not on_cpu, has_gpu=vllm.has_gpu)

        set_num_threads = torch.set_num_threads  # torch's own function, which is put back below
        try:
            arguments = self._engine_arguments(vllm, weights, enforce_eager)
            with in_one_process():
                self._vllm, self._llm = vllm, vllm.LLMEngine.from_engine_args(arguments)
            _LOADED.add(self)  # while the set has this engine, the end of another leaves vLLM's process groups alone

            # Repair the faults that `library.py` and `drafts.py` name, and never sample token ids from `num_ids` on.
            self._llm.apply_model(keep_scales)
            self._llm.collective_rpc(repair_sampling)
            size = self._llm.model_config.get_vocab_size()
            num_ids = min(self._rows or size, size)  # with `_rows` None: all rows of the output layer
            if num_ids < size:
                self._llm.apply_model(partial(mask_rows, num_ids))
        except Exception as error:
            raise EngineError(f"vLLM cannot serve {self._folder}: {type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads = set_num_threads  # on a CPU vLLM replaces the function by one without effect

        model = self._llm.model_config
        return Capabilities(
            vocab_size=num_ids,
            num_top_log_probs=num_ids,
            # vLLM drafts only where the context has room for the drafts that a pass verifies and for as many new ones.
            max_model_len=model.max_model_len - 2 * self._num_drafts,
            quantized=is_quantized(self._settings) or bool(model.quantization),
            coded_weights=self._weight_format.coded_weights,
            dtype=self._dtype,
            device=self._device.type,
            sleeps=sleeps(self._settings),
        )

    def _engine_arguments(self, vllm: Any, weights: Sequence[tuple[str, Tensor]], enforce_eager: bool) -> Any:
        """Return vLLM's `EngineArgs` for these settings, this device and the weights to start with."""
        settings, on_cpu = self._settings, self._device.type == "cpu"
        device = self._device.index if settings.device is None else settings.device

        overrides: dict[str, Any] = {"head_dtype": "float32"} if settings.head_dtype == "fp32" else {}
        if config := self._weight_format.quantization_config:
            overrides["quantization_config"] = config

        return vllm.EngineArgs(
            model=self._folder,
            skip_tokenizer_init=True,  # prompts and responses are token ids
            generation_config="vllm",  # no sampling parameters from the model's folder
            # vLLM loads `weights` if there are any, else those in the model's folder.
            load_format=register_loader(self._weight_format.convert(weights)) if weights else "auto",
            hf_overrides=overrides,
            dtype=self._dtype,
            kv_cache_dtype=settings.kv_cache_dtype or "auto",
            seed=0,  # not used: every request has a seed
            max_num_seqs=settings.max_num_seqs,
            max_logprobs=-1,  # no limit
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: after temperature and top-k
            enforce_eager=enforce_eager,
            enable_chunked_prefill=None if vllm.has_gpu else False,  # on a CPU it would rewind random generators
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes or (_CPU_CACHE_BYTES if on_cpu else None),
            enable_sleep_mode=sleeps(settings),
            device_ids=None if device is None else [device],
            use_tqdm_on_load=False,
            disable_log_stats=True,
            **self._length_and_draft_arguments,
        )

    def _add_all(self, requests: Sequence[Request], version: Version, num_threads: int) -> None:
        """Give vLLM requests for responses, and collect their log-probs in place of vLLM's own processor.

        Args:
            num_threads: number of threads with which torch computes for the learner. vLLM's thread sets the same
                number, because torch has such a number for each thread.
        """
        torch.set_num_threads(num_threads)
        for request in requests:
            sampling_params = to_sampling_params(request, self._eos_token_ids, self.capabilities.max_model_len)
            top = _TopLogProbs()
            handler = partial(self._finish, request, version, top)
            internal_id = self._add(request.prompt.token_ids, sampling_params, handler)
            state = self._llm.output_processor.request_states[internal_id]
            state.logprobs_processor.update_from_output = top.add

    def _add(self, prompt: Sequence[int], sampling_params: dict[str, Any], handler: Callable[[Any], None]) -> str:
        """Give vLLM a request whose output goes to `handler`, and return the request id that vLLM uses."""
        request_id, vllm = str(next(self._request_ids)), self._vllm
        parameters = vllm.SamplingParams(
            **sampling_params, detokenize=False, flat_logprobs=True, output_kind=vllm.RequestOutputKind.FINAL_ONLY
        )
        self._handlers[request_id] = handler
        return self._llm.add_request(request_id, vllm.tokens_input(list(prompt)), parameters)

    def _step(self) -> None:
        """Have vLLM take one step, and give each finished output to the handler of its request."""
        with _TURNS:
            outputs = self._llm.step()
        for output in outputs:
            if output.finished:
                self._handlers.pop(output.request_id)(output)

    def _finish(self, request: Request, version: Version, top: "_TopLogProbs", output: Any) -> None:
        """Hand the rollout in vLLM's finished output, and the counts of its drafts, to the caller's thread.

        Args:
            top: the log-probs of the response, which were collected while it was generated.
        """
        response = output.outputs[0]
        length, prompt_length = len(response.token_ids), len(request.prompt.token_ids)
        # Each token of the response has the log-probs of itself and of the top tokens.
        ids, log_probs = top.arrays(length, width=1 + request.sampling.num_top_log_probs)
        rollout = make_rollout(request, response.token_ids, ids, log_probs, response.finish_reason, version)
        metrics = response.spec_decode_metrics  # None without a draft model
        drafts = count_drafts(prompt_length, length, metrics) if metrics else None
        self._complete([rollout], drafts)

    def _replace_weights(self, weights: Sequence[tuple[str, Tensor]]) -> str:
        """Have vLLM load new weights; return the digest of the tensors that vLLM has taken.

        Where `weights` are sent as codes and scales, the digest is that of these, else that of the weights in the
        engine's dtype, before they are quantized here.
        """
        # Wake up in two parts, so that memory for the cache is taken only after the weights are loaded.
        if self._is_asleep:
            self._llm.wake_up(["weights"])

        # `watch` adds each tensor to the digest when vLLM reads it.
        codes = self._weight_format.coded_weights
        if codes and codes.are_in(weights):
            digest = WeightsDigest(dtype=None)  # every tensor in its own dtype
            converted = digest.watch(weights)
        else:
            digest = WeightsDigest(dtype=self._dtype)
            converted = self._weight_format.convert(digest.watch(self._cast(weights)))

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": converted})
        self._llm.apply_model(pack_tied_head)  # on a CPU vLLM itself does not pack a tied output layer again

        if self._is_asleep:
            self._llm.wake_up(["kv_cache"])
            self._is_asleep = False
        self._forget_states()  # the prefix cache of the old weights

        return digest.hexdigest()

    def _replace_draft_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Have vLLM's draft model load new weights; raise EngineError if vLLM has not read all of them to the end."""
        read = WeightsDigest(self._dtype)
        # `watch` adds each tensor when vLLM reads it, so the digest differs where vLLM has stopped before the last one.
        self._llm.collective_rpc(reload_draft, args=(read.watch(self._cast(weights)),))
        self._forget_states()  # the prefix cache of the old weights

        digest, expected = read.hexdigest(), weights_digest(weights, self._dtype)
        if digest != expected:
            raise EngineError(
                f"vLLM's draft model has taken only a part of its new weights: digest {digest[:12]} in place of "
                f"{expected[:12]}. Leave engine.draft out, or use engine=transformers"
            )

    def _cast(self, weights: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the engine's dtype."""
        return ((name, tensor.to(self._dtype)) for name, tensor in weights)

    def _forget_states(self) -> None:
        """Empty the prefix cache, whose keys and values are those of old weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache still holds states of the old weights and could not be reset")


def _check_settings(settings: VLLMEngineConfig, device: torch.device) -> None:
    """Raise ConfigError for settings that vLLM does not support on the learner's kind of device.

    Some settings are refused on a CPU, and drafts with vLLM's second model runner on every device.
    """
    if settings.draft and os.environ.get(SECOND_RUNNER, "0") != "0":
        raise ConfigError(
            f"engine.draft has run on vLLM's first model runner only, and {SECOND_RUNNER} asks for the second; unset it"
        )

    if device.type != "cpu":
        return

    if sleeps(settings) or settings.device is not None:
        raise ConfigError(
            "engine.enable_sleep_mode and engine.device are for GPUs, and this run is on a CPU; leave them out"
        )
    if settings.quantization == "fp8":
        raise ConfigError(
            "vLLM computes with FP8 blocks on GPUs; its kernels for CPUs need AMX and most leave activations as they "
            "are. Use engine.quantization=int8_w8a8, which it has here, or engine=transformers, which computes what a "
            "GPU would"
        )


def _lengths_and_drafts(
    model: PreTrainedModel, settings: VLLMEngineConfig, drafter: VLLMEngine | None
) -> tuple[int, dict[str, Any]]:
    """Return how many tokens are drafted at once (0 without drafts), and vLLM's arguments for lengths and drafts."""
    if drafter is None:
        return 0, {"max_model_len": settings.max_model_len}

    # Context length of the policy; None where neither the settings nor the model's config name one.
    context = settings.max_model_len or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = drafter.capabilities.max_model_len  # context length of the draft model, which the policy may not exceed
    assert settings.draft is not None and settings.draft.tokens != "auto"  # the settings' checks ensure both
    tokens = settings.draft.tokens
    return tokens, draft_arguments(
        num_drafts=tokens,
        folder=drafter._folder,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(context or limit, limit),
    )


class _TopLogProbs:
    """The top log-probs of one response, kept as the arrays that vLLM's sampler gives.

    vLLM's own processor makes four Python objects of every number: about 2,000 bytes for a token's top 20.
    """

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []

    def add(self, output: Any) -> None:
        """Add the top log-probs in one step's `EngineCoreOutput`; replaces `LogprobsProcessor.update_from_output`."""
        if (new := output.new_logprobs) is not None:
            self._ids.append(new.logprob_token_ids.copy())  # a view would keep the rows of all requests
            self._log_probs.append(new.logprobs.copy())

    def arrays(self, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and log-probs, [length, width] each: the sampled token in column 0, then top tokens."""
        if not self._ids:
            return np.empty((0, width)), np.empty((0, width))
        return (
            np.concatenate(self._ids).reshape(length, width),
            np.concatenate(self._log_probs).reshape(length, width),
        )


def _set_log_probs(future: Future, num_prompt_log_probs: int, output: Any) -> None:
    """Set a future to the log-probs in vLLM's finished output of a `LogProbRequest`.

    The result is the list of the log-probs of the last `num_prompt_log_probs` prompt tokens and of the request's token.
    """
    of_prompt = output.prompt_logprobs.logprobs[-num_prompt_log_probs:] if num_prompt_log_probs else []
    # Entry 0 belongs to the sampled token, entry 1 to the request's token.
    future.set_result([*of_prompt, output.outputs[0].logprobs.logprobs[1]])
