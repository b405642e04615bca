"""Reads rows of local files (JSON Lines, JSON, CSV, parquet, and folders of them) and of data sets on the hub.

A record is a row as it stands in the file, with its place for messages: `problems.jsonl line 17`. Each call reads from
the first row to the last; all but JSON are read piece by piece.
"""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from pyarrow import parquet

from jackpot.core.errors import DataError
from jackpot.core.package import install

GZIP = ".gz"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of the first three with `GZIP` too
_LISTED = f"{', '.join(SUFFIXES)} (the first three also with {GZIP})"
_SPLIT = re.compile(
    r"(?<![a-zA-Z])(train|training|test|testing|validation|valid|val|dev|eval)(?![a-zA-Z])", re.IGNORECASE
)
_MAX_LISTED = 5  # files named in a message
_log = logging.getLogger(__name__)


class Record(NamedTuple):
    """Holds one row of a file or data set, before its columns are interpreted."""

    place: str  # file or data set and row number, for messages
    values: Mapping[str, Any]  # by column


def kind_of(path: Path) -> str | None:
    """Return the ending that says what a file holds, such as `.jsonl` or `.csv.gz`; None for other files."""
    ending = "".join(path.suffixes[-2:]) if path.suffix == GZIP else path.suffix
    return ending if ending.removesuffix(GZIP) in SUFFIXES and ending != f".parquet{GZIP}" else None


