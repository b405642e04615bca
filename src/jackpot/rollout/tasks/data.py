"""Sources of problems, as the settings name them, and access to their problems by index.

A source is a benchmark, a file or folder, or a data set of the Hugging Face hub. Rows without an answer, rows whose
answers are too long to be verified and rows whose prompt is too long are left out and counted. Prompts with text for
which the tokenizer has no tokens are counted too; a tokenizer that lacks tokens for half of the prompts is refused.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

from jackpot.config.tasks import DataConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.rollout.rewards.verifier.compare import is_readable
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.tasks.base import Split
from jackpot.rollout.tasks.benchmarks import BENCHMARKS, Benchmark
from jackpot.rollout.tasks.rows import SUFFIXES, DataRow, Record, find_files, kind_of, make_reader, read_files, read_hub

DATA_FOLDER = "JACKPOT_DATA"  # environment variable with the folder of local copies of benchmarks
HUB = "hub:"  # prefix of a source on the hub
COLUMN_SAMPLE = 100  # number of rows, from the first, in which a column is looked for: a row of JSON may lack it
LONGEST_PROBLEM = 1_000_000  # most characters of a problem, whatever the limit of tokens: a tokenizer needs 1 s for it
_BATCH = 256  # number of rows that are filtered together
# Names of the counts of rows: all rows that were read; rows left out, by reason; and rows that are kept although the
# verifier cannot read the answer, or although the tokenizer has no tokens for a part of the prompt.
COUNTED = ("rows", "without_answer", "long_answer", "too_long", "unreadable_answer", "unknown_tokens")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A source of problems, whose rows are read in the same order each time."""

    name: str  # name of the source in uids and messages
    records: Callable[[], Iterator[Record]]  # returns an iterator over all rows, from the first
    benchmark: Benchmark  # columns and answer formats where `settings` name none
    settings: DataConfig
    is_local: bool  # True for files; False for data of the hub, which is contacted when rows are read

    def rows(self) -> Iterator[DataRow]:
        """Yield every row, or the first `settings.limit` ones.

        Raises:
            DataError: a column is missing (the message lists all others), a row has no problem, or a value is no text.
        """
        records = islice(self.records(), self.settings.limit)
        first = list(islice(records, COLUMN_SAMPLE))
        if not first:
            raise DataError(f"{self.name} has no rows; give a source that has some")
        read_row = make_reader(first, self.benchmark, self.settings)
        for index, record in enumerate(chain(first, records)):
            yield read_row(index, record)


def find_source(settings: DataConfig, split: Split) -> DataSource:
    """Find the source that `task.train` or `task.test` names, without reading it.

    A benchmark is read from a file in the folder JACKPOT_DATA if the file is there, else from the hub. Other sources
    have the columns of `_OWN_DATA` unless the settings name others.

    Raises:
        DataError: the source is neither a benchmark (the message lists all benchmarks), nor data of the hub, nor the
            path of files with rows; a benchmark or a folder lacks the split; the source is local files, and
            `settings` name a subset, which only data of the hub have; or JACKPOT_DATA names no folder.
    """
    name = settings.source
    if name in BENCHMARKS:
        return _benchmark(name, settings, split)
    if name.startswith(HUB):
        return _on_hub(source_name(name), _OWN_DATA, settings, settings.split or split, "give a local file as source")

    if not is_address(name):  # then it was meant as the name of a benchmark, and there is none of that name
        raise DataError(
            f"{unknown_name('benchmark', name, BENCHMARKS)}; or give {HUB}OWNER/NAME, or the path of a "
            f"{', '.join(SUFFIXES)} file or of a folder of them"
        )

    path = Path(name).expanduser()
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and kind_of(path) is None:
        raise DataError(f"there is no folder {name}; for the data set of the hub write {HUB}{name}")
    return _local(source_name(name), _OWN_DATA, settings, find_files(path, settings.split, split))


def is_address(source: str) -> bool:
    """Tell whether a source is data of the hub or a path: it has an ending such as `.jsonl`, or a slash, or exists."""
    path = Path(source).expanduser()
    return source.startswith(HUB) or kind_of(path) is not None or "/" in source or path.exists()


def source_name(source: str) -> str:
    """Return the name of a source: OWNER/NAME of data of the hub, or the last part of a path without its ending."""
    path = Path(source).expanduser()
    return source.removeprefix(HUB) if source.startswith(HUB) else path.name.removesuffix(kind_of(path) or "")


def find_sources(settings: Sequence[DataConfig], split: Split) -> list[DataSource]:
    """Find several sources; sources with equal names are numbered, so that the ids of their problems differ.

    Raises:
        DataError: as `find_source`.
    """
    sources = [find_source(source, split) for source in settings]
    names = [source.name for source in sources]
    for index, source in enumerate(sources):
        # Append the first number, from the source's place in `settings` on, that gives a name which is not yet used.
        if names.count(source.name) > 1:
            used_names = {*names, *(renamed.name for renamed in sources)}
            numbered = (f"{source.name}-{suffix}" for suffix in count(index + 1))
            sources[index] = replace(source, name=next(name for name in numbered if name not in used_names))
    return sources


_OWN_DATA = Benchmark(hub="", answer={"answer": "plain"}, uid=("id",))  # defaults of the user's own data


