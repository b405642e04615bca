"""Saved rollouts are parquet files with one row for each response; this module writes and reads them.

List columns have one entry for each response token; `*_top_ids` and `*_top_log_probs` have K entries for each. Columns
from the learner are those of the first update on the rollout. `SCHEMA_VERSION` stands in the file's metadata.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.config.config import Config
from jackpot.core.errors import DataError
from jackpot.core.files import whole_file
from jackpot.core.types import TrainingSample
from jackpot.rollout.tasks.base import decode

SCHEMA_VERSION = 1
_FILE_NAME = re.compile(r"iteration-\d{6,}\.parquet")


def write_rollouts(
    folder: Path,
    iteration: int,
    samples: Sequence[TrainingSample],
    traces: Mapping[str, Mapping[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
) -> Path:
    """Write iteration-N.parquet, and thin out the files where there are more than `rollouts.keep` then.

    Args:
        folder: `rollouts` in the run folder.
        traces: per-token columns of every rollout from the learner, by uid.

    Returns:
        The path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = _table(iteration, samples, traces, tokenizer)
    metadata = {"schema_version": str(SCHEMA_VERSION), "config": config.model_dump_json()}
    path = folder / f"iteration-{iteration:06d}.parquet"
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")
    thin_rollouts(folder, config.rollouts.keep)
    return path


def thin_rollouts(folder: Path, keep: int) -> None:
    """Remove files between the first and the newest until `keep` are left, each time the one that leaves the least gap.

    No gap is twice as wide as if all were equal, but for the file of the best checkpoint, which stays where `keep` is
    more than 2.
    """
    files = {int(path.stem.split("-")[1]): path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name)}
    while len(files) > keep:
        numbers = sorted(files)
        neighbours = zip(numbers, numbers[1:], numbers[2:], strict=False)
        gaps = {number: after - before for before, number, after in neighbours}
        if keep > 2 and (best := best_rollouts(folder.parent, numbers)) is not None:
            gaps.pop(best, None)
        files.pop(min(gaps, key=gaps.__getitem__) if keep > 1 else numbers[0]).unlink()


def best_rollouts(run: Path, iterations: Sequence[int]) -> int | None:
    """Return the last of these iterations that is not after the run's best checkpoint; None without one.

    Args:
        run: the run folder.
    """
    link = run / "checkpoints" / "best"
    best = int(link.readlink().name.split("-")[1]) if link.is_symlink() else -1
    return max((number for number in iterations if number <= best), default=None)


