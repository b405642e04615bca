"""Reading of rows from files and from the hub, and of each row's problem, right answers and id from its columns.

`read_files` and `read_hub` yield all rows in order. Files are read piece by piece, but `.json` files as a whole.
"""

import csv
import gzip
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from jackpot.config.tasks import ROW_NUMBER, AnswersConfig, DataConfig
from jackpot.core.errors import DataError, first_line
from jackpot.core.foreign import MOST_ROWS, Expansion, open_foreign, table_batches
from jackpot.core.package import install
from jackpot.rollout.rewards.verifier.choices import choice, letter_choice
from jackpot.rollout.rewards.verifier.extract import hashed_answer
from jackpot.rollout.tasks.benchmarks import Benchmark

GZIP = ".gz"
_SPLIT = re.compile(
    r"(?<![a-zA-Z])(train|training|test|testing|validation|valid|val|dev|eval)(?![a-zA-Z])", re.IGNORECASE
)
LARGEST_JSON = 2**31  # largest size of a .json file, bytes; .jsonl, with one row a line, has no such limit
LONGEST_LINE = 64 * 2**20  # longest line of a file with one row a line, bytes
_LARGEST_NUMBER = 10**300  # largest absolute value of a number that is an answer or an id
_MAX_LISTED = 5  # largest number of files named in a message
_IN_BRACES = re.compile(r"\{([^{}]+)\}")
_ABSENT = object()  # stands for a value that a row does not have, unlike None, which a row may have
_log = logging.getLogger(__name__)


class Record(NamedTuple):
    """A row of a file or data set, before its columns are interpreted."""

    where: str  # file or data set, and line or row, for messages: `problems.jsonl line 17`
    values: Mapping[str, Any]  # by column


class _OpenFile:
    """An open file of rows, with the number of lines or rows that have been read."""

    def __init__(self, path: Path, content: Any) -> None:
        """Begin to read the rows of a file; `content` is the file at `path`, open in binary mode and decompressed."""
        self.path, self.content = path, content
        self.count = 0  # number of lines or rows before the one that is being read
        self.expansion = Expansion(path)

    def lines(self) -> Iterator[str]:
        """Yield every line as text; count it when the next one is asked for."""
        while line := self._bounded(self.content.readline, LONGEST_LINE):
            yield str(line, "utf-8-sig")  # without a byte order mark
            self.count += 1

    def whole(self) -> str:
        """Return the whole file as text."""
        return str(self._bounded(self.content.read, LARGEST_JSON), "utf-8-sig")

    def _bounded(self, read_bytes: Callable[[int], bytes], largest: int) -> bytes:
        """Return what `read_bytes` reads, a line or the whole file; raise ValueError beyond `largest` bytes."""
        text = read_bytes(largest + 1)
        self.expansion.add(len(text))
        if len(text) > largest:
            raise ValueError(f"it goes on for more than {largest:,} bytes")
        return text


def _json_lines(file: _OpenFile) -> Iterator[Any]:
    """Yield the rows of a file with a JSON object in each line."""
    yield from (json.loads(line) for line in file.lines() if line.strip())


def _json(file: _OpenFile) -> Iterator[Any]:
    """Yield the rows of a file that is one JSON list."""
    for row in json.loads(file.whole()):
        yield row
        file.count += 1


def _csv(file: _OpenFile) -> Iterator[Any]:
    """Yield the rows of a CSV file, whose first line names the columns."""
    rows = csv.reader(file.lines(), strict=True)
    header = next(rows, [])
    # Skip empty lines; refuse a row of another length than the header, and a header that names a column twice.
    for row in filter(None, rows):
        if not len(row) == len(header) == len(set(header)):
            raise ValueError(f"{len(row)} values for the columns {', '.join(header):.200}")
        yield dict(zip(header, row, strict=True))


def _parquet(file: _OpenFile) -> Iterator[Any]:
    """Yield the rows of a parquet file."""
    for batch in table_batches(file.path):
        for row in batch.to_pylist():
            yield row
            file.count += 1