def _benchmark(name: str, settings: DataConfig, split: Split) -> DataSource:
    """Find the source of a benchmark; a benchmark's only split serves both for training and for testing."""
    benchmark = BENCHMARKS[name]
    # Take the split that the settings name, or else the benchmark's split for this purpose, or else its only split.
    splits = {known.split: known for known in (benchmark.train, benchmark.test) if known}
    usual = getattr(benchmark, split) or next(iter(splits.values()))
    split_name = settings.split or usual.split
    if split_name not in splits:
        raise DataError(f"{name}: {unknown_name('split', split_name, splits)}")

    file, folder = splits[split_name].file, os.environ.get(DATA_FOLDER)
    if folder and not Path(folder).is_dir():
        raise DataError(f"{DATA_FOLDER} is {folder!r}, which is not a folder; name one, or unset it to use the hub")
    if folder and (path := Path(folder) / file).exists():
        return _local(name, benchmark, settings, [path])
    instead = f"give a local file as source, or put {file} into a folder and set {DATA_FOLDER} to it"
    return replace(_on_hub(benchmark.hub, benchmark, settings, split_name, instead), name=name)


def _local(name: str, benchmark: Benchmark, settings: DataConfig, files: Sequence[Path]) -> DataSource:
    """Return a source that reads rows from local files; refuse `settings` with a subset, which no file has."""
    if settings.subset is not None:
        raise DataError(f"subset is {settings.subset!r}, but {files[0]} is local and has none; leave subset out")
    return DataSource(name, lambda: read_files(files), benchmark, settings, is_local=True)


def _on_hub(path: str, benchmark: Benchmark, settings: DataConfig, split: str, instead: str) -> DataSource:
    """Return a source that reads a data set of the hub; `instead` says in errors what to do without the hub."""
    records = partial(read_hub, path, settings.subset or benchmark.subset, split, instead)
    return DataSource(path, records, benchmark, settings, is_local=False)


class PromptSize(NamedTuple):
    """The length of a prompt in tokens, and whether the tokenizer knows all of its text."""

    tokens: int
    has_unknown: bool  # whether the tokenizer has no tokens for a part of the text


Measure = Callable[[list[DataRow]], list[PromptSize]]  # returns the size of each row's prompt


class RowCounts(Counter[str]):
    """The number of rows of a source, and the number of rows with each defect, under the names in `COUNTED`."""

    @property
    def kept(self) -> int:
        """Return the number of rows that became problems: others have no answer, or too long an answer or prompt."""
        return self["rows"] - self["without_answer"] - self["long_answer"] - self["too_long"]


class Problems:
    """All problems of a source, held in memory.

    Args:
        measure: returns the `PromptSize` of each row.
        limit: rows whose prompt has more tokens than this are left out; None: no limit.

    Raises:
        DataError: as `DataSource.rows`; no problem is left; two rows have equal ids; or half of the
            prompts have a part for which the tokenizer has no tokens.
    """

    def __init__(self, source: DataSource, measure: Measure, limit: int | None) -> None:
        """Read the usable rows, with at most `limit` prompt tokens by `measure` (None: any), and refuse equal ids."""
        self.source, self.counts = source, RowCounts()
        self.rows = list(_kept(source, measure, limit, self.counts))
        earlier: dict[str, DataRow] = {}
        for row in self.rows:
            if (twin := earlier.setdefault(row.uid, row)) is not row:
                raise DataError(
                    f"{row.where} has the id {row.uid!r}, as {twin.where} has; ids must differ: fix the data, or set "
                    f"columns.uid to another column, or to row, which makes ids of the row's number"
                )


def _kept(source: DataSource, measure: Measure, limit: int | None, counts: RowCounts) -> Iterator[DataRow]:
    """Yield the rows that can be used as problems, and count all rows in `counts`.

    `measure` and `limit` are as in `Problems`.

    Raises:
        DataError: no row can be used, or half of the prompts have a part for which the tokenizer has no tokens.
    """
    rows = source.rows()
    while batch := list(islice(rows, _BATCH)):
        answered = [row for row in batch if row.answers]
        with_short_answers = [
            row._replace(answers=tuple(answer for answer in row.answers if len(answer) <= MAX_ANSWER_LENGTH))
            for row in answered
        ]
        verifiable = [row for row in with_short_answers if row.answers]
        short = [row for row in verifiable if len(str(row.problem)) <= LONGEST_PROBLEM]
        with_sizes = zip(short, measure(short), strict=True)
        usable = [(row, size) for row, size in with_sizes if limit is None or size.tokens <= limit]

        counts.update(
            rows=len(batch),
            without_answer=len(batch) - len(answered),
            long_answer=len(answered) - len(verifiable),
            too_long=len(verifiable) - len(usable),  # too many characters to be measured, or too many tokens
            unreadable_answer=sum(not any(map(is_readable, row.answers)) for row, _ in usable),
            unknown_tokens=sum(size.has_unknown for _, size in usable),
        )

        # Refuse a tokenizer that lacks tokens for half of the prompts read so far (if there are any).
        if 2 * counts["unknown_tokens"] >= max(counts.kept, 1):
            row = next(row for row, size in usable if size.has_unknown)
            raise DataError(
                f"{row.where}: the tokenizer has no tokens for parts of this prompt, as of {counts['unknown_tokens']} "
                f"of the first {counts.kept} prompts of {source.name}; take a tokenizer that was made for this text, "
                f"or a template and an instruction in its words"
            )
        yield from (row for row, _ in usable)

    if not counts.kept:
        raise DataError(
            f"{source.name}: no problem is left of {counts['rows']} rows: {counts['without_answer']} have no answer "
            f"(see columns.answer and answers), {counts['long_answer']} have an answer of more than "
            f"{MAX_ANSWER_LENGTH:,} characters, {counts['too_long']} have a prompt of more than {longest(limit)} (see "
            f"max_prompt_tokens, and what sampling.max_new_tokens leaves of the context)"
        )


def longest(limit: int | None) -> str:
    """Return the largest length of a prompt as words for a message: in tokens or, without a `limit`, in characters."""
    return f"{LONGEST_PROBLEM:,} characters" if limit is None else f"{limit} tokens"
