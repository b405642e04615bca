"""Readers of the files in which libraries save rollouts: JSON lines, parquet, and torch.save.

A record is a response with columns by the names of the library that wrote the file. A damaged file may have anything in
place of a record.
"""

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from jackpot.analysis.replay.responses import DamagedRecord
from jackpot.core.errors import first_line
from jackpot.core.foreign import LARGEST_TEXT, check_foreign, open_foreign, parse_json, table_batches

Warn = Callable[[str], None]  # receives a sentence about each record that cannot be read
DumpRecord = Mapping[str, Any]
MOST_TOKENS = 1_000_000  # tokens of a response with prompt and padding; a small compressed file may claim many more
_MOST_LISTED = 64  # most numbers in a column of a response, as a multiple of MOST_TOKENS: a top-k list has many a token


def check_size(tokens: int, entries: int) -> None:
    """Refuse a column of a response that is too large. Raises DamagedRecord.

    Args:
        tokens: number of tokens that the column covers.
        entries: number of all numbers in the column, several for each token of a top-k list.
    """
    if tokens > MOST_TOKENS:
        raise DamagedRecord(f"it has {tokens:,} tokens, and at most {MOST_TOKENS:,} are read")
    if entries > _MOST_LISTED * MOST_TOKENS:
        raise DamagedRecord(
            f"it has a column of {entries:,} numbers, and at most {_MOST_LISTED * MOST_TOKENS:,} are read"
        )


def matching(path: Path, pattern: str) -> list[Path]:
    """Return the path itself if it is a file that matches a pattern, or all such files below a folder.

    A file that does not match gives an empty list. Files are sorted by name, where numbers in names sort as numbers.
    """
    if path.is_file():
        return [path] if path.match(pattern) else []

    def sort_key(file: Path) -> list[list[tuple[int, int, str]]]:
        """Return for each part of a path its words, split at `_`: (0, number, "") for a number, else (1, 0, word)."""
        parts = [part.split("_") for part in (*file.parent.parts, file.stem)]
        return [[(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in words] for words in parts]

    return sorted((file for file in path.rglob(pattern) if file.is_file()), key=sort_key)


def json_lines(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield (row, record) of every line that is a JSON object, from row 1; skip blank lines, and warn of all others."""
    try:
        with open_foreign(path) as file:
            # Of a line at most one byte more than the limit is read, so that no huge line fills the memory.
            for row, line in enumerate(iter(lambda: file.readline(LARGEST_TEXT + 1), b""), start=1):
                if len(line) > LARGEST_TEXT:
                    warn(f"{path.name} is left out from line {row} on, which has more than {LARGEST_TEXT:,} bytes")
                    return
                try:
                    record = parse_json(line) if line.strip() else None
                except ValueError as error:
                    warn(f"{path.name} line {row} is no JSON and is left out: {first_line(error)}")
                    continue

                if isinstance(record, dict):
                    yield row, record
                elif line.strip():
                    warn(f"{path.name} line {row} is no JSON object and is left out")
    except OSError as error:
        warn(f"{path.name} is left out: {first_line(error)}")


def parquet_rows(path: Path, warn: Warn, columns: Sequence[str] | None = None) -> Iterator[tuple[int, DumpRecord]]:
    """Yield (index, record) of every row, and warn of rows that are damaged or too large.

    A few rows are in memory at a time. Where the file cannot be read on, warn and end.

    Args:
        path: the parquet file.
        warn: function that receives a sentence about everything that is left out.
        columns: names of the columns to read, as far as the file has them; None: all.
    """
    index = 0
    try:
        for batch in table_batches(path, columns):
            for offset in range(len(batch)):
                row = batch.slice(offset, 1)

                try:
                    for column in row.columns:
                        check_size(*_sizes(column))
                    yield index, row.to_pylist()[0]
                except DamagedRecord as error:
                    warn(f"{path.name}, response {index}: {error}; left out")

                index += 1
    except Exception as error:  # pyarrow raises many kinds on a damaged file, ValueError and OverflowError among them
        warn(f"{path.name} cannot be read after row {index}: {first_line(error)}")


def _sizes(column: pa.Array) -> tuple[int, int]:
    """Return how many tokens, and how many numbers in all their lists, one row of a column has; (0, 0) without lists.

    `column` holds that row alone.
    """
    sizes = []  # number of entries at each level of nested lists, the outermost first
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
        sizes.append(len(column))
    return (sizes[0], sizes[-1]) if sizes else (0, 0)


def torch_file(path: Path, warn: Warn) -> Any:
    """Load a file of tensors and plain values that torch.save wrote; for a damaged file warn, and return None.

    Tensors are memory-mapped, so that opening a file costs no memory, unless it is of torch's old format without zip.
    """
    try:
        check_foreign(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds, and refuses code in a pickle by one of them
        warn(f"{path.name} cannot be read and is left out: {first_line(error)}")
        return None


def batch_rows(batch: DumpRecord) -> Iterator[dict[str, Any]]:
    """Yield the responses of a batch, each as a record with its row of every column.

    A column with fewer rows than the batch has responses is missing in the last records. A batch without the column
    `sequences` counts as one response.

    Args:
        batch: columns by name, `sequences` [B, S] among them.

    Raises:
        DamagedRecord: the file repeats one row, so that a few bytes stand for any number of sequences.
    """
    columns = {name: column for name, column in batch.items() if isinstance(column, Tensor) and column.ndim}
    sequences = columns.get("sequences", torch.empty(0))
    if sequences.nbytes > sequences.untyped_storage().nbytes():  # rows share memory
        raise DamagedRecord(f"its {len(sequences):,} sequences take more bytes than the file has for them")

    for row in range(max(1, len(sequences))):
        yield {name: column[row] for name, column in columns.items() if row < len(column)}
