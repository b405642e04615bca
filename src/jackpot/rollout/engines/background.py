"""Engines that write while nobody waits for them.

Somebody else (a thread, a server) writes and reports each rollout as it ends; `submit` returns at once and `collect`
waits for reports. Everything that both sides touch is behind one condition.
"""

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.base import Capabilities, Engine, Request
from jackpot.rollout.engines.checks import check_request
from jackpot.rollout.engines.ledger import Ledger

Result = TypeVar("Result")


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


class ThreadEngine(BackgroundEngine):
    """The writer is a thread of this process, on which all that it touches lives: it steps while there is something to
    write and takes jobs between two steps."""

    def __init__(self, version: Version, writer: str) -> None:
        """The thread starts here: what it needs has to be there before.

        Args:
            writer: what errors call it.
        """
        super().__init__(version)
        self._writer = writer
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=writer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
            self._thread.join()
            self._ledger.clear()

    def _post(self, job: Callable[[], Result]) -> "Future[Result]":
        """Have the thread do something between two steps."""
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future

    def _call(self, job: Callable[[], Result]) -> Result:
        return self._wait(self._post(job))

    def _wait(self, future: "Future[Result]") -> Result:
        """The result, or the failure that ended the thread before it came."""
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if not self._thread.is_alive():
                    raise self._failure or EngineError(f"the thread of {self._writer} has ended") from None

    # On the thread

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether a step would get on with something."""

    @abstractmethod
    def _step(self) -> None:
        """Write a little, and `_finish` what has ended."""

    def _end(self) -> None:
        """The last thing that the thread does."""

    def _run(self) -> None:
        try:
            while True:
                try:
                    job = self._jobs.get(block=not self._is_busy)
                except queue.Empty:
                    self._step()
                    continue
                if job is None:
                    break
                self._do(*job)
        except BaseException as error:  # whatever it was, nobody may wait for ever
            self._fail(self._broken(error))
        finally:
            self._end()

    def _do(self, job: Callable[[], Any], future: Future) -> None:
        """An error of ours goes to whoever waits; any other ends the engine too."""
        try:
            future.set_result(job())
        except EngineError as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(self._broken(error))
            raise

    def _broken(self, error: BaseException) -> EngineError:
        return EngineError(f"{self._writer} cannot go on: {type(error).__name__}: {error}. Make a new engine")
