"""vLLM servers that the user has started, in other processes or on other machines.

Two threads take part. All servers are called from an event loop on the second:

- The caller's thread hands over prompts and new weights. It waits for rollouts in `collect`, for log-probs in `score`
  and for one updated server in `update_weights`; it is unblocked by these, or by the failure of the engine.
- `_serve`, one task per server, brings the server to the newest weights and then runs `_dispatch`. It is unblocked by
  lost servers and new weights, and ends only with the engine.
- `_dispatch` consumes the shared queue of prompts while its server holds the newest weights. It waits for
  `_state_changed`, which a new prompt, a finished one, new weights and a lost server set. It produces one `_run_prompt`
  task per prompt.
- `_run_prompt` waits for the server's completion and for the check that the right weights generated it. It produces a
  rollout or log-probs, or puts the prompt back into the queue, so that each prompt gets exactly one result.

Tested with vLLM 0.32 on CPUs; not yet run on a GPU.
"""

import asyncio
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import VLLMServerEngineConfig, is_quantized
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.models.load import DTYPES
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.checks import check_request, check_scores, check_weights
from jackpot.rollout.engines.vllm.client import ServerClient, ServerLost, ServerRestarted, open_session
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
from jackpot.rollout.engines.vllm.replica import Replica
from jackpot.rollout.engines.vllm.server_info import ExpectedModel, model_sizes
from jackpot.rollout.engines.vllm.weight_format import WeightFormat
from jackpot.rollout.engines.vllm.weight_sync import SavedWeights, WeightsFolder

Result = TypeVar("Result")
_MAX_EVENTS = 1000  # kept between two calls of `take_events`
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between two attempts to reach a server


