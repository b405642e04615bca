"""The description of a format of saved rollouts, and one reader for the files of all formats."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from jackpot.analysis.replay.formats.columns import Columns, translate
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, check_size, parquet_rows
from jackpot.analysis.replay.responses import DamagedRecord, SavedResponse, response_of
from jackpot.core.errors import DataError, first_line
from jackpot.core.foreign import check_foreign


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpWriter:
    """A way to write our rollouts as a library saves its own, one JSON object a line."""

    file_name: str  # file below the folder of an export, with braces for the iteration
    columns: tuple[str, ...]  # our columns from which a record is made
    lost: str  # text that names our columns that the format does not have
    record: Callable[[int, DumpRecord], DumpRecord] = lambda iteration, row: row  # makes a record of our columns


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpFormat:
    """The format of one library's saved rollouts: how to find, recognize and read files, and maybe to write them."""

    name: str
    files: Callable[[Path], list[Path]]  # function that finds the files of this format at a path, in order
    records: Callable[[Path, Warn], Iterator[tuple[int, Any]]]  # function that yields (index, record) of a file
    marks: tuple[frozenset[str], ...]  # a file with all columns of one of these sets has the format; (): every file
    needed: tuple[str, ...]  # columns without which no correction can be replayed
    how: str  # instructions for logging the columns that are missing
    columns: Columns | None = None  # names and layout of the library's columns; None: ours, those of `response_of`
    where: Callable[[Path], str] = lambda path: path.name  # function that returns a file's name for messages
    batch: tuple[str, ...] = ()  # columns that are equal if a file repeats the batch of the one before; (): no repeats
    writer: DumpWriter | None = None  # None: the format is only read

    def recognizes(self, path: Path, warn: Warn) -> bool:
        """Tell whether a file is of this format by its columns, or those of its first record; warn of a damaged file.

        A format without `marks` recognizes every file, unread.
        """
        if not self.marks:
            return True
        if path.suffix == ".parquet":
            present = _parquet_columns(path, warn)
        else:
            records = (record for _, record in self.records(path, warn) if isinstance(record, Mapping))
            present = set(next(records, ()))
        return any(mark <= present for mark in self.marks)  # a mark is a set of columns, all of which must be present

    def read(self, path: Path, warn: Warn, incomplete: list[str]) -> Iterator[SavedResponse]:
        """Yield the responses of one file, and warn of records that are damaged, too large or lack a needed column.

        Args:
            path: the file.
            warn: receives a sentence about each record that is left out.
            incomplete: gets a sentence on what the first record lacks, if no record has all needed columns.
        """
        where = self.where(path)
        has_whole_record = False  # whether any record has all needed columns
        lacking: list[str] = []
        for index, record in self.records(path, warn):
            name = f"{where}, response {index}"
            if not isinstance(record, Mapping):
                warn(f"{name} is {type(record).__name__}, not columns by name; left out")
                continue

            if missing := [column for column in self.needed if record.get(column) is None]:
                present = ", ".join(sorted(column for column, values in record.items() if values is not None))
                lacking.append(f"{name} lacks {', '.join(missing)}; it has {present or 'nothing'}")
                continue

            has_whole_record = True
            try:
                _check_sizes(record)
                response = response_of(translate(record, self.columns) if self.columns else record, where, index)
            except DamagedRecord as error:  # an error of `response_of` names file and response already
                warn(f"{error if str(error).startswith(where) else f'{name}: {error}'}; left out")
            except Exception as error:  # a stranger's file may hold anything in place of lists of numbers
                warn(f"{name}: {type(error).__name__}: {first_line(error)}; left out")
            else:
                yield response

        if lacking and not has_whole_record:
            incomplete.append(lacking[0])
            return
        for text in lacking:
            warn(f"{text}; left out")


def read_files(dump: DumpFormat, files: Iterable[Path], warn: Warn) -> Iterator[SavedResponse]:
    """Yield the responses of all files in their order, and warn of files that lack a needed column.

    A file that repeats the batch of the file before, by the columns `DumpFormat.batch`, is skipped.

    Args:
        dump: format of the files.
        files: files in their order.
        warn: receives a sentence about everything that is left out.

    Raises:
        DataError: every file lacks a needed column; the message says how to log it.
    """
    has_response = False  # whether any file has a readable response
    incomplete: list[str] = []  # a sentence on what is lacking for each file that lacks a column in all records
    last_digest = None
    for file in files:
        digest = _batch_digest(file, dump.batch) if dump.batch else None
        if digest is not None and digest == last_digest:
            continue

        last_digest = digest
        for response in dump.read(file, warn, incomplete):
            has_response = True
            yield response

    if incomplete and not has_response:
        raise DataError(f"{incomplete[0]}. No correction can be replayed without them.\n{dump.how}")
    for lack in incomplete:
        warn(f"{lack}; the file is left out")


def _parquet_columns(path: Path, warn: Warn) -> set[str]:
    """Return the names of a parquet file's columns; for a damaged file warn, and return an empty set."""
    try:
        return set(pq.read_schema(check_foreign(path)).names)
    except (OSError, pa.ArrowException) as error:
        warn(f"{path.name} cannot be read: {first_line(error)}")
        return set()


def _batch_digest(path: Path, names: Sequence[str]) -> str | None:
    """Return a digest of some columns of a parquet file; None for a damaged file, of which `parquet_rows` warns later.

    Args:
        path: the file.
        names: names of the columns.
    """
    problems: list[str] = []
    digest = hashlib.sha256()
    for _, row in parquet_rows(path, problems.append, names):
        digest.update(repr(row).encode())
    return None if problems else digest.hexdigest()


def _check_sizes(record: DumpRecord) -> None:
    """Refuse a record with too large a column, before any column is copied. Raises DamagedRecord."""
    for column in record.values():
        if isinstance(column, Tensor):
            check_size(len(column) if column.ndim else 0, column.numel())
        elif isinstance(column, list | tuple):
            check_size(len(column), sum(len(row) for row in column if isinstance(row, list | tuple | Tensor)))
