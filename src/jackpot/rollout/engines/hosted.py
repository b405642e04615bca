"""Engines in other processes: the host that answers there, the peer that asks a host, and the engines that users see.

    PooledEngine ──chunks, weights──► Pool ──► HostPeer ──Link──► EngineHost ──► Engine
     (one a model)                          (one a process)       (there)       (one a model)

A host holds the engines of all models of the run that generate, so that one engine may draft for another. The pool cuts
every call of `submit` into chunks of a fixed number of requests, in their order, and a host generates one chunk at a
time. So neither the number of hosts nor what happens to them changes how responses are batched. Messages have the
format of `core.messages`. They hold no weights: hosts read weights from memory that they share with this process. While
an engine sleeps, neither hosts nor this process keep its weights.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError, JackpotError
from jackpot.core.messages import MessageError, pack, unpack
from jackpot.core.types import TOKEN_COLUMNS, Prompt, Rollout, Version
from jackpot.models.quantization.convert import CodedWeights
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.base import Capabilities, Engine, Request
from jackpot.rollout.engines.checks import ASLEEP, check_scores, check_weights
from jackpot.rollout.engines.draft_counts import DraftCounts, take_all
from jackpot.rollout.engines.pool import Peer, PeerLost, PeerRestarted, Pool, PoolLimits
from jackpot.rollout.engines.shared_weights import SharedWeights, read_weights

_log = logging.getLogger(__name__)

SIGN_SECONDS = 1.0  # time between two signs of life of a host that generates, plus what a decoding step takes
_ATTEMPTS = 5  # attempts at one chunk before the run stops


class EngineHost:
    """The host in a process with engines, which answers the messages of a `HostPeer`. One thread makes all calls."""

    def __init__(self, engines: Mapping[str, Engine], sign: Callable[[], None] = lambda: None) -> None:
        """Take over engines.

        Args:
            engines: by the setting that describes each engine.
            sign: called every `SIGN_SECONDS` while an engine generates, to show that this process is alive.
        """
        self._engines, self._sign = engines, sign
        self._held: dict[str, str] = {}  # name of each engine's weights; absent while it has those it was made with

    def answer(self, message: Tensor) -> Tensor:
        """Do what a message asks for, and return the answer; `core.messages.pack` makes message and answer."""
        try:
            return pack(self._do(unpack(message)))
        except MessageError as error:
            return pack({"lost": str(error)})
        except JackpotError as error:
            return pack({"refused": str(error)})
        except (ValueError, KeyError, TypeError) as error:  # a bug, which the other side reports
            _log.exception("a message could not be answered")
            return pack({"refused": f"{type(error).__name__}: {error}"})

    def _do(self, ask: dict[str, Any]) -> dict[str, Any]:
        if ask["do"] == "hello":
            return {"held": self._held, "engines": {name: _described(one) for name, one in self._engines.items()}}
        engine = self._engines[ask["engine"]]
        if ask["do"] == "take":
            return self._take(engine, ask)
        if ask["do"] == "sleep":
            engine.sleep()
            self._held[ask["engine"]] = ask["name"]
            return {}
        if self._held != ask["held"]:
            return {"stale": self._held}
        return _generated(engine, ask, self._sign) if ask["do"] == "generate" else _scored(engine, ask)

    def _take(self, engine: Engine, ask: dict[str, Any]) -> dict[str, Any]:
        self._held.pop(ask["engine"], None)
        try:
            digest = engine.update_weights(read_weights(ask["path"]), Version(*ask["version"]))
        except OSError as error:  # newer weights have replaced these
            return {"lost": f"cannot read the weights {ask['name']}: {error}"}
        self._held[ask["engine"]] = ask["name"]
        return {"digest": digest}


def _described(engine: Engine) -> dict[str, Any]:
    capabilities = engine.capabilities
    names = {"dtype": str(capabilities.dtype).removeprefix("torch.")}
    names |= {"coded_weights": capabilities.coded_weights and tuple(capabilities.coded_weights)}
    facts = {name: getattr(capabilities, name) for name in Capabilities.__dataclass_fields__} | names
    return {"capabilities": facts, "events": engine.take_events()}


def _generated(engine: Engine, ask: dict[str, Any], sign: Callable[[], None]) -> dict[str, Any]:
    samplings = [Sampling(**one) for one in ask["samplings"]]
    requests = [
        Request(
            uid=uid,
            prompt=Prompt(uid=uid, text="", answer="", token_ids=tuple(ids.tolist())),
            seed=seed,
            sampling=samplings[index],
            exact_drafts=exact,
        )
        for uid, ids, seed, index, exact in ask["requests"]
    ]
    engine.submit(requests)

    rollouts: dict[str, Rollout] = {}
    while len(rollouts) < len(requests):
        rollouts |= {one.uid: one for one in engine.collect(len(requests) - len(rollouts), timeout=SIGN_SECONDS)}
        sign()

    in_order = [rollouts[request.uid] for request in requests]
    rows = [(rollout.finish, *(getattr(rollout, name) for name in TOKEN_COLUMNS)) for rollout in in_order]
    return {"rollouts": rows, "drafts": asdict(engine.take_draft_counts())}


def _scored(engine: Engine, ask: dict[str, Any]) -> dict[str, Any]:
    return {"log_probs": engine.score(ask["rollouts"], ask["temperature"])}


class Link(ABC):
    """A connection of a peer with its host, wherever the host runs."""

    @abstractmethod
    async def open(self) -> None:
        """Start the host, or replace a host that does not answer as it should by a new one.

        Raises:
            PeerLost: the host cannot be reached; the call is repeated later.
            EngineError: no host can be started with these settings.
        """

    @abstractmethod
    async def ask(self, message: Tensor) -> Tensor:
        """Send a message to `EngineHost.answer`, and return the answer.

        Raises:
            PeerLost: no answer came in time.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the host."""


@dataclass(eq=False)
class SentWeights:
    """The newest weights of one engine."""

    name: str  # name of these weights, which no other weights have
    version: Version
    memory: SharedWeights | None  # None while the engine sleeps
    digest: str | None = None  # digest that the first host computed which took the weights


class Newest(dict[str, SentWeights]):
    """The newest weights of every engine, by the setting that describes the engine."""

    is_resting = False  # True while all engines that can sleep do so, so that training uses their memory


class HostRequest(NamedTuple):
    """A request to a host: a chunk of responses to generate, or rollouts to score."""

    message: dict[str, Any]
    parse: Callable[[dict[str, Any]], Any]  # converts the answer to the result


class HostPeer(Peer):
    """The pool's side of one host: it asks the host, and brings it to the newest weights."""

    weights: Newest | None

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name, capacity=1)
        self._link = link
        self._held: dict[str, str] = {}
        self._is_open = self._is_starting = False
        self.engines: dict[str, Any] = {}  # last report of the host about each of its engines

    async def sync(self, newest: Newest) -> None:
        """Make sure that the host holds the newest weights, as `Peer.sync` says.

        A host that was lost is not started while engines sleep, since the engines of a new host are awake, but when
        the next weights come.
        """
        if self.error is not None and not isinstance(self.error, PeerRestarted) and newest.is_resting:
            await self.close()
            self._is_open, self.was_restarted = False, True
        if newest.is_resting and not self._is_open:
            return

        self._is_starting = not self._is_open or self.error is not None
        try:
            if self._is_starting:
                await self._meet()
            for engine, weights in newest.items():
                if self._held.get(engine) != weights.name:
                    await self._send(engine, weights)
        finally:
            self._is_starting = False

    def is_awaited(self, newest: Newest) -> bool:
        """Return whether an update waits for the host.

        A host that is being started is also waited for when engines go to sleep, because its engines are awake.
        """
        return super().is_awaited(newest) or (newest.is_resting and self._is_starting)

    async def run(self, request: HostRequest) -> Any:
        assert self.weights is not None  # a peer without them is given no request
        held = {engine: weights.name for engine, weights in self.weights.items()}
        answer = await self._ask(request.message | {"held": held})
        if "stale" in answer:
            raise PeerRestarted(f"it holds {answer['stale'] or 'no weights'} and not {held}")
        return request.parse(answer)

    async def close(self) -> None:
        await self._link.close()

    async def _meet(self) -> None:
        """Reach the host, and ask which engines and weights it holds."""
        if not self._is_open or not isinstance(self.error, PeerRestarted):
            await self._link.open()
        self._is_open = True
        answer = await self._ask({"do": "hello"})
        self.was_restarted = not self._held.items() <= answer["held"].items()
        self._held, self.engines = answer["held"], answer["engines"]

    async def _send(self, engine: str, weights: SentWeights) -> None:
        message = {"do": "take", "engine": engine, "name": weights.name, "version": list(weights.version)}
        memory = weights.memory

        if memory is None:
            await self._ask(message | {"do": "sleep"})
            self._held[engine] = weights.name
            return

        answer = await self._ask(message | {"path": str(memory.path)})
        self._held[engine] = weights.name
        digest: str = answer["digest"]
        expected = weights.digest or digest
        weights.digest = expected

        if digest != expected:
            raise EngineError(
                f"{self.name} read the weights {weights.name} and holds digest {digest[:12]}, another one "
                f"{expected[:12]}; its memory or its version of this program differs. Take it out of the run"
            )

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = unpack(await self._link.ask(pack(message)))
        except MessageError as error:
            raise PeerLost(f"it answers: {error}") from error
        if "lost" in answer:
            raise PeerLost(answer["lost"])
        if "refused" in answer:
            raise EngineError(answer["refused"])
        return answer


