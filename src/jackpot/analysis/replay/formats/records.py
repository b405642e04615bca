"""Finds the files of saved rollouts and reads their records, with limits on what a damaged or hostile file may cost.

A record is a response, or what stands in its place, with columns by the names of the library that wrote it.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from jackpot.analysis.replay.responses import DamagedRecord

Warn = Callable[[str], None]  # receives a sentence about each record that cannot be read
DumpRecord = Mapping[str, Any]
_ROWS = 64  # parquet rows in memory at once
_LISTED = 64  # numbers for each token in one column of a response; beyond that a top-k list is refused
_NUMBER_BYTES = 8  # of a decoded number, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLimits:
    """Limits what a file may make the reader hold in memory: a small file can stand for a huge one."""

    response_tokens: int = 1_000_000  # tokens of a response, its prompt and padding included
    file_bytes: int = 2_000_000_000  # size of a file, and of each column of it when it is decoded

    def check_response(self, numbers: int, tokens: int) -> None:
        """Refuse a column of a response by its number of tokens and of all numbers. Raises DamagedRecord."""
        if tokens > self.response_tokens:
            raise DamagedRecord(
                f"it has {tokens:,} tokens, and at most {self.response_tokens:,} are read; raise --max-response-tokens"
            )
        if numbers > _LISTED * self.response_tokens:
            raise DamagedRecord(f"it has a column of {numbers:,} numbers; raise --max-response-tokens")

    def check_file(self, size: int) -> None:
        """Refuse a file or a column by its size, bytes, when it is unpacked. Raises DamagedRecord."""
        if size > self.file_bytes:
            raise DamagedRecord(
                f"it takes {size / 1e9:.3g} GB unpacked, and at most {self.file_bytes / 1e9:.3g} GB are read; raise "
                f"--max-file-gb"
            )


def matching(path: Path, *patterns: str) -> list[Path]:
    """Return the file itself, or the matching files below a folder, numbers in their names in numeric order."""
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in patterns) else []
    found = {file for pattern in patterns for file in path.rglob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: [[_part(text) for text in name.split("_")] for name in _names(file)])


def _names(file: Path) -> tuple[str, ...]:
    return (*file.parent.parts, file.stem)


def _part(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)


def json_lines(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[tuple[int, DumpRecord]]:
    """Yield number and content of every line that is a JSON object, and warn of the others."""
    try:
        limits.check_file(path.stat().st_size)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line) if line.strip() else None
                except (ValueError, RecursionError) as error:
                    warn(f"{path.name} line {number} is no JSON and is left out: {first_line(error)}")
                    continue
                if isinstance(record, dict):
                    yield number, record
                elif line.strip():
                    warn(f"{path.name} line {number} is no JSON object and is left out")
    except (OSError, DamagedRecord) as error:
        warn(f"{path.name} is left out: {first_line(error)}")


def parquet_rows(
    path: Path, warn: Warn, limits: ReadLimits, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, DumpRecord]]:
    """Yield number and content of every row, a few in memory at a time, and warn of what is damaged or too large."""
    number = 0
    try:
        limits.check_file(path.stat().st_size)
        file = pq.ParquetFile(path)
        _check_columns(file.metadata, limits)
        for part in file.iter_batches(batch_size=_ROWS, columns=columns and list(columns)):
            is_small = max(map(_leaves, part.columns), default=0) <= limits.response_tokens
            for row in part.to_pylist() if is_small else range(len(part)):
                try:
                    yield number, row if is_small else _checked_row(part.slice(row, 1), limits)
                except DamagedRecord as error:
                    warn(f"{path.name}, response {number}: {error}; left out")
                number += 1
    except Exception as error:  # pyarrow raises many kinds on a damaged file, ValueError and OverflowError among them
        warn(f"{path.name} cannot be read after row {number}: {first_line(error)}")


def _check_columns(metadata: pq.FileMetaData, limits: ReadLimits) -> None:
    """Refuse a file by the numbers that its footer announces: encoded, a million equal ones take a few bytes."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            limits.check_file(max(column.num_values * _NUMBER_BYTES, column.total_uncompressed_size))


def _leaves(column: pa.Array) -> int:
    """Count the entries of an array, those of lists in it one by one."""
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    return len(column)


def _checked_row(row: pa.RecordBatch, limits: ReadLimits) -> DumpRecord:
    for column in row.columns:
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            limits.check_response(_leaves(column), pc.list_value_length(column)[0].as_py() or 0)
    return row.to_pylist()[0]


def torch_file(path: Path, warn: Warn, limits: ReadLimits) -> Any:
    """Load tensors and plain values that torch.save wrote; warn and return None where it is damaged or too large.

    Tensors are memory-mapped, so that opening a file costs no memory.
    """
    try:
        limits.check_file(path.stat().st_size)
        is_zip = zipfile.is_zipfile(path)
        _check_zip(path, limits)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch raises many kinds, and refuses code in a pickle by one of them
        warn(f"{path.name} cannot be read and is left out: {first_line(error)}")
        return None


def torch_bytes(content: bytes, limits: ReadLimits) -> Any:
    """Load what torch.save wrote into memory. Raises DamagedRecord where it is too large, and what torch raises."""
    _check_zip(io.BytesIO(content), limits)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_zip(file: Path | io.BytesIO, limits: ReadLimits) -> None:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as content:
            limits.check_file(sum(entry.file_size for entry in content.infolist()))


def batch_rows(batch: DumpRecord, where: str, warn: Warn, limits: ReadLimits) -> Iterator[dict[str, Any]]:
    """Yield the responses of a batch [B, ...] of `sequences`, each with those columns of the batch that reach to it.

    Warns of a batch that is too large. A batch without sequences counts as one response.
    """
    columns = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    try:
        for column in columns.values():
            limits.check_file(column.numel() * column.element_size())
    except DamagedRecord as error:
        warn(f"{where}: a batch is left out: {error}")
        return
    sequences = columns.get("sequences")
    for row in range(max(1, len(sequences)) if sequences is not None and sequences.ndim else 1):
        yield {name: column[row] for name, column in columns.items() if column.ndim and row < len(column)}


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
