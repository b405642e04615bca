"""Which requests an engine owes an answer."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout
from jackpot.rollout.engines.base import Request


class Ledger:
    """Every uid from `submit` to `collect`, and the rollouts that wait to be collected. Not safe between threads."""

    def __init__(self) -> None:
        self._in_flight: set[str] = set()
        self._finished: dict[str, Rollout] = {}

    def __len__(self) -> int:
        """Rollouts submitted and not collected."""
        return len(self._in_flight)

    @property
    def unfinished(self) -> int:
        return len(self._in_flight) - len(self._finished)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises EngineError for a uid that is in flight already, or twice in the call."""
        uids = Counter(request.uid for request in requests)
        if twice := [uid for uid, count in uids.items() if count > 1 or uid in self._in_flight]:
            raise EngineError(f"uids already in flight: {twice[:5]}; give every request a uid of its own")

    def check_empty(self) -> None:
        """Raises EngineError while something is in flight: its tokens would come from two sets of weights."""
        if self._in_flight:
            raise EngineError(
                f"{len(self._in_flight)} rollouts are in flight; collect them before the weights are replaced"
            )

    def admit(self, requests: Sequence[Request]) -> None:
        self._in_flight.update(request.uid for request in requests)

    def finish(self, rollouts: Iterable[Rollout]) -> None:
        """Keep answers until they are collected; one that is not in flight (any more) is dropped."""
        self._finished |= {rollout.uid: rollout for rollout in rollouts if rollout.uid in self._in_flight}

    def finished(self, uids: Container[str] | None) -> list[Rollout]:
        """What can be collected, of `uids` where given."""
        return [rollout for uid, rollout in self._finished.items() if uids is None or uid in uids]

    def take(self, n: int, uids: Container[str] | None) -> list[Rollout]:
        """Hand out up to `n` of `finished`."""
        taken = self.finished(uids)[:n]
        for rollout in taken:
            del self._finished[rollout.uid]
        self._in_flight.difference_update(rollout.uid for rollout in taken)
        return taken

    def clear(self) -> None:
        self._in_flight.clear()
        self._finished.clear()
