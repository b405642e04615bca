"""Signals that end a run: the first Ctrl-C, SIGTERM or SIGHUP after the iteration in progress, the second at once."""

import os
import signal
import stat
import threading
from contextlib import suppress
from typing import Any

HANGUP = signal.SIGHUP  # the terminal was closed, or the connection to it lost
TERMINATIONS = [signal.SIGTERM, HANGUP]


class StopSignal:
    """A `with` block in which the first SIGINT, SIGTERM or SIGHUP sets `requested`, and the second ends the process.

    Only the main thread of a process receives signals: in another thread `requested` stays False. SIGINT counts also
    if the process ignored it before the block, as a process does that a script starts with `&`. A SIGHUP that the
    process ignored before does not count, as after a start with nohup. After SIGHUP, output to a terminal that is gone
    is dropped, because writing it would fail.
    """

    def __init__(self) -> None:
        """Begin without a signal; handlers are set on entry."""
        self.requested = False  # True once a signal has asked for the end of the run
        self._before: dict[int, Any] = {}  # the handlers on entry, by signal number

    def __enter__(self) -> "StopSignal":
        """Handle the signals until the block ends, in the main thread; leave SIGHUP alone if it was ignored before."""
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, *TERMINATIONS)}
            if self._before.get(HANGUP) is signal.SIG_IGN:
                del self._before[HANGUP]
            for signum in self._before:
                signal.signal(signum, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers that the signals had before the block."""
        self._restore()

    def _request(self, signum: int, frame: Any) -> None:
        """Handle the first signal: ask for the end of the run, and let the next signal end the process at once."""
        self.requested = True
        self._restore()
        # If the process ignored Ctrl-C before the block, the restored handler would too: have Ctrl-C end the process.
        if self._before[signal.SIGINT] is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signum == HANGUP:
            _drop_lost_output()

    def _restore(self) -> None:
        """Give the signals the handlers that they had on entry."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def _drop_lost_output() -> None:
    """Drop what is written to standard output and standard error, unless it goes to a file or to a living terminal.

    A pipe is dropped too: the process at its other end, such as tee, ends by the same hangup.
    """
    for descriptor in (1, 2):
        with suppress(OSError):  # closed
            if not (stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
