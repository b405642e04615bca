"""The end of this process together with the process that started it, however that one ends."""

import os
import select
import signal
import time
from contextlib import suppress
from multiprocessing import parent_process
from threading import Thread

_LOOKS = 1.0  # seconds between two looks at the parent, where the kernel does not tell


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Watch the parent from now on; when it is gone, kill this process, and its group where it leads one.

    Args:
        number: the signal; another than SIGKILL goes to this process alone, which may need its children to stop well.
    """
    Thread(target=_watch, args=(os.getppid(), number), name="parent", daemon=True).start()


def _watch(parent: int, number: int) -> None:
    if starter := parent_process():  # of multiprocessing, whose fork server outlives it and is the parent
        starter.join()
    else:
        with suppress(AttributeError, OSError):  # on Linux; readable once the process has ended
            ended = select.poll()
            ended.register(os.pidfd_open(parent), select.POLLIN)
            ended.poll()
        while os.getppid() == parent:
            time.sleep(_LOOKS)

    leads = number == signal.SIGKILL and os.getpgid(0) == os.getpid()
    (os.killpg if leads else os.kill)(os.getpid(), number)
