"""Engines in other processes: the host that answers there, the peer that asks a host, and the engines that callers use.

    PooledEngine ──chunks, weights──► Pool ──► HostPeer ──Link──► EngineHost ──► Engine
     (one a model)                          (one a process)       (there)       (one a model)

A host holds the engines of all models of the run that generate, so that one engine may draft for another. The pool cuts
every call of `submit` into chunks of a fixed number of requests, in their order, and a host generates one chunk at a
time. So neither the number of hosts nor the loss of a host changes how responses are batched. Messages have the format
of `core.messages`. They hold no weights: hosts read weights from memory that they share with this process. While an
engine sleeps, neither hosts nor this process keep its weights.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError, JackpotError
from jackpot.core.messages import MessageError, pack, unpack
from jackpot.core.types import TOKEN_COLUMNS, Prompt, Rollout, Version
from jackpot.models.quantization.convert import CodedWeights
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.base import Capabilities, Engine, Request
from jackpot.rollout.engines.checks import check_weights
from jackpot.rollout.engines.draft_counts import DraftCounts
from jackpot.rollout.engines.pool import Peer, PeerLost, PeerRequest, PeerRestarted, Pool, PoolLimits
from jackpot.rollout.engines.shared_weights import SharedWeights, read_weights

_log = logging.getLogger(__name__)

SIGN_SECONDS = 1.0  # seconds between two signs of life of a generating host, plus the rest of its decoding step
_ATTEMPTS = 5  # attempts at one chunk before the run stops


class EngineHost:
    """The part of a host process that answers the messages of a `HostPeer` with its engines, called by one thread."""

    def __init__(self, engines: Mapping[str, Engine], sign: Callable[[], None] = lambda: None) -> None:
        """Take over engines that this process has made.

        Args:
            engines: engines by the name of the setting that describes each, `engine` or `evaluation.engine`.
            sign: called every `SIGN_SECONDS` while an engine generates, to show that this process is alive.
        """
        self._engines, self._sign = engines, sign
        # Names of the newest weights by engine; an engine with the weights that it was made with has no entry.
        self._weight_names: dict[str, str] = {}

    def answer(self, message: Tensor, **changes: Any) -> Tensor:
        """Do what a message asks for, and return the answer, which after an error is an entry "lost" or "refused".

        Message and answer have the format of `core.messages.pack`.

        Args:
            changes: entries in place of those of the message.
        """
        try:
            return pack(self._do(unpack(message) | changes))
        except MessageError as error:  # damaged on its way, so it may be sent again: `HostPeer` raises PeerLost
            return pack({"lost": str(error)})
        except JackpotError as error:
            return pack({"refused": str(error)})
        except (ValueError, KeyError, TypeError) as error:  # a bug, which the process that sent the message reports
            _log.exception("a message could not be answered")
            return pack({"refused": f"{type(error).__name__}: {error}"})

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the entry `do` of a message says, and return the content of the answer.

        That is to report the engines ("hello"), or to have one take new weights, sleep, generate or score. A message to
        generate or score has, under `held`, the names of the weights that the engines must have; if they have others,
        nothing is done and the answer is "stale".
        """
        if message["do"] == "hello":
            described = {name: _describe(engine) for name, engine in self._engines.items()}
            return {"held": self._weight_names, "engines": described}

        engine = self._engines[message["engine"]]
        if message["do"] == "take":
            return self._take(engine, message)
        if message["do"] == "sleep":
            engine.sleep()
            self._weight_names[message["engine"]] = message["name"]
            return {}

        if self._weight_names != message["held"]:  # then `HostPeer.run` raises PeerRestarted
            return {"stale": self._weight_names}
        if message["do"] == "generate":
            return _generate(engine, message, self._sign)
        # What is left is "score".
        return {"log_probs": engine.score(message["rollouts"], message["temperature"])}

    def _take(self, engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
        """Have an engine take the weights that a message names; answer with the digest, or "lost" if it cannot."""
        self._weight_names.pop(message["engine"], None)  # none until the update has succeeded
        try:
            digest = engine.update_weights(read_weights(message["path"]), Version(*message["version"]))
        except OSError as error:  # newer weights have replaced these
            return {"lost": f"cannot read the weights {message['name']}: {error}"}
        self._weight_names[message["engine"]] = message["name"]
        return {"digest": digest}


def _describe(engine: Engine) -> dict[str, Any]:
    """Return the engine's capabilities, as plain values that `_capabilities` reads, and the engine's new events."""
    facts = asdict(engine.capabilities)
    facts["dtype"] = str(facts["dtype"]).removeprefix("torch.")
    facts["coded_weights"] = facts["coded_weights"] and tuple(facts["coded_weights"])
    return {"capabilities": facts, "events": engine.take_events()}


def _generate(engine: Engine, message: dict[str, Any], sign: Callable[[], None]) -> dict[str, Any]:
    """Generate the responses that a message of `PooledEngine` asks for; return the answer for `_parse_generated`.

    Args:
        sign: called about every `SIGN_SECONDS` until all responses are finished, to show that this process is alive.
    """
    samplings = [Sampling(**fields) for fields in message["samplings"]]
    requests = [
        Request(
            uid=uid,
            prompt=Prompt(uid=uid, text="", answer="", token_ids=tuple(token_ids.tolist())),  # engines read ids only
            seed=seed,
            sampling=samplings[sampling_index],
            exact_drafts=exact_drafts,
        )
        for uid, token_ids, seed, sampling_index, exact_drafts in message["requests"]
    ]
    engine.submit(requests)

    rollouts: dict[str, Rollout] = {}
    while len(rollouts) < len(requests):
        finished = engine.collect(len(requests) - len(rollouts), timeout=SIGN_SECONDS)
        rollouts |= {rollout.uid: rollout for rollout in finished}
        sign()

    # A rollout is sent as a tuple: why it ended, then its columns of tokens.
    read_columns = attrgetter("finish", *TOKEN_COLUMNS)
    rows = [read_columns(rollouts[request.uid]) for request in requests]
    return {"rollouts": rows, "drafts": asdict(engine.take_draft_counts())}


class Link(ABC):
    """A connection from a `HostPeer` to its host, in whatever process or machine the host runs."""

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
    """The newest weights of one engine; while the engine sleeps, a record of the sleep in their place."""

    name: str  # name of these weights, or of this sleep, which is used only once
    version: Version
    memory: SharedWeights | None  # None while the engine sleeps
    digest: str | None = None  # digest that the first host has computed; None until a host has taken the weights


class NewestWeights(dict[str, SentWeights]):
    """The newest weights of every engine, by the name of the setting that describes the engine, such as `engine`."""

    is_resting = False  # True while all engines that can sleep do so, so that training uses their memory


class HostPeer(Peer):
    """The peer that stands in this process for one host: it sends the host requests and the newest weights."""

    weights: NewestWeights | None

    def __init__(self, name: str, link: Link) -> None:
        """Describe the host at the other end of `link`; nothing is sent before the first `sync`."""
        super().__init__(name, capacity=1)
        self._link = link
        self._weight_names: dict[str, str] = {}  # name of the weights that each engine of the host holds
        self._is_open = False
        self._is_starting = False  # True while `sync` starts or reaches the host
        self.engines: dict[str, Any] = {}  # last report of the host about each of its engines

    async def sync(self, newest: NewestWeights) -> None:
        """Make sure that the host holds the newest weights, as `Peer.sync` says.

        While engines sleep, a lost host is not started again, because the engines of a new host would be awake; it is
        started when the next weights come.
        """
        # While engines sleep (`is_resting`), a lost host is closed and counts as restarted. An exception is a
        # host that can still be reached and has lost only its weights (PeerRestarted).
        if self.error is not None and not isinstance(self.error, PeerRestarted) and newest.is_resting:
            await self.close()
            self._is_open, self.was_restarted = False, True
        if newest.is_resting and not self._is_open:
            return

        self._is_starting = not self._is_open or self.error is not None
        try:
            if self._is_starting:
                await self._meet()  # starts the host unless it can be reached, and asks which weights it holds
            for engine, weights in newest.items():
                if self._weight_names.get(engine) != weights.name:
                    await self._send(engine, weights)
        finally:
            self._is_starting = False

    def is_awaited(self, newest: NewestWeights) -> bool:
        """Return whether an update of the weights waits until this host holds them.

        When engines go to sleep, the update also waits for a host that is being started, whose engines are awake.
        """
        return super().is_awaited(newest) or (newest.is_resting and self._is_starting)

    async def run(self, request: PeerRequest) -> Any:
        """Have the host do a request, as `Peer.run` says; raise PeerRestarted if the host lacks `self.weights`."""
        assert self.weights is not None  # a peer without weights is given no request
        held = {engine: weights.name for engine, weights in self.weights.items()}
        answer = await self._ask({**request.message, "held": held})
        if "stale" in answer:
            raise PeerRestarted(f"it holds {answer['stale'] or 'no weights'} and not {held}")
        return request.parse(answer)

    async def close(self) -> None:
        """End the host."""
        await self._link.close()

    async def _meet(self) -> None:
        """Start the host unless it can be reached, and ask the host which engines and weights it holds."""
        if not self._is_open or not isinstance(self.error, PeerRestarted):
            await self._link.open()
        self._is_open = True
        answer = await self._ask({"do": "hello"})
        self.was_restarted = not self._weight_names.items() <= answer["held"].items()
        self._weight_names, self.engines = answer["held"], answer["engines"]

    async def _send(self, engine: str, weights: SentWeights) -> None:
        """Have an engine of the host take new weights, or sleep.

        Raises:
            EngineError: the host has read other weights than the first host that took them: their digests differ.
        """
        message = {"do": "take", "engine": engine, "name": weights.name, "version": list(weights.version)}

        if weights.memory is None:  # `weights` stands for a sleep
            await self._ask(message | {"do": "sleep"})
            self._weight_names[engine] = weights.name
            return

        answer = await self._ask(message | {"path": str(weights.memory.path)})
        self._weight_names[engine] = weights.name

        digest: str = answer["digest"]
        weights.digest = weights.digest or digest
        if digest != weights.digest:
            raise EngineError(
                f"{self.name} read the weights {weights.name} and holds digest {digest[:12]}, another one "
                f"{weights.digest[:12]}; its memory or its version of this program differs. Take it out of the run"
            )

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message to the host and return the answer.

        Raises:
            PeerLost: no answer came, it is damaged, or it has the entry `lost`.
            EngineError: the answer has the entry `refused`.
        """
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
    """A pool of hosts, and for each model that generates one engine, whose work is done by the hosts."""

    def __init__(
        self,
        links: Mapping[str, Link],
        weights: Mapping[str, tuple[Sequence[tuple[str, Tensor]], torch.dtype]],
        version: Version,
        *,
        chunk: int,
        patience: float,
    ) -> None:
        """Start the hosts, and wait until each of them holds the weights or is lost, and at least one holds them.

        Args:
            links: connections to the hosts, by the name of the host.
            weights: the first weights of each engine and their dtype, by the setting of the engine, such as `engine`.
            chunk: number of requests that a host is given at once.
            patience: seconds after which the run stops if no host can be reached.

        Raises:
            EngineError: no host can be reached, or a host refuses.
        """
        self.chunk = chunk
        limits = PoolLimits(
            patience=patience,
            patience_setting="placement.timeout",
            unreachable_advice="Their own errors stand above. Start the same command again once it is clear why; "
            "with fewer placement.engines each has more memory",
            attempts=_ATTEMPTS,
            attempts_setting="the most attempts",
            failing_advice="it ends every engine that it is given; their own errors stand above",
        )

        self._weight_numbers = count()
        # Shape of every parameter of each engine.
        self._shapes = {name: {key: tensor.shape for key, tensor in named} for name, (named, _) in weights.items()}
        newest = NewestWeights(
            {name: self._share(name, named, version, dtype) for name, (named, dtype) in weights.items()}
        )

        self.pool: Pool[HostPeer] = Pool(limits, newest, thread_name="the engines' thread")
        try:
            self.pool.call(self.pool.join(*(HostPeer(name, link) for name, link in links.items())))
        except BaseException:
            self.pool.close()
            raise

        first = next(peer for peer in self.pool.peers if peer.engines)  # a host that has reported its engines
        # The engines by the setting that describes each; the pool closes when its last engine is closed.
        self.engines = {
            name: PooledEngine(
                pool=self,
                name=name,
                version=version,
                capabilities=_capabilities(facts["capabilities"]),
                events=facts["events"],
            )
            for name, facts in first.engines.items()
        }

    def replace(self, name: str, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        """Give one engine new weights in all hosts, and return the digest of the weights that the hosts have read."""
        capabilities = self.engines[name].capabilities
        codes = capabilities.coded_weights
        check_weights(weights, self._shapes[name], codes)
        as_codes = codes is not None and codes.are_in(weights)
        # Quantized weights, as codes and scales, keep their dtypes.
        sent = self._share(name, weights, version, dtype=None if as_codes else capabilities.dtype)
        self.pool.update(NewestWeights({**self.pool.newest, name: sent}))  # waits until the hosts hold them
        assert sent.digest is not None  # a host has taken the weights
        return sent.digest

    def sleep(self, name: str) -> None:
        """Have one engine sleep in all hosts, and free its weights in this process too.

        The call returns once the engine sleeps in every host that is not lost; lost hosts start again at an update.
        """
        # A record of the sleep takes the place of the weights, whose memory is freed.
        asleep = SentWeights(
            name=f"{name} asleep {next(self._weight_numbers)}", version=self.pool.newest[name].version, memory=None
        )
        newest = NewestWeights({**self.pool.newest, name: asleep})
        # Whether every engine that can sleep now does; `memory` is None while an engine sleeps.
        newest.is_resting = all(
            newest[key].memory is None for key, engine in self.engines.items() if engine.capabilities.sleeps
        )
        self.pool.update(newest)  # waits until the engine sleeps in the hosts

    def _share(
        self, name: str, weights: Sequence[tuple[str, Tensor]], version: Version, dtype: torch.dtype | None
    ) -> SentWeights:
        """Copy the weights of the engine `name` into new shared memory, which has a name of its own.

        Args:
            dtype: dtype that the weights are cast to; None: each keeps its dtype.

        Raises:
            EngineError: there is no room for the weights.
        """
        try:
            memory = SharedWeights(weights, dtype)
        except OSError as error:
            raise EngineError(
                f"cannot put the weights of {name} into shared memory: {error}. There must be room for each model that "
                f"generates twice, beside what every engine holds"
            ) from error
        return SentWeights(name=f"{name} {next(self._weight_numbers)}", version=version, memory=memory)


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
            name: name of the setting that describes the engine, such as `engine`.
            version: version of the weights that the hosts hold.
            events: events from the start of one host's engine, which `take_events` returns once.
        """
        super().__init__(version)
        self._pool, self._name = pool, name
        self._capabilities = capabilities
        self._events += events
        pool.pool.on_failure.append(self._fail)  # a failure of the pool ends this engine too

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call: those of the engine's start, and those of hosts.

        The events of the engine's start come once, whatever the number of hosts. Events of hosts, `peer_lost`,
        `peer_back` and `peer_restarted`, name the host as `peer`; they belong to all engines of the pool, and the first
        engine that is asked returns them.
        """
        return super().take_events() + self._pool.pool.take_events()

    def _release(self) -> None:
        """Have the engine sleep in all hosts, which frees its weights there and in this process."""
        self._pool.sleep(self._name)

    def _begin(self, requests: Sequence[Request]) -> None:
        """Give the requests to the pool in chunks; errors name a chunk by the uid of its first request."""
        self._pool.pool.begin(
            [
                (chunk[0].uid, self._chunk_request(chunk), lambda result: self._complete(*result))
                for chunk in _chunks(requests, self._pool.chunk)
            ]
        )

    def _chunk_request(self, chunk: Sequence[Request]) -> PeerRequest:
        """Return the request to a host for the responses of a chunk.

        The message has a list of the different `Sampling`s of the chunk, and for each response the fields of its
        `Request`, in the order in which `_generate` unpacks them: of the `Sampling`, only the index in that list.
        """
        # Each `Sampling` object is sent once; equal but distinct objects are both sent.
        samplings = list({id(request.sampling): request.sampling for request in chunk}.values())
        indices = {id(sampling): index for index, sampling in enumerate(samplings)}
        rows = [
            (
                request.uid,
                torch.tensor(request.prompt.token_ids),
                request.seed,
                indices[id(request.sampling)],
                request.exact_drafts,
            )
            for request in chunk
        ]

        message = {
            "do": "generate",
            "engine": self._name,
            "samplings": [sampling.model_dump() for sampling in samplings],
            "requests": rows,
        }
        return PeerRequest(message=message, parse=lambda answer: _parse_generated(chunk, answer))

    def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says, which the hosts compute chunk by chunk."""
        message = {"do": "score", "engine": self._name, "temperature": temperature}
        # A request for each chunk of rollouts; errors name a request by the uid of its first rollout.
        requests = [
            (chunk[0].uid, PeerRequest(message=message | {"rollouts": list(chunk)}, parse=itemgetter("log_probs")))
            for chunk in _chunks(rollouts, self._pool.chunk)
        ]
        return list(chain.from_iterable(self._pool.pool.results(requests)))

    def _take_weights(self, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights as `Engine.update_weights` says; return the digest of the weights that a host read.

        The call returns once all hosts in reach, at least one, hold the new weights. A host out of reach gets them
        before it gets another chunk of requests.
        """
        return self._pool.replace(self._name, weights, version)

    def _end(self) -> None:
        """Close the pool if no other engine of it is open."""
        if all(engine._is_closed for engine in self._pool.engines.values()):
            self._pool.pool.close()


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Cut a sequence into pieces of `size` items, of which the last may be shorter."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def _parse_generated(chunk: Sequence[Request], answer: dict[str, Any]) -> tuple[list[Rollout], DraftCounts]:
    """Return the rollouts of a chunk, and the counts of their drafts, from a host's answer (`_generate`)."""
    rollouts = []
    for request, (finish, *columns) in zip(chunk, answer["rollouts"], strict=True):
        tokens = dict(zip(TOKEN_COLUMNS, columns, strict=True))
        rollouts.append(Rollout(uid=request.uid, prompt=request.prompt, finish=finish, **tokens))
    return rollouts, DraftCounts(**answer["drafts"])


def _capabilities(facts: dict[str, Any]) -> Capabilities:
    """Return the capabilities of a host's engine, from the plain values to which `_describe` turned them."""
    coded = facts["coded_weights"] and CodedWeights(
        names=tuple(facts["coded_weights"][0]), quantization=facts["coded_weights"][1]
    )
    return Capabilities(**facts | {"dtype": getattr(torch, facts["dtype"]), "coded_weights": coded})
