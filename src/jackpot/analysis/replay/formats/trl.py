"""Reads and writes TRL's `log_completions`: OUTPUT_DIR/completions/completions_STEP.parquet.

GRPOTrainer writes `step, prompt, completion`, a column for each reward function, what is in `_logs["extra"]`, and
`advantage` (read at f2cd577, version 1.10.0.dev, and in 1.16.0). Log-probs and token ids are not among them, so a
subclass must add them. Its tensors are padded: prompts on the left, completions on the right. The tests run it with
1.0.0 and 1.16.0, without vLLM.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jackpot.analysis.replay.formats.base import DumpFormat, DumpWriter, SavedIteration
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import DumpRecord, matching, parquet_rows
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
_SAME = 1e-6  # relative difference of the advantages of a response that counts as none
_ROWS = 64  # of a file in memory at once


def record(saved: SavedIteration, number: int, row: DumpRecord) -> dict[str, Any]:
    """Write a response with TRL's columns and those of the hint.

    Raises:
        DataError: the tokens of the response have several advantages, and TRL's file has one.
    """
    prompt, ids = row["prompt_ids"], row["token_ids"]
    before, behind = [0] * (saved.prompt_width - len(prompt)), [0] * (saved.width - len(ids))

    sampled = [value for value, kept in zip(row["advantages"], row["sampled_mask"], strict=True) if kept] or [0.0]
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


def save(_: SavedIteration, path: Path, records: Iterator[DumpRecord]) -> None:
    """Write a parquet file a few rows at a time, with the types of the first."""
    table = pa.Table.from_pylist([*islice(records, _ROWS)])
    with pq.ParquetWriter(path, table.schema) as file:
        while len(table):
            file.write_table(table)
            table = pa.Table.from_pylist([*islice(records, _ROWS)])


FORMAT = DumpFormat(
    name="trl",
    files=lambda path: matching(path, "completions_*.parquet"),
    records=parquet_rows,
    marks=(frozenset({"step", "prompt", "completion"}),),
    needed=("completion_ids", "completion_mask", "sampling_per_token_logps"),
    how=HOW,
    columns=Columns(
        prompt="prompt_ids",
        ids="completion_ids",
        present=("prompt_mask", "completion_mask"),
        masks=("completion_mask", "tool_mask"),
        rollout_log_probs="sampling_per_token_logps",
        old_log_probs="old_per_token_logps",
        advantages="advantage",
    ),
    batch=("prompt", "completion", "advantage", "sampling_per_token_logps"),
    writer=DumpWriter(
        file_name="completions/completions_{:05d}.parquet",
        columns=(
            *("prompt", "response", "prompt_ids", "token_ids"),
            *("reward", "sampled_mask", "advantages", "rollout_log_probs", "old_log_probs"),
        ),
        lost="top-k lists, log_probs at the update",
        record=record,
        save=save,
    ),
)
