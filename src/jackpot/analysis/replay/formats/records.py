"""Finds the files of saved rollouts and reads their records.

A record is a response, or what stands in its place, with columns by the names of the library that wrote it.
"""

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from jackpot.analysis.replay.responses import DamagedRecord
from jackpot.core.errors import first_line
from jackpot.core.foreign import LARGEST_TEXT, MOST_REPETITION, Expansion, check_foreign, open_foreign, parse_json

Warn = Callable[[str], None]  # receives a sentence about each record that cannot be read
DumpRecord = Mapping[str, Any]
MOST_TOKENS = 1_000_000  # of a response, its prompt and padding included: a small file can stand for a huge one
_LISTED = 64  # numbers for each token in one column of a response; beyond that a top-k list is refused
_ROWS = 64  # parquet rows in memory at once


def check_size(tokens: int, numbers: int) -> None:
    """Refuse a column of a response by its number of tokens and of all numbers. Raises DamagedRecord."""
    if tokens > MOST_TOKENS:
        raise DamagedRecord(f"it has {tokens:,} tokens, and at most {MOST_TOKENS:,} are read")
    if numbers > _LISTED * MOST_TOKENS:
        raise DamagedRecord(f"it has a column of {numbers:,} numbers, and at most {_LISTED * MOST_TOKENS:,} are read")


def matching(path: Path, pattern: str) -> list[Path]:
    """Return the file itself, or the matching files below a folder, numbers in their names in numeric order."""
    if path.is_file():
        return [path] if path.match(pattern) else []

    def order(file: Path) -> list[list[tuple[int, int, str]]]:
        names = [name.split("_") for name in (*file.parent.parts, file.stem)]
        return [[(0, int(text), "") if text.isdecimal() else (1, 0, text) for text in name] for name in names]

    return sorted((file for file in path.rglob(pattern) if file.is_file()), key=order)


def json_lines(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield number and content of every line that is a JSON object, and warn of the others."""
    try:
        with open_foreign(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST_TEXT + 1), b""), 1):
                if len(line) > LARGEST_TEXT:
                    warn(f"{path.name} is left out from line {number} on, which has more than {LARGEST_TEXT:,} bytes")
                    return
                try:
                    record = parse_json(line) if line.strip() else None
                except ValueError as error:
                    warn(f"{path.name} line {number} is no JSON and is left out: {first_line(error)}")
                    continue

                if isinstance(record, dict):
                    yield number, record
                elif line.strip():
                    warn(f"{path.name} line {number} is no JSON object and is left out")
    except OSError as error:
        warn(f"{path.name} is left out: {first_line(error)}")


def parquet_rows(path: Path, warn: Warn, columns: Sequence[str] | None = None) -> Iterator[tuple[int, DumpRecord]]:
    """Yield number and content of every row, a few in memory at a time, and warn of what is damaged or too large.

    Args:
        columns: those that are read, as far as the file has them; None for all.
    """
    number = 0
    try:
        expansion = Expansion(path, MOST_REPETITION)
        parts = pq.ParquetFile(check_foreign(path)).iter_batches(batch_size=_ROWS, columns=columns and list(columns))
        for part in parts:
            expansion.add(part.nbytes)
            for index in range(len(part)):
                row = part.slice(index, 1)

                try:
                    for column in row.columns:
                        check_size(*_sizes(column))
                    yield number, row.to_pylist()[0]
                except DamagedRecord as error:
                    warn(f"{path.name}, response {number}: {error}; left out")

                number += 1
    except Exception as error:  # pyarrow raises many kinds on a damaged file, ValueError and OverflowError among them
        warn(f"{path.name} cannot be read after row {number}: {first_line(error)}")


def _sizes(column: pa.Array) -> tuple[int, int]:
    """Count the tokens of the list in a row's column, and all numbers in it; 0 of each where it is no list."""
    sizes = []
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
        sizes.append(len(column))
    return (sizes[0], sizes[-1]) if sizes else (0, 0)


def torch_file(path: Path, warn: Warn) -> Any:
    """Load tensors and plain values that torch.save wrote; warn and return None where it is damaged.

    Tensors are memory-mapped, so that opening a file costs no memory.
    """
    try:
        check_foreign(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds, and refuses code in a pickle by one of them
        warn(f"{path.name} cannot be read and is left out: {first_line(error)}")
        return None


def batch_rows(batch: DumpRecord) -> Iterator[dict[str, Any]]:
    """Yield the responses of a batch [B, ...] of `sequences`, each with those columns of the batch that reach to it.

    A batch without sequences counts as one response.

    Raises:
        DamagedRecord: the file repeats one row, so that a few bytes stand for any number of sequences.
    """
    columns = {name: column for name, column in batch.items() if isinstance(column, Tensor) and column.ndim}
    sequences = columns.get("sequences", torch.empty(0))
    if sequences.nbytes > sequences.untyped_storage().nbytes():
        raise DamagedRecord(f"its {len(sequences):,} sequences take more bytes than the file has for them")

    for row in range(max(1, len(sequences))):
        yield {name: column[row] for name, column in columns.items() if row < len(column)}
