"""The scored responses of an evaluation on the disk, k to each problem of a set of problems.

    NAME.jsonl      until all responses to the set NAME are scored: one line for each, appended as soon as it is scored
    NAME.parquet    after that: one row for each, ordered by problem and sample; NAME.jsonl is removed

A kill loses only responses that were not scored yet. It can tear the last line, whose response is then generated again.
It cannot tear the table, which is renamed into place when its last byte is on the disk. Neither file is ever in memory
as a whole.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
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
from jackpot.models.hub import resolve_path
from jackpot.models.load import load_config
from jackpot.rollout.evaluate import ScoredResponse
from jackpot.rollout.pass_at_k import ResponseOutcomes

SCHEMA_VERSION = 1
SCHEMA = pa.schema(
    {
        "uid": pa.string(),  # id of the problem
        "sample": pa.int32(),  # number of the response to its problem, from 0 to k - 1
        "prompt": pa.string(),
        "answer": pa.string(),  # reference answer of the problem
        "response": pa.string(),
        "correct": pa.bool_(),  # null where the task has no verdict
        "reward": pa.float64(),
        "tokens": pa.int32(),  # length of the response
        "finish": pa.string(),  # stop, length (cut at the limit) or aborted (by the engine)
        "reward_error": pa.string(),  # timeout, crash or invalid; null where scoring succeeded
    }
)
_FIELDS: dict[str, tuple[type, ...]] = {  # fields of a line of NAME.jsonl, with their types
    "number": (int,),  # index of the problem
    "sample": (int,),
    "response": (str,),
    "correct": (bool, type(None)),
    "reward": (float, int),
    "tokens": (int,),
    "finish": (str,),
    "reward_error": (str, type(None)),
}
_ROWS_AT_ONCE = 1024  # rows of the table that are in memory at a time
_log = logging.getLogger(__name__)


class AnswerFile:
    """The file with `k` scored responses to each problem of a set; processes may fill it one after the other."""

    def __init__(self, folder: Path, name: str, problems: int, k: int) -> None:
        """Open the file of a set of problems, and find the responses that are in it already.

        Args:
            folder: folder of the evaluation.
            name: name of the set.
            problems: number of problems.
            k: number of responses to each problem.

        Raises:
            CheckpointError: NAME.parquet exists, but has not problems x k rows or cannot be read.
        """
        self.path, self._lines = folder / f"{name}.parquet", folder / f"{name}.jsonl"
        self._shape = (problems, k)
        if self.is_finished:
            self._check_table()
            self._lines.unlink(missing_ok=True)  # an earlier process was killed after writing the table
        elif self._lines.exists():
            # A killed process may have left a part of a line.
            whole_size = sum(len(text) for _, text in _lines(self._lines) if text.endswith(b"\n"))
            os.truncate(self._lines, whole_size)

        self._missing = self._offsets() < 0  # [problems, k]; an offset of -1 stands for a missing response
        self._appended = AppendedFile(self._lines)

    @property
    def is_finished(self) -> bool:
        """Return whether all responses are in the file: NAME.parquet is written only then."""
        return self.path.is_file()

    @property
    def done(self) -> int:
        """Return the number of responses that were in the file when it was opened."""
        return int(self._missing.size - self._missing.sum())

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield (problem index, sample number) of every response that was not in the file when it was opened."""
        for index, sample in np.argwhere(self._missing):
            yield int(index), int(sample)

    def add(self, answers: Iterable[tuple[int, int, ScoredResponse]]) -> None:
        """Append scored responses, each as (problem index, sample number, response).

        Raises:
            CheckpointError: the disk does not take the lines; earlier lines stay whole.
        """
        lines = b"".join(json.dumps(_line(*answer), allow_nan=False).encode() + b"\n" for answer in answers)
        try:
            self._appended.append(lines)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self._lines}: {error}. Make room and run the same command to continue"
            ) from error

    def finish(self, prompt: Callable[[int], Prompt], metadata: Mapping[str, str]) -> None:
        """Write the table of the complete set, NAME.parquet, and remove NAME.jsonl.

        Args:
            prompt: function that returns the prompt of a problem by its index.
            metadata: texts that are stored in the file, beside `schema_version` and `k`.

        Raises:
            CheckpointError: responses are missing, or the disk does not take the table.
        """
        offsets = self._offsets()
        if missing := int((offsets < 0).sum()):
            raise CheckpointError(f"{self._lines} lacks {missing} of {offsets.size} responses; run the command again")

        schema = SCHEMA.with_metadata({**metadata, "schema_version": str(SCHEMA_VERSION), "k": str(self._shape[1])})
        try:
            with whole_file(self.path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
                rows = self._rows(offsets, prompt)
                while batch := list(islice(rows, _ROWS_AT_ONCE)):
                    writer.write_table(pa.Table.from_pylist(batch, schema))
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error}. Make room and run the same command; all responses are in "
                f"{self._lines}"
            ) from error

        self._lines.unlink(missing_ok=True)

    def _offsets(self) -> NDArray[np.int64]:
        """Return the byte offset at which the line of each response begins, [problems, k]; -1 for a missing response.

        All offsets are 0 for a complete set, whose responses are in the table.
        """
        offsets = np.full(self._shape, 0 if self.is_finished else -1, dtype=np.int64)
        unreadable = 0
        for offset, text in _lines(self._lines):
            key = _key(text)  # (problem, sample), indices of `offsets`; (-1, -1) for an unreadable line
            if all(0 <= index < size for index, size in zip(key, self._shape, strict=True)):
                offsets[key] = offset
            else:
                unreadable += 1

        if unreadable:
            _log.warning("%s: %d lines cannot be read; their responses are generated again", self._lines, unreadable)
        return offsets

    def _rows(self, offsets: NDArray[np.int64], prompt: Callable[[int], Prompt]) -> Iterator[dict[str, Any]]:
        """Yield the rows of NAME.parquet, from the lines of NAME.jsonl.

        `offsets`, [problems, k], are where the lines of the responses begin; `prompt` returns a problem by its index.
        """
        with self._lines.open("rb") as file:
            for index, line_offsets in enumerate(offsets):
                problem = prompt(index)
                columns = {"uid": problem.uid, "prompt": problem.text, "answer": problem.answers}
                for offset in line_offsets:
                    file.seek(offset)
                    yield columns | json.loads(file.readline())

    def _check_table(self) -> None:
        """Raise CheckpointError if the table cannot be read, or does not have k rows for each problem."""
        problems, k = self._shape
        try:
            rows = pq.read_metadata(self.path).num_rows
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(
                f"cannot read the responses in {self.path}: {error}. Bring it back, or remove it to make them again"
            ) from error

        if rows != problems * k:
            raise CheckpointError(
                f"{self.path} has {rows} responses, not {problems} problems x {k}: another command wrote it. "
                f"Give another folder, or remove it"
            )