@dataclass(kw_only=True, slots=True)
class _QueuedPrompt:
    """One prompt from the queue to its result."""

    uid: str  # name of the response, for errors
    body: Mapping[str, Any]  # body of the completions call, without the model's name
    parse: Callable[[Any], Any]  # converts the JSON of the completion to the result
    finish: Callable[[Any], None]  # hands the result to the caller's thread
    failed_at: list[str] = field(default_factory=list)  # server and error of each failed attempt


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
            quant_method=weight_format.quant_method,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        self._id = f"jackpot-{secrets.token_hex(6)}"  # name of this engine, unlike any other's
        aliases = {alias: name for alias, name in all_names.items() if alias != name}
        self._files = WeightsFolder(settings.weights_folder, self._id, dtype, aliases, weight_format)
        self._weight_numbers = count()
        self._events: deque[dict[str, Any]] = deque(weight_format.events, maxlen=_MAX_EVENTS)
        self._queue: deque[_QueuedPrompt] = deque()
        self._score_futures: set[Future] = set()  # those for which `score` waits
        self._replicas: list[Replica] = []
        self._tasks: list[asyncio.Task] = []
        self._newest = self._save(list(named.items()))
        self._loop = asyncio.new_event_loop()
        self._state_changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-servers", daemon=True)
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self.close()
            raise

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call.

        They are `server_lost`, `server_back` and `server_restarted`, each with the `server` (docs/vllm.md), and once
        `quantized`, where the settings quantize.
        """
        return [self._events.popleft() for _ in range(len(self._events))]

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
        prompts = [self._rollout_prompt(request) for request in requests]
        self._loop.call_soon_threadsafe(self._add, prompts)

    def _rollout_prompt(self, request: Request) -> _QueuedPrompt:
        capabilities = self.capabilities
        sampling_params = to_sampling_params(request, self._eos_token_ids, capabilities.max_model_len)
        return _QueuedPrompt(
            uid=request.uid,
            body=completion_body(request.prompt.token_ids, sampling_params),
            parse=partial(
                parse_completion,
                request=request,
                sampling_params=sampling_params,
                vocab_size=capabilities.vocab_size,
                version=self._version,
            ),
            finish=lambda rollout: self._complete([rollout]),
        )

    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says. At temperatures other than 1 each token takes one server request."""
        self._check_open()
        check_scores(rollouts, temperature, self.capabilities)
        by_rollout = [list(logprob_requests(rollout, temperature)) for rollout in rollouts]
        prompts, futures = [], []
        for rollout, requests in zip(rollouts, by_rollout, strict=True):
            for request in requests:
                future: Future[list[float]] = Future()
                futures.append(future)
                parse = partial(parse_log_probs, request=request, uid=rollout.uid)
                body = log_prob_body(request)
                prompts.append(_QueuedPrompt(uid=rollout.uid, body=body, parse=parse, finish=future.set_result))

        def add() -> None:
            self._score_futures = set(futures)
            if self._failure is not None:
                self._fail(self._failure)
            self._add(prompts)

        self._loop.call_soon_threadsafe(add)
        results = iter([future.result() for future in futures])
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
        self._call(self._sync_all(saved))
        self._version = version
        self._files.keep_only([saved, *(one.loading for one in self._replicas if one.loading is not None)])
        return saved.digest

    def _save(self, sent: Sequence[tuple[str, Tensor]]) -> SavedWeights:
        return self._files.save(sent, f"{self._id}-{next(self._weight_numbers)}")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self._call(self._stop())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
                self._files.remove()
                self._in_flight.clear()

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # On the event loop's thread

    async def _start(self) -> None:
        settings = self._settings
        self._session = open_session()
        for url in settings.urls:
            client = ServerClient(url, self._session, timeout=settings.timeout)
            self._replicas.append(Replica(url, client, self._expected, self._id))
        self._tasks = [asyncio.create_task(self._serve(replica)) for replica in self._replicas]
        await self._wait_until_synced()
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        self._capabilities = Capabilities(
            vocab_size=self._expected.sizes["vocab_size"],
            num_top_log_probs=min(info.num_top_log_probs for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
            quantized=is_quantized(settings) or any(info.quantized for info in infos),
            dtype=self._expected.dtype,
            device="cpu" if all(info.device == "cpu" for info in infos) else "cuda",
        )

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_session"):
            await self._session.close()

    async def _sync_all(self, saved: SavedWeights) -> None:
        self._newest = saved
        self._notify()
        await self._wait_until_synced()

    async def _wait_until_synced(self) -> None:
        """Return when at least one server holds the newest weights and every other one does too or is lost."""
        while True:
            if self._failure is not None:
                raise self._failure
            is_synced = [replica.weights is self._newest for replica in self._replicas]
            pairs = zip(is_synced, self._replicas, strict=True)
            if any(is_synced) and all(synced or replica.is_lost for synced, replica in pairs):
                return
            await self._state_changed.wait()

    def _notify(self) -> None:
        """Unblock all tasks that wait for `_state_changed`."""
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _fail(self, failure: EngineError) -> None:
        super()._fail(failure)
        for future in self._score_futures:
            if not future.done():
                future.set_exception(failure)
        for task in self._tasks:
            task.cancel()
        self._notify()

    def _add(self, prompts: Sequence[_QueuedPrompt]) -> None:
        self._queue.extend(prompts)
        self._notify()

    async def _serve(self, replica: Replica) -> None:
        """Keep a server at the newest weights and give it prompts, as long as the engine lives."""
        try:
            while True:
                was_lost = replica.is_lost
                try:
                    await replica.sync(self._newest)
                    self._check_limits(replica)
                    if was_lost:
                        self._log_event("server_restarted" if replica.was_restarted else "server_back", replica)
                    self._notify()
                    await self._dispatch(replica)
                except ServerLost as lost:
                    await self._back_off(replica, lost)
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineError(f"the servers' thread cannot go on: {type(error).__name__}: {error}"))

    def _check_limits(self, replica: Replica) -> None:
        """Raise EngineError for a server that comes later and has smaller limits than `capabilities`."""
        if not hasattr(self, "_capabilities"):
            return
        for name in ("max_model_len", "num_top_log_probs"):
            has, promised = getattr(replica.info, name), getattr(self._capabilities, name)
            if has < promised:
                raise EngineError(
                    f"{replica.url} has {name} {has}, and the others {promised}; start it as the others are"
                )
        if replica.info.quantized and not self._capabilities.quantized:
            raise EngineError(f"{replica.url} is quantized, and the others are not; start it as the others are")

    async def _back_off(self, replica: Replica, lost: ServerLost) -> None:
        """Wait before the next attempt to reach a lost server, longer every time.

        Raises:
            EngineError: no server has been in reach for `connect_timeout` seconds.
        """
        if not replica.is_lost:
            self._log_event("server_lost", replica, why=str(lost), sent_again=replica.num_resent)
            replica.num_resent = 0
        replica.mark_lost(lost)
        self._notify()
        timeout = self._settings.connect_timeout
        if all(other.is_lost for other in self._replicas):
            left = timeout - (time.monotonic() - max(other.lost_since for other in self._replicas))
            if left <= 0.0:
                reasons = "; ".join(f"{other.url}: {other.error}" for other in self._replicas)
                raise EngineError(
                    f"no server could be used for engine.connect_timeout = {timeout:g} seconds ({reasons}). "
                    f"Are they running, and is engine.urls right?"
                )
            timeout = left
        if isinstance(lost, ServerRestarted) and replica.num_failures == 1:
            return
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(replica.num_failures - 1, 10))
        await asyncio.sleep(min(wait * random.uniform(0.5, 1.5), timeout))

    async def _dispatch(self, replica: Replica) -> None:
        """Give a server prompts until it fails or new weights are there; then wait for its running prompts.

        Raises:
            ServerLost: the server failed.
        """
        tasks: set[asyncio.Task] = set()
        try:
            while replica.error is None and replica.weights is self._newest:
                if self._queue and self._is_next(replica):
                    replica.num_running += 1
                    task = asyncio.create_task(self._run_prompt(replica, self._queue.popleft()))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    self._notify()
                else:
                    await self._state_changed.wait()
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if replica.error is not None:
            raise replica.error

    def _is_next(self, replica: Replica) -> bool:
        """Return whether the server has the fewest running prompts of all ready ones, and fewer than `max_num_seqs`."""
        fewest = min(one.num_running for one in self._replicas if one.error is None and one.weights is self._newest)
        return replica.num_running == fewest < self._settings.max_num_seqs

    async def _run_prompt(self, replica: Replica, prompt: _QueuedPrompt) -> None:
        """Get one prompt's result from a server; queue the prompt again if the server is lost."""
        try:
            result = await replica.complete(prompt.body, prompt.parse)
        except ServerLost as lost:
            replica.error = replica.error or lost
            self._requeue(replica, prompt, lost)
        except EngineError as error:
            self._fail(EngineError(f"{replica.url}: {error}"))
        except Exception as error:
            self._fail(EngineError(f"the answer to {prompt.uid} cannot be used: {type(error).__name__}: {error}"))
        else:
            replica.num_failures = 0
            prompt.finish(result)
        finally:
            replica.num_running -= 1
            self._notify()

    def _requeue(self, replica: Replica, prompt: _QueuedPrompt, lost: ServerLost) -> None:
        prompt.failed_at.append(f"{replica.url}: {lost}")
        replica.num_resent += 1
        if len(prompt.failed_at) < self._settings.max_retries:
            self._queue.appendleft(prompt)
        else:
            attempts = "; ".join(prompt.failed_at)
            self._fail(
                EngineError(
                    f"{prompt.uid} failed engine.max_retries = {len(prompt.failed_at)} times ({attempts}); look at "
                    f"the servers' logs"
                )
            )

    def _log_event(self, event: str, replica: Replica, **details: Any) -> None:
        self._events.append({"event": event, "server": replica.url, **details})
