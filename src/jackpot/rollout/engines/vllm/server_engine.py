"""vLLM servers that somebody started, perhaps elsewhere.

One thread runs an event loop on which all servers are asked. Requests wait in one queue; each server takes from it
while it holds the newest weights. A request whose server fails goes back, so each is answered once, by weights that a
check after the answer has named. Tested with vLLM 0.32 on CPUs; not yet run on a GPU.
"""

import asyncio
import os
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.checks import check_request, check_scores, check_weights
from jackpot.rollout.engines.vllm.client import ServerClient, ServerLost, ServerRestarted, open_session
from jackpot.rollout.engines.vllm.protocol import (
    check_temperature,
    completion_body,
    read_score,
    rollout_reader,
    sampling_words,
    score_body,
    score_questions,
    score_reader,
)
from jackpot.rollout.engines.vllm.replica import ModelFacts, Peer
from jackpot.rollout.engines.vllm.server_info import model_sizes
from jackpot.rollout.engines.vllm.weight_format import sent_form
from jackpot.rollout.engines.vllm.weight_sync import WeightsFolder, WrittenWeights

Result = TypeVar("Result")
_MOST_EVENTS = 1000
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between two attempts to reach a server


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The fields of `VLLMServerEngineConfig`."""

    urls: Sequence[str]
    weights_folder: str
    dtype: torch.dtype
    max_num_seqs: int
    api_key_var: str
    timeout: float
    max_retries: int
    connect_timeout: float
    quantization: str | None = None
    kv_cache_dtype: str | None = None


@dataclass(kw_only=True, slots=True)
class _Job:
    """One prompt, until it is answered."""

    uid: str
    body: Mapping[str, Any]
    read: Callable[[Any], Any]
    end: Callable[[Any], None]
    tried: list[str] = field(default_factory=list)  # servers that failed at it, and how


class VLLMServerEngine(BackgroundEngine):
    """Decodes on other machines, or at least in other processes."""

    def __init__(
        self, model: PreTrainedModel, *, eos_token_ids: Sequence[int], version: Version, settings: ServerSettings
    ) -> None:
        """
        Args:
            model: its weights are the first that the servers are given; it is not kept.
            eos_token_ids: end every response, beside `Sampling.stop_token_ids`.

        Raises:
            EngineError: no server can be reached, or one serves something else; says what to do.
        """
        super().__init__(version)
        self._settings, self._eos_token_ids = settings, tuple(eos_token_ids)
        named = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        everywhere = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        form = sent_form(model, settings.quantization)
        self._facts = ModelFacts(
            sizes=model_sizes(model),
            parameters=frozenset(everywhere),
            dtype=settings.dtype,
            method=form.method,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        self._nonce = f"jackpot-{secrets.token_hex(6)}"
        aliases = {alias: name for alias, name in everywhere.items() if alias != name}
        self._files = WeightsFolder(settings.weights_folder, self._nonce, settings.dtype, aliases, form)
        self._numbers = count()
        self._events: deque[dict[str, Any]] = deque(form.events, maxlen=_MOST_EVENTS)
        self._pending: deque[_Job] = deque()
        self._scores: set[Future] = set()  # that somebody waits for
        self._peers: list[Peer] = []
        self._tasks: list[asyncio.Task] = []
        self._newest = self._write(list(named.items()))
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-servers", daemon=True)
        self._thread.start()
        try:
            self._call(self._begin_all())
        except BaseException:
            self.close()
            raise

    def take_events(self) -> list[dict[str, Any]]:
        """`server_lost`, `server_back` and `server_restarted`, each with the `server` (docs/vllm.md); once, what was
        quantised."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _check(self, request: Request) -> None:
        wanted, most = request.sampling.num_top_log_probs, self.capabilities.num_top_log_probs
        if most < min(wanted, self.capabilities.vocab_size):
            raise EngineError(
                f"{request.uid} asks for {wanted} top log-probs, and a server returns at most {most}; start the "
                f"servers with --max-logprobs -1, or ask for fewer with sampling.num_top_log_probs"
            )
        check_request(request, self.capabilities)
        check_temperature(request.sampling.temperature, request.uid)

    def _begin(self, requests: Sequence[Request]) -> None:
        jobs = [self._rollout_job(request) for request in requests]
        self._loop.call_soon_threadsafe(self._add, jobs)

    def _rollout_job(self, request: Request) -> _Job:
        words = sampling_words(request, self._eos_token_ids, self.capabilities.context_length)
        return _Job(
            uid=request.uid,
            body=completion_body(request.prompt.token_ids, words),
            read=rollout_reader(request, words, self.capabilities.vocab_size, self._version),
            end=lambda rollout: self._finish([rollout]),
        )

    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """As `Engine.score`. At temperatures other than 1 the servers are asked for every token by itself."""
        self._open()
        check_scores(rollouts, temperature, self.capabilities)
        questions = [list(score_questions(rollout, temperature)) for rollout in rollouts]
        jobs, futures = [], []
        for rollout, of_rollout in zip(rollouts, questions, strict=True):
            for question in of_rollout:
                future: Future[list[float]] = Future()
                futures.append(future)
                read = score_reader(question, rollout.uid)
                jobs.append(_Job(uid=rollout.uid, body=score_body(question), read=read, end=future.set_result))

        def add() -> None:
            self._scores = set(futures)
            if self._failure is not None:
                self._fail(self._failure)
            self._add(jobs)

        self._loop.call_soon_threadsafe(add)
        answers = iter([future.result() for future in futures])
        return [read_score([next(answers) for _ in of_rollout]) for of_rollout in questions]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """As `Engine.update_weights`; the digest is of the file that the servers read. At least one has done so then;
        one that is out of reach does before it is asked again."""
        self._open()
        self._ledger.check_empty()
        sent = [(name, tensor.detach()) for name, tensor in named_tensors]
        check_weights(sent, self._shapes)
        written = self._write(sent)
        self._call(self._replace(written))
        self._version = version
        self._files.keep_only([written, *(peer.reads for peer in self._peers if peer.reads is not None)])
        return written.digest

    def _write(self, sent: Sequence[tuple[str, Tensor]]) -> WrittenWeights:
        return self._files.write(sent, f"{self._nonce}-{next(self._numbers)}")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self._call(self._end_all())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
                self._files.remove()
                self._ledger.clear()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # On the event loop's thread

    async def _begin_all(self) -> None:
        settings = self._settings
        self._session = open_session(os.environ.get(settings.api_key_var), settings.api_key_var)
        for url in settings.urls:
            client = ServerClient(url, self._session, timeout=settings.timeout, api_key_var=settings.api_key_var)
            self._peers.append(Peer(url, client, self._facts, self._nonce))
        self._tasks = [asyncio.create_task(self._serve(peer)) for peer in self._peers]
        await self._settle()
        facts = [peer.facts for peer in self._peers if peer.facts is not None]
        self._capabilities = Capabilities(
            vocab_size=self._facts.sizes["vocab_size"],
            num_top_log_probs=min(one.num_top_log_probs for one in facts),
            context_length=min(one.context_length for one in facts),
            quantised=bool(settings.quantization) or any(one.quantised for one in facts),
            streaming=True,
            updates_in_flight=False,
            dtype=settings.dtype,
        )

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_session"):
            await self._session.close()

    async def _replace(self, written: WrittenWeights) -> None:
        self._newest = written
        self._tell()
        await self._settle()

    async def _settle(self) -> None:
        """Returns when one server holds the newest weights and every other one does too or is out of reach."""
        while True:
            if self._failure is not None:
                raise self._failure
            hold = [peer.holds is self._newest for peer in self._peers]
            if any(hold) and all(held or peer.is_lost for held, peer in zip(hold, self._peers, strict=True)):
                return
            await self._news.wait()

    def _tell(self) -> None:
        """Wake all who wait for something to change."""
        self._news.set()
        self._news = asyncio.Event()

    def _fail(self, failure: EngineError) -> None:
        super()._fail(failure)
        for future in self._scores:
            if not future.done():
                future.set_exception(failure)
        for task in self._tasks:
            task.cancel()
        self._tell()

    def _add(self, jobs: Sequence[_Job]) -> None:
        self._pending.extend(jobs)
        self._tell()

    async def _serve(self, peer: Peer) -> None:
        """Keep a server busy, for as long as the engine lives."""
        try:
            while True:
                was_lost = peer.is_lost
                try:
                    await peer.prepare(self._newest)
                    self._check_capabilities(peer)
                    if was_lost:
                        self._note("server_restarted" if peer.was_restarted else "server_back", peer)
                    self._tell()
                    await self._work(peer)
                except ServerLost as lost:
                    await self._recover(peer, lost)
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineError(f"the servers' thread cannot go on: {type(error).__name__}: {error}"))

    def _check_capabilities(self, peer: Peer) -> None:
        """Raises EngineError for a server that came later and can do less than was promised."""
        if not hasattr(self, "_capabilities"):
            return
        for name in ("context_length", "num_top_log_probs"):
            has, promised = getattr(peer.facts, name), getattr(self._capabilities, name)
            if has < promised:
                raise EngineError(f"{peer.url} has {name} {has}, and the others {promised}; start it as the others are")
        if peer.facts.quantised and not self._capabilities.quantised:
            raise EngineError(f"{peer.url} is quantised, and the others are not; start it as the others are")

    async def _recover(self, peer: Peer, lost: ServerLost) -> None:
        """Wait before a server is tried again, longer every time.

        Raises:
            EngineError: none has been in reach for too long.
        """
        if not peer.is_lost:
            self._note("server_lost", peer, why=str(lost), sent_again=peer.sent_again)
            peer.sent_again = 0
        peer.lose(lost)
        self._tell()
        connect_timeout = self._settings.connect_timeout
        if all(other.is_lost for other in self._peers):
            left = connect_timeout - (time.monotonic() - max(other.lost_since for other in self._peers))
            if left <= 0.0:
                reasons = "; ".join(f"{other.url}: {other.trouble}" for other in self._peers)
                raise EngineError(
                    f"no server could be used for engine.connect_timeout = {connect_timeout:g} seconds ({reasons}). "
                    f"Are they running, and is engine.urls right?"
                )
            connect_timeout = left
        if isinstance(lost, ServerRestarted) and peer.failures == 1:
            return
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(peer.failures - 1, 10))
        await asyncio.sleep(min(wait * random.uniform(0.5, 1.5), connect_timeout))

    async def _work(self, peer: Peer) -> None:
        """Give a server requests until it fails at one or new weights are there; then wait for what it still answers.

        Raises:
            ServerLost: how it failed.
        """
        tasks: set[asyncio.Task] = set()
        try:
            while peer.trouble is None and peer.holds is self._newest:
                if self._pending and self._is_turn(peer):
                    peer.load += 1
                    task = asyncio.create_task(self._answer(peer, self._pending.popleft()))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    self._tell()
                else:
                    await self._news.wait()
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if peer.trouble is not None:
            raise peer.trouble

    def _is_turn(self, peer: Peer) -> bool:
        """True for the servers that have the least to do, unless they have enough."""
        least = min(one.load for one in self._peers if one.trouble is None and one.holds is self._newest)
        return peer.load == least < self._settings.max_num_seqs

    async def _answer(self, peer: Peer, job: _Job) -> None:
        try:
            answer = await peer.ask(job.body, job.read)
        except ServerLost as lost:
            peer.trouble = peer.trouble or lost
            self._again(peer, job, lost)
        except EngineError as error:
            self._fail(EngineError(f"{peer.url}: {error}"))
        except Exception as error:
            self._fail(EngineError(f"the answer to {job.uid} cannot be used: {type(error).__name__}: {error}"))
        else:
            peer.failures = 0
            job.end(answer)
        finally:
            peer.load -= 1
            self._tell()

    def _again(self, peer: Peer, job: _Job, lost: ServerLost) -> None:
        job.tried.append(f"{peer.url}: {lost}")
        peer.sent_again += 1
        if len(job.tried) < self._settings.max_retries:
            self._pending.appendleft(job)
        else:
            self._fail(
                EngineError(
                    f"{job.uid} failed engine.max_retries = {len(job.tried)} times ({'; '.join(job.tried)}); look at "
                    f"the servers' logs"
                )
            )

    def _note(self, event: str, peer: Peer, **details: Any) -> None:
        self._events.append({"event": event, "server": peer.url, **details})
