"""Reads problem, right answers and id from the columns of a row, in the forms in which published data has them.

| of a row | forms |
|---|---|
| a column's name | the name itself, or a path into nested values: `reward_model.ground_truth`, `prompt.0.content` |
| problem | text, chat messages, or several columns: `{Body} {Question}` |
| answer | text or a number, or a list of them, any of which is right |
| options of multiple choice | a list, a mapping from label to text, lists `text` and `label`, or one column for each |
| answer to multiple choice | a letter or label, the number of the option from 0, or its text; it becomes `(B) text` |
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from string import ascii_uppercase
from typing import Any, NamedTuple

from jackpot.config.tasks import ROW_NUMBER, AnswersConfig, DataConfig
from jackpot.core.errors import DataError
from jackpot.rollout.rewards.verifier.choices import choice, letter_choice
from jackpot.rollout.rewards.verifier.extract import hashed_answer
from jackpot.rollout.tasks.benchmarks import Benchmark
from jackpot.rollout.tasks.files import Record

_IN_BRACES = re.compile(r"\{([^{}]+)\}")
_ABSENT = object()


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
    place: str  # file and row number, for messages


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
        place, values = record
        asked, found = problem(record), _lookup(values, answer)
        given = found if isinstance(found, list) else [found]
        if options:
            offered = _choice(values, options, place)
            asked = append(asked, offered.text)
            answers = [offered.reference(one, extract, answer, place) for one in given]
        else:
            answers = [None if (text := _text(one, answer, place)) is None else extract(text) for one in given]
        return DataRow(
            uid=str(number) if uid is None else _uid(values, uid, chosen.uid is not None, number, place),
            problem=asked,
            answers=tuple(dict.fromkeys(one for one in answers if one is not None)),
            place=place,
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
        f"{first[0].place}: no column {' or '.join(map(repr, candidates))} for the {role}; there are "
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


def _uid(values: Mapping[str, Any], column: str, is_chosen: bool, number: int, place: str) -> str:
    """Return the id of a row; a row without one is named by its number, unless the settings name the column."""
    text = _text(_lookup(values, column), column, place)
    if text is None and is_chosen:
        raise DataError(
            f"{place}: column {column!r} is empty; every row needs an id: fill it in, remove the row, or choose "
            f"another column (columns.uid: {ROW_NUMBER} makes ids of the row's number)"
        )
    return f"row-{number}" if text is None else text


def _problem_reader(first: Sequence[Record], candidates: Sequence[str]) -> Callable[[Record], Problem]:
    """Return the function that reads the problem of a row from one column, or from those that stand in braces."""
    pattern = candidates[0]
    if not _IN_BRACES.search(pattern):
        column = _column("problem", candidates, first)
        return lambda record: _required(_problem(_lookup(record.values, column), column, record.place), column, record)
    for name in _IN_BRACES.findall(pattern):
        _column("problem", [name], first)

    def joined(record: Record) -> Problem:
        text = _IN_BRACES.sub(
            lambda match: _text(_lookup(record.values, match[1]), match[1], record.place) or "", pattern
        )
        return _required(text.strip() or None, pattern, record)

    return joined


def _required(problem: Problem | None, column: str, record: Record) -> Problem:
    if problem is None:
        raise DataError(
            f"{record.place}: column {column!r} is empty; every row needs a problem: fill it in, remove the row, or "
            f"choose another column with columns.problem"
        )
    return problem


def _problem(value: Any, column: str, place: str) -> Problem | None:
    """Return a problem as text, or as chat messages where the value is a list; None where it is empty."""
    if not isinstance(value, list):
        return _text(value, column, place)
    messages = tuple(_message(one, column, place) for one in value)
    if messages and messages[-1].role == "assistant":
        raise DataError(
            f"{place}: the messages in column {column!r} end with one of the assistant; a prompt ends with the user's: "
            f"name the column of the prompt alone"
        )
    return messages or None


def _message(value: Any, column: str, place: str) -> Message:
    """Return a chat message; its content may be a list of parts, as long as all are text."""
    role, content = (_lookup(value, name) for name in ("role", "content"))
    if isinstance(content, list) and all(_lookup(part, "type") == "text" for part in content):
        content = "".join(str(_lookup(part, "text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{place}: column {column!r} holds a list with {value!r:.80}; chat messages are "
            f'{{"role": "user", "content": "..."}}, with text alone'
        )
    return Message(role, _text(content, column, place) or "")


class _Choice(NamedTuple):
    """Holds the options of one problem."""

    written: Sequence[str]  # as the data has them
    options: Sequence[str]  # their texts, without letters that the data writes before them
    labels: Sequence[str]  # what the data calls them; A, B, ... where it has no names for them
    is_labelled: bool  # whether the data has names for them

    @property
    def text(self) -> str:
        """Return the options as they stand below the problem, one on each line after its letter."""
        return "\n" + "".join(
            f"\n{letter}. {option}" for letter, option in zip(ascii_uppercase, self.options, strict=False)
        )

    def reference(self, value: Any, extract: Callable[[str], str | None], column: str, place: str) -> str | None:
        """Return letter and text of the option that an answer names: by its label, its number from 0, or its text."""
        text = _text(value, column, place)
        answer = None if text is None else extract(text)
        if answer is None:
            return None
        is_number = isinstance(value, int) and not self.is_labelled
        named = [*self.labels].index(answer) if answer in self.labels else None
        for texts in (self.options, self.written):
            if named is None and not is_number and [*texts].count(answer) == 1:
                named = [*texts].index(answer)
        if named is None and (bare := answer.strip("(). ").upper()) in self.labels and not is_number:
            named = [*self.labels].index(bare)
        if named is None and answer.isdecimal() and not self.is_labelled:
            named = int(answer)
        if named is None or named >= len(self.options):
            raise DataError(
                f"{place}: the answer {answer!r:.80} is none of the {len(self.options)} options "
                f"({', '.join(self.labels)}); it is a label, a number from 0, or the text of an option: set "
                f"columns.answer or answers"
            )
        return choice(ascii_uppercase[named], self.options[named])


def _choice(values: Mapping[str, Any], columns: Sequence[str], place: str) -> _Choice:
    """Return the options of a row.

    Raises:
        DataError: fewer than 2 or more than 26 options, an empty one, or a value of another form.
    """
    found: list[Any] = [_lookup(values, name) for name in columns]
    labels: list[Any] | None = None
    if len(columns) == 1:
        (given,) = found
        if isinstance(given, Mapping) and isinstance(given.get("text"), list):
            found, labels = given["text"], given.get("label")
        elif isinstance(given, Mapping):
            found, labels = list(given.values()), list(given)
        elif isinstance(given, list):
            found = given
    options = [_text(one, ", ".join(columns), place) for one in found]
    names = list(map(str, labels)) if labels is not None else list(ascii_uppercase[: len(options)])
    if not 2 <= len(options) <= len(ascii_uppercase) or None in options or len(names) != len(options):
        raise DataError(
            f"{place}: columns.options ({', '.join(columns)}) gives {found!r:.80}; multiple choice needs 2 to 26 "
            f"options, each with a text"
        )
    return _Choice(options, _unlabelled(options), names, labels is not None)


def _unlabelled(options: Sequence[str]) -> list[str]:
    """Return the options without the letters that the data writes before all of them: `A) 21` is `21`."""
    found = [
        re.fullmatch(rf"\(?{letter}[).:]\s*(.+)", option, re.DOTALL)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    ]
    return [match[1] for match in found if match] if all(found) else list(options)


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
