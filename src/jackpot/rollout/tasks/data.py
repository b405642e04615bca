"""Reads problems with answers from a benchmark, a file or folder, or a data set of the Hugging Face hub."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from jackpot.config.tasks import ROW_NUMBER, DataConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.rollout.rewards.verifier.extract import hashed_answer
from jackpot.rollout.tasks.base import Split
from jackpot.rollout.tasks.benchmarks import BENCHMARKS, AnswerFormat, Benchmark
from jackpot.rollout.tasks.files import SUFFIXES, Record, find_files, read_files, read_hub

DATA_FOLDER = "JACKPOT_DATA"  # environment variable with the folder of local copies of benchmarks
HUB = "hub:"  # prefix of a source on the hub
COLUMN_SAMPLE = 100  # rows whose columns are collected: a row of JSON may lack some


class DataRow(NamedTuple):
    """Holds one problem as read from a data source."""

    uid: str
    problem: str
    answer: str | None  # None where the row has none
    place: str  # file and row number, for messages


@dataclass(frozen=True, slots=True)
class DataSource:
    """Reads the rows of a data source, each time the same rows in the same order."""

    name: str  # for uids and messages
    records: Callable[[], Iterator[Record]]  # starts reading from the first row
    benchmark: Benchmark  # defaults for the settings that are left open
    settings: DataConfig
    is_local: bool  # False: on the hub, which is contacted when rows are read

    def rows(self) -> Iterator[DataRow]:
        """Yield every row up to `limit`.

        Raises:
            DataError: missing columns (lists those present), a row without a problem, or a value that is no text.
        """
        records = islice(self.records(), self.settings.limit)
        first = list(islice(records, COLUMN_SAMPLE))
        if not first:
            raise DataError(f"{self.name} has no rows; give a source that has some")
        read = _reader(first, self.benchmark, self.settings)
        for number, record in enumerate(chain(first, records)):
            yield read(number, record)


def find_source(settings: DataConfig, split: Split) -> DataSource:
    """Find the source that `task.train` or `task.test` names, without reading it.

    A benchmark is read from its file in the folder JACKPOT_DATA if there is one, else from the hub.

    Raises:
        DataError: the source is neither a benchmark (lists them), nor a path, nor on the hub; or there is no such file.
    """
    source = settings.source
    if source in BENCHMARKS:
        return _benchmark(source, settings, split)
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        return _on_hub(name, name, settings.split or split, _OWN_DATA, settings, "give a local file as source")
    path = Path(source).expanduser()
    if not (path.suffix in SUFFIXES or "/" in source or path.exists()):
        raise DataError(
            f"{unknown_name('benchmark', source, BENCHMARKS)}; or give {HUB}OWNER/NAME, or the path of a "
            f"{', '.join(SUFFIXES)} file or of a folder of them"
        )
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and path.suffix not in SUFFIXES:
        raise DataError(f"there is no folder {source}; for the data set of the hub write {HUB}{source}")
    return _local(path.stem if path.suffix in SUFFIXES else path.name, path, settings.split, split, _OWN_DATA, settings)


_OWN_DATA = Benchmark(hub="", answer={"answer": "plain"}, uid=("id",), note="defaults of the user's own data")


def _benchmark(name: str, settings: DataConfig, split: Split) -> DataSource:
    """Find a benchmark. One that has a single split uses it both for training and for testing."""
    benchmark = BENCHMARKS[name]
    parts = [one for one in (benchmark.train, benchmark.test) if one]
    part = getattr(benchmark, split) or parts[0]
    if settings.split is not None:
        part = next((one for one in parts if one.split == settings.split), None)
        if part is None:
            raise DataError(f"{name}: {unknown_name('split', settings.split, [one.split for one in parts])}")
    folder = os.environ.get(DATA_FOLDER)
    if folder and not Path(folder).is_dir():
        raise DataError(f"{DATA_FOLDER} is {folder!r}, which is not a folder; name one, or unset it to use the hub")
    if folder and (path := Path(folder) / part.file).exists():
        return _local(name, path, None, split, benchmark, settings)
    instead = f"give a local file as source, or put {part.file} into a folder and set {DATA_FOLDER} to it"
    return _on_hub(name, benchmark.hub, part.split, benchmark, settings, instead)


def _local(
    name: str, path: Path, part: str | None, split: Split, benchmark: Benchmark, settings: DataConfig
) -> DataSource:
    if settings.subset is not None:
        raise DataError(f"subset is {settings.subset!r}, but {path} is local and has none; leave subset out")
    files = find_files(path, part, split)
    return DataSource(name, lambda: read_files(files), benchmark, settings, is_local=True)


def _on_hub(name: str, path: str, part: str, benchmark: Benchmark, settings: DataConfig, instead: str) -> DataSource:
    subset, streaming = settings.subset or benchmark.subset, settings.streaming
    return DataSource(
        name, lambda: read_hub(path, subset, part, streaming, instead), benchmark, settings, is_local=False
    )


def _reader(first: Sequence[Record], benchmark: Benchmark, settings: DataConfig) -> Callable[[int, Record], DataRow]:
    """Return the function that reads a row, chosen by the columns of the first rows."""
    columns, place = {name for record in first for name in record.values}, first[0].place
    chosen = settings.columns
    problem = _column("problem", [chosen.problem] if chosen.problem else benchmark.problem, columns, place)
    answer = _column("answer", [chosen.answer] if chosen.answer else list(benchmark.answer), columns, place)
    uid = _uid_column(benchmark, settings, columns, place)
    extract = ANSWERS[settings.answers or benchmark.answer.get(answer, "plain")]

    def read(number: int, record: Record) -> DataRow:
        values, place = record.values, record.place
        text = _text(values.get(answer), answer, place)
        return DataRow(
            uid=str(number) if uid is None else _required_text(values, uid, place),
            problem=_required_text(values, problem, place),
            answer=None if text is None else extract(text),
            place=place,
        )

    return read


def _column(role: str, candidates: Sequence[str], columns: set[str], place: str) -> str:
    """Return the first candidate that is a column."""
    found = next((name for name in candidates if name in columns), None)
    if found is None:
        raise DataError(
            f"{place}: no column {' or '.join(map(repr, candidates))} for the {role}; there are "
            f"{', '.join(sorted(columns)) or 'none'}. Set columns.{role} to the right one"
        )
    return found


def _uid_column(benchmark: Benchmark, settings: DataConfig, columns: set[str], place: str) -> str | None:
    """Return the column of row ids; None where row numbers are the ids."""
    chosen = settings.columns.uid
    if chosen == ROW_NUMBER or settings.streaming:
        return None
    if chosen is not None:
        return _column("uid", [chosen], columns, place)
    return next((name for name in benchmark.uid if name in columns), None)


def _required_text(values: Mapping[str, Any], column: str, place: str) -> str:
    """Return the text of a column that every row must have."""
    text = _text(values.get(column), column, place)
    if text is None:
        raise DataError(
            f"{place}: column {column!r} is empty; every row needs it: fill it in, remove the row, or choose another "
            f"column (columns.uid: {ROW_NUMBER} makes ids of the row's number)"
        )
    return text


def _text(value: Any, column: str, place: str) -> str | None:
    """Return a value as text, numbers without trailing zeros (142.0 is 142), or None where it is empty.

    Raises:
        DataError: the value is neither text nor a finite number, or is text that cannot be UTF-8.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):  # NaN stands for a missing value
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        return _number(Decimal(str(value)))
    if not isinstance(value, str):
        raise DataError(f"{place}: column {column!r} holds {value!r:.80}; it must be text or a finite number")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: column {column!r} has half a character, {value[error.start]!r}, which is not UTF-8; write the "
            f"file as UTF-8"
        ) from error
    return value.strip() or None


def _number(value: Decimal) -> str:
    """Format a number without trailing zeros."""
    text = f"{value:f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _last_boxed(text: str) -> str | None:
    r"""Return MATH's answer: the content of the last balanced \boxed{...}, or the word after a bare \boxed."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*", text)]):
        if not text.startswith("{", start):
            if bare := re.match(r"[^\s$\\{}]+", text[start:]):
                return bare[0]
            continue
        depth = 0
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
            if depth == 0:
                return text[start + 1 : end].strip() or None
    return None


ANSWERS: dict[AnswerFormat, Callable[[str], str | None]] = {
    "plain": lambda text: text,
    "hashes": hashed_answer,
    "boxed": _last_boxed,
}
