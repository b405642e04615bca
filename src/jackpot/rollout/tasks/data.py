"""Reads problems with answers from a benchmark, a file or folder, or a data set of the Hugging Face hub."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path

from jackpot.config.tasks import DataConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.rollout.tasks.base import Split
from jackpot.rollout.tasks.benchmarks import BENCHMARKS, Benchmark
from jackpot.rollout.tasks.columns import DataRow, make_reader
from jackpot.rollout.tasks.files import SUFFIXES, Record, find_files, kind_of, read_files, read_hub

DATA_FOLDER = "JACKPOT_DATA"  # environment variable with the folder of local copies of benchmarks
HUB = "hub:"  # prefix of a source on the hub
COLUMN_SAMPLE = 100  # rows whose columns are collected: a row of JSON may lack some


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
        read = make_reader(first, self.benchmark, self.settings)
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
        name = source_name(source)
        return _on_hub(name, name, settings.split or split, _OWN_DATA, settings, "give a local file as source")
    path = Path(source).expanduser()
    if not is_place(source):
        raise DataError(
            f"{unknown_name('benchmark', source, BENCHMARKS)}; or give {HUB}OWNER/NAME, or the path of a "
            f"{', '.join(SUFFIXES)} file or of a folder of them"
        )
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and kind_of(path) is None:
        raise DataError(f"there is no folder {source}; for the data set of the hub write {HUB}{source}")
    return _local(source_name(source), path, settings.split, split, _OWN_DATA, settings)


def is_place(source: str) -> bool:
    """Return whether a source is data of the hub or a path, and not a name."""
    path = Path(source).expanduser()
    return source.startswith(HUB) or kind_of(path) is not None or "/" in source or path.exists()


def source_name(source: str) -> str:
    """Return the name of a source: the path of data of the hub, or the last part of a path without its kind."""
    if source.startswith(HUB):
        return source.removeprefix(HUB)
    name = Path(source).expanduser().name
    return name.removesuffix(kind_of(Path(name)) or "")


def find_sources(settings: Sequence[DataConfig], split: Split) -> list[DataSource]:
    """Find several sources; those of the same name are numbered, so that the ids of their problems differ.

    Raises:
        DataError: as `find_source`.
    """
    found = [find_source(one, split) for one in settings]
    names = [one.name for one in found]
    taken, numbered = set(names), []
    for number, one in enumerate(found, start=1):
        if names.count(one.name) > 1:
            free = (name for i in count(number) if (name := f"{one.name}-{i}") not in taken)
            one = replace(one, name=next(free))
            taken.add(one.name)
        numbered.append(one)
    return numbered


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
