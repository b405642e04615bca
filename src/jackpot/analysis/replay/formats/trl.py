"""Reads TRL's `log_completions`: OUTPUT_DIR/completions/completions_STEP.parquet.

GRPOTrainer writes `step, prompt, completion`, a column for each reward function, `advantage`, and what is in
`_logs["extra"]` (read at f2cd577, version 1.10.0.dev). Log-probs and token ids are not among them, so a subclass must
add them. Its tensors are padded: prompts on the left, completions on the right. Run with 1.16.0 too, without vLLM.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpRecord,
    ReadLimits,
    Warn,
    first_keys,
    matching,
    parquet_rows,
    responses_of,
)
from jackpot.analysis.replay.responses import SavedResponse

HOW = """TRL's completions have only text and rewards. With log_completions=True, use_vllm=True and one process, train
with
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


FORMAT = DumpFormat(name="trl", files=files, recognizes=recognizes, read=read, how=HOW, mark=mark)
