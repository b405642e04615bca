"""Bookkeeping of requests between `submit` and `collect`, for engines of every kind.

It refuses uids that appear twice, and keeps finished rollouts until the caller collects them.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout
from jackpot.rollout.engines.base import Request


class InFlightRequests:
    """The uids of all requests from `submit` to `collect`, and finished rollouts until they are collected.

    Not thread-safe. A request is in flight until its rollout is collected, also while the finished rollout waits.
    """

    def __init__(self) -> None:
        self._uids: set[str] = set()
        self._completed: dict[str, Rollout] = {}

    def __len__(self) -> int:
        """Return the number of requests whose rollout has not been collected."""
        return len(self._uids)

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
        """Store finished rollouts until they are collected; drop those whose uid is not in flight."""
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

    def clear(self) -> None:
        """Forget all requests and rollouts."""
        self._uids.clear()
        self._completed.clear()
