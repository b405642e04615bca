"""A pool of peers that share one queue of requests; a peer is a server, or an engine in another process or actor.

Two kinds of threads take part. An event loop on a thread of the pool calls all peers:

- A caller's thread hands over requests (`begin`, `results`) and new weights (`update`), and waits for results or for
  peers.
- `_serve`, one task per peer, brings the peer to the newest weights and then runs `_dispatch`, again after each failure
  of the peer and after each update of the weights, until the pool ends.
- `_dispatch` takes requests from the shared queue while its peer holds the newest weights, and starts a `_do` task for
  each. It waits for `_state_changed`, which a new request, a finished one, new weights and a lost peer set.
- `_do` waits for the peer's result for one request. If the peer is lost, it puts the request back at the front of the
  queue, so that each request gets exactly one result.

A peer that does not hold the newest weights is given no request; a peer that has lost them raises `PeerLost`.
"""

import asyncio
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from jackpot.core.errors import EngineError

Result = TypeVar("Result")

_MAX_EVENTS = 1000  # events that are kept between two calls of `take_events`
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # first and longest wait between two attempts to reach a peer, seconds


class PeerLost(Exception):
    """The error that a peer failed at a request; another attempt, at this peer or another, may succeed."""


class PeerRestarted(PeerLost):
    """The error that a peer has lost its weights by a restart; the peer itself can be reached."""


class PeerRequest(NamedTuple):
    """A message to a peer, and the function that converts the peer's answer to the result."""

    message: Mapping[str, Any]  # what the peer is sent
    parse: Callable[[Any], Any]  # converts the peer's answer to the result


class Peer(ABC):
    """A worker of a pool, such as a server. All methods run on the pool's event loop; the pool sets the attributes."""

    kind: ClassVar[str] = "peer"  # the word for a peer in events and errors, as in `peer_lost`

    def __init__(self, name: str, capacity: int) -> None:
        """Describe a peer; nothing is sent before the first `sync`.

        Args:
            name: name of the peer, unique in the pool.
            capacity: number of requests that the peer does at the same time.
        """
        self.name, self.capacity = name, capacity
        self.weights: Any = None  # weights that the peer holds; None while it must not get requests
        self.num_running = 0  # number of requests that the peer works on
        self.error: PeerLost | None = None  # reason why the peer is lost and gets no requests; None: it is not lost
        self.num_failures = 0  # number of failures since the last result
        self.lost_since: float | None = None  # `time.monotonic` of the first failure since the last `sync`, seconds
        self.num_resent = 0  # number of requests queued again because of the current failure
        self.was_restarted = False  # whether the last `sync` found the peer without the weights that it was sent

    @property
    def is_lost(self) -> bool:
        """Return whether the peer has failed, and no `sync` has succeeded since."""
        return self.lost_since is not None

    def is_awaited(self, newest: Any) -> bool:
        """Return whether an update waits until the peer holds the newest weights."""
        return not self.is_lost

    @abstractmethod
    async def sync(self, newest: Any) -> None:
        """Make sure that the peer holds the newest weights. No request runs meanwhile.

        The attribute `error` says why the peer was lost; it is None if the peer was not lost.

        Args:
            newest: the weights that `Pool.update` was given last.

        Raises:
            PeerLost: the peer cannot be reached or updated now; `sync` is called again later.
            EngineError: the peer can never be used, so the pool fails; the text says what to do.
        """

    @abstractmethod
    async def run(self, request: Any) -> Any:
        """Do a request with the weights that the peer holds, and return the result.

        Other requests may run meanwhile, but no `sync`.

        Raises:
            PeerLost: there is no result, or other weights may have made the result.
            EngineError: no peer could do the request; the text says what to do.
        """

    async def close(self) -> None:
        """Close the connections and processes that the peer keeps open. No other call follows."""
        return  # unless overridden, nothing is closed: a server that the user has started goes on


AnyPeer = TypeVar("AnyPeer", bound=Peer)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """The limits after which a pool fails, with the settings that they come from and advice for the errors."""

    patience: float  # seconds after which the pool fails if no peer can be reached
    patience_setting: str  # name of the setting of `patience`
    unreachable_advice: str  # advice that ends the error where no peer can be reached
    attempts: int  # number of failed attempts at one request after which the pool fails
    attempts_setting: str  # name of the setting of `attempts`
    failing_advice: str  # advice that ends the error where a request has failed `attempts` times


@dataclass(kw_only=True, slots=True)
class _Work:
    """A request that waits in the queue or that a peer works on."""

    uid: str  # name of the request, for errors
    request: Any  # what `Peer.run` is called with
    finish: Callable[[Any], None]  # called with the result, on the event loop's thread
    failures: list[str] = field(default_factory=list)  # "PEER: ERROR" of each failed attempt


