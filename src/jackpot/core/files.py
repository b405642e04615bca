"""Files that a kill or a full disk cannot tear, and the lock on a run folder."""

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from jackpot.core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PARTIAL = ".partial"
_log = logging.getLogger(__name__)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place to write to: it becomes `path` when the block ends, and is removed where the block raises."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        partial.replace(path)
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes) -> None:
    with whole_file(path) as partial:
        partial.write_bytes(content)


class AppendedFile:
    """A file that grows by whole records. Those that find the disk full wait in memory and come first next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = b""

    def append(self, record: bytes) -> None:
        """Write what waits and `record`. OSError where they cannot be written now: the file is as before, all wait."""
        self.waiting += record
        with self.path.open("ab", buffering=0) as file:
            end, rest = file.tell(), memoryview(self.waiting)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(end)
                raise
        self.waiting = b""


@contextmanager
def needed(folder: Path) -> Iterator[None]:
    """For what a run cannot begin without: CheckpointError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot begin in {folder}: {error}. Mend that (is the disk full? may you write there?) and run the same "
            f"command, or give another folder"
        ) from error


def hold_lock(path: Path) -> IO[str]:
    """`path`, opened, and ours until it is closed or the process ends, however it ends. Its text says whose it is.

    Does without where the system has no such locks.

    Raises:
        CheckpointError: another process has it.
    """
    file = path.open("a+")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise CheckpointError(
            f"{path.parent} is in use by {holder}; two at once would spoil it. Wait for it or stop it, or give "
            f"another folder"
        ) from None
    except OSError as error:  # some network file systems
        _log.warning("cannot lock %s: %s; make sure that no other process uses the folder", path, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file