class _Kind(NamedTuple):
    """A kind of file with rows, such as CSV."""

    rows: Callable[[_OpenFile], Iterator[Any]]  # yields the rows of such a file, and counts up the file's `count`
    unit: str  # word for a row in messages, such as `line 17` or `row 17`: line or row
    form: str  # description of what such a file holds, for messages


_KINDS = {
    ".jsonl": _Kind(_json_lines, "line", 'one row a line, {"problem": "1+1?", "answer": "2"}, in UTF-8'),
    ".json": _Kind(_json, "row", 'a list of rows, [{"problem": "1+1?", ...}, ...], in UTF-8; one row a line is .jsonl'),
    ".csv": _Kind(
        _csv,
        "line",
        "the names of its columns in the first line, each once, and as many values in every row, those with a comma or "
        "a line break in double quotes, in UTF-8",
    ),
    ".parquet": _Kind(_parquet, "row", f"a table with UTF-8 text, of which up to {MOST_ROWS:,} rows are read at once"),
}
SUFFIXES = tuple(_KINDS)  # the first three may also be followed by `GZIP`
_LISTED = f"{', '.join(SUFFIXES)} (the first three also with {GZIP})"


def kind_of(path: Path) -> str | None:
    """Return the ending of a file with rows, such as `.jsonl` or `.csv.gz`; None for every other path."""
    ending = "".join(path.suffixes[-2:]) if path.suffix == GZIP else path.suffix
    return ending if ending.removesuffix(GZIP) in SUFFIXES and ending != f".parquet{GZIP}" else None


def read_files(files: Iterable[Path]) -> Iterator[Record]:
    """Yield every row of every file, in order.

    The library `datasets` does not read local files here, because its readers name neither file nor line of a damaged
    row, fill up a short row of CSV with nothing, and turn the answer 007 into 7.

    Raises:
        DataError: a file cannot be read, or the content does not fit the file's ending; names the line or row.
    """
    for path in files:
        suffix = kind_of(path) or ""
        kind = _KINDS[suffix.removesuffix(GZIP)]
        file = None

        try:
            with open_foreign(path) as stored, gzip.open(stored) if suffix.endswith(GZIP) else stored as content:
                file = _OpenFile(path, content)
                for row in kind.rows(file):
                    if not isinstance(row, Mapping):
                        raise ValueError(f"{row!r:.80} is no row")
                    yield Record(f"{path} {kind.unit} {file.count + 1}", row)
        except Exception as error:  # json, csv, gzip, zlib, pyarrow and the disk have no common error class
            # Name the line or row after those that were read, but no row of a file that failed before its first row.
            count = file.count if file else 0
            where = f"{path} {kind.unit} {count + 1}" if count or (file and kind.unit == "line") else path
            raise DataError(
                f"{where} cannot be read as {suffix}: {error}. Such a file holds {kind.form}; correct it, or give it "
                f"the ending of what it is"
            ) from error


def find_files(path: Path, split: str | None, usual_split: str) -> list[Path]:
    """Return the file at `path`, or the files of one split in the folder at `path`, sorted by name.

    A file belongs to the split that is a word of its name (`train.jsonl`, `gsm8k_train.jsonl`, `train2.jsonl`,
    `train-00000-of-00002.parquet`), or else a word of the name of the nearest folder above that names a split. Case
    does not matter. Without `split`, all files are returned if none of them names a split; otherwise the files of
    `usual_split` are, and a warning lists the files that name no split.

    Raises:
        DataError: nothing at `path`, an unknown kind of file, or no file of the split (lists the files there are).
    """
    if path.is_file() and kind_of(path):
        return [path]

    files = [
        file
        for file in sorted(path.rglob("*"))
        if kind_of(file) and file.is_file() and not re.search(r"(^|/)\.", str(file.relative_to(path)))
    ]
    if not files:
        problem = f"is not one of {_LISTED}, and holds none" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}; give the path of a {_LISTED} file, or of a folder of them")

    nameless = [file for file in files if not _SPLIT.search(str(file.relative_to(path)))]
    if split is None and nameless == files:
        return files

    wanted_split = split or usual_split
    files_of_split = [file for file in files if _is_of(file.relative_to(path), wanted_split)]
    if not files_of_split:
        raise DataError(
            f"{path} holds no files of split {wanted_split!r}, only {_listed(files, path)}; set split to one that is "
            f"there, or give the path of a file"
        )
    if split is None and nameless:
        _log.warning(
            "%s (%s): %d files name no split and are left out, for others do: %s; put train or test into their names, "
            "set split, or move them elsewhere",
            *(path, wanted_split, len(nameless), _listed(nameless, path)),
        )
    return files_of_split


