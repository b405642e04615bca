"""The door for files that others wrote: they are read where they are regular files of bounded size, depth and growth.

A stranger's folder may hold a pipe, a device, a link to anywhere, a kilobyte that expands to gigabytes, or JSON that is
nested without end. Every reader of such a folder opens its files here; what is refused is an OSError or a ValueError,
as a damaged file is, so that a reader says it in the words that it has for those.
"""

import json
import os
import stat
from pathlib import Path
from typing import IO, Any

LARGEST_TEXT = 256 * 2**20  # bytes of a file, or of a line, that is parsed as a whole
ALWAYS_EXPANDED = 64 * 2**20  # bytes that any compressed file may expand to
MOST_EXPANSION = 100  # bytes out of a byte of a larger one; text has 3 to 30
MOST_REPETITION = 2_000  # the same of a table, whose columns name a value once that stands in many rows


class ForeignFileError(OSError):
    """A file that is not read because of what it is, before its content is looked at."""


def open_foreign(path: Path, largest: float = float("inf"), inside: Path | None = None) -> IO[bytes]:
    """Open a file for reading.

    Args:
        largest: most bytes that it may have.
        inside: folder that it must lie in, whatever links lead to it; None: anywhere.

    Raises:
        ForeignFileError: a pipe, a device or a folder; a file that is too large, or outside of `inside`.
        OSError: it cannot be opened.
    """
    if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
        raise ForeignFileError(f"{path} is a link to {path.resolve()}, outside of {inside}")

    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer is opened without waiting
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > largest:
        os.close(descriptor)
        size = f"has {facts.st_size:,} bytes, and at most {largest:,} are read"
        raise ForeignFileError(f"{path} {size if stat.S_ISREG(facts.st_mode) else 'is no regular file'}")
    return os.fdopen(descriptor, "rb")


def read_foreign(path: Path, largest: float = LARGEST_TEXT, inside: Path | None = None) -> bytes:
    """Return the content of a file; arguments and errors as of `open_foreign`."""
    with open_foreign(path, largest, inside) as file:
        content = file.read(-1 if largest == float("inf") else int(largest) + 1)
    if len(content) > largest:  # its size is not known beforehand everywhere, as in /proc
        raise ForeignFileError(f"{path} goes on for more than {largest:,} bytes")
    return content


def check_foreign(path: Path, inside: Path | None = None) -> Path:
    """Return the path of a file that a library is to open by itself; errors as of `open_foreign`."""
    open_foreign(path, inside=inside).close()
    return path


def parse_json(text: bytes | str, kind: type = object) -> Any:
    """Parse JSON whose outermost value is of a kind.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has an integer of thousands of digits, or is of another kind.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"it holds {value!r:.40}, which is no {kind.__name__}")
    return value


class Expansion:
    """A count of the bytes that come out of a compressed file, which refuses a file that no honest one is like.

    Args:
        path: of the file, whose size is what the bytes are compared with.
        times: bytes that may come out of a byte, once they are more than ALWAYS_EXPANDED.
    """

    def __init__(self, path: Path, times: int = MOST_EXPANSION) -> None:
        self._path, self._times = path, times
        self._most = max(ALWAYS_EXPANDED, times * path.stat().st_size)
        self._count = 0

    def add(self, count: int) -> None:
        """Count further bytes.

        Raises:
            ForeignFileError: they are more than a file of this size can honestly hold.
        """
        self._count += count
        if self._count > self._most:
            raise ForeignFileError(
                f"{self._path} expands to more than {self._times:,} times its size, which honest data does not"
            )
