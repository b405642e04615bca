"""The answers of an evaluation on the disk.

    NAME.jsonl      while it goes on: one line an answer, as soon as it is scored, in the order in which they ended
    NAME.parquet    when all are there: one row an answer, ordered by problem and sample; the lines are then removed

A kill costs what was not yet scored. It can tear the last line, which is then asked again, and never the table: that is
renamed into place when its last byte is on the disk. Neither is ever held in memory as a whole.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from jackpot.core.errors import CheckpointError
from jackpot.core.files import AppendedFile, whole_file
from jackpot.core.types import Prompt
from jackpot.models.load import load_config, resolve_path
from jackpot.rollout.evaluate import ScoredResponse
from jackpot.rollout.pass_at_k import ResponseOutcomes

SCHEMA_VERSION = 1
SCHEMA = pa.schema(
    {
        "uid": pa.string(),  # of the problem
        "sample": pa.int32(),  # from 0 to k - 1
        "prompt": pa.string(),
        "answer": pa.string(),  # the reference
        "response": pa.string(),
        "correct": pa.bool_(),
        "reward": pa.float64(),
        "tokens": pa.int32(),  # of the response
        "finish": pa.string(),  # stop, length (cut at the limit) or aborted (the engine gave it up)
        "reward_error": pa.string(),  # timeout or crash; null where scoring succeeded
    }
)
_FIELDS: dict[str, tuple[type, ...]] = {  # of a line
    "number": (int,),  # of the problem
    "sample": (int,),
    "response": (str,),
    "correct": (bool,),
    "reward": (float, int),
    "tokens": (int,),
    "finish": (str,),
    "reward_error": (str, type(None)),
}
_ROWS_AT_ONCE = 1024
_log = logging.getLogger(__name__)


class AnswerFile:
    """The answers to one set of problems, `k` to each; opening it finds those that are there."""

    def __init__(self, folder: Path, name: str, problems: int, k: int) -> None:
        """
        Raises:
            CheckpointError: the table is there and has other rows than asked for.
        """
        self.path, self._lines = folder / f"{name}.parquet", folder / f"{name}.jsonl"
        self._shape = (problems, k)
        if self.is_finished:
            self._check_table()
            self._lines.unlink(missing_ok=True)  # a kill came between the table and this
        elif self._lines.exists():
            os.truncate(self._lines, _whole_size(self._lines))
        self._missing = self._places() < 0
        self._appended = AppendedFile(self._lines)

    @property
    def is_finished(self) -> bool:
        return self.path.is_file()

    @property
    def done(self) -> int:
        """Answers that are there."""
        return int(self._missing.size - self._missing.sum())

    def missing(self) -> Iterator[tuple[int, int]]:
        """Problem number and sample of every answer that was not there when this was opened."""
        for number, sample in np.argwhere(self._missing):
            yield int(number), int(sample)

    def add(self, answers: Iterable[tuple[int, int, ScoredResponse]]) -> None:
        """Append answers with their problem number and sample.

        Raises:
            CheckpointError: the disk does not take them. What was there before is.
        """
        record = b"".join(json.dumps(_line(*one), allow_nan=False).encode() + b"\n" for one in answers)
        try:
            self._appended.append(record)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self._lines}: {error}. Make room and run the same command; it goes on from there"
            ) from error

    def finish(self, prompt: Callable[[int], Prompt], metadata: Mapping[str, str]) -> None:
        """Write the table and remove the lines.

        Args:
            prompt: of a problem, by its number.
            metadata: to keep in the file beside `schema_version` and `k`.

        Raises:
            CheckpointError: answers are missing, or the disk does not take it.
        """
        places = self._places()
        if missing := int((places < 0).sum()):
            raise CheckpointError(f"{self._lines} lacks {missing} of {places.size} answers; run the same command again")
        about = {"schema_version": str(SCHEMA_VERSION), "k": str(self._shape[1])}
        schema = SCHEMA.with_metadata({**metadata, **about})
        try:
            with whole_file(self.path) as partial:
                with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
                    for rows in self._rows(places, prompt):
                        writer.write_table(pa.Table.from_pylist(rows, schema))
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error}. Make room and run the same command; all answers are in "
                f"{self._lines}"
            ) from error
        self._lines.unlink(missing_ok=True)

    def _places(self) -> NDArray[np.int64]:
        """Where the line of each answer begins, [problems, k]; -1 where there is none."""
        places = np.full(self._shape, 0 if self.is_finished else -1, dtype=np.int64)
        unreadable = 0
        for place, text in _lines(self._lines):
            which = _which(text)
            if all(0 <= index < size for index, size in zip(which, self._shape, strict=True)):
                places[which] = place
            else:
                unreadable += 1
        if unreadable:
            _log.warning("%s: %d lines cannot be read; what stood there is asked again", self._lines, unreadable)
        return places

    def _rows(self, places: NDArray[np.int64], prompt: Callable[[int], Prompt]) -> Iterator[list[dict[str, Any]]]:
        """The rows of the table, some at a time."""
        rows: list[dict[str, Any]] = []
        with self._lines.open("rb") as file:
            for number, samples in enumerate(places):
                problem = prompt(number)
                known = {"uid": problem.uid, "prompt": problem.text, "answer": problem.answer}
                for place in samples:
                    file.seek(place)
                    rows.append(known | json.loads(file.readline()))
                if len(rows) >= _ROWS_AT_ONCE:
                    yield rows
                    rows = []
        if rows:
            yield rows

    def _check_table(self) -> None:
        try:
            rows, (problems, k) = pq.read_metadata(self.path).num_rows, self._shape
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(
                f"cannot read the answers in {self.path}: {error}. Bring the file back, or remove it to ask them again"
            ) from error
        if rows != problems * k:
            raise CheckpointError(
                f"{self.path} has {rows} answers, asked for are {problems} problems x {k}; it was not written by this "
                f"command. Give another folder, or remove it"
            )


def read_outcomes(path: Path) -> ResponseOutcomes:
    """What became of the answers in a table.

    Raises:
        CheckpointError: no table, or not one of this version.
    """
    columns = ["correct", "reward", "tokens", "finish", "reward_error"]
    try:
        table = pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"cannot read the answers in {path}: {error}") from error
    about = table.schema.metadata or {}
    if (version := about.get(b"schema_version", b"none").decode()) != str(SCHEMA_VERSION):
        raise CheckpointError(f"{path} has schema version {version}; this version of Jackpot reads {SCHEMA_VERSION}")
    k = int(about[b"k"])
    found = {name: table[name].to_numpy().reshape(-1, k) for name in columns[:3]}
    words = {name: table[name].fill_null("").to_numpy().astype(str).reshape(-1, k) for name in columns[3:]}
    return ResponseOutcomes(
        correct=found["correct"].astype(bool),
        rewards=found["reward"],
        tokens=found["tokens"].astype(np.int64),
        finishes=words["finish"],
        reward_errors=words["reward_error"],
    )


def _line(number: int, sample: int, answered: ScoredResponse) -> dict[str, Any]:
    rollout, score = answered.rollout, answered.score
    return {
        "number": number,
        "sample": sample,
        "response": answered.response,
        "correct": score.correct,
        "reward": score.reward,
        "tokens": len(rollout.token_ids),
        "finish": rollout.finish,
        "reward_error": score.reward_error,
    }


def _whole_size(path: Path) -> int:
    """The bytes up to the end of the last whole line."""
    size = 0
    for place, text in _lines(path):
        size = place + len(text) if text.endswith(b"\n") else size
    return size


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line and where it begins; none where there is no file."""
    if path.exists():
        place = 0
        with path.open("rb") as file:
            for text in file:
                yield place, text
                place += len(text)


def _which(text: bytes) -> tuple[int, int]:
    """Problem number and sample of a line; (-1, -1) where it is not one of ours, whole."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return -1, -1
    if not isinstance(line, dict) or line.keys() != _FIELDS.keys():
        return -1, -1
    fits = all(type(line[name]) in types for name, types in _FIELDS.items()) and isfinite(line["reward"])
    return (line["number"], line["sample"]) if fits else (-1, -1)


_WHAT_COUNTS = (".json", ".safetensors", ".model", ".txt", ".jinja")  # weights, configs, tokenizer, chat template


def model_digest(path: str | Path) -> str:
    """What changes when the model or its tokenizer does: a hash of the folder's files, or the hub's commit.

    It reads all weights once, about a second for each gigabyte.

    Raises:
        ModelError: no such folder, or the hub cannot be reached.
    """
    source = Path(resolve_path(path))
    if not source.is_dir():
        return f"commit {load_config(path)._commit_hash}"
    whole = hashlib.sha256()
    for file in sorted(one for one in source.iterdir() if one.suffix in _WHAT_COUNTS):
        with file.open("rb") as content:
            whole.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return f"sha256 {whole.hexdigest()}"
