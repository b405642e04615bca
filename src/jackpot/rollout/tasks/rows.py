"""Reads rows of files and of data sets on the hub, and the problem, right answers and id of each from its columns.

A record is a row as it stands in the file, with its file and line for messages: `problems.jsonl line 17`. Each call
reads from the first row to the last; all but JSON are read piece by piece. Columns may have the forms in which
published data has them:

| of a row | forms |
|---|---|
| a column's name | the name itself, or a path into nested values: `reward_model.ground_truth`, `prompt.0.content` |
| problem | text, chat messages, or several columns: `{Body} {Question}` |
| answer | text or a number, or a list of them, any of which is right |
| options of multiple choice | a list, a mapping from label to text, lists `text` and `label`, or one column for each |
| answer to multiple choice | a letter or label, the number of the option from 0, or its text; it becomes `(B) text` |

`datasets` does not read local files here: its readers name neither file nor line of what is damaged, fill up a short
row of CSV with nothing, and make 7 of an answer that stands there as 007.
"""

import csv
import gzip
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from io import BufferedIOBase
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

import pyarrow
from pyarrow import parquet

from jackpot.config.tasks import ROW_NUMBER, AnswersConfig, DataConfig
from jackpot.core.errors import DataError
from jackpot.core.package import install
from jackpot.rollout.rewards.verifier.choices import choice, letter_choice
from jackpot.rollout.rewards.verifier.extract import hashed_answer
from jackpot.rollout.tasks.benchmarks import Benchmark

GZIP = ".gz"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of the first three with `GZIP` too
_LISTED = f"{', '.join(SUFFIXES)} (the first three also with {GZIP})"
_SPLIT = re.compile(
    r"(?<![a-zA-Z])(train|training|test|testing|validation|valid|val|dev|eval)(?![a-zA-Z])", re.IGNORECASE
)
_MAX_LISTED = 5  # files named in a message
_log = logging.getLogger(__name__)
_IN_BRACES = re.compile(r"\{([^{}]+)\}")
_ABSENT = object()


class Record(NamedTuple):
    """Holds one row of a file or data set, before its columns are interpreted."""

    where: str  # file or data set and row number, for messages
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
    inside = [file for file in sorted(path.rglob("*")) if kind_of(file) and file.is_file()]
    files = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise DataError(f"{path} holds no {_LISTED} file; give a folder that does, or a file")

    nameless = [file for file in files if not any(map(_SPLIT.search, file.relative_to(path).parts))]
    if split is None and len(nameless) == len(files):
        return files
    wanted = split or usual_split
    if chosen := [file for file in files if _is_of(file.relative_to(path), wanted)]:
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
    names = ", ".join(str(file.relative_to(folder)) for file in files[:_MAX_LISTED])
    return names + (f" and {len(files) - _MAX_LISTED} more" if len(files) > _MAX_LISTED else "")


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


def _is_of(path: Path, split: str) -> bool:
    """Return whether the innermost part of the path that names a split names this one."""
    before, after = ("a-zA-Z" if end.isalpha() else "0-9" for end in (split[0], split[-1]))  # train2 is of train
    wanted = re.compile(rf"(?<![{before}]){re.escape(split)}(?![{after}])", re.IGNORECASE)
    innermost = next((part for part in reversed(path.parts) if wanted.search(part) or _SPLIT.search(part)), "")
    return bool(wanted.search(innermost))


def _json_lines(path: Path, file: BufferedIOBase) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path} line {number}"
            yield Record(where, _mapping(_parsed(_decoded(line, where), where), where))


