"""Ends this process when the process that started it ends, however that was: as an event, and not by a time limit."""

import os
import select
import signal
import time
from contextlib import suppress
from threading import Thread

_LOOKS = 1.0  # seconds between two looks at the parent, where the kernel does not tell


def end_with_parent() -> None:
    """Watch the parent from now on; when it is gone, kill this process, and its group where it leads one."""
    Thread(target=_watch, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    with suppress(AttributeError, OSError):  # on Linux; readable once the process has ended
        ended = select.poll()
        ended.register(os.pidfd_open(parent), select.POLLIN)
        ended.poll()
    while os.getppid() == parent:
        time.sleep(_LOOKS)

    leads = os.getpgid(0) == os.getpid()
    (os.killpg if leads else os.kill)(os.getpid(), signal.SIGKILL)
