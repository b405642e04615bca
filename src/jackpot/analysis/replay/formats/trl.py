"""Reads and writes TRL's `log_completions`: OUTPUT_DIR/completions/completions_STEP.parquet.

GRPOTrainer writes `step, prompt, completion`, a column for each reward function, what is in `_logs["extra"]`, and
`advantage` (read at f2cd577, version 1.10.0.dev, and in 1.16.0). Log-probs and token ids are not among them, so a
subclass must add them. Its tensors are padded: prompts on the left, completions on the right. The tests run it with
1.0.0 and 1.16.0, without vLLM.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpRecord,
    DumpWriter,
    ReadLimits,
    SavedIteration,
    Warn,
    first_keys,
    matching,
    parquet_rows,
    responses_of,
)
from jackpot.analysis.replay.responses import SavedResponse
from jackpot.core.errors import DataError

HOW = """TRL's completions have only text and rewards. With log_completions=True and one process, train with
    class Logged(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask",
                         "tool_mask", "sampling_per_token_logps", "old_per_token_logps"):
                if name in output:
                    self._logs["extra"][name].extend(output[name].tolist())
            return output
Without old_per_token_logps, give --model and it is scored (at --temperature)."""
_OF_BATCH = ("prompt", "completion", "advantage", "sampling_per_token_logps")  # columns that differ between batches
_SAME = 1e-6  # relative difference of the advantages of a response that counts as none
_ROWS = 64  # of a file in memory at once
_NEEDED = ("completion_ids", "completion_mask", "sampling_per_token_logps")


def files(path: Path) -> list[Path]:
    """Find the completion files of a path, in their order."""
    return matching(path, "completions_*.parquet")


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    return path.suffix == ".parquet" and first_keys(path, warn, limits) >= {"step", "prompt", "completion"}


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    yield from responses_of(parquet_rows(path, warn, limits), path.name, warn, limits, _NEEDED, HOW, _renamed)


def mark(path: Path, limits: ReadLimits) -> str | None:
    """Digest a file's batch, as TRL saves a batch again at every logged step that trains on it."""
    try:
        there = [name for name in _OF_BATCH if name in pq.read_schema(path).names]
    except (OSError, pa.ArrowException):
        return None  # the reader warns of it
    problems: list[str] = []
    digest = hashlib.sha256()
    for _, row in parquet_rows(path, problems.append, limits, there):
        digest.update(repr(row).encode())
    return None if problems else digest.hexdigest()


def _renamed(row: DumpRecord) -> dict[str, Any]:
    """Rename the columns. `completion_mask` is 1 on all tokens; `tool_mask`, padded with 1, is 0 on a tool's tokens."""
    exists = row["completion_mask"]
    length = max((place + 1 for place, kept in enumerate(exists) if kept), default=0)
    of_model = row["tool_mask"] if row.get("tool_mask") is not None else exists
    mask = [kept and sampled for kept, sampled in zip(exists, of_model, strict=True)]
    renamed = {"token_ids": row["completion_ids"][:length], "sampled_mask": mask[:length]}
    renamed["advantages"] = row.get("advantage")
    if row.get("prompt_ids") is not None and row.get("prompt_mask") is not None:
        renamed["prompt_ids"] = torch.tensor(row["prompt_ids"])[torch.tensor(row["prompt_mask"]).bool()]
    for ours, theirs in (("rollout_log_probs", "sampling_per_token_logps"), ("old_log_probs", "old_per_token_logps")):
        renamed[ours] = None if row.get(theirs) is None else row[theirs][:length]
    return renamed


def file_name(iteration: int) -> str:
    """Return the file of an iteration."""
    return f"completions/completions_{iteration:05d}.parquet"


def write(saved: SavedIteration, path: Path) -> None:
    """Write an iteration with TRL's columns and those of the hint.

    Raises:
        DataError: the tokens of a response have several advantages, and TRL's file has one.
    """
    numbers = ("reward", "sampled_mask", "advantages", "rollout_log_probs", "old_log_probs")
    rows = saved.rows(("prompt", "response", "prompt_ids", "token_ids", *numbers))
    with closing(_Writer(path)) as file:
        while part := [*islice(rows, _ROWS)]:
            file.add(pa.Table.from_pylist([_row(saved, row) for row in part]))


class _Writer:
    """Writes a parquet file a few rows at a time, with the columns of the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        self._file = self._file or pq.ParquetWriter(self._path, table.schema)
        self._file.write_table(table)

    def close(self) -> None:
        if self._file:
            self._file.close()


def _row(saved: SavedIteration, row: DumpRecord) -> dict[str, Any]:
    prompt, ids = row["prompt_ids"], row["token_ids"]
    before, behind = [0] * (saved.prompt_width - len(prompt)), [0] * (saved.width - len(ids))
    sampled = [one for one, kept in zip(row["advantages"], row["sampled_mask"], strict=True) if kept] or [0.0]
    if max(sampled) - min(sampled) > _SAME * max(map(abs, sampled)):
        raise DataError(
            f"TRL has one advantage for a response, and a response of iteration {saved.number} has {min(sampled):.4g} "
            f"to {max(sampled):.4g}; give --format verl, slime, prime_rl or jsonl"
        )
    return {
        "step": saved.number,
        "prompt": row["prompt"],
        "completion": row["response"],
        "reward": row["reward"],
        "prompt_ids": before + prompt,
        "prompt_mask": before + [1] * len(prompt),
        "completion_ids": ids + behind,
        "completion_mask": [1] * len(ids) + behind,
        "tool_mask": [*map(int, row["sampled_mask"]), *[1] * len(behind)],
        "sampling_per_token_logps": row["rollout_log_probs"] + [0.0] * len(behind),
        "old_per_token_logps": row["old_log_probs"] + [0.0] * len(behind),
        "advantage": sampled[0],
    }


FORMAT = DumpFormat(
    name="trl",
    files=files,
    recognizes=recognizes,
    read=read,
    how=HOW,
    mark=mark,
    writer=DumpWriter(file_name=file_name, write=write, lost="top-k lists, log_probs at the update"),
)
