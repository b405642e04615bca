"""What all readers of saved rollouts share: which file, which columns, and the errors."""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jackpot.analysis.replay.responses import DamagedRecord, Response, response_of
from jackpot.core.errors import DataError

Tell = Callable[[str], None]  # what cannot be read, a sentence each
Record = Mapping[str, Any]
_ROWS = 64  # of parquet in memory at once
POLICY = ("old_log_probs", "log_probs")


class IncompleteDump(DataError):
    """A file without a column that every correction needs."""

    def __init__(self, lack: str, how: str) -> None:
        super().__init__(f"{lack}. No correction can be replayed without them.\n{how}")
        self.lack = lack


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How one library writes rollouts down."""

    name: str
    files: Callable[[Path], list[Path]]  # of this format in a folder, or the file itself, in their order
    recognises: Callable[[Path], bool]  # by what stands in a file
    read: Callable[[Path, Tell], Iterator[Response]]
    how: str  # how to log what is missing
    mark: Callable[[Path], str | None] = lambda _: None  # two files in a row with the same one are read once


def read_files(found: Format, files: Iterable[Path], tell: Tell) -> Iterator[Response]:
    """The responses of all files in their order; a file of which none has all columns is told.

    One that repeats the file before it is not read again.

    Raises:
        IncompleteDump: there is such a file, and no other.
    """
    lacking: list[IncompleteDump] = []
    is_whole, before = False, None
    for file in files:
        mark = found.mark(file)
        if mark is not None and mark == before:
            continue
        before = mark
        try:
            for response in found.read(file, tell):
                is_whole = True
                yield response
        except IncompleteDump as error:
            lacking.append(error)
    if lacking and not is_whole:
        raise lacking[0]
    for error in lacking:
        tell(f"{error.lack}; the file is left out")


def matching(path: Path, *patterns: str) -> list[Path]:
    """The file itself, or those in a folder by their names with numbers in order."""
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in patterns) else []
    found = {file for pattern in patterns for file in path.rglob(pattern)}
    return sorted(found, key=lambda file: (file.parent, [_part(text) for text in file.stem.split("_")]))


def _part(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)


def json_lines(path: Path, tell: Tell) -> Iterator[tuple[int, Record]]:
    """Number and content of every line that is a JSON object; the others are told."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError as error:
                tell(f"{path.name} line {number} is no JSON and is left out: {str(error).splitlines()[0]}")
                continue
            if isinstance(record, dict):
                yield number, record
            elif line.strip():
                tell(f"{path.name} line {number} is no JSON object and is left out")


def parquet_rows(path: Path, tell: Tell, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Record]]:
    """Number and content of every row, a few in memory at a time; a damaged file is told."""
    number = 0
    try:
        for part in pq.ParquetFile(path).iter_batches(batch_size=_ROWS, columns=columns and list(columns)):
            for row in part.to_pylist():
                yield number, row
                number += 1
    except (OSError, pa.ArrowException) as error:
        tell(f"{path.name} cannot be read after row {number}: {str(error).splitlines()[0]}")


def torch_file(path: Path, tell: Tell) -> Any:
    """What torch.save wrote, tensors and plain values only; None where it is damaged, which is told.

    Tensors stay in the file until they are read, so that a look at a checkpoint of many gigabytes costs none.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds, and refuses code in a pickle by one of them
        tell(f"{path.name} cannot be read and is left out: {str(error).strip().splitlines()[0]}")
        return None


def first_keys(path: Path) -> set[str]:
    """The columns of the first record of a JSONL or parquet file; none where it cannot be read."""
    read = parquet_rows if path.suffix == ".parquet" else json_lines
    return set(next(iter(read(path, lambda _: None)), (0, {}))[1])


def responses_of(
    records: Iterable[tuple[int, Record]],
    where: str,
    tell: Tell,
    needed: Sequence[str],
    how: str,
    rename: Callable[[Record], Record] = dict,
) -> Iterator[Response]:
    """Records of one file as responses; those that are damaged or lack a needed column are told.

    Args:
        needed: columns under the names of the format.
        rename: to our names, from a record that has all of `needed`.

    Raises:
        IncompleteDump: no record has all that is needed; the message says how to log it.
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
            tell(f"{error}; left out")
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            tell(f"{where}, response {number}: {type(error).__name__}: {error}; left out")
    if lacking and not is_whole:
        raise IncompleteDump(lacking[0], how)
    for text in lacking:
        tell(f"{text}; left out")


def _lacks(where: str, missing: Sequence[str], record: Record) -> str:
    there = ", ".join(sorted(name for name, value in record.items() if value is not None)) or "nothing"
    return f"{where} lacks {', '.join(missing)}; it has {there}"
