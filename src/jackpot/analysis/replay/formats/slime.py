"""Reads and writes slime's debug dumps, of training or of rollouts.

`--save-debug-train-data` and `--save-debug-rollout-data` write {"rollout_id", "samples": [...]} with torch.save (read
at 624b824, version 0.3.1). A sample's `tokens` are prompt and response, the other columns the response only. Only the
dump of training has the policy's `log_probs` and `advantages`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpRecord,
    DumpWriter,
    ReadLimits,
    SavedIteration,
    Warn,
    matching,
    responses_of,
    torch_file,
)
from jackpot.analysis.replay.responses import SavedResponse

HOW = """Run slime with --save-debug-train-data FOLDER/{rollout_id}.pt: it has the engine's and the policy's log-probs
and advantages. --save-debug-rollout-data has only the engine's: give --model, and the policy's are scored (at
--temperature)."""
_STATUS = {"stop": "completed", "length": "truncated", "aborted": "aborted"}
_NEEDED = ("tokens", "rollout_log_probs")


def files(path: Path) -> list[Path]:
    """Find the dumps of training or rollouts, without those of evaluations of a path, in their order."""
    return [file for file in matching(path, "*.pt") if not file.stem.startswith("eval_")]


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    content = torch_file(path, warn, limits) if path.suffix == ".pt" else None
    return isinstance(content, dict) and "samples" in content


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    content = torch_file(path, warn, limits)
    samples = content.get("samples") if isinstance(content, dict) else None
    if content is not None and not (isinstance(samples, list) and samples):
        warn(f"{path.name} has no list of samples and is left out")
        return
    yield from responses_of(enumerate(samples or ()), path.name, warn, limits, _NEEDED, HOW, _renamed)


def _renamed(sample: DumpRecord) -> dict[str, Any]:
    length = int(sample["response_lengths" if "response_lengths" in sample else "response_length"])
    start = len(sample["tokens"]) - length
    mask = sample.get("loss_masks", sample.get("loss_mask"))
    return {
        "uid": None if sample.get("sample_index", sample.get("index")) is None else _uid(sample),
        "prompt_ids": sample["tokens"][:start],
        "token_ids": sample["tokens"][start:],
        "sampled_mask": mask,
        "rollout_log_probs": sample["rollout_log_probs"],
        "old_log_probs": sample.get("log_probs"),
        "advantages": sample.get("advantages"),
    }


def _uid(sample: DumpRecord) -> str:
    return f"{sample.get('rollout_ids', sample.get('rollout_id'))}/{sample.get('sample_index', sample.get('index'))}"


def file_name(iteration: int) -> str:
    """Return the file of an iteration."""
    return f"{iteration}.pt"


def write(saved: SavedIteration, path: Path) -> None:
    """Write an iteration as a dump of rollouts, which `--load-debug-rollout-data` reads, with two columns of training.

    `Sample.from_dict` keeps `log_probs` and `advantages`, which are not among its fields, as attributes.
    """
    texts = ("prompt_uid", "prompt", "answer", "response", "finish", "reward")
    tokens = ("prompt_ids", "token_ids", "sampled_mask", "rollout_log_probs", "old_log_probs", "advantages")
    groups: dict[str, int] = {}
    samples = [
        _sample(number, groups.setdefault(row["prompt_uid"], len(groups)), row)
        for number, row in enumerate(saved.rows((*texts, *tokens)))
    ]
    torch.save({"rollout_id": saved.number, "samples": samples}, path)


def _sample(number: int, group: int, row: DumpRecord) -> dict[str, Any]:
    return {
        "group_index": group,
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


FORMAT = DumpFormat(
    name="slime",
    files=files,
    recognizes=recognizes,
    read=read,
    how=HOW,
    writer=DumpWriter(file_name=file_name, write=write, lost="top-k lists, log_probs at the update"),
)