def _is_of(path: Path, split: str) -> bool:
    """Return whether a file belongs to a split, which the name of the file or of a folder above it names.

    If several of these names name splits, the innermost of them counts, the file's own name first.
    """
    # The split's name must stand as a word: no letter before or after a letter at its ends, and no digit before or
    # after a digit. So train2 belongs to the split train, and trainer does not.
    before, after = ("a-zA-Z" if end.isalpha() else "0-9" for end in (split[0], split[-1]))
    pattern = re.compile(rf"(?<![{before}]){re.escape(split)}(?![{after}])", re.IGNORECASE)
    innermost = next((name for name in reversed(path.parts) if pattern.search(name) or _SPLIT.search(name)), "")
    return bool(pattern.search(innermost))


def _listed(files: Sequence[Path], folder: Path) -> str:
    """Return a text for a message that names the first files, relative to `folder`, and how many more there are."""
    names = [str(file.relative_to(folder)) for file in files]
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def read_hub(path: str, subset: str | None, split: str, instead: str) -> Iterator[Record]:
    """Yield every row of a data set on the hub, in order; `datasets` downloads it once into its cache.

    Args:
        path: OWNER/NAME, or another path that `datasets.load_dataset` takes.
        instead: advice for error messages on what to do without the hub.

    Raises:
        DataError: the package `datasets` is missing, or the data set cannot be fetched or has no such subset or split.
    """
    name = f"{path} ({', '.join(filter(None, [subset, split]))})"
    count = 0
    try:
        from datasets import load_dataset  # takes a second to import, and most runs do not need it

        for count, row in enumerate(load_dataset(path, name=subset, split=split), start=1):
            yield Record(f"{name} row {count}", row)  # pyright: ignore[reportArgumentType]  a row is a mapping
    except Exception as error:  # datasets, huggingface_hub, httpx, fsspec and pyarrow have no common error class
        message = f"{type(error).__name__}: {first_line(error)[:500]}"  # some errors contain a traceback
        raise DataError(
            f"{name} cannot be fetched from the hub, after row {count}: {message}. It needs the package datasets "
            f"({install('train')}). Check its name, subset and split, and the connection (a private one needs "
            f"HF_TOKEN); or {instead}"
        ) from error


class Message(NamedTuple):
    """A message of a chat."""

    role: str
    content: str


Problem = str | tuple[Message, ...]


class DataRow(NamedTuple):
    """The problem, right answers and id that were read from one row of a data source."""

    uid: str
    problem: Problem  # text, or the messages of a chat
    answers: tuple[str, ...]  # right answers, each of which a response may give; empty where the row has none
    where: str  # file and row number, for messages


def append(problem: Problem, text: str) -> Problem:
    """Return a problem with a text appended to it, or to its last message where the problem is a chat."""
    if isinstance(problem, str):
        return problem + text
    return (*problem[:-1], problem[-1]._replace(content=problem[-1].content + text))


