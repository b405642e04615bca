"""The end of this process together with the process that started it, however that one ends."""

import os
import select
import signal
import time
from contextlib import suppress
from multiprocessing import parent_process
from threading import Thread

_LOOKS = 1.0  # seconds between two looks at the parent, where the kernel does not report its end


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Watch the parent from now on; when the parent is gone, send a signal to this process.

    Args:
        signal_number: SIGKILL goes to the group of this process too, where the process leads a group; another signal
            goes to this process alone, which may still need its children while it stops, such as to save its state.
    """
    Thread(target=_watch, args=(os.getppid(), signal_number), name="parent", daemon=True).start()


def _watch(parent: int, signal_number: int) -> None:
    """Wait until the parent is gone, then send the signal."""
    if starter := parent_process():  # multiprocessing started this process; its fork server may outlive the starter
        starter.join()
    else:
        # On Linux a descriptor becomes readable when the parent ends; elsewhere look again and again.
        with suppress(AttributeError, OSError):
            parent_ended = select.poll()
            parent_ended.register(os.pidfd_open(parent), select.POLLIN)
            parent_ended.poll()
        while os.getppid() == parent:
            time.sleep(_LOOKS)

    # Where this process leads a group, SIGKILL goes to the whole group; any other signal goes to this process alone.
    leads_group = os.getpgid(0) == os.getpid()
    send = os.killpg if leads_group and signal_number == signal.SIGKILL else os.kill
    send(os.getpid(), signal_number)
