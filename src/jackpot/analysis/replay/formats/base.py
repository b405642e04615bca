"""Shared parts of the readers of saved rollouts: finding files, reading records, and warnings about damaged ones."""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jackpot.analysis.replay.responses import DamagedRecord, SavedResponse, response_of
from jackpot.core.errors import DataError

Warn = Callable[[str], None]  # receives a sentence about each record that cannot be read
DumpRecord = Mapping[str, Any]
_ROWS = 64  # parquet rows in memory at once
POLICY = ("old_log_probs", "log_probs")


class IncompleteDump(DataError):
    """A file without a column that every correction needs."""

    def __init__(self, lack: str, how: str) -> None:
        super().__init__(f"{lack}. No correction can be replayed without them.\n{how}")
        self.lack = lack


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpFormat:
    """The reader of one library's saved rollouts."""

    name: str
    files: Callable[[Path], list[Path]]  # finds the files of this format in a folder, or the file itself, in order
    recognizes: Callable[[Path], bool]  # decides by the content of a file
    read: Callable[[Path, Warn], Iterator[SavedResponse]]
    how: str  # instructions for logging the columns that are missing
    mark: Callable[[Path], str | None] = lambda _: None  # of two neighbouring files with equal marks one is read


def read_files(found: DumpFormat, files: Iterable[Path], warn: Warn) -> Iterator[SavedResponse]:
    """Yield the responses of all files in their order, and warn of files without a needed column.

    A file that repeats the one before it is not read again.

    Raises:
        IncompleteDump: every file lacks a needed column.
    """
    lacking: list[IncompleteDump] = []
    is_whole, before = False, None
    for file in files:
        mark = found.mark(file)
        if mark is not None and mark == before:
            continue
        before = mark
        try:
            for response in found.read(file, warn):
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
    found = {file for pattern in patterns for file in path.rglob(pattern)}
    return sorted(found, key=lambda file: (file.parent, [_part(text) for text in file.stem.split("_")]))


def _part(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)


def json_lines(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield number and content of every line that is a JSON object, and warn of the others."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError as error:
                warn(f"{path.name} line {number} is no JSON and is left out: {str(error).splitlines()[0]}")
                continue
            if isinstance(record, dict):
                yield number, record
            elif line.strip():
                warn(f"{path.name} line {number} is no JSON object and is left out")


def parquet_rows(path: Path, warn: Warn, columns: Sequence[str] | None = None) -> Iterator[tuple[int, DumpRecord]]:
    """Yield number and content of every row, a few in memory at a time, and warn of a damaged file."""
    number = 0
    try:
        for part in pq.ParquetFile(path).iter_batches(batch_size=_ROWS, columns=columns and list(columns)):
            for row in part.to_pylist():
                yield number, row
                number += 1
    except (OSError, pa.ArrowException) as error:
        warn(f"{path.name} cannot be read after row {number}: {str(error).splitlines()[0]}")


def torch_file(path: Path, warn: Warn) -> Any:
    """Load tensors and plain values that torch.save wrote; warn and return None where the file is damaged.

    Tensors are memory-mapped, so that opening a checkpoint of many gigabytes costs no memory.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds, and refuses code in a pickle by one of them
        warn(f"{path.name} cannot be read and is left out: {str(error).strip().splitlines()[0]}")
        return None


def first_keys(path: Path) -> set[str]:
    """Return the columns of the first record of a JSONL or parquet file; an empty set where it cannot be read."""
    read = parquet_rows if path.suffix == ".parquet" else json_lines
    return set(next(iter(read(path, lambda _: None)), (0, {}))[1])


def responses_of(
    records: Iterable[tuple[int, DumpRecord]],
    where: str,
    warn: Warn,
    needed: Sequence[str],
    how: str,
    rename: Callable[[DumpRecord], DumpRecord] = dict,
) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of records that are damaged or lack a needed column.

    Args:
        needed: columns by the names of the format.
        rename: maps a record that has all of `needed` to the columns of `response_of`.

    Raises:
        IncompleteDump: no record has all needed columns; the message says how to log them.
    """
    lacking: list[str] = []
    is_whole = False
    for number, record in records:
        if missing := [name for name in needed if record.get(name) is None]:
            lacking.append(_lacks(f"{where}, response {number}", missing, record))
            continue
        is_whole = True
        try:
            renamed = rename(record)
            yield response_of(renamed, where, number)
        except DamagedRecord as error:
            warn(f"{error}; left out")
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            warn(f"{where}, response {number}: {type(error).__name__}: {error}; left out")
    if lacking and not is_whole:
        raise IncompleteDump(lacking[0], how)
    for text in lacking:
        warn(f"{text}; left out")


def _lacks(where: str, missing: Sequence[str], record: DumpRecord) -> str:
    there = ", ".join(sorted(name for name, value in record.items() if value is not None)) or "nothing"
    return f"{where} lacks {', '.join(missing)}; it has {there}"
