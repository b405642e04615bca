"""Safe reading of files that others wrote: only regular files, of bounded size, nesting and expansion.

A refused file raises an OSError or a ValueError, as a damaged file does, so that readers need no further error message.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

LARGEST_TEXT = 256 * 2**20  # most bytes of a file, or of a line, that is parsed as a whole
ALWAYS_EXPANDED = 64 * 2**20  # bytes that any compressed file may expand to, however small it is
MOST_EXPANSION = 100  # bytes that each byte of a larger compressed file may expand to; text expands to 3 to 30
MOST_REPETITION = 2_000  # bytes of a table for each byte of its file, whose columns store a value once for many rows
MOST_ROWS = 256  # rows of a table that are read at once
LARGEST_BATCH = 128 * 2**20  # bytes of the rows that are read at once, unless one row takes more


class ForeignFileError(OSError):
    """A file that is refused for its type, its place or its size, whatever its content says."""


def open_foreign(path: Path, largest: float = float("inf"), inside: Path | None = None) -> IO[bytes]:
    """Open for reading a file that someone else wrote, if it is a regular file of at most `largest` bytes.

    A folder from elsewhere may hold a pipe or a device, on which reading never ends, or a link to any other file.

    Args:
        largest: most bytes that the file may have.
        inside: folder that the file must lie in, after all links are followed; None: anywhere.

    Raises:
        ForeignFileError: a pipe, a device or a folder; a file that is too large, or outside of `inside`.
        OSError: the file cannot be opened.
    """
    if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
        raise ForeignFileError(f"{path} is a link to {path.resolve()}, outside of {inside}")

    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer is opened without waiting
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
        os.close(descriptor)
        size = f"has {status.st_size:,} bytes, and at most {largest:,} are read"
        raise ForeignFileError(f"{path} {size if stat.S_ISREG(status.st_mode) else 'is no regular file'}")
    return os.fdopen(descriptor, "rb")


def read_foreign(path: Path, largest: float = LARGEST_TEXT, inside: Path | None = None) -> bytes:
    """Return the content of a file; the arguments and the errors are those of `open_foreign`."""
    with open_foreign(path, largest, inside) as file:
        content = file.read(-1 if largest == float("inf") else int(largest) + 1)
    if len(content) > largest:  # some files, as in /proc, report a size of 0
        raise ForeignFileError(f"{path} goes on for more than {largest:,} bytes")
    return content


def check_foreign(path: Path, inside: Path | None = None) -> Path:
    """Check a file that a library will open by itself, and return its path; raise the errors of `open_foreign`."""
    open_foreign(path, inside=inside).close()
    return path


def parse_json(text: bytes | str, kind: type = object) -> Any:
    """Parse JSON whose outermost value is an instance of the class `kind`.

    Raises:
        ValueError: the text is no JSON, is nested too deeply, has an integer of thousands of digits, or holds a value
            of another class.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"it holds {value!r:.40}, which is no {kind.__name__}")
    return value


class Expansion:
    """A count of the bytes that come out of a compressed file, with a limit that no honest file reaches.

    Args:
        path: path of the compressed file.
        times: the limit as a multiple of the file's size; up to ALWAYS_EXPANDED bytes are allowed in any case.
    """

    def __init__(self, path: Path, times: int = MOST_EXPANSION) -> None:
        self._path, self._times = path, times
        self._limit = max(ALWAYS_EXPANDED, times * path.stat().st_size)
        self._count = 0

    def add(self, count: int) -> None:
        """Count further bytes that came out of the file.

        Raises:
            ForeignFileError: the sum is above the limit.
        """
        self._count += count
        if self._count > self._limit:
            raise ForeignFileError(
                f"{self._path} expands to more than {self._times:,} times its size, which honest data does not"
            )


def table_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a parquet file as `pyarrow.RecordBatch`es of at most MOST_ROWS rows and LARGEST_BATCH bytes.

    A row that takes more bytes is a batch of its own.

    Args:
        path: the parquet file.
        columns: names of the columns to read, as far as the file has them; None: all.

    Raises:
        ForeignFileError: as in `open_foreign`, or all rows take more than MOST_REPETITION times the file's size.
        pyarrow.ArrowException, OSError: the file is damaged.
    """
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]  # the rest of this module does without it

    file = parquet.ParquetFile(check_foreign(path))
    footer = file.metadata
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    encoded = parquet.ParquetFile(path, read_dictionary=paths)  # has each text once, however many rows repeat it
    # Two counts of bytes must stay below the limit: that of all row groups as the footer states it (`stored`), and that
    # of the batches as they turn out (`yielded`).
    stored, yielded = (Expansion(path, MOST_REPETITION) for _ in range(2))

    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        chunks = [group.column(column) for column in range(group.num_columns)]
        # Count the bytes that the footer states for each column, but at least 8 for each value.
        size = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
        stored.add(size)

        # Estimate the bytes of the largest row. Its texts are at most the dictionaries of all texts, which come with
        # the first row of `encoded`; where texts are not in dictionaries, the mean row stands for the largest.
        # The reader of single rows gets no name, so it is freed at once with the dictionaries that it holds in memory.
        texts = sum(row.nbytes for row in islice(encoded.iter_batches(1, row_groups=[index], columns=columns), 1))
        largest = max(texts, size // max(group.num_rows, 1), 1)

        rows = min(MOST_ROWS, max(LARGEST_BATCH // largest, 1))
        for batch in file.iter_batches(batch_size=rows, row_groups=[index], columns=columns):
            yielded.add(batch.nbytes)
            yield batch