def _table(
    iteration: int,
    samples: Sequence[TrainingSample],
    traces: Mapping[str, Mapping[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
) -> pa.Table:
    rollouts = [item.rollout for item in samples]
    tokens = [tokenizer.convert_ids_to_tokens(rollout.token_ids.tolist()) for rollout in rollouts]
    verdicts = [item.score.correct for item in samples]

    columns = {
        "iteration": _numbers(np.full(len(samples), iteration)),
        "uid": _strings([rollout.uid for rollout in rollouts]),
        "prompt_uid": _strings([rollout.prompt.uid for rollout in rollouts]),
        "prompt": _strings([rollout.prompt.text for rollout in rollouts]),
        "answer": _strings([rollout.prompt.answers for rollout in rollouts]),
        "response": _strings([decode(tokenizer, rollout.token_ids) for rollout in rollouts]),
        "finish": _strings([rollout.finish for rollout in rollouts]),
        "sampled_by": _strings([rollout.sampled_by or "" for rollout in rollouts]),
        "reward": _numbers(np.array([item.score.reward for item in samples], dtype=np.float64)),
        "correct": _numbers(np.array(verdicts, dtype=bool), [verdict is not None for verdict in verdicts]),
        "prompt_ids": _lists([torch.tensor(rollout.prompt.token_ids, dtype=torch.int64) for rollout in rollouts]),
        "token_ids": _lists([rollout.token_ids for rollout in rollouts]),
        "tokens": _split(_strings([*chain(*tokens)]), [*map(len, tokens)]),
        "sampled_mask": _lists([rollout.sampled_mask for rollout in rollouts]),
        "advantages": _lists([item.advantages for item in samples]),
        "rollout_log_probs": _lists([rollout.rollout_log_probs for rollout in rollouts]),
        "rollout_top_ids": _lists([rollout.top_ids for rollout in rollouts]),
        "rollout_top_log_probs": _lists([rollout.top_log_probs for rollout in rollouts]),
        "versions": _lists([rollout.versions for rollout in rollouts]),
    }

    rows = [traces[rollout.uid] for rollout in rollouts]
    columns |= {name: _lists([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return pa.table(columns)


# Columns are made from the buffers of Arrow's format: `pa.array` would import pandas wherever it is installed, 0.3 s.


def _lists(rows: Sequence[Tensor]) -> pa.Array:
    """Return the tensors of all rows, [T] or [T, K] each, as one column of lists; floats as float64."""
    joined = torch.cat(list(rows))
    values = _numbers((joined.double() if joined.is_floating_point() else joined).flatten().numpy())
    if joined.dim() > 1:
        values = _split(values, [joined.shape[1]] * len(joined))
    return _split(values, [*map(len, rows)])


def _split(values: pa.Array, lengths: Sequence[int]) -> pa.Array:
    """Return the values as one column of lists with these lengths."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    return pa.ListArray.from_arrays(_numbers(ends).cast(pa.int32()), values)


def _numbers(values: np.ndarray, exist: Sequence[bool] | None = None) -> pa.Array:
    """Return numbers or bools [N] as a column; null where `exist` is False."""
    content = _bits(values) if values.dtype == bool else pa.py_buffer(values)
    buffers = [None if exist is None else _bits(exist), content]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _strings(values: Sequence[str | None]) -> pa.Array:
    """Return texts as a column."""
    texts = [(value or "").encode() for value in values]
    ends = pa.py_buffer(np.cumsum([0, *map(len, texts)], dtype=np.int64))
    buffers = [_bits([value is not None for value in values]), ends, pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers).cast(pa.string())


def _bits(flags: Sequence[bool] | np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(flags, dtype=bool), bitorder="little"))


class UnreadableRollouts(DataError):
    """Names a file of saved rollouts that is damaged or of another schema version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFile:
    """Describes one file of saved rollouts."""

    path: Path
    iteration: int
    responses: int  # number of responses in the file
    tokens: int  # number of response tokens in the file


def list_rollout_files(run: Path) -> tuple[list[RolloutFile], list[str]]:
    """List the files of saved rollouts in a run folder by iteration, with a sentence about each unreadable one."""
    found, unreadable = [], []
    for path in sorted((run / "rollouts").glob("iteration-*.parquet")):
        try:
            found.append(open_rollout_file(path))
        except UnreadableRollouts as error:
            unreadable.append(str(error))
    return found, unreadable


def read_columns(
    file: RolloutFile, columns: Sequence[str] | None = None, rows: Sequence[int] | None = None
) -> pa.Table:
    """Read columns and rows of a file; None reads all.

    Raises:
        UnreadableRollouts: the file is damaged behind its footer, lacks a column, or is gone by now.
    """
    try:
        if missing := set(columns or ()) - set(pq.read_schema(file.path).names):
            raise UnreadableRollouts(_why(file.path, f"it has no column {', '.join(sorted(missing))}"))
        table = pq.read_table(file.path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise UnreadableRollouts(_why(file.path, error)) from error
    return table if rows is None else table.take(pa.array(rows, pa.int64()))


def flat_column(table: pa.Table, column: str) -> np.ndarray:
    """Concatenate a list column over all responses: [tokens]."""
    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(column).chunks]
    return np.concatenate(chunks) if chunks else np.empty(0)


def open_rollout_file(path: Path) -> RolloutFile:
    """Read the footer of one file.

    Raises:
        UnreadableRollouts: the file is damaged or of another schema version.
    """
    try:
        file = pq.ParquetFile(path)
        version = (file.schema_arrow.metadata or {}).get(b"schema_version", b"none").decode()
        if version != str(SCHEMA_VERSION):
            raise UnreadableRollouts(_why(path, f"its schema version is {version}, this one reads {SCHEMA_VERSION}"))
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        tokens = sum(column.num_values for column in columns if column.path_in_schema.startswith("token_ids."))
        iteration = int(path.stem.split("-")[1])
        return RolloutFile(path=path, iteration=iteration, responses=file.metadata.num_rows, tokens=tokens)
    except (OSError, pa.ArrowException, ValueError) as error:
        if isinstance(error, UnreadableRollouts):
            raise
        raise UnreadableRollouts(_why(path, error)) from error


def _why(path: Path, why: object) -> str:
    return f"{path.parent.parent.name}/rollouts/{path.name} cannot be read and is left out: {str(why).splitlines()[0]}"
