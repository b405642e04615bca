"""vLLM in this process, on a thread of its own. It is imported when an engine is made, not before.

All of vLLM lives on that thread: it steps while anything is unfinished and takes jobs (new requests, weights, sleep)
between two steps. Tested with vLLM 0.32 on a CPU; not yet run on a GPU.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from jackpot.core.digest import WeightsDigest
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.background import ThreadEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.checks import check_request, check_scores, check_weights
from jackpot.rollout.engines.vllm.protocol import (
    check_temperature,
    read_rollout,
    read_score,
    sampling_words,
    score_questions,
)
from jackpot.rollout.engines.vllm.weight_format import SentForm

_GIVEN = "jackpot"  # a load format of ours
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_ENVIRONMENT = {  # where the user has not set them
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner's threads share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMSettings:
    """How the engine is set up; the fields are those of `VLLMEngineConfig`, in vLLM's units."""

    dtype: torch.dtype
    kv_cache_dtype: str | None
    max_num_seqs: int
    context_length: int | None
    gpu_memory_utilization: float
    cache_bytes: int | None
    device: int | None
    sleeps: bool
    compiles: bool
    on_gpu: bool  # where the learner is, for which the other numbers are meant


class VLLMEngine(ThreadEngine):
    """Decodes with a copy of the model that vLLM owns."""

    def __init__(
        self,
        folder: str,
        *,
        shapes: Mapping[str, Size],
        form: SentForm,
        first: Sequence[tuple[str, Tensor]],
        eos_token_ids: Sequence[int],
        version: Version,
        settings: VLLMSettings,
    ) -> None:
        """
        Args:
            folder: of the model, whose weights are the first ones.
            shapes: of every parameter, by the names that `update_weights` will be given.
            form: in which vLLM gets weights.
            first: the folder's weights by these names, where the form is not the folder's; they are not kept.
            eos_token_ids: end every response, beside `Sampling.stop_token_ids`.

        Raises:
            EngineError: vLLM is not installed, is for another kind of device, or cannot load the model; says why.
        """
        self._shapes, self._eos_token_ids = shapes, tuple(eos_token_ids)
        self._settings, self._form = settings, form
        self._events = list(form.events)
        self._llm: Any = None
        self._answers: dict[str, Callable[[Any], None]] = {}  # by vLLM's request id, what to do with the answer
        self._numbers = count()
        self._is_asleep = False
        super().__init__(version, writer="vLLM")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", category=FutureWarning)  # of torch to vLLM's authors
                self._capabilities = self._call(lambda: self._load(folder, first))
        except BaseException:
            self.close()
            raise

    def _check(self, request: Request) -> None:
        check_request(request, self.capabilities)
        check_temperature(request.sampling.temperature, request.uid)

    def _begin(self, requests: Sequence[Request]) -> None:
        version, threads = self._version, torch.get_num_threads()

        def add_all() -> None:
            torch.set_num_threads(threads)  # a setting of each thread: as many as the learner has
            self._add_all(requests, version)

        self._post(add_all)

    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """As `Engine.score`. At temperatures other than 1 vLLM is asked for every token by itself."""
        self._open()
        self._awake()
        check_scores(rollouts, temperature, self.capabilities)
        questions = [list(score_questions(rollout, temperature)) for rollout in rollouts]
        asked = [question for of_rollout in questions for question in of_rollout]
        futures: list[Future] = [Future() for _ in asked]

        def add_all() -> None:
            for question, future in zip(asked, futures, strict=True):
                self._add(question.prompt, question.words, _score_reader(question.prompt_tokens, future))

        self._post(add_all)
        answers = iter([self._wait(future) for future in futures])
        return [read_score([next(answers) for _ in of_rollout]) for of_rollout in questions]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """As `Engine.update_weights`. vLLM keeps some weights fused or packed: the digest is of what it was given."""
        self._open()
        self._ledger.check_empty()
        sent = [(name, tensor.detach()) for name, tensor in named_tensors]
        check_weights(sent, self._shapes)
        digest = self._call(lambda: self._replace_weights(sent))
        self._version = version
        return digest

    def take_events(self) -> list[dict[str, Any]]:
        """Once, what was quantised."""
        events, self._events = self._events, []
        return events

    def rest(self) -> None:
        if self._settings.sleeps and not self._is_asleep:
            self._open()
            self._ledger.check_empty()
            self._call(lambda: self._llm.sleep(level=2))  # forgets weights and cache: new weights come next
            self._is_asleep = True

    def submit(self, requests: Sequence[Request]) -> None:
        self._awake()
        super().submit(requests)

    def _awake(self) -> None:
        if self._is_asleep:
            raise EngineError("the engine sleeps and has no weights; send them with update_weights first")

    # On vLLM's thread

    @property
    def _is_busy(self) -> bool:
        return self._llm is not None and self._llm.has_unfinished_requests()

    def _end(self) -> None:
        if self._llm is not None:
            self._llm.engine_core.shutdown()
        self._llm = None

    def _load(self, folder: str, first: Sequence[tuple[str, Tensor]]) -> Capabilities:
        vllm = _import_vllm(compiles=self._settings.compiles)
        settings, config = self._settings, self._form.config
        _check_device(settings.on_gpu, vllm.has_gpu)
        set_num_threads = torch.set_num_threads
        try:
            arguments = vllm.EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                generation_config="vllm",
                load_format=vllm.load_format_of(self._form.tensors(first)) if first else "auto",
                hf_overrides={"quantization_config": config} if config else {},
                dtype=settings.dtype,
                kv_cache_dtype=settings.kv_cache_dtype or "auto",
                seed=0,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=settings.context_length,
                max_logprobs=-1,
                logprobs_mode="processed_logprobs",
                enforce_eager=not settings.compiles,
                enable_chunked_prefill=None if vllm.has_gpu else False,  # it would rewind generators: not on a CPU
                gpu_memory_utilization=settings.gpu_memory_utilization,
                kv_cache_memory_bytes=settings.cache_bytes,
                enable_sleep_mode=settings.sleeps,
                device_ids=None if settings.device is None else [settings.device],
                use_tqdm_on_load=False,
                disable_log_stats=True,
            )
            with _one_process():
                self._vllm, self._llm = vllm, vllm.LLMEngine.from_engine_args(arguments)
            self._llm.apply_model(_keep_scales)
        except Exception as error:
            raise EngineError(f"vLLM cannot serve {folder}: {type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads = set_num_threads  # which vLLM makes do nothing on a CPU
        model = self._llm.model_config
        return Capabilities(
            vocab_size=model.get_vocab_size(),
            num_top_log_probs=model.get_vocab_size(),
            context_length=model.max_model_len,
            quantised=bool(self._form.quantization or settings.kv_cache_dtype or model.quantization),
            streaming=True,
            updates_in_flight=False,
            dtype=settings.dtype,
        )

    def _add_all(self, requests: Sequence[Request], version: Version) -> None:
        for request in requests:
            words = sampling_words(request, self._eos_token_ids, self.capabilities.context_length)
            self._add(request.prompt.token_ids, words, self._rollout_reader(request, version))

    def _add(self, prompt: Sequence[int], words: dict[str, Any], answer: Callable[[Any], None]) -> None:
        number = str(next(self._numbers))
        vllm = self._vllm
        parameters = vllm.SamplingParams(
            **words, detokenize=False, flat_logprobs=True, output_kind=vllm.RequestOutputKind.FINAL_ONLY
        )
        self._answers[number] = answer
        self._llm.add_request(number, vllm.tokens_input(list(prompt)), parameters)

    def _step(self) -> None:
        for output in self._llm.step():
            if output.finished:
                self._answers.pop(output.request_id)(output)

    def _rollout_reader(self, request: Request, version: Version) -> Callable[[Any], None]:
        def read(output: Any) -> None:
            answer = output.outputs[0]
            shape = (len(answer.token_ids), 1 + request.sampling.num_top_log_probs)
            ids = np.array(answer.logprobs.token_ids).reshape(shape)
            log_probs = np.array(answer.logprobs.logprobs).reshape(shape)
            self._finish([read_rollout(request, answer.token_ids, ids, log_probs, answer.finish_reason, version)])

        return read

    def _replace_weights(self, sent: Sequence[tuple[str, Tensor]]) -> str:
        """The digest of what vLLM has taken, or its codes were made from, tensor by tensor as it took them."""
        if self._is_asleep:
            self._llm.wake_up(["weights"])
        digest = WeightsDigest(self._settings.dtype)
        cast = ((name, tensor.to(self._settings.dtype)) for name, tensor in sent)
        given = self._form.tensors(digest.watch(cast))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": given})
        self._llm.apply_model(_pack_tied_head)
        if self._is_asleep:
            self._llm.wake_up(["kv_cache"])
            self._is_asleep = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache still holds states of the old weights and could not be reset")
        return digest.hexdigest()


def _pack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs the output layer into a copy; that of a tied one `reload_weights` leaves as it was."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _keep_scales(model: torch.nn.Module) -> None:
    """On a CPU (0.32) oneDNN reads the scales of INT8 weights where they were when it packed these, which
    `reload_weights` frees afterwards; so somebody must hold them."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler"):
            kernel.process_weights_after_loading = partial(_pack_and_keep, kernel)


def _pack_and_keep(kernel: Any, layer: torch.nn.Module) -> None:
    type(kernel).process_weights_after_loading(kernel, layer)
    kernel.kept = layer.weight_scale


def _score_reader(prompt_tokens: int, future: Future) -> Callable[[Any], None]:
    """Puts the log-probs of the last `prompt_tokens` of the prompt and of the token after it into the future."""

    def read(output: Any) -> None:
        of_prompt = output.prompt_logprobs.logprobs[-prompt_tokens:] if prompt_tokens else []
        future.set_result([*of_prompt, output.outputs[0].logprobs.logprobs[1]])  # after the token that was drawn

    return read


@dataclass(frozen=True, slots=True)
class _VLLM:
    """What this file uses of vLLM."""

    EngineArgs: Any
    LLMEngine: Any
    SamplingParams: Any
    RequestOutputKind: Any
    tokens_input: Any
    load_format_of: Callable[[Iterable[tuple[str, Tensor]]], str]
    has_gpu: bool


def _check_device(on_gpu: bool, has_gpu: bool) -> None:
    """Raises EngineError where vLLM would run on another kind of device than the learner."""
    if on_gpu != has_gpu:
        ours, its, other = ("a GPU", "the CPU", "cpu") if on_gpu else ("the CPU", "a GPU", "cuda")
        raise EngineError(
            f"training runs on {ours} and vLLM here is for {its}, so engine's settings would be meant for the wrong "
            f"one; set device: {other}, install vLLM for {ours}, or use engine=transformers"
        )


@contextmanager
def _one_process() -> Iterator[None]:
    """An engine made meanwhile is in this process, where weights are handed over as tensors, whatever the user has set
    for other engines."""
    before = os.environ.get(_MULTIPROCESSING)
    os.environ[_MULTIPROCESSING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTIPROCESSING]
        else:
            os.environ[_MULTIPROCESSING] = before


def _import_vllm(compiles: bool) -> _VLLM:
    """What this file uses of it. Without `compiles`, torch.compile does nothing in this process from now on, in the
    learner neither: vLLM compiles at the first request, so it cannot be switched on again after the start.

    Raises:
        EngineError: it is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not compiles:
        torch._dynamo.config.disable = True  # vLLM would compile the gathering of log-probs: 14 s at the first request
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs import tokens_input
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported: {error}. Install it with pip install 'jackpot-rl[vllm]', or use "
            f"engine=transformers; docs/vllm.md has the versions"
        ) from error

    def load_format_of(weights: Iterable[tuple[str, Tensor]]) -> str:
        """The name under which vLLM, asked next, loads a model with these weights instead of its folder's."""

        @register_model_loader(_GIVEN)
        class Given(BaseModelLoader):
            def download_model(self, model_config: Any) -> None:
                """There is nothing to download."""

            def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
                model.load_weights(iter(weights))

        return _GIVEN

    has_gpu = not current_platform.is_cpu()
    return _VLLM(EngineArgs, LLMEngine, SamplingParams, RequestOutputKind, tokens_input, load_format_of, has_gpu)
