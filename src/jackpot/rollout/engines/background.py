"""Base classes of engines that generate in the background, while their caller does other work.

Two sides share the state of a `BackgroundEngine`, always under one condition (`_changed`):

- The *caller* (the trainer's thread) adds requests in `submit`, which hands them over by `_begin` and returns at once.
  In `collect` it waits for the condition, until enough rollouts are finished, no request is unfinished, generation has
  failed, or its timeout has passed.
- The *generating side* (a thread of this process, or servers) consumes the requests. It produces finished rollouts
  through `_complete`, or one failure through `_fail`, after which every call of the caller raises.

A `ThreadEngine` generates on one thread, which alone touches the model. That thread takes calls (new requests, weights,
sleep) from a queue, and takes generation steps between two calls. It waits for the queue only while no request is
unfinished, until `_post` or `close` adds a call. The results of calls are futures. The end of the thread also unblocks
a caller that waits for a future.
"""

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.draft_counts import DraftCounts
from jackpot.rollout.engines.in_flight import QueuedEngine

Result = TypeVar("Result")


class BackgroundEngine(QueuedEngine):
    """An engine that generates in the background, on another thread or in other processes, while its caller works.

    `_begin` starts generating; later the generating side hands over each response by `_complete`, or ends by `_fail`.
    """

    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """Return finished rollouts as `Engine.collect` does; if generation has failed, raise once all are returned.

        Raises:
            EngineError: the engine is closed or has failed, or `n` is negative.
        """
        self._check_open(despite_failure=True)

        def is_settled() -> bool:
            """Return whether `collect` need not wait: enough rollouts, no unfinished request, or a failure."""
            return (
                len(self._in_flight.completed(uids)) >= n
                or not self._in_flight.num_unfinished
                or self._failure is not None
            )

        with self._changed:
            self._changed.wait_for(is_settled, timeout)
            rollouts = self._in_flight.pop(n, uids)
            if self._failure is not None and not rollouts:
                raise self._failure
            return rollouts

    def _complete(self, rollouts: Sequence[Rollout], drafts: DraftCounts | None = None) -> None:
        """Hand finished rollouts to the caller; the generating side calls this.

        Args:
            drafts: counts of the drafts of these rollouts; None: nothing was drafted.
        """
        with self._changed:
            if drafts is not None:
                self._draft_counts += drafts
            self._in_flight.complete(rollouts)
            self._changed.notify_all()

    def _fail(self, failure: EngineError) -> None:
        """Record that generation cannot go on; the generating side calls this, and later calls raise `failure`."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


class ThreadEngine(BackgroundEngine):
    """An engine that generates on a thread of this process, which alone touches the model and its state."""

    def __init__(self, version: Version, thread_name: str) -> None:
        """Start the thread that generates; before that, a subclass must have set the attributes that `_step` reads.

        Args:
            thread_name: name of the thread, which errors mention.
        """
        super().__init__(version)
        # Functions that the thread is to call, each with the future of its result; None ends the thread.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _post(self, function: Callable[[], Result]) -> "Future[Result]":
        """Have the thread call a function between two generation steps; return a future of the function's result."""
        future: Future[Result] = Future()
        self._calls.put((function, future))
        return future

    def _call(self, function: Callable[[], Result]) -> Result:
        """Have the thread call a function between two generation steps; wait for the result and return it."""
        return self._wait(self._post(function))

    def _wait(self, future: "Future[Result]") -> Result:
        """Return the result of a future, or raise the failure that ended the thread before the result came."""
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if not self._thread.is_alive():
                    raise self._failure or EngineError(f"the thread of {self._thread.name} has ended") from None

    # Methods that run on the engine's thread

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Return whether a request is unfinished, so that `_step` has something to generate."""

    @abstractmethod
    def _step(self) -> None:
        """Generate for a short time, and hand over the finished rollouts with `_complete`."""

    def _shut_down(self) -> None:
        """Free what the thread owns, such as a model; the thread calls this last."""

    def _run(self) -> None:
        """Do the calls in the queue, and take generation steps while it is empty, until `close` or a failure."""
        try:
            while True:
                try:
                    call = self._calls.get(block=not self._is_busy)
                except queue.Empty:
                    self._step()
                    continue

                if call is None:  # the engine is closed
                    break
                self._serve(*call)
        except BaseException as error:  # SystemExit included: a waiting caller must be unblocked by any of them
            self._fail(self._as_failure(error))
        finally:
            self._shut_down()

    def _serve(self, function: Callable[[], Any], future: Future) -> None:
        """Call a function, and store its result or error in a future; any error but an EngineError ends the thread."""
        try:
            future.set_result(function())
        except EngineError as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(self._as_failure(error))
            raise

    def _as_failure(self, error: BaseException) -> EngineError:
        """Return the EngineError that tells the caller why the thread has ended."""
        return EngineError(f"{self._thread.name} cannot go on: {type(error).__name__}: {error}. Make a new engine")