def make_reader(
    first: Sequence[Record], benchmark: Benchmark, settings: DataConfig
) -> Callable[[int, Record], DataRow]:
    """Find out which columns the first rows have, and return a function that reads a record into a `DataRow`.

    | part of a row | forms that it may have |
    |---|---|
    | a column's name | the name itself, or a path into nested values: `reward_model.ground_truth`, `prompt.0.content` |
    | problem | text, chat messages, or several columns: `{Body} {Question}` |
    | answer | text or a number, or a list of them, any of which is right |
    | options of multiple choice | a list, a mapping from label to text, lists `text` and `label`, or a column each |
    | answer to multiple choice | a letter or label, the index of the option, or its text; it becomes `(B) text` |

    Raises:
        DataError: a column is missing (lists the columns there are); in the function, a row without problem or text.
    """
    columns, choose_column = settings.columns, partial(_column, first)
    # The problem is one column, or several in braces, which `_problem` joins.
    problem_columns = [columns.problem] if columns.problem else benchmark.problem
    joined_columns = [choose_column("problem", [name]) for name in _IN_BRACES.findall(problem_columns[0])]
    problem_column = problem_columns[0] if joined_columns else choose_column("problem", problem_columns)
    answer_column = choose_column("answer", [columns.answer] if columns.answer else list(benchmark.answer))
    option_columns = [choose_column("options", [name]) for name in columns.options]

    # Take the column of ids from the settings, or else from the benchmark if its data has one; else number the rows.
    present = [name for name in benchmark.uid if any(name in record.values for record in first)]
    uid_columns = [columns.uid] if columns.uid else present
    uid_column = choose_column("uid", uid_columns) if uid_columns and columns.uid != ROW_NUMBER else None

    # The form of the answers is that of the settings, or else the benchmark's for the answer's column. `extract` finds
    # the answer in a text, or returns None; the empty pattern is for the type checker alone.
    form = settings.answers or AnswersConfig(name=benchmark.answer.get(answer_column, "plain"))
    extract = ANSWERS.get(form.name) or partial(_last_match, form.regex or re.compile(""))

    def read_row(index: int, record: Record) -> DataRow:
        """Read a record by the columns chosen above; a missing uid is made of `index`, its place in the data."""
        values, uid = record.values, str(index)
        try:
            problem = _needed("problem", problem_column, _problem(values, problem_column))
            in_column = _lookup(values, answer_column)
            entries = in_column if isinstance(in_column, list) else [in_column]
            texts = [_text(value, answer_column) for value in entries]
            answers = [text and extract(text) for text in texts]  # None where a value, or the answer in it, is missing

            if option_columns:
                options_text, choose = _choice(values, option_columns)
                problem = append(problem, options_text)
                # Each answer becomes the option that it names; an integer may be the index of an option.
                are_ints = [isinstance(value, int) for value in entries]
                answers = [answer and choose(answer, is_int) for answer, is_int in zip(answers, are_ints, strict=True)]
            # A column of ids that the settings name has an id in every row; in a benchmark's column ids may be missing.
            if uid_column is not None:
                text = _text(_lookup(values, uid_column), uid_column)
                uid = _needed("uid", uid_column, text) if columns.uid else text or f"row-{index}"
        except DataError as error:
            raise DataError(f"{record.where}: {error}") from error
        distinct_answers = tuple(dict.fromkeys(filter(None, answers)))
        return DataRow(uid=uid, problem=problem, answers=distinct_answers, where=record.where)

    return read_row


def _lookup(values: Any, path: str, default: Any = None) -> Any:
    """Return the value at a column's name or dotted path, or `default` where the row has no such value."""
    # A path is split at its dots unless a column has the whole path, dots included, as its name.
    is_name = isinstance(values, Mapping) and path in values
    for name in [path] if is_name else path.split("."):
        try:
            values = values[int(name) if isinstance(values, list) else name]
        except (LookupError, TypeError, ValueError):
            return default
    return values


def _column(first: Sequence[Record], role: str, candidates: Sequence[str]) -> str:
    """Return the first candidate that is a column of the rows `first`; `role` says in errors what the column holds."""
    for name in candidates:
        if any(_lookup(record.values, name, _ABSENT) is not _ABSENT for record in first):
            return name

    names = {  # for the message: names of columns, and for nested values the paths one level into them
        f"{name}.{key}" if key else name
        for record in first
        for name, value in record.values.items()
        for key in (value if isinstance(value, Mapping) and value else [""])
    }
    raise DataError(
        f"{first[0].where}: no column {' or '.join(map(repr, candidates))} for the {role}; there are "
        f"{', '.join(sorted(names)) or 'none'}. Set columns.{role} to the right one"
    )


