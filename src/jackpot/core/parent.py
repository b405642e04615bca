"""The end of this process together with the process that started it, however that one ends."""

import os
import select
import signal
import time
from contextlib import suppress
from threading import Thread

_LOOKS = 1.0  # seconds between two looks at the parent, where the kernel does not tell


def end_with_parent() -> None:
    """Watch the parent from now on; when it has ended, kill this process, and its group if it leads one."""
    Thread(target=_watch, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    with suppress(AttributeError, OSError):  # only Linux has pidfds; one is readable once its process has ended
        ended = select.poll()
        ended.register(os.pidfd_open(parent), select.POLLIN)
        ended.poll()

    while os.getppid() == parent:  # elsewhere: a process whose parent has ended gets another parent
        time.sleep(_LOOKS)

    leads = os.getpgid(0) == os.getpid()
    (os.killpg if leads else os.kill)(os.getpid(), signal.SIGKILL)