def read_outcomes(path: Path) -> ResponseOutcomes:
    """Read NAME.parquet: verdict, reward, length, end and scoring error of each response, as arrays [problems, k].

    `correct` is None where no response has a verdict. A response without a scoring error has the text "".

    Raises:
        CheckpointError: the table cannot be read or has another schema version.
    """
    try:
        table = pq.read_table(path, columns=["correct", "reward", "tokens", "finish", "reward_error"])
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"cannot read the responses in {path}: {error}") from error

    about = table.schema.metadata or {}
    if (version := about.get(b"schema_version", b"none").decode()) != str(SCHEMA_VERSION):
        raise CheckpointError(f"{path} has schema version {version}; this version of Jackpot reads {SCHEMA_VERSION}")

    k = int(about[b"k"])
    has_verdict = table["correct"].null_count < len(table)
    texts = {
        name: table[name].fill_null("").to_numpy().astype(str).reshape(-1, k) for name in ("finish", "reward_error")
    }

    return ResponseOutcomes(
        correct=table["correct"].fill_null(False).to_numpy().reshape(-1, k) if has_verdict else None,
        rewards=table["reward"].to_numpy().reshape(-1, k),
        tokens=table["tokens"].to_numpy().reshape(-1, k).astype(np.int64),
        finishes=texts["finish"],
        reward_errors=texts["reward_error"],
    )


def _line(index: int, sample: int, answer: ScoredResponse) -> dict[str, Any]:
    """Return a scored response, number `sample` to problem `index`, as the fields of its line in NAME.jsonl."""
    rollout, score = answer.rollout, answer.score
    return {
        "number": index,
        "sample": sample,
        "response": answer.response,
        "correct": score.correct,
        "reward": score.reward,
        "tokens": len(rollout.token_ids),
        "finish": rollout.finish,
        "reward_error": score.reward_error,
    }


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, text) of every line of a file; nothing where the file does not exist."""
    if path.exists():
        offset = 0
        with path.open("rb") as file:
            for text in file:
                yield offset, text
                offset += len(text)


def _key(text: bytes) -> tuple[int, int]:
    """Return (problem index, sample number) of a line; (-1, -1) for a line whose fields are not exactly `_FIELDS`."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return -1, -1

    has_fields = isinstance(line, dict) and line.keys() == _FIELDS.keys()
    if has_fields and all(type(line[name]) in types for name, types in _FIELDS.items()) and isfinite(line["reward"]):
        return line["number"], line["sample"]
    return -1, -1


# Endings of the files that are hashed: weights, configs, tokenizer, chat template.
_DIGESTED = (".json", ".safetensors", ".model", ".txt", ".jinja")


def model_digest(path: str | Path) -> str:
    """Return a digest of a model and its tokenizer: a hash of the files in its folder, or the commit on the hub.

    Hashed are files whose ending is in `_DIGESTED`. All weights are read once, about a second for each gigabyte.

    Raises:
        ModelError: the folder does not exist, or the hub cannot be reached.
    """
    source = Path(resolve_path(path))
    if not source.is_dir():
        return f"commit {load_config(path)._commit_hash}"

    digest = hashlib.sha256()
    for file in sorted(entry for entry in source.iterdir() if entry.suffix in _DIGESTED):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return f"sha256 {digest.hexdigest()}"