def _needed(role: str, column: str, value: Any) -> Any:
    """Return the `value` that a row has for its problem or uid, or raise DataError where it is None."""
    if value is None:
        raise DataError(
            f"column {column!r} is empty; every row needs {'an id' if role == 'uid' else f'a {role}'}: fill it in, "
            f"remove the row, or choose another column with columns.{role}"
            + (f" ({ROW_NUMBER} makes ids of the row's number)" if role == "uid" else "")
        )
    return value


def _problem(values: Mapping[str, Any], column: str) -> Problem | None:
    """Return a row's problem, as text or chat messages; None where the problem is empty.

    In a `column` such as `{Body} {Question}` each name in braces is replaced by the value of that column.
    Raise DataError for messages that end with the assistant's, and for a value of another form.
    """
    if _IN_BRACES.search(column):
        return _IN_BRACES.sub(lambda match: _text(_lookup(values, match[1]), match[1]) or "", column).strip() or None

    value = _lookup(values, column)
    if not isinstance(value, list):
        return _text(value, column)

    messages = tuple(_message(message, column) for message in value)
    if messages and messages[-1].role == "assistant":
        raise DataError(
            f"the messages in column {column!r} end with one of the assistant; a prompt ends with the user's: name the "
            f"column of the prompt alone"
        )
    return messages or None


def _message(value: Any, column: str) -> Message:
    """Read a chat message from its dict with `role` and `content`; the content is text, or a list of texts to join.

    Raise DataError for a value of another form.
    """
    role, content = (_lookup(value, name) for name in ("role", "content"))
    if isinstance(content, list) and all(_lookup(entry, "type") == "text" for entry in content):
        content = "".join(str(_lookup(entry, "text", "")) for entry in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"column {column!r} holds a list with {value!r:.80}; chat messages are "
            f'{{"role": "user", "content": "..."}}, with text alone'
        )
    return Message(role, _text(content, column) or "")


def _choice(values: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, Callable[[str, bool], str]]:
    """Return the text that lists a row's options below its problem, and a function that finds the option of an answer.

    The text has a line for each option, `A. 142`. The function takes an answer and whether the data holds it as an
    integer, and returns the reference that the verifier compares with, `(A) 142`.

    Raises:
        DataError: fewer than 2 or more than 26 options, an empty option, or a value of another form.
    """
    # The options stand in one column, as {"text": [...], "label": [...]}, as {label: text} or as a list of texts, or
    # each option stands in a column of its own. Without labels they are called A, B, C, ...
    labels = None
    match [_lookup(values, name) for name in columns]:
        case [{"text": [*contents]} as column]:
            labels = column.get("label")
        case [dict() as column]:
            contents, labels = list(column.values()), list(column)
        case [[*contents]] | contents:  # one list of texts, or the values of several columns
            pass

    options = [text for value in contents if (text := _text(value, ", ".join(columns))) is not None]
    # The label of each option, as an answer may give it.
    names = list(ascii_uppercase[: len(options)]) if labels is None else list(map(str, labels))
    if not 2 <= len(contents) <= len(ascii_uppercase) or not len(options) == len(names) == len(contents):
        raise DataError(
            f"columns.options ({', '.join(columns)}) gives {contents!r:.80}; multiple choice needs 2 to 26 options, "
            f"each with a text"
        )
    plain = _unlabelled(options)  # the options without letters of their own; the prompt calls them A, B, C, ...

    def choose(answer: str, is_integer: bool) -> str:
        """Return the reference, such as `(A) 142`, for the option that an answer names.

        `names` are the labels of the options, `options` their texts, and `plain` the texts without a letter of their
        own, such as `A) `. With `is_integer` the data gives the answer as a number, not as text.
        """
        # An answer is read as a label, else as an option's text, else as a letter with punctuation, such as `(b)`, else
        # as an index from 0. Where the data has no labels, an integer is an index and never the text of an option.
        # A label or text that two options share names neither of them.
        candidates = [(names, answer)]
        if not is_integer or labels is not None:
            candidates += [(plain, answer), (options, answer), (names, answer.strip("(). ").upper())]
        indices = [texts.index(text) for texts, text in candidates if texts.count(text) == 1]
        if labels is None and answer.isdecimal() and len(answer) < 9:  # int() takes 4,300 digits
            indices.append(int(answer))

        if not indices or indices[0] >= len(plain):
            raise DataError(
                f"the answer {answer!r:.80} is none of the {len(plain)} options ({', '.join(names)}); it is a label, a "
                f"number from 0, or the text of an option: set columns.answer or answers"
            )
        return choice(ascii_uppercase[indices[0]], plain[indices[0]])

    # There are 26 letters, of which as many are used as there are options.
    lines = [f"\n{letter}. {text}" for letter, text in zip(ascii_uppercase, plain, strict=False)]
    return "\n" + "".join(lines), choose