class Pool(Generic[AnyPeer]):
    """A pool of peers, which gives each request exactly one result even if peers are lost and come back."""

    def __init__(
        self, limits: PoolLimits, newest: Any, thread_name: str, events: Iterable[dict[str, Any]] = ()
    ) -> None:
        """Start the thread of a pool without peers.

        Args:
            limits: after how long without peers, and after how many attempts of a request, the pool fails.
            newest: weights that peers must hold to be given requests. The pool hands the object to `Peer.sync`, and
                compares it by identity alone.
            events: events that `take_events` returns first.
        """
        self.newest: Any = newest
        self.peers: list[AnyPeer] = []
        self.failure: EngineError | None = None
        self.on_failure: list[Callable[[EngineError], None]] = []  # called once with the failure, on the loop's thread
        self.check: Callable[[AnyPeer], None] = lambda peer: None  # raises EngineError for a peer that does not fit

        self._limits = limits
        self._queue: deque[_Work] = deque()  # requests that no peer works on
        self._futures: set[Future] = set()  # futures for which `results` waits
        self._events: deque[dict[str, Any]] = deque(events, maxlen=_MAX_EVENTS)
        self._tasks: dict[AnyPeer, asyncio.Task] = {}  # the task of `_serve` for each peer
        self._is_closed = False

        self._loop = asyncio.new_event_loop()
        self._state_changed = asyncio.Event()  # set, and replaced by a new event, by every `_notify`
        self._thread = threading.Thread(target=self._loop.run_forever, name=thread_name, daemon=True)
        self._thread.start()

    # Methods that are called by other threads than the event loop's

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the event loop, wait for the coroutine's result and return it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def begin(self, requests: Sequence[tuple[str, Any, Callable[[Any], None]]]) -> None:
        """Queue requests and return at once.

        Args:
            requests: for each request its name for errors, the object that a peer is given, and the function that is
                called with the result, on the event loop's thread and in any order.
        """
        works = [_Work(uid=uid, request=request, finish=finish) for uid, request, finish in requests]
        self._loop.call_soon_threadsafe(self._add, works)

    def results(self, requests: Sequence[tuple[str, Any]]) -> list[Any]:
        """Return the results of requests, in their order, once all are done.

        Args:
            requests: for each request its name for errors, and the object that a peer is given.

        Raises:
            EngineError: the pool has failed.
        """
        futures: list[Future] = [Future() for _ in requests]
        # From now on every future gets the failure of the pool, if it has failed or fails; `result` below raises it.
        self._loop.call_soon_threadsafe(self._watch, futures)
        pairs = zip(requests, futures, strict=True)  # each request, and the future that gets its result
        self.begin([(uid, request, future.set_result) for (uid, request), future in pairs])
        return [future.result() for future in futures]

    def update(self, newest: Any) -> None:
        """Set the newest weights, and wait until each peer holds them or is lost, and at least one holds them."""
        self.call(self._update(newest))

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call: a peer was lost, came back, or was restarted.

        The oldest events are dropped when there are too many.
        """
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self, *final_steps: Callable[[], Awaitable[None]]) -> None:
        """Abandon all requests, close the peers, await each of `final_steps`, and end the thread, unless closed."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.call(self._stop(final_steps))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self.newest = None  # frees the memory of the weights
            for peer in self.peers:
                peer.weights = None

    # Methods that run on the event loop's thread

    async def join(self, *peers: AnyPeer) -> None:
        """Add peers, and wait until each peer of the pool holds the newest weights or is lost, and at least one does.

        Raises:
            EngineError: the pool has failed.
        """
        for peer in peers:
            self.peers.append(peer)
            self._tasks[peer] = asyncio.create_task(self._serve(peer))
        await self._until_synced()

    async def _until_synced(self) -> None:
        """Wait until each peer holds the newest weights or is lost, and at least one holds them.

        Raises:
            EngineError: the pool has failed.
        """
        while self.failure is None:
            behind = [peer for peer in self.peers if peer.weights is not self.newest]
            is_any_synced = len(behind) < len(self.peers)
            # Lost peers are not awaited.
            if is_any_synced and not any(peer.is_awaited(self.newest) for peer in behind):
                return
            await self._state_changed.wait()
        raise self.failure

    async def _stop(self, final_steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Cancel all work, close the peers, and await the functions `final_steps`."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()  # the frames of the tasks hold weights

        await asyncio.gather(*(peer.close() for peer in self.peers), return_exceptions=True)
        for step in final_steps:
            await step()

    async def _update(self, newest: Any) -> None:
        """Set the newest weights and wait for the peers, as `update` says."""
        self.newest = newest
        self._notify()
        await self._until_synced()

    def _notify(self) -> None:
        """Unblock all tasks that wait for `_state_changed`."""
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _fail(self, failure: EngineError) -> None:
        """End the pool: callers that wait for results, now or later, get the first failure as their error."""
        if self.failure is None:
            self.failure = failure
            for listener in self.on_failure:
                listener(failure)

        for future in self._futures:
            if not future.done():
                future.set_exception(self.failure)

        for task in self._tasks.values():
            task.cancel()
        self._notify()

    def _watch(self, futures: Sequence[Future]) -> None:
        """Store the futures that `results` waits for; if the pool fails or has failed, all of them get the error."""
        self._futures = set(futures)
        if self.failure is not None:
            self._fail(self.failure)

    def _add(self, works: Sequence[_Work]) -> None:
        """Put requests at the end of the queue."""
        self._queue.extend(works)
        self._notify()

    async def _serve(self, peer: AnyPeer) -> None:
        """Bring a peer to the newest weights and give it requests, again and again until the pool is closed.

        A lost peer is tried again, after a while unless it was only restarted; any other error fails the pool.
        """
        try:
            while True:
                was_lost, newest = peer.is_lost, self.newest

                try:
                    await peer.sync(newest)
                    peer.weights = newest
                    peer.error, peer.lost_since = None, None
                    self.check(peer)  # raises EngineError for a peer that does not fit
                    if was_lost:
                        self._log("restarted" if peer.was_restarted else "back", peer)
                    self._notify()
                    await self._dispatch(peer)  # returns when new weights come
                except PeerLost as lost:
                    await self._back_off(peer, lost)
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineError(f"{self._thread.name} cannot go on: {type(error).__name__}: {error}"))

    async def _back_off(self, peer: Peer, lost: PeerLost) -> None:
        """Record that a peer is lost, and wait before the next attempt to reach it, longer every time.

        Raises:
            EngineError: no peer has been in reach for `patience` seconds.
        """
        if not peer.is_lost:  # its first failure since a `sync` has succeeded
            self._log("lost", peer, why=str(lost), sent_again=peer.num_resent)
            peer.num_resent = 0
        peer.error, peer.weights = lost, None
        peer.num_failures += 1
        peer.lost_since = peer.lost_since or time.monotonic()
        self._notify()

        # Where all peers are lost, the pool fails `patience` seconds after the last of them was lost.
        limits = self._limits
        timeout = limits.patience
        lost_since = [member.lost_since for member in self.peers if member.lost_since is not None]
        if lost_since and len(lost_since) == len(self.peers):
            timeout -= time.monotonic() - max(lost_since)
            if timeout <= 0.0:
                reasons = "; ".join(f"{member.name}: {member.error}" for member in self.peers)
                raise EngineError(
                    f"no {peer.kind} could be used for {limits.patience_setting} = {limits.patience:g} seconds "
                    f"({reasons}). {limits.unreachable_advice}"
                )

        # A peer that was only restarted can be reached, so the first attempt is made at once.
        if isinstance(lost, PeerRestarted) and peer.num_failures == 1:
            return

        # The wait doubles with every failure (10 times at most: bounds the power), and up to half of it is added or
        # taken away at random.
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(peer.num_failures - 1, 10))
        await asyncio.sleep(min(wait * random.uniform(0.5, 1.5), timeout))

    async def _dispatch(self, peer: Peer) -> None:
        """Give a peer requests until it fails or new weights come; then wait until it has ended its requests.

        Raises:
            PeerLost: the peer failed.
        """
        tasks: set[asyncio.Task] = set()
        try:
            while peer.error is None and peer.weights is self.newest:
                if self._queue and self._is_next(peer):  # the peer has room, and no other is less busy
                    peer.num_running += 1
                    task = asyncio.create_task(self._do(peer, self._queue.popleft()))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    self._notify()
                else:
                    await self._state_changed.wait()
            if tasks:
                await asyncio.wait(tasks)

        finally:  # tasks are left only where this task was cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if peer.error is not None:
            raise peer.error

    def _is_next(self, peer: Peer) -> bool:
        """Return whether `peer` has room for another request, and no ready peer works on fewer requests."""
        loads = [ready.num_running for ready in self.peers if ready.error is None and ready.weights is self.newest]
        return peer.num_running == min(loads) < peer.capacity

    async def _do(self, peer: Peer, work: _Work) -> None:
        """Have a peer do a request and hand over the result; queue the request again if the peer is lost.

        Any other error fails the pool.
        """
        try:
            result = await peer.run(work.request)
        except PeerLost as lost:
            peer.error = peer.error or lost  # of several requests that fail together, the first says why
            self._requeue(peer, work, lost)
        except EngineError as error:
            self._fail(EngineError(f"{peer.name}: {error}"))
        except Exception as error:
            self._fail(EngineError(f"the answer to {work.uid} cannot be used: {type(error).__name__}: {error}"))
        else:
            peer.num_failures = 0
            work.finish(result)

        finally:
            peer.num_running -= 1  # `_dispatch` has counted the request
            self._notify()

    def _requeue(self, peer: Peer, work: _Work, lost: PeerLost) -> None:
        """Put a request back at the front of the queue, or fail the pool if the request has failed too often."""
        work.failures.append(f"{peer.name}: {lost}")
        peer.num_resent += 1
        if len(work.failures) < self._limits.attempts:
            self._queue.appendleft(work)
        else:
            self._fail(
                EngineError(
                    f"{work.uid} failed {self._limits.attempts_setting} = {len(work.failures)} times "
                    f"({'; '.join(work.failures)}); {self._limits.failing_advice}"
                )
            )

    def _log(self, event: str, peer: Peer, **details: Any) -> None:
        """Add an event about a peer, such as `server_lost`, for `take_events`."""
        self._events.append({"event": f"{peer.kind}_{event}", peer.kind: peer.name, **details})
