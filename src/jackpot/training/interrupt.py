"""Ctrl-C and SIGTERM end a run: the first one after the iteration in progress, the second one at once."""

import signal
import threading
from types import TracebackType
from typing import Any


class StopSignal:
    """Turns the first SIGINT or SIGTERM within a `with` block into a request to stop; the second ends the process.

    Only the main thread of a process receives signals: in another thread `requested` stays False. SIGINT counts also
    where it is ignored on entry, as in a process that a script starts in its background.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}  # the handlers on entry, by signal number

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            for number in self._before:
                signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _request(self, signum: int, frame: Any) -> None:
        self.requested = True
        self._restore()
        if self._before[signal.SIGINT] is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