def _unlabelled(options: Sequence[str]) -> list[str]:
    """Return the options without their letters, where the data writes a letter before every option: `A) 21` is `21`."""
    # Match each option with its own letter; letters that are left over have no option.
    matches = [
        re.fullmatch(rf"\(?{letter}[).:]\s*(.+)", option, re.DOTALL)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    ]
    return [match[1] for match in matches if match] if all(matches) else list(options)


def _text(value: Any, column: str) -> str | None:
    """Return the value of a column as text, numbers without trailing zeros (142.0 is 142), or None where it is empty.

    Raises:
        DataError: the value is neither text nor a finite number, or is text that cannot be UTF-8.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):  # NaN stands for a missing value
        return None

    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    is_finite = isinstance(value, int) or (is_number and math.isfinite(value))  # an int may be too large for a float
    if is_number and is_finite and abs(value) < _LARGEST_NUMBER:
        digits = f"{Decimal(str(value)) or 0:f}"  # `or 0` drops the sign of -0.0; `:f` writes no exponent
        return digits.rstrip("0").rstrip(".") if "." in digits else digits

    if not isinstance(value, str) or re.search("[\ud800-\udfff]", value):  # half of a surrogate pair
        raise DataError(
            f"column {column!r} holds {value!r:.80}; it must be text in UTF-8 or a finite number, below 1e300"
        )
    return value.strip() or None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match of a pattern or, if the pattern has no groups, the whole match.

    Return None where nothing matches, or where the result is empty.
    """
    # `last` is None where nothing matches. Group 0, which a pattern without groups has, is the whole match.
    *_, last = [None, *pattern.finditer(text)]
    return last and ((last[min(1, pattern.groups)] or "").strip() or None)


def _last_boxed(text: str) -> str | None:
    r"""Return the answer in a solution of MATH: the content of the last \boxed{...}, or the word after a bare \boxed.

    The text is read once, with a stack of open braces, since data may hold thousands of boxes that are never closed.
    """
    last: tuple[int, str] | None = None  # position and content of the last box
    opened: list[int | None] = []  # for every open brace: where the content of its box begins, None without a box

    # The last box is the one that begins last, so `max` compares positions: an outer box closes after an inner one.
    # Group 1 is the opening brace of a box, or the word after a bare \boxed. Any other match is a single brace.
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s$\\{}]+)|(?<!\\)[{}]", text):
        if match[1] == "{":
            opened.append(match.end())
        elif match[1]:
            last = max(last or (-1, ""), (match.start(1), match[1]))
        elif match[0] == "{":
            opened.append(None)
        elif opened and (start := opened.pop()) is not None:
            last = max(last or (-1, ""), (start, text[start : match.start()]))

    return (last[1].strip() or None) if last else None


# For each value of the setting `answers`, the function that takes the text of the answer's column and returns the
# answer, or None where it finds none.
ANSWERS: Mapping[str, Callable[[str], str | None]] = {
    "plain": lambda text: text,
    "hashes": hashed_answer,
    "boxed": _last_boxed,
    "letter": letter_choice,
}
