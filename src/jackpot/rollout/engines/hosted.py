"""Engines in other processes: what answers there (`EngineHost`), the peer that asks it, and the engines of the pool.

    PooledEngine ──chunks, weights──► Pool ──► HostPeer ──Link──► EngineHost ──► Engine
     (one a model)                          (one a process)       (there)       (one a model)

A host holds the engines of all models of the run that generate, so that one may draft for another. The pool cuts every
call of `submit` into chunks of a fixed number of requests, in their order, and a host generates one chunk at a time.
So neither the number of hosts nor what happens to them changes how responses are batched. Messages are those of
`core.messages`. Weights do not travel in them: hosts read them from memory that they share with this process. While an
engine sleeps there are none, neither in hosts nor in this process.
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

SIGN_SECONDS = 1.0  # at most, between two signs of life of a host that generates; a step of decoding is not interrupted
_ATTEMPTS = 5  # at one chunk


class EngineHost:
    """Answers a `HostPeer` with the engines of this process. All calls come from one thread."""

    def __init__(self, engines: Mapping[str, Engine], sign: Callable[[], None] = lambda: None) -> None:
        """Take over engines, by the setting that describes each.

        Args:
            sign: called every `SIGN_SECONDS` while an engine generates.
        """
        self._engines, self._sign = engines, sign
        self._held: dict[str, str] = {}  # name of the weights of each engine; none are those that it was made with

    def answer(self, message: Tensor) -> Tensor:
        """Do what a message asks for; return the answer, both as `core.messages.pack` makes them."""
        try:
            return pack(self._do(unpack(message)))
        except MessageError as error:
            return pack({"lost": str(error)})
        except JackpotError as error:
            return pack({"refused": str(error)})
        except (ValueError, KeyError, TypeError) as error:  # a bug: the other side says it
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
        except OSError as error:  # newer ones have replaced them
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
    """Connects a peer with its host, in whatever way the host was placed."""

    @abstractmethod
    async def open(self) -> None:
        """Start the host, or a new one in place of one that does not answer as it should.

        Raises:
            PeerLost: it cannot be reached; the call is repeated later.
            EngineError: no host can be started like that.
        """

    @abstractmethod
    async def ask(self, message: Tensor) -> Tensor:
        """Return what `EngineHost.answer` makes of a message.

        Raises:
            PeerLost: no answer came in time.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the host."""


@dataclass(eq=False)
class SentWeights:
    """Holds the newest weights of one engine."""

    name: str  # unlike that of any others
    version: Version
    memory: SharedWeights | None  # None: there are none, for as long as the engine sleeps
    digest: str | None = None  # what the first host that took them computed


class Newest(dict[str, SentWeights]):
    """Holds the newest weights of every engine, by the setting that describes it."""

    is_resting = False  # whether the engines that can sleep do, so that others use their memory


class HostRequest(NamedTuple):
    """Holds one chunk, or what is to be scored at once."""

    message: dict[str, Any]
    parse: Callable[[dict[str, Any]], Any]  # makes the result of the answer


class HostPeer(Peer):
    """Asks one host."""

    weights: Newest | None

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name, capacity=1)
        self._link = link
        self._held: dict[str, str] = {}
        self._is_open = self._is_starting = False
        self.engines: dict[str, Any] = {}  # what the host last said of each of its engines

    async def sync(self, newest: Newest) -> None:
        """Make sure that the host holds the newest weights, as `Peer.sync` says.

        One that was lost is not started while engines rest, as they are awake when they are made, but with the next
        weights.
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
        """Return whether an update waits for it: also for one that is being started when engines are to rest."""
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
        """Reach the host, and learn what it holds."""
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
    """Makes the engines whose work hosts do, one for each model that generates.

    Args:
        weights: the first weights of each engine, by the setting that describes it, and their dtype.
        chunk: requests that a host is given at once.
        patience: seconds without any host, after which the run stops.
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
        """Wait until a host holds the weights, and all others do or are lost.

        Args:
            links: connections to the hosts by name.
            sleeping: the engines that release memory when they sleep.

        Raises:
            EngineError: no host can be reached, or one refuses.
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
        """Return the engines by the setting that describes each. The pool closes with the last of them."""
        return dict(self._engines)

    def replace(
        self, name: str, sent: Sequence[tuple[str, Tensor]], version: Version, codes: CodedWeights | None = None
    ) -> str:
        """Replace the newest weights of one engine; return the digest of what hosts hold.

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
        """Have one engine sleep in all hosts, and free its weights here too.

        Returns once all hosts have done so, but for those that are lost, which are started when there are new weights.
        """
        asleep = SentWeights(f"{name} asleep {next(self._numbers)}", self.pool.newest[name].version, None)
        newest = Newest({**self.pool.newest, name: asleep})
        newest.is_resting = all(newest[one].memory is None for one in self._sleeping)
        self.pool.update(newest)

    def release(self, name: str) -> None:
        """Close the pool once all of its engines are closed."""
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
    """Generates with the hosts of a pool, chunk by chunk."""

    def __init__(
        self,
        pool: EnginePool,
        name: str,
        version: Version,
        capabilities: Capabilities,
        events: Sequence[dict[str, Any]],
    ) -> None:
        """Take the part of one engine in a pool.

        Args:
            events: that the engine of a host had when it was made, for `take_events`.
        """
        super().__init__(version)
        self._pool, self._name, self._capabilities, self._events = pool, name, capabilities, list(events)
        self._draft_counts: deque[DraftCounts] = deque()  # of finished chunks
        self._is_asleep = False
        pool.pool.on_failure.append(self._fail)

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call: those of a host's engine once, and `peer_lost`,
        `peer_back` and `peer_restarted`, each with the `peer`.

        The engines of a pool share the latter: the one that is asked first returns them.
        """
        events, self._events = self._events, []
        return events + self._pool.pool.take_events()

    def take_draft_counts(self) -> DraftCounts:
        return take_all(self._draft_counts)

    def sleep(self) -> None:
        """Release the memory that the engine has in all hosts until the next `update_weights`, where it can."""
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
        """Replace all weights as `Engine.update_weights` says; return the digest of what a host read.

        The call returns once at least one host and all others in reach hold the new weights. One out of reach gets them
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
