"""Reads and writes slime's debug dumps, of training or of rollouts.

`--save-debug-train-data` and `--save-debug-rollout-data` write {"rollout_id", "samples": [...]} with torch.save (read
at 624b824, version 0.3.1). A sample's `tokens` are prompt and response, the other columns the response only. Only the
dump of training has the policy's `log_probs` and `advantages`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jackpot.analysis.replay.formats.base import DumpFormat, DumpWriter, SavedIteration
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, matching, torch_file

HOW = """Run slime with --save-debug-train-data FOLDER/{rollout_id}.pt: it has the engine's and the policy's log-probs
and advantages. --save-debug-rollout-data has only the engine's: give --model, and the policy's are scored (at
--temperature)."""
_STATUS = {"stop": "completed", "length": "truncated", "aborted": "aborted"}


def files(path: Path) -> list[Path]:
    """Find the dumps of training or rollouts of a path, without those of evaluations, in their order."""
    return [file for file in matching(path, "*.pt") if not file.stem.startswith("eval_")]


def records(path: Path, warn: Warn) -> Iterator[tuple[int, Any]]:
    """Yield the samples of a file, numbered, and warn of a file without a list of them."""
    content = torch_file(path, warn)
    samples = content.get("samples") if isinstance(content, dict) else None
    if isinstance(samples, list) and samples:
        yield from enumerate(samples)
    elif content is not None:
        warn(f"{path.name} has no list of samples and is left out")


def record(saved: SavedIteration, number: int, row: DumpRecord) -> dict[str, Any]:
    """Write a response as `--load-debug-rollout-data` reads it, with two columns of the dump of training.

    `Sample.from_dict` keeps `log_probs` and `advantages`, which are not among its fields, as attributes.
    """
    return {
        "group_index": row["prompt_uid"],
        "index": number,
        "rollout_id": None,
        "prompt": row["prompt"],
        "tokens": row["prompt_ids"] + row["token_ids"],
        "response": row["response"],
        "response_length": len(row["token_ids"]),
        "label": row["answer"],
        "reward": row["reward"],
        "loss_mask": [*map(int, row["sampled_mask"])],
        "rollout_log_probs": row["rollout_log_probs"],
        "status": _STATUS[row["finish"]],
        "metadata": {},
        "log_probs": row["old_log_probs"],
        "advantages": row["advantages"],
    }


def save(saved: SavedIteration, path: Path, records: Iterator[DumpRecord]) -> None:
    """Write the samples of an iteration, groups of a prompt numbered as they come."""
    groups: dict[str, int] = {}
    samples = [{**sample, "group_index": groups.setdefault(sample["group_index"], len(groups))} for sample in records]
    torch.save({"rollout_id": saved.number, "samples": samples}, path)


FORMAT = DumpFormat(
    name="slime",
    files=files,
    records=records,
    marks=(frozenset({"tokens"}),),
    needed=("tokens", "rollout_log_probs"),
    how=HOW,
    columns=Columns(
        ids="tokens",
        masks=("loss_masks", "loss_mask"),
        length=("response_lengths", "response_length"),
        old_log_probs="log_probs",
        uid=("rollout_ids", "rollout_id", "sample_index", "index"),
        at_end=True,
    ),
    writer=DumpWriter(
        file_name="{}.pt",
        columns=(
            *("prompt_uid", "prompt", "answer", "response", "finish", "reward"),
            *("prompt_ids", "token_ids", "sampled_mask", "rollout_log_probs", "old_log_probs", "advantages"),
        ),
        lost="top-k lists, log_probs at the update",
        record=record,
        save=save,
    ),
)
