"""A real engine that generates in the background: `TransformersEngine` on a thread of its own."""

from collections.abc import Callable, Sequence

from torch import Tensor

from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.background import ThreadEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine


class ThreadedEngine(ThreadEngine):
    """Runs an inner engine on the thread, between two of its steps.

    `before_step` is called on the thread before every step: a test can hold generation there. `finished` counts all
    rollouts finished so far.
    """

    def __init__(self, inner: TransformersEngine, before_step: Callable[[], None] = lambda: None) -> None:
        self.finished = 0
        self._inner, self._before_step = inner, before_step
        self._unfinished = 0
        super().__init__(inner.version, thread_name="the engine's thread")

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def version(self) -> Version:
        return self._inner.version

    def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        return self._call(lambda: self._inner.score(rollouts, temperature))

    def _take_weights(self, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        return self._call(lambda: self._inner.update_weights(weights, version))

    def wait_for_more(self, than: int, seconds: float = 60.0) -> bool:
        """Return whether more than `than` rollouts finish within some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished > than, seconds)

    def _begin(self, requests: Sequence[Request]) -> None:
        def submit() -> None:
            self._inner.submit(requests)
            self._unfinished += len(requests)

        self._post(submit)

    @property
    def _is_busy(self) -> bool:
        return self._unfinished > 0

    def _shut_down(self) -> None:
        self._inner.close()

    def _step(self) -> None:
        self._before_step()
        rollouts = self._inner.collect(self._unfinished, timeout=0.0)
        self._unfinished -= len(rollouts)
        with self._changed:
            self.finished += len(rollouts)
            self._complete(rollouts)
