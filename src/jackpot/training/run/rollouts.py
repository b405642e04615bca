"""Saved rollouts are parquet files with one row for each response; this module writes and reads them.

List columns have one entry for each response token; `*_top_ids` and `*_top_log_probs` have K entries for each. Columns
from the learner are those of the first update on the rollout. `SCHEMA_VERSION` stands in the file's metadata.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.config.run import Config
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

    No gap is twice as wide as if all were equal.
    """
    files = {int(path.stem.split("-")[1]): path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name)}
    while len(files) > keep:
        numbers = sorted(files)
        gaps = {two: three - one for one, two, three in zip(numbers, numbers[1:], numbers[2:], strict=False)}
        files.pop(min(gaps, key=gaps.__getitem__) if keep > 1 else numbers[0]).unlink()


def _table(
    iteration: int,
    samples: Sequence[TrainingSample],
    traces: Mapping[str, Mapping[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
) -> pa.Table:
    rollouts = [item.rollout for item in samples]
    ids = [rollout.token_ids.tolist() for rollout in rollouts]
    columns = {
        "iteration": [iteration] * len(samples),
        "uid": [rollout.uid for rollout in rollouts],
        "prompt_uid": [rollout.prompt.uid for rollout in rollouts],
        "prompt": [rollout.prompt.text for rollout in rollouts],
        "answer": [rollout.prompt.answers for rollout in rollouts],
        "response": [decode(tokenizer, rollout.token_ids) for rollout in rollouts],
        "finish": [rollout.finish for rollout in rollouts],
        "reward": [item.score.reward for item in samples],
        "correct": [item.score.correct for item in samples],
        "prompt_ids": [rollout.prompt.token_ids for rollout in rollouts],
        "token_ids": ids,
        "tokens": [tokenizer.convert_ids_to_tokens(row) for row in ids],
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


def _lists(rows: Sequence[Tensor]) -> pa.Array:
    """Return the tensors of all rows, [T] or [T, K] each, as one column of lists; floats as float64."""
    joined = torch.cat(list(rows))
    values = pa.array((joined.double() if joined.is_floating_point() else joined).flatten().numpy())
    if joined.dim() > 1:
        count, size = joined.shape
        values = pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * size, pa.int32()), values)
    return pa.ListArray.from_arrays(pa.array(accumulate(map(len, rows), initial=0), pa.int32()), values)


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
        columns = [group.column(place) for group in groups for place in range(group.num_columns)]
        tokens = sum(column.num_values for column in columns if column.path_in_schema.startswith("token_ids."))
        iteration = int(path.stem.split("-")[1])
        return RolloutFile(path=path, iteration=iteration, responses=file.metadata.num_rows, tokens=tokens)
    except (OSError, pa.ArrowException, ValueError) as error:
        if isinstance(error, UnreadableRollouts):
            raise
        raise UnreadableRollouts(_why(path, error)) from error


def _why(path: Path, why: object) -> str:
    return f"{path.parent.parent.name}/rollouts/{path.name} cannot be read and is left out: {str(why).splitlines()[0]}"