def _csv(path: Path, file: BufferedIOBase) -> Iterator[Record]:
    lines = (_decoded(line, f"{path} line {number}") for number, line in enumerate(file, start=1))
    rows = csv.reader(lines, strict=True)
    try:
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path} line 1: a column is named twice ({', '.join(header)}); rename it")
        for row in filter(None, rows):
            where = f"{path} line {rows.line_num}"
            if len(row) != len(header):
                raise DataError(
                    f"{where}: {len(row)} values for {len(header)} columns; put a value that holds a comma or a line "
                    f"break into double quotes"
                )
            yield Record(where, dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise DataError(f"{path} line {rows.line_num}: not CSV ({error}); correct it") from error


def _json(path: Path, file: BufferedIOBase) -> Iterator[Record]:
    rows = _parsed(_decoded(file.read(), str(path)), str(path))
    if not isinstance(rows, list):
        raise DataError(
            f"{path} holds {_kind(rows)}; a .json file is a list of rows, [{{...}}, {{...}}]. One row a line is .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        where = f"{path} row {number}"
        yield Record(where, _mapping(row, where))


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


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8, byte {error.start + 1} is 0x{raw[error.start]:02x}; convert the file, for example "
            f"with iconv -f LATIN1 -t UTF-8"
        ) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "one row a line is .jsonl, so rename it" if "Extra data" in str(error) else "correct it"
        raise DataError(f"{where}: not JSON ({error}); {hint}") from error


def _mapping(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f'{where}: {_kind(row)}; a row is a mapping from columns to values, {{"problem": "1+1?", ...}}')
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
    try:
        from datasets import load_dataset  # takes a second to import, and most runs do not need it
    except ImportError as error:
        raise DataError(f"{name} needs the package datasets: {install('train')}; or {instead}") from error

    number = 0
    try:
        rows = load_dataset(path, name=subset, split=split, streaming=streaming)
    except Exception as error:  # of datasets, huggingface_hub, httpx, fsspec, pyarrow
        raise DataError(
            f"{name} cannot be fetched from the hub: {_short(error)}. Check its name, subset and split, and the "
            f"connection (a private one needs HF_TOKEN); or {instead}"
        ) from error
    try:
        for number, row in enumerate(rows, start=1):
            yield Record(f"{name} row {number}", row)
    except Exception as error:  # a broken connection raises errors of several libraries
        raise DataError(f"{name} ends after row {number}: {_short(error)}; {instead}") from error


def _short(error: Exception) -> str:
    """Return the first line of an error; some contain the traceback of another process."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]


class Message(NamedTuple):
    """Holds one message of a chat."""

    role: str
    content: str


Problem = str | tuple[Message, ...]


class DataRow(NamedTuple):
    """Holds one problem as read from a data source."""

    uid: str
    problem: Problem
    answers: tuple[str, ...]  # right answers, any of which counts; empty where the row has none
    where: str  # file and row number, for messages


def append(problem: Problem, text: str) -> Problem:
    """Put a text after a problem: after its last message where it is a chat."""
    if isinstance(problem, str):
        return problem + text
    *before, last = problem
    return (*before, last._replace(content=last.content + text))


def make_reader(
    first: Sequence[Record], benchmark: Benchmark, settings: DataConfig
) -> Callable[[int, Record], DataRow]:
    """Return the function that reads a row by its number, with the columns that the first rows have.

    Raises:
        DataError: a column is missing (lists those present).
    """
    chosen = settings.columns
    problem = _problem_reader(first, [chosen.problem] if chosen.problem else benchmark.problem)
    answer = _column("answer", [chosen.answer] if chosen.answer else list(benchmark.answer), first)
    options = [_column("options", [name], first) for name in chosen.options]
    uid = _uid_column(benchmark, settings, first)
    extract = _extractor(settings.answers or AnswersConfig(name=benchmark.answer.get(answer, "plain")))

    def read(number: int, record: Record) -> DataRow:
        where, values = record
        asked, in_column = problem(record), _lookup(values, answer)
        texts = in_column if isinstance(in_column, list) else [in_column]
        if options:
            offered = _choice(values, options, where)
            asked = append(asked, offered.text)
            answers = [offered.reference(text, extract, answer, where) for text in texts]
        else:
            answers = [_extracted(text, extract, answer, where) for text in texts]
        return DataRow(
            uid=str(number) if uid is None else _uid(values, uid, chosen.uid is not None, number, where),
            problem=asked,
            answers=tuple(dict.fromkeys(text for text in answers if text is not None)),
            where=where,
        )

    return read


def problem_columns(values: Mapping[str, Any], candidates: Sequence[str]) -> set[str]:
    """Return the columns of a row that the problem is made of, of names as `ColumnsConfig.problem` has them."""
    names = {part for name in candidates for part in _IN_BRACES.findall(name) or [name]}
    return {name if name in values else name.partition(".")[0] for name in names} & values.keys()


def _lookup(values: Any, path: str, default: Any = None) -> Any:
    """Return the value at a column's name or dotted path; `default` where there is none."""
    if isinstance(values, Mapping) and path in values:
        return values[path]
    for part in path.split("."):
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


def _column(role: str, candidates: Sequence[str], first: Sequence[Record]) -> str:
    """Return the first candidate that is a column of the first rows."""
    for name in candidates:
        if any(_lookup(record.values, name, _ABSENT) is not _ABSENT for record in first):
            return name
    names = sorted({name for record in first for name in _names(record.values)})
    raise DataError(
        f"{first[0].where}: no column {' or '.join(map(repr, candidates))} for the {role}; there are "
        f"{', '.join(names) or 'none'}. Set columns.{role} to the right one"
    )


def _names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the columns of a row; for nested values the paths into them, one level deep."""
    for name, value in values.items():
        yield from (f"{name}.{key}" for key in value) if isinstance(value, Mapping) and value else (name,)


def _uid_column(benchmark: Benchmark, settings: DataConfig, first: Sequence[Record]) -> str | None:
    """Return the column of row ids; None where row numbers are the ids."""
    chosen = settings.columns.uid
    if chosen == ROW_NUMBER or settings.streaming:
        return None
    if chosen is not None:
        return _column("uid", [chosen], first)
    return next((name for name in benchmark.uid if any(name in record.values for record in first)), None)


def _uid(values: Mapping[str, Any], column: str, is_chosen: bool, number: int, where: str) -> str:
    """Return the id of a row; a row without one is named by its number, unless the settings name the column."""
    text = _text(_lookup(values, column), column, where)
    if text is None and is_chosen:
        raise DataError(
            f"{where}: column {column!r} is empty; every row needs an id: fill it in, remove the row, or choose "
            f"another column (columns.uid: {ROW_NUMBER} makes ids of the row's number)"
        )
    return f"row-{number}" if text is None else text


def _problem_reader(first: Sequence[Record], candidates: Sequence[str]) -> Callable[[Record], Problem]:
    """Return the function that reads the problem of a row from one column, or from those that stand in braces."""
    pattern = candidates[0]
    if not _IN_BRACES.search(pattern):
        column = _column("problem", candidates, first)
        return lambda record: _required(_problem(_lookup(record.values, column), column, record.where), column, record)
    for name in _IN_BRACES.findall(pattern):
        _column("problem", [name], first)

    def joined(record: Record) -> Problem:
        text = _IN_BRACES.sub(
            lambda match: _text(_lookup(record.values, match[1]), match[1], record.where) or "", pattern
        )
        return _required(text.strip() or None, pattern, record)

    return joined


def _required(problem: Problem | None, column: str, record: Record) -> Problem:
    if problem is None:
        raise DataError(
            f"{record.where}: column {column!r} is empty; every row needs a problem: fill it in, remove the row, or "
            f"choose another column with columns.problem"
        )
    return problem


def _problem(value: Any, column: str, where: str) -> Problem | None:
    """Return a problem as text, or as chat messages where the value is a list; None where it is empty."""
    if not isinstance(value, list):
        return _text(value, column, where)
    messages = tuple(_message(message, column, where) for message in value)
    if messages and messages[-1].role == "assistant":
        raise DataError(
            f"{where}: the messages in column {column!r} end with one of the assistant; a prompt ends with the user's: "
            f"name the column of the prompt alone"
        )
    return messages or None


def _message(value: Any, column: str, where: str) -> Message:
    """Return a chat message; its content may be a list of parts, as long as all are text."""
    role, content = (_lookup(value, name) for name in ("role", "content"))
    if isinstance(content, list) and all(_lookup(part, "type") == "text" for part in content):
        content = "".join(str(_lookup(part, "text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{where}: column {column!r} holds a list with {value!r:.80}; chat messages are "
            f'{{"role": "user", "content": "..."}}, with text alone'
        )
    return Message(role, _text(content, column, where) or "")


class _Choice(NamedTuple):
    """Holds the options of one problem."""

    written: list[str]  # as the data has them
    options: list[str]  # their texts, without letters that the data writes before them
    labels: list[str]  # what the data calls them; A, B, ... where it has no names for them
    is_labelled: bool  # whether the data has names for them

    @property
    def text(self) -> str:
        """Return the options as they stand below the problem, one on each line after its letter."""
        return "\n" + "".join(
            f"\n{letter}. {option}" for letter, option in zip(ascii_uppercase, self.options, strict=False)
        )

    def reference(self, value: Any, extract: Callable[[str], str | None], column: str, where: str) -> str | None:
        """Return letter and text of the option that an answer names: by its label, its number from 0, or its text."""
        answer = _extracted(value, extract, column, where)
        if answer is None:
            return None

        is_number = isinstance(value, int) and not self.is_labelled
        named = self.labels.index(answer) if answer in self.labels else None
        for texts in (self.options, self.written):
            if named is None and not is_number and texts.count(answer) == 1:
                named = texts.index(answer)
        if named is None and (bare := answer.strip("(). ").upper()) in self.labels and not is_number:
            named = self.labels.index(bare)
        if named is None and answer.isdecimal() and not self.is_labelled:
            named = int(answer)
        if named is None or named >= len(self.options):
            raise DataError(
                f"{where}: the answer {answer!r:.80} is none of the {len(self.options)} options "
                f"({', '.join(self.labels)}); it is a label, a number from 0, or the text of an option: set "
                f"columns.answer or answers"
            )
        return choice(ascii_uppercase[named], self.options[named])


def _choice(values: Mapping[str, Any], columns: Sequence[str], where: str) -> _Choice:
    """Return the options of a row.

    Raises:
        DataError: fewer than 2 or more than 26 options, an empty one, or a value of another form.
    """
    written: list[Any] = [_lookup(values, name) for name in columns]
    labels: list[Any] | None = None
    if len(columns) == 1:
        (column,) = written
        if isinstance(column, Mapping) and isinstance(column.get("text"), list):
            written, labels = column["text"], column.get("label")
        elif isinstance(column, Mapping):
            written, labels = list(column.values()), list(column)
        elif isinstance(column, list):
            written = column

    options = [text for value in written if (text := _text(value, ", ".join(columns), where)) is not None]
    names = list(map(str, labels)) if labels is not None else list(ascii_uppercase[: len(options)])
    if not 2 <= len(written) <= len(ascii_uppercase) or not len(options) == len(names) == len(written):
        raise DataError(
            f"{where}: columns.options ({', '.join(columns)}) gives {written!r:.80}; multiple choice needs 2 to 26 "
            f"options, each with a text"
        )
    return _Choice(options, _unlabelled(options), names, labels is not None)


def _unlabelled(options: Sequence[str]) -> list[str]:
    """Return the options without the letters that the data writes before all of them: `A) 21` is `21`."""
    matches = [
        re.fullmatch(rf"\(?{letter}[).:]\s*(.+)", option, re.DOTALL)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    ]
    return [match[1] for match in matches if match] if all(matches) else list(options)


def _text(value: Any, column: str, where: str) -> str | None:
    """Return a value as text, numbers without trailing zeros (142.0 is 142), or None where it is empty.

    Raises:
        DataError: the value is neither text nor a finite number, or is text that cannot be UTF-8.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):  # NaN stands for a missing value
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        return _number(Decimal(str(value)))
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {value!r:.80}; it must be text or a finite number")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: column {column!r} has half a character, {value[error.start]!r}, which is not UTF-8; write the "
            f"file as UTF-8"
        ) from error
    return value.strip() or None


def _number(value: Decimal) -> str:
    """Format a number without trailing zeros."""
    text = f"{value:f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _extracted(value: Any, extract: Callable[[str], str | None], column: str, where: str) -> str | None:
    """Return the answer in the value of its column, or None where there is none."""
    text = _text(value, column, where)
    return None if text is None else extract(text)


def _extractor(form: AnswersConfig) -> Callable[[str], str | None]:
    """Return the function that finds the answer in its column's text."""
    if form.name != "regex":
        return ANSWERS[form.name]
    pattern = re.compile(form.regex or "")

    def search(text: str) -> str | None:
        *_, last = [None, *pattern.finditer(text)]
        return None if last is None else (last[1 if pattern.groups else 0] or "").strip() or None

    return search


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


ANSWERS: Mapping[str, Callable[[str], str | None]] = {
    "plain": lambda text: text,
    "hashes": hashed_answer,
    "boxed": _last_boxed,
    "letter": letter_choice,
}
