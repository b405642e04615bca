"""The part that engines of every kind share: the requests in flight, and the checks before each call."""

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.base import Capabilities, Engine, Request
from jackpot.rollout.engines.checks import check_request, check_scores
from jackpot.rollout.engines.draft_counts import DraftCounts


class InFlightRequests:
    """The uids of all requests from `submit` to `collect`, and finished rollouts until they are collected.

    Not thread-safe. A request is in flight until its rollout is collected, also while the finished rollout waits.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._uids: set[str] = set()  # uids of all requests in flight
        self._completed: dict[str, Rollout] = {}  # finished rollouts that are not collected, by uid, oldest first

    @property
    def num_unfinished(self) -> int:
        """Return the number of requests whose rollout is not finished."""
        return len(self._uids) - len(self._completed)

    def check_empty(self) -> None:
        """Raise EngineError while a request is in flight: its tokens would come from two sets of weights."""
        if self._uids:
            raise EngineError(f"{len(self._uids)} rollouts are in flight; collect them before the weights are replaced")

    def add(self, requests: Sequence[Request]) -> None:
        """Add the uids of new requests, all of them or none.

        Raises:
            EngineError: a uid is already in flight, or appears twice in `requests`.
        """
        uids = Counter(request.uid for request in requests)
        if twice := [uid for uid, count in uids.items() if count > 1 or uid in self._uids]:
            raise EngineError(f"uids already in flight: {twice[:5]}; give every request a uid of its own")
        self._uids.update(uids)

    def complete(self, rollouts: Iterable[Rollout]) -> None:
        """Store finished rollouts until they are collected; drop rollouts whose uid is not in flight."""
        self._completed |= {rollout.uid: rollout for rollout in rollouts if rollout.uid in self._uids}

    def completed(self, uids: Container[str] | None) -> list[Rollout]:
        """Return the finished rollouts, oldest first; only those with one of `uids`, unless `uids` is None."""
        return [rollout for uid, rollout in self._completed.items() if uids is None or uid in uids]

    def pop(self, n: int, uids: Container[str] | None) -> list[Rollout]:
        """Remove and return up to `n` finished rollouts, oldest first, among those that `completed(uids)` returns.

        Raises:
            EngineError: `n` is negative.
        """
        if n < 0:
            raise EngineError(f"collect takes a number of rollouts, got {n}")
        popped = self.completed(uids)[:n]
        for rollout in popped:
            del self._completed[rollout.uid]
        self._uids.difference_update(rollout.uid for rollout in popped)
        return popped


class QueuedEngine(Engine):
    """An engine that records its requests in flight and checks each call first; how it generates, a subclass decides.

    The subclass sets `_capabilities` before the first request.
    """

    _capabilities: Capabilities

    def __init__(self, version: Version) -> None:
        """Start without requests in flight; `version` is that of the weights that the engine holds."""
        self._version = version
        self._in_flight = InFlightRequests()
        self._events: list[dict[str, Any]] = []  # events since the last `take_events`
        self._draft_counts = DraftCounts()  # counts since the last `take_draft_counts`
        self._changed = threading.Condition()  # guards `_in_flight`, `_draft_counts` and `_failure`
        self._failure: EngineError | None = None  # reason why generation cannot go on
        self._is_asleep = False  # True from `sleep` until new weights come
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def version(self) -> Version:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """Check requests and have them generated, as `Engine.submit` says; return at once."""
        self._check_awake()
        for request in requests:
            self._check(request)
        with self._changed:
            self._in_flight.add(requests)
        self._begin(requests)

    def _check(self, request: Request) -> None:
        """Raise EngineError for a request that this engine cannot fulfill."""
        check_request(request, self.capabilities)

    @abstractmethod
    def _begin(self, requests: Sequence[Request]) -> None:
        """Start to generate requests, which are already checked and in flight, and return at once."""

    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        self._check_awake()
        check_scores(rollouts, temperature, self.capabilities)
        return self._score(rollouts, temperature)

    @abstractmethod
    def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says, of rollouts that are already checked."""

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        self._check_idle()
        digest = self._take_weights([(name, tensor.detach()) for name, tensor in named_tensors], version)
        self._version, self._is_asleep = version, False
        return digest

    @abstractmethod
    def _take_weights(self, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights, and return the digest of the weights received; no request is in flight.

        Raises:
            EngineError: a name is missing, unknown or sent twice, or a shape differs. The old weights stay.
        """

    def take_events(self) -> list[dict[str, Any]]:
        events = list(self._events)
        self._events.clear()  # the list itself stays, because others add events to it
        return events

    def take_draft_counts(self) -> DraftCounts:
        with self._changed:
            counts = replace(self._draft_counts)
            self._draft_counts.clear()  # in place, as a batch that is under way goes on counting in it
        return counts

    def sleep(self) -> None:
        """Release memory until the next `update_weights`, if `capabilities` say that the engine sleeps.

        Raises:
            EngineError: the engine is closed or has failed, or rollouts are in flight.
        """
        self._check_open()
        if self.capabilities.sleeps and not self._is_asleep:
            self._check_idle()
            self._release()
            self._is_asleep = True

    def _release(self) -> None:
        """Release the memory that the engine needs only while it is awake; no request is in flight."""

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._end()
        finally:
            self._in_flight = InFlightRequests()  # forgets all requests and rollouts

    @abstractmethod
    def _end(self) -> None:
        """Stop generating, and free the engine's memory and processes; `close` calls this once."""

    def _check_open(self, despite_failure: bool = False) -> None:
        """Raise EngineError if the engine is closed, or has failed and `despite_failure` is False."""
        if self._is_closed:
            raise EngineError("the engine is closed; make a new one")
        if self._failure is not None and not despite_failure:
            raise self._failure

    def _check_idle(self) -> None:
        """Raise EngineError if the engine is closed or has failed, or if rollouts are in flight."""
        self._check_open()
        self._in_flight.check_empty()

    def _check_awake(self) -> None:
        """Raise EngineError if the engine is closed or has failed, or if it sleeps."""
        self._check_open()
        if self._is_asleep:
            raise EngineError("the engine sleeps and has no weights; send them with update_weights first")
