"""File writes that a kill or a full disk cannot leave half done, and the lock on a run folder."""

import fcntl
import hashlib
import logging
import os
import platform
import secrets
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from jackpot.core.errors import CheckpointError

PARTIAL = ".partial"  # suffix of a file that is still being written
LEASE_SECONDS = 30.0  # seconds without renewal after which a lease is free; its owner renews it six times in that time
_SETTLES = 1.0  # seconds after which a lease file, which two processes may write at once, names its one owner
_log = logging.getLogger(__name__)


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Yield a temporary path to write to; rename it to `path` after the block, remove it if block or rename fails.

    The content is flushed to the disk before the rename, and the name after it: a power failure leaves the whole new
    file, or the file that was there before.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        flush_file(partial)
        partial.replace(path)
        flush_folder(path.parent)
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`; after a failure the file is as before, and never half written."""
    with whole_file(path) as partial:
        partial.write_bytes(content)


def flush_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> dict[str, Any]:
    """Return {"size": bytes of a file, "sha256": its SHA-256 in hexadecimal digits}."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def flushed_checksum(path: Path) -> dict[str, Any]:
    """Wait until the content of a file is on the disk, and return its checksum."""
    flush_file(path)
    return checksum(path)


def cause_of(error: BaseException) -> str:
    """Describe an error by the OSError that caused it; without such a cause, by the error itself.

    Torch, for one, reports a full disk as a wrong position in the file; only the cause of that error names the disk.
    """
    candidate: BaseException | None = error
    while candidate is not None and not isinstance(candidate, OSError):
        candidate = candidate.__cause__ or candidate.__context__

    cause = candidate or error
    text = str(cause).strip()
    # The text of a CheckpointError, our own, says everything; any other needs the name of its class.
    return text if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {text}"


class AppendedFile:
    """A file to which whole records are appended. Records that a full disk cannot take wait in memory, and are written
    before the next record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = b""  # records that could not be written yet

    def append(self, record: bytes) -> None:
        """Write the records that could not be written before, then `record`.

        Raises:
            OSError: the records cannot be written now. The file is as before, and all records wait for the next call.
        """
        self.waiting += record
        with self.path.open("ab", buffering=0) as file:
            end, unwritten = file.tell(), memoryview(self.waiting)
            try:
                while unwritten:  # one write may take only a part of the bytes
                    unwritten = unwritten[file.write(unwritten) :]
            except OSError:
                file.truncate(end)
                raise
        self.waiting = b""


@contextmanager
def checkpoint_error_in(folder: Path) -> Generator[None]:
    """Turn an OSError of the `with` block into a CheckpointError, which says that a run cannot begin in `folder`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot begin in {folder}: {error}. Fix that (is the disk full? may you write there?) and run the same "
            f"command, or give another folder"
        ) from error


def hold_lock(path: Path) -> IO[str]:
    """Open the file `path`, lock it until it is closed or this process ends, and write this process's name into it.

    Return the open file.

    Some file systems, such as NFS and Lustre, may be without locks. There the process whose name the file holds has a
    lease, which it renews by setting the file's modification time. Another process that finds the file waits
    LEASE_SECONDS, and takes the lease unless it was renewed.

    Raises:
        CheckpointError: another process holds the lock or the lease.
    """
    file = path.open("a+")
    owner = f"process {os.getpid()} on {platform.node()} ({secrets.token_hex(4)})\n"

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_locks = True
    except BlockingIOError:
        raise _in_use(file, path) from None
    except OSError as error:
        # Without locks the file is a lease. If it is not empty, see whether the process named in it still renews it.
        has_locks = False
        if path.stat().st_size:
            _log.warning("cannot lock %s: %s; waiting %g s whether another process uses it", path, error, LEASE_SECONDS)
            modified = path.stat().st_mtime_ns
            time.sleep(LEASE_SECONDS)
            if path.stat().st_mtime_ns != modified:
                raise _in_use(file, path) from None

    file.truncate(0)
    file.write(owner)
    file.flush()

    # Of two processes that take a lease at once, the one whose name the file holds a moment later keeps the lease.
    if not has_locks:
        time.sleep(_SETTLES)
        if path.read_text() != owner:
            raise _in_use(file, path)
        Thread(target=_renew, args=(file, path, owner), name="lease", daemon=True).start()
    return file


def _in_use(file: IO[str], path: Path) -> CheckpointError:
    """Close a lock file, and return the error that the process named in the file uses the file's folder."""
    file.seek(0)
    holder = file.read().strip() or "another process"
    file.close()
    return CheckpointError(
        f"{path.parent} is in use by {holder}; two at once would spoil it. Wait for it or stop it, or give "
        f"another folder"
    )


def _renew(file: IO[str], path: Path, owner: str) -> None:
    """Renew the lease `path` until its file is closed; kill this process if another process has taken the lease."""
    while not file.closed:
        with suppress(OSError):  # such as of a file server that does not answer for a moment
            if path.read_text() != owner:
                _log.error("%s was taken over while this process stood still; it ends here, before it writes", path)
                os.kill(os.getpid(), signal.SIGKILL)
            os.utime(path)
        time.sleep(LEASE_SECONDS / 6)  # a renewal may come late, or fail, without the lease becoming free
