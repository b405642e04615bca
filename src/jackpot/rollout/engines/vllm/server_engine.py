"""vLLM servers that the user has started, in other processes or on other machines: a pool of `Replica`s.

The caller's thread hands over prompts and new weights. It waits for rollouts in `collect`, for log-probs in `score` and
for the servers in `update_weights`. Everything else is done by the pool (`engines/pool.py`), one job a prompt.

Tested with vLLM 0.32 on CPUs; not yet run on a GPU.
"""

import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import VLLMServerEngineConfig, is_quantized
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.models.load import DTYPES
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.checks import check_request, check_scores, check_weights
from jackpot.rollout.engines.pool import Pool, PoolLimits
from jackpot.rollout.engines.vllm.client import ServerClient, open_session
from jackpot.rollout.engines.vllm.protocol import (
    check_temperature,
    completion_body,
    join_log_probs,
    log_prob_body,
    logprob_requests,
    parse_completion,
    parse_log_probs,
    to_sampling_params,
)
from jackpot.rollout.engines.vllm.replica import Job, Replica
from jackpot.rollout.engines.vllm.server_info import ExpectedModel, model_sizes
from jackpot.rollout.engines.vllm.weight_format import WeightFormat
from jackpot.rollout.engines.vllm.weight_sync import SavedWeights, WeightsFolder


class VLLMServerEngine(BackgroundEngine):
    """Decodes with vLLM servers that the user has started, all with the same model."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: VLLMServerEngineConfig,
        *,
        eos_token_ids: Sequence[int],
        version: Version,
    ) -> None:
        """Send the weights of a model to the servers, and wait until all servers in reach hold them.

        Args:
            model: model whose weights the servers are sent first; it is not kept.
            eos_token_ids: tokens that end every response, besides `Sampling.stop_token_ids`.

        Raises:
            EngineError: no server can be reached, or one serves something else; the text says what to do.
        """
        super().__init__(version)
        self._settings, self._eos_token_ids = settings, tuple(eos_token_ids)
        dtype, named = DTYPES[settings.dtype], dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        # With tied parameters under each of their names: name -> name under which it is sent.
        all_names = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        weight_format = WeightFormat.of_model(model, settings.quantization)
        self._expected = ExpectedModel(
            sizes=model_sizes(model),
            parameters=frozenset(all_names),
            dtype=dtype,
            head_dtype="float32" if settings.head_dtype == "fp32" else None,
            quant_method=weight_format.quant_method,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        self._replicas: list[Replica] = []
        self._id = f"jackpot-{secrets.token_hex(6)}"  # name of this engine, unlike any other's
        aliases = {alias: name for alias, name in all_names.items() if alias != name}
        self._files = WeightsFolder(settings.weights_folder, self._id, dtype, aliases, weight_format)
        self._weight_numbers = count()
        limits = PoolLimits(
            patience=settings.connect_timeout,
            patience_setting="engine.connect_timeout",
            unreachable="Are they running, and is engine.urls right?",
            attempts=settings.max_retries,
            attempts_setting="engine.max_retries",
            failing="look at the servers' logs",
        )
        self._pool = Pool(limits, self._save(list(named.items())), thread_name="the servers' thread")
        self._pool.on_failure.append(self._fail)
        for event in weight_format.events:
            self._pool.log_event(event)
        try:
            self._pool.call(self._start())
        except BaseException:
            self.close()
            raise

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call.

        They are `server_lost`, `server_back` and `server_restarted`, each with the `server` (docs/vllm.md), and once
        `quantized`, where the settings quantize.
        """
        return self._pool.take_events()

    def _check(self, request: Request) -> None:
        num_top, limit = request.sampling.num_top_log_probs, self.capabilities.num_top_log_probs
        if limit < min(num_top, self.capabilities.vocab_size):
            raise EngineError(
                f"{request.uid} asks for {num_top} top log-probs, and a server returns at most {limit}; start the "
                f"servers with --max-logprobs -1, or ask for fewer with sampling.num_top_log_probs"
            )
        check_request(request, self.capabilities)
        check_temperature(request.sampling.temperature, request.uid)

    def _begin(self, requests: Sequence[Request]) -> None:
        self._pool.begin(
            [(request.uid, self._job(request), lambda rollout: self._complete([rollout])) for request in requests]
        )

    def _job(self, request: Request) -> Job:
        capabilities = self.capabilities
        sampling_params = to_sampling_params(request, self._eos_token_ids, capabilities.max_model_len)
        return Job(
            body=completion_body(request.prompt.token_ids, sampling_params),
            parse=partial(
                parse_completion,
                request=request,
                sampling_params=sampling_params,
                vocab_size=capabilities.vocab_size,
                version=self._version,
            ),
        )

    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says. At temperatures other than 1 each token takes one server request."""
        self._check_open()
        check_scores(rollouts, temperature, self.capabilities)
        by_rollout = [list(logprob_requests(rollout, temperature)) for rollout in rollouts]
        jobs = [
            (rollout.uid, Job(log_prob_body(one), partial(parse_log_probs, request=one, uid=rollout.uid)))
            for rollout, requests in zip(rollouts, by_rollout, strict=True)
            for one in requests
        ]
        results = iter(self._pool.results(jobs))
        return [join_log_probs([next(results) for _ in requests]) for requests in by_rollout]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights as `Engine.update_weights` says; return the digest of the file that the servers read.

        The call returns once at least one server and all others in reach hold the new weights. A server out of reach
        gets them before its next request.
        """
        self._check_open()
        self._in_flight.check_empty()
        sent = [(name, tensor.detach()) for name, tensor in named_tensors]
        check_weights(sent, self._shapes)
        saved = self._save(sent)
        self._pool.update(saved)
        self._version = version
        self._files.keep_only([saved, *(one.loading for one in self._replicas if one.loading is not None)])
        return saved.digest

    def _save(self, sent: Sequence[tuple[str, Tensor]]) -> SavedWeights:
        return self._files.save(sent, f"{self._id}-{next(self._weight_numbers)}")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self._pool.close(*([self._session.close] if hasattr(self, "_session") else []))
            finally:
                self._files.remove()
                self._in_flight.clear()

    async def _start(self) -> None:
        settings = self._settings
        self._session = open_session(settings.urls)
        for url in settings.urls:
            client = ServerClient(url, self._session, timeout=settings.timeout)
            self._replicas.append(Replica(url, client, self._expected, self._id, settings.max_num_seqs))
        await self._pool.join(*self._replicas)
        await self._pool.until_synced()
        self._capabilities = self._find_capabilities()
        self._pool.check = self._check_limits

    def _find_capabilities(self) -> Capabilities:
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        return Capabilities(
            vocab_size=self._expected.sizes["vocab_size"],
            num_top_log_probs=min(info.num_top_log_probs for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
            quantized=is_quantized(self._settings) or any(info.quantized for info in infos),
            dtype=self._expected.dtype,
            device="cpu" if all(info.device == "cpu" for info in infos) else "cuda",
        )

    def _check_limits(self, replica: Replica) -> None:
        """Raise EngineError for a server that comes later and has smaller limits than `capabilities`."""
        for name in ("max_model_len", "num_top_log_probs"):
            has, promised = getattr(replica.info, name), getattr(self._capabilities, name)
            if has < promised:
                raise EngineError(
                    f"{replica.name} has {name} {has}, and the others {promised}; start it as the others are"
                )
        if replica.info.quantized and not self._capabilities.quantized:
            raise EngineError(f"{replica.name} is quantized, and the others are not; start it as the others are")
