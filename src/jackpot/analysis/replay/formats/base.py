"""Shared parts of the readers of saved rollouts: finding files, reading records, and warnings about damaged ones."""

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from jackpot.analysis.replay.responses import DamagedRecord, SavedResponse, response_of
from jackpot.core.errors import DataError

Warn = Callable[[str], None]  # receives a sentence about each record that cannot be read
DumpRecord = Mapping[str, Any]
_ROWS = 64  # parquet rows in memory at once
_LISTED = 64  # numbers for each token in one column of a response; beyond that a top-k list is refused
_NUMBER_BYTES = 8  # of a decoded number, at most


class IncompleteDump(DataError):
    """A file without a column that every correction needs."""

    def __init__(self, lack: str, how: str) -> None:
        super().__init__(f"{lack}. No correction can be replayed without them.\n{how}")
        self.lack = lack


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedIteration:
    """One saved iteration of a run of ours, for the writers of formats."""

    number: int
    rows: Callable[[Sequence[str]], Iterator[DumpRecord]]  # yields the responses with these columns, in their order
    prompt_width: int  # tokens of the longest prompt
    width: int  # tokens of the longest response


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpWriter:
    """Writes rollouts of ours as a library saves its own."""

    file_name: Callable[[int], str]  # of an iteration, below the folder of an export
    write: Callable[[SavedIteration, Path], None]  # writes an iteration to a file
    lost: str  # columns of ours that the format does not have


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpFormat:
    """Reads one library's saved rollouts, and writes some formats."""

    name: str
    files: Callable[[Path], list[Path]]  # finds the files of this format in a folder, or the file itself, in order
    recognizes: Callable[[Path, Warn, ReadLimits], bool]  # decides by the content of a file
    read: Callable[[Path, Warn, ReadLimits], Iterator[SavedResponse]]
    how: str  # instructions for logging the columns that are missing
    mark: Callable[[Path, ReadLimits], str | None] = lambda *_: None  # one of neighbouring files of equal marks is read
    writer: DumpWriter | None = None  # None: the format is only read


def read_files(found: DumpFormat, files: Iterable[Path], warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of all files in their order, and warn of files without a needed column.

    A file that repeats the one before it is not read again.

    Raises:
        IncompleteDump: every file lacks a needed column.
    """
    lacking: list[IncompleteDump] = []
    is_whole, before = False, None
    for file in files:
        mark = found.mark(file, limits)
        if mark is not None and mark == before:
            continue
        before = mark
        try:
            for response in found.read(file, warn, limits):
                is_whole = True
                yield response
        except IncompleteDump as error:
            lacking.append(error)
    if lacking and not is_whole:
        raise lacking[0]
    for error in lacking:
        warn(f"{error.lack}; the file is left out")


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


def write_lines(path: Path, records: Iterable[DumpRecord]) -> None:
    """Write one JSON object a line."""
    with path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


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


def first_keys(path: Path, warn: Warn, limits: ReadLimits) -> set[str]:
    """Return the columns of a parquet file or of the first record of a JSONL file; an empty set where it is damaged."""
    if path.suffix != ".parquet":
        return set(next(iter(json_lines(path, warn, limits)), (0, {}))[1])
    try:
        return set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        warn(f"{path.name} cannot be read: {first_line(error)}")
        return set()


def responses_of(
    records: Iterable[tuple[int, Any]],
    where: str,
    warn: Warn,
    limits: ReadLimits,
    needed: Sequence[str],
    how: str,
    rename: Callable[[DumpRecord], DumpRecord] = dict,
) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of records that are damaged, too large or lack a needed column.

    Args:
        needed: columns by the names of the format.
        rename: maps a record that has all of `needed` to the columns of `response_of`.

    Raises:
        IncompleteDump: no record has all needed columns; the message says how to log them.
    """
    lacking: list[str] = []
    is_whole = False
    for number, record in records:
        place = f"{where}, response {number}"
        if not isinstance(record, Mapping):
            warn(f"{place} is {type(record).__name__}, not columns by name; left out")
            continue
        if missing := [name for name in needed if record.get(name) is None]:
            lacking.append(_lacks(place, missing, record))
            continue
        is_whole = True
        try:
            _check_size(record, limits)
            response = response_of(rename(record), where, number)
        except DamagedRecord as error:
            warn(f"{error if str(error).startswith(where) else f'{place}: {error}'}; left out")
        except Exception as error:  # a stranger's file may hold anything in place of lists of numbers
            warn(f"{place}: {type(error).__name__}: {first_line(error)}; left out")
        else:
            yield response
    if lacking and not is_whole:
        raise IncompleteDump(lacking[0], how)
    for text in lacking:
        warn(f"{text}; left out")


def _check_size(record: DumpRecord, limits: ReadLimits) -> None:
    """Refuse a record with a column that is too large, before anything of it is copied. Raises DamagedRecord."""
    for name, column in record.items():
        if isinstance(column, Tensor):
            limits.check_response(column.numel(), len(column) if column.ndim else 0)
        elif isinstance(column, list | tuple):
            limits.check_response(0, len(column))
            rows = [len(row) for row in column if isinstance(row, list | tuple | Tensor)]
            limits.check_response(sum(rows), len(column))
            if any(isinstance(entry, list | tuple) for row in column if isinstance(row, list | tuple) for entry in row):
                raise DamagedRecord(f"{name} has lists in lists in a list")


def _lacks(where: str, missing: Sequence[str], record: DumpRecord) -> str:
    there = ", ".join(sorted(name for name, value in record.items() if value is not None)) or "nothing"
    return f"{where} lacks {', '.join(missing)}; it has {there}"
