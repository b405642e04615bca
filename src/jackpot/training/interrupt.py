"""Ctrl-C, SIGTERM and SIGHUP end a run: the first one after the iteration in progress, the second one at once."""

import os
import signal
import stat
import threading
from types import TracebackType
from typing import Any

HANGUP = signal.SIGHUP  # the terminal was closed, or the connection to it lost
TERMINATIONS = [signal.SIGTERM, HANGUP]


class StopSignal:
    """Turns the first SIGINT, SIGTERM or SIGHUP in a `with` block into a request to stop; the second ends the process.

    Only the main thread of a process receives signals: in another thread `requested` stays False. SIGINT counts also
    where it is ignored on entry, as in a process that a script starts in its background; SIGHUP does not, as in one
    that was started with nohup. After SIGHUP, output to a terminal that is gone is dropped: writing it would fail.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}  # the handlers on entry, by signal number

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, *TERMINATIONS)}
            if self._before.get(HANGUP) is signal.SIG_IGN:
                del self._before[HANGUP]
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
        if signum == HANGUP:
            _drop_lost_output()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _drop_lost_output() -> None:
    """Lead standard output and standard error to nowhere, unless they are files or a terminal that is still there.

    A process behind a pipe, such as tee, is ended by the same hangup, now or in a moment.
    """
    for descriptor in (1, 2):
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
                continue
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        except OSError:  # closed
            continue
