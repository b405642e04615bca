"""An engine that writes while nobody waits for it. Layer 3.

Somebody else (a thread, a server) writes and reports each rollout as it ends; `submit` returns at once and `collect`
waits for reports. Everything that both sides touch is behind one condition.
"""

import threading
from abc import abstractmethod
from collections.abc import Container, Sequence

from jackpot.engines.base import Capabilities, Engine
from jackpot.engines.checks import check_request
from jackpot.engines.ledger import Ledger
from jackpot.errors import EngineError
from jackpot.types import Request, Rollout, Version


class BackgroundEngine(Engine):
    """`submit` and `collect` over a writer that runs by itself. Its `_capabilities` are set by who makes it."""

    _capabilities: Capabilities

    def __init__(self, version: Version) -> None:
        self._version = version
        self._ledger = Ledger()
        self._changed = threading.Condition()
        self._failure: EngineError | None = None
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def version(self) -> Version:
        return self._version

    @abstractmethod
    def _begin(self, requests: Sequence[Request]) -> None:
        """Have these written; returns at once. Each ends in one `_finish`, or everything ends in one `_fail`."""

    def _check(self, request: Request) -> None:
        """Raises EngineError for a request that this engine cannot answer as asked."""
        check_request(request, self.capabilities)

    def submit(self, requests: Sequence[Request]) -> None:
        self._open()
        with self._changed:
            self._ledger.check(requests)
            for request in requests:
                self._check(request)
            self._ledger.admit(requests)
        self._begin(requests)

    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """As `Engine.collect`. What has ended before a failure can still be collected; then the failure is raised."""
        self._open(despite_failure=True)
        if n < 0:
            raise EngineError(f"collect takes a number of rollouts, got {n}")

        def is_settled() -> bool:
            ledger = self._ledger
            return len(ledger.finished(uids)) >= n or not ledger.unfinished or self._failure is not None

        with self._changed:
            self._changed.wait_for(is_settled, timeout)
            taken = self._ledger.take(n, uids)
            if self._failure is not None and not taken:
                raise self._failure
            return taken

    def _finish(self, rollouts: Sequence[Rollout]) -> None:
        """Called by the writer."""
        with self._changed:
            self._ledger.finish(rollouts)
            self._changed.notify_all()

    def _fail(self, failure: EngineError) -> None:
        """Called by the writer when it cannot go on; every later call raises this."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _open(self, despite_failure: bool = False) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; make a new one")
        if self._failure is not None and not despite_failure:
            raise self._failure
