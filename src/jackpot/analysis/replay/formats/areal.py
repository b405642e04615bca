"""Reads AReaL's `rollout.dump_to_file`: LOG_PATH/rollout/VERSION/TASK.jsonl, one response a line.

AReaL writes `task_id, sample_idx, seqlen, prompt_len, head_version, tail_version, reward, prompt, completion`
(`_dump_trajectory`, read at 4aef98d). Token ids and log-probs are not among them, so its executor needs added lines.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpRecord,
    ReadLimits,
    Warn,
    first_keys,
    json_lines,
    matching,
    responses_of,
)
from jackpot.analysis.replay.responses import SavedResponse

HOW = """AReaL's rollout.dump_to_file has only text and rewards. Add to areal/infra/workflow_executor.py, in
_dump_trajectory, before await f.write(json.dumps(record) + ...):
    record |= {"input_ids": ids, "loss_mask": mask, "logprobs": traj["logprobs"][i, :seqlen].tolist()}
and give --model: the policy's log-probs are scored (at --temperature), as AReaL computes them later."""
_NEEDED = ("input_ids", "loss_mask", "logprobs")


def files(path: Path) -> list[Path]:
    """Find the dumped tasks of a path, without those of evaluations, in their order."""
    return [file for file in matching(path, "*.jsonl") if "eval-rollout" not in file.parts]


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    return path.suffix == ".jsonl" and first_keys(path, warn, limits) >= {"task_id", "sample_idx", "tail_version"}


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    where = f"{path.parent.name}/{path.name}"
    yield from responses_of(json_lines(path, warn, limits), where, warn, limits, _NEEDED, HOW, _renamed)


def _renamed(line: DumpRecord) -> dict[str, Any]:
    start = next((place for place, kept in enumerate(line["loss_mask"]) if kept), len(line["input_ids"]))
    return {
        "uid": f"{line.get('task_id')}/{line.get('sample_idx')}",
        "prompt_ids": line["input_ids"][:start],
        "token_ids": line["input_ids"][start:],
        "sampled_mask": line["loss_mask"][start:],
        "rollout_log_probs": line["logprobs"][start:],
    }


FORMAT = DumpFormat(name="areal", files=files, recognizes=recognizes, read=read, how=HOW)