def find_files(path: Path, split: str | None, usual_split: str) -> list[Path]:
    """Return the file at `path`, or the files of one split in the folder at `path`, sorted by name.

    A file belongs to the split that is a word of its name (`train.jsonl`, `gsm8k_train.jsonl`, `train2.jsonl`,
    `train-00000-of-00002.parquet`), or else of the name of the nearest folder above it that names one. Without `split`,
    return the files of `usual_split` where any file names a split (a warning lists those that name none), and all files
    where none does. Case does not matter.

    Raises:
        DataError: nothing at `path`, an unknown kind of file, or no file of that split (lists the files present).
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; give the path of a {_LISTED} file or of a folder of them")
    if path.is_file():
        if kind_of(path) is None:
            raise DataError(f"{path} is not one of {_LISTED}; rename it if it is, or convert it")
        return [path]
    inside = sorted(one for one in path.rglob("*") if kind_of(one) and not _is_hidden(one.relative_to(path)))
    files = [one for one in inside if one.is_file()]
    if not files:
        raise DataError(f"{path} holds no {_LISTED} file; give a folder that does, or a file")
    nameless = [one for one in files if not _names_a_split(one.relative_to(path))]
    if split is None and len(nameless) == len(files):
        return files
    wanted = split or usual_split
    if chosen := [one for one in files if _is_of(one.relative_to(path), wanted)]:
        if split is None and nameless:
            _log.warning(
                "%s (%s): %d files name no split and are left out, for others do: %s; put train or test into their "
                "names, set split, or move them elsewhere",
                *(path, wanted, len(nameless), _listed(nameless, path)),
            )
        return chosen
    raise DataError(
        f"{path} holds no files of split {wanted!r}, only {_listed(files, path)}; set split to one that is there, or "
        f"give the path of a file"
    )


def _listed(files: Sequence[Path], folder: Path) -> str:
    """List the first files for a message."""
    names = [str(one.relative_to(folder)) for one in files]
    return ", ".join(names[:_MAX_LISTED]) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )


def read_files(files: Sequence[Path]) -> Iterator[Record]:
    """Yield every row of every file, in order.

    Raises:
        DataError: the content of a file does not fit its suffix; names the line or row.
    """
    for path in files:
        kind = kind_of(path) or ""
        try:
            if kind == ".parquet":
                yield from _parquet(path)
            else:
                with gzip.open(path) if kind.endswith(GZIP) else path.open("rb") as file:
                    yield from _READERS[kind.removesuffix(GZIP)](path, file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not gzip that can be read to its end ({error}); write it again") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}; check the path and its permissions") from error


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _names_a_split(path: Path) -> bool:
    return any(_SPLIT.search(part) for part in path.parts)


def _is_of(path: Path, split: str) -> bool:
    """Return whether the innermost part of the path that names a split names this one."""
    before, after = ("a-zA-Z" if end.isalpha() else "0-9" for end in (split[0], split[-1]))  # train2 is of train
    wanted = re.compile(rf"(?<![{before}]){re.escape(split)}(?![{after}])", re.IGNORECASE)
    part = next((one for one in reversed(path.parts) if wanted.search(one) or _SPLIT.search(one)), "")
    return bool(wanted.search(part))


def _json_lines(path: Path, file: BufferedIOBase) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{path} line {number}"
            yield Record(place, _mapping(_parsed(_decoded(line, place), place), place))


def _csv(path: Path, file: BufferedIOBase) -> Iterator[Record]:
    lines = (_decoded(line, f"{path} line {number}") for number, line in enumerate(file, start=1))
    rows = csv.reader(lines, strict=True)
    try:
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path} line 1: a column is named twice ({', '.join(header)}); rename it")
        for row in filter(None, rows):
            place = f"{path} line {rows.line_num}"
            if len(row) != len(header):
                raise DataError(
                    f"{place}: {len(row)} values for {len(header)} columns; put a value that holds a comma or a line "
                    f"break into double quotes"
                )
            yield Record(place, dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise DataError(f"{path} line {rows.line_num}: not CSV ({error}); correct it") from error


def _json(path: Path, file: BufferedIOBase) -> Iterator[Record]:
    rows = _parsed(_decoded(file.read(), str(path)), str(path))
    if not isinstance(rows, list):
        raise DataError(
            f"{path} holds {_kind(rows)}; a .json file is a list of rows, [{{...}}, {{...}}]. One row a line is .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        place = f"{path} row {number}"
        yield Record(place, _mapping(row, place))


def _parquet(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in _rows_of(batch):
                    number += 1
                    yield Record(f"{path} row {number}", row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} after row {number}: not parquet that can be read ({error}); write it again") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} row {number + 1}: not UTF-8 ({error}); write the file as UTF-8") from error


def _rows_of(batch: pyarrow.RecordBatch) -> Iterator[Mapping[str, Any]]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # to_pylist() fails for the whole batch: convert row by row to find the bad one
        for index in range(batch.num_rows):
            yield from batch.slice(index, 1).to_pylist()


def _decoded(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8, byte {error.start + 1} is 0x{raw[error.start]:02x}; convert the file, for example "
            f"with iconv -f LATIN1 -t UTF-8"
        ) from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "one row a line is .jsonl, so rename it" if "Extra data" in str(error) else "correct it"
        raise DataError(f"{place}: not JSON ({error}); {hint}") from error


def _mapping(row: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f'{place}: {_kind(row)}; a row is a mapping from columns to values, {{"problem": "1+1?", ...}}')
    return row


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "null"}.get(type(value), f"{value!r}")


_READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}


def read_hub(path: str, subset: str | None, split: str, streaming: bool, instead: str) -> Iterator[Record]:
    """Yield every row of a data set on the hub, in order.

    `datasets` downloads it once into its cache, or with `streaming` fetches it each time.

    Args:
        path: OWNER/NAME, or another path that `datasets.load_dataset` takes.
        instead: for error messages, what to do without the hub.

    Raises:
        DataError: the package is missing, the data set cannot be fetched, or it has no such subset or split.
    """
    name = f"{path} ({', '.join(filter(None, [subset, split]))})"
    rows = _load(path, subset, split, streaming, name, instead)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield Record(f"{name} row {number}", row)
    except Exception as error:  # a broken connection raises errors of several libraries
        raise DataError(f"{name} ends after row {number}: {_short(error)}; {instead}") from error


def _load(
    path: str, subset: str | None, split: str, streaming: bool, name: str, instead: str
) -> Iterator[Mapping[str, Any]]:
    try:
        from datasets import load_dataset  # takes a second to import, and most runs do not need it
    except ImportError as error:
        raise DataError(f"{name} needs the package datasets: {install('train')}; or {instead}") from error
    try:
        return load_dataset(path, name=subset, split=split, streaming=streaming)
    except Exception as error:  # of datasets, huggingface_hub, httpx, fsspec, pyarrow
        raise DataError(
            f"{name} cannot be fetched from the hub: {_short(error)}. Check its name, subset and split, and the "
            f"connection (a private one needs HF_TOKEN); or {instead}"
        ) from error


def _short(error: Exception) -> str:
    """Return the first line of an error; some contain the traceback of another process."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]