class EnginePool:
    """A pool of hosts with an engine for each model that generates; the hosts do the engines' work.

    Args:
        weights: the first weights of each engine and their dtype, by the setting that describes the engine.
        chunk: number of requests that a host is given at once.
        patience: seconds without any host after which the run stops.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        weights: Mapping[str, tuple[Sequence[tuple[str, Tensor]], torch.dtype]],
        version: Version,
        *,
        chunk: int,
        patience: float,
        sleeping: Collection[str] = (),
    ) -> None:
        """Start the hosts, and wait until at least one holds the weights and every other host does or is lost.

        Args:
            links: connections to the hosts, by the name of the host.
            sleeping: settings of the engines that release memory when they sleep.

        Raises:
            EngineError: no host can be reached, or a host refuses.
        """
        self.chunk = chunk
        limits = PoolLimits(
            patience=patience,
            patience_setting="placement.timeout",
            unreachable="Their own errors stand above. Start the same command again once it is clear why; with fewer "
            "placement.engines each has more memory",
            attempts=_ATTEMPTS,
            attempts_setting="the most attempts",
            failing="it ends every engine that it is given; their own errors stand above",
        )

        self._numbers, self._sleeping = count(), frozenset(sleeping)
        self._shapes = {name: {key: one.shape for key, one in named} for name, (named, _) in weights.items()}
        self._dtypes = {name: dtype for name, (_, dtype) in weights.items()}
        newest = {name: self._shared(name, named, version, dtype) for name, (named, dtype) in weights.items()}

        self.pool: Pool[HostPeer] = Pool(limits, Newest(newest), thread_name="the engines' thread")
        try:
            self.pool.call(self._start([HostPeer(name, link) for name, link in links.items()]))
        except BaseException:
            self.pool.close()
            raise

        first = next(peer for peer in self.pool.peers if peer.engines)
        self._engines = {
            name: PooledEngine(self, name, version, _capabilities(facts["capabilities"]), facts["events"])
            for name, facts in first.engines.items()
        }
        self._open = set(self._engines)

    async def _start(self, peers: Sequence[HostPeer]) -> None:
        await self.pool.join(*peers)
        await self.pool.until_synced()

    @property
    def engines(self) -> "dict[str, PooledEngine]":
        """Return the engines by the setting that describes each. The pool closes when its last engine is closed."""
        return dict(self._engines)

    def replace(
        self, name: str, sent: Sequence[tuple[str, Tensor]], version: Version, codes: CodedWeights | None = None
    ) -> str:
        """Replace the newest weights of one engine; return the digest of the weights that hosts hold then.

        Args:
            codes: as in `Capabilities`.
        """
        check_weights(sent, self._shapes[name], codes)
        as_codes = codes is not None and codes.are_in(sent)
        weights = self._shared(name, sent, version, None if as_codes else self._dtypes[name])
        self.pool.update(Newest({**self.pool.newest, name: weights}))
        assert weights.digest is not None  # a host has taken them
        return weights.digest

    def sleep(self, name: str) -> None:
        """Have one engine sleep in all hosts, and free its weights in this process too.

        The call returns once the engine sleeps in all hosts but lost ones, which are started again with new weights.
        """
        asleep = SentWeights(f"{name} asleep {next(self._numbers)}", self.pool.newest[name].version, None)
        newest = Newest({**self.pool.newest, name: asleep})
        newest.is_resting = all(newest[one].memory is None for one in self._sleeping)
        self.pool.update(newest)

    def release(self, name: str) -> None:
        """Note that the engine `name` is closed, and close the pool with its last engine."""
        self._open.discard(name)
        if not self._open:
            self.pool.close()

    def _shared(
        self, name: str, sent: Sequence[tuple[str, Tensor]], version: Version, dtype: torch.dtype | None
    ) -> SentWeights:
        try:
            memory = SharedWeights(sent, dtype)
        except OSError as error:
            raise EngineError(
                f"cannot put the weights of {name} into shared memory: {error}. There must be room for each model that "
                f"generates twice, beside what every engine holds"
            ) from error
        return SentWeights(f"{name} {next(self._numbers)}", version, memory)


class PooledEngine(BackgroundEngine):
    """An engine whose responses the hosts of a pool generate, chunk by chunk."""

    def __init__(
        self,
        pool: EnginePool,
        name: str,
        version: Version,
        capabilities: Capabilities,
        events: Sequence[dict[str, Any]],
    ) -> None:
        """Make the engine of one model in a pool.

        Args:
            name: the setting that describes the engine.
            events: events of a host's engine at its start, which `take_events` returns once.
        """
        super().__init__(version)
        self._pool, self._name, self._capabilities, self._events = pool, name, capabilities, list(events)
        self._draft_counts: deque[DraftCounts] = deque()  # counts of finished chunks
        self._is_asleep = False
        pool.pool.on_failure.append(self._fail)

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call: events of a host's engine, and of hosts.

        Events of a host's engine are returned once, whatever the number of hosts. `peer_lost`, `peer_back` and
        `peer_restarted` name the host as `peer`; all engines of the pool share them, and the first engine that is
        asked returns them.
        """
        events, self._events = self._events, []
        return events + self._pool.pool.take_events()

    def take_draft_counts(self) -> DraftCounts:
        return take_all(self._draft_counts)

    def sleep(self) -> None:
        """Release the engine's memory in all hosts until the next `update_weights`, if the engine can sleep."""
        self._check_open()
        if self.capabilities.sleeps and not self._is_asleep:
            self._in_flight.check_empty()
            self._pool.sleep(self._name)
            self._is_asleep = True

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_awake()
        super().submit(requests)

    def _check_awake(self) -> None:
        self._check_open()
        if self._is_asleep:
            raise EngineError(ASLEEP)

    def _begin(self, requests: Sequence[Request]) -> None:
        chunks = _chunks(requests, self._pool.chunk)
        self._pool.pool.begin([(chunk[0].uid, self._host_request(chunk), self._finish) for chunk in chunks])

    def _host_request(self, chunk: Sequence[Request]) -> HostRequest:
        samplings = list({id(one.sampling): one.sampling for one in chunk}.values())
        indices = {id(one): index for index, one in enumerate(samplings)}
        message = {
            "do": "generate",
            "engine": self._name,
            "samplings": [one.model_dump() for one in samplings],
            "requests": [
                (one.uid, torch.tensor(one.prompt.token_ids), one.seed, indices[id(one.sampling)], one.exact_drafts)
                for one in chunk
            ],
        }
        return HostRequest(message, lambda answer: _parsed(chunk, answer))

    def _finish(self, result: tuple[list[Rollout], DraftCounts]) -> None:
        rollouts, counts = result
        self._draft_counts.append(counts)
        self._complete(rollouts)

    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        self._check_awake()
        check_scores(rollouts, temperature, self.capabilities)
        message = {"do": "score", "engine": self._name, "temperature": temperature}
        requests = [
            (chunk[0].uid, HostRequest(message | {"rollouts": list(chunk)}, lambda answer: answer["log_probs"]))
            for chunk in _chunks(rollouts, self._pool.chunk)
        ]
        return [one for scores in self._pool.pool.results(requests) for one in scores]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights as `Engine.update_weights` says; return the digest of the weights that a host read.

        The call returns once all hosts in reach, at least one, hold the new weights. A host out of reach gets them
        before its next chunk.
        """
        self._check_open()
        self._in_flight.check_empty()
        digest = self._pool.replace(self._name, list(named_tensors), version, self.capabilities.coded_weights)
        self._version, self._is_asleep = version, False
        return digest

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pool.release(self._name)
            self._in_flight.clear()


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _parsed(chunk: Sequence[Request], answer: dict[str, Any]) -> tuple[list[Rollout], DraftCounts]:
    rollouts = [
        Rollout(uid=one.uid, prompt=one.prompt, finish=finish, **dict(zip(TOKEN_COLUMNS, columns, strict=True)))
        for one, (finish, *columns) in zip(chunk, answer["rollouts"], strict=True)
    ]
    return rollouts, DraftCounts(**answer["drafts"])


def _capabilities(facts: dict[str, Any]) -> Capabilities:
    coded = facts["coded_weights"] and CodedWeights(tuple(facts["coded_weights"][0]), facts["coded_weights"][1])
    return Capabilities(**facts | {"dtype": getattr(torch, facts["dtype"]), "coded_weights": coded})
