"""Reads verl's `trainer.rollout_data_dir`: one STEP.jsonl for each step, a line for each response.

verl writes `input, output, gts, score, step` and every list of `reward_extra_infos_dict` that has an entry for each
response (`_write_generations`; read at 1dda039, version 0.10.0.dev). None of them has log-probs, so verl's trainer
needs added lines. Its tensors are padded: prompts [P] on the left, responses [R] on the right, `attention_mask` has
[P + R] entries.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

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

HOW = """verl's rollout_data_dir has only text and scores. Set actor_rollout_ref.rollout.calculate_log_probs=True and
trainer.use_v1=False, whose trainer is verl/trainer/ppo/ray_trainer.py (the default, use_v1=True, logs in
verl/trainer/ppo/v1/trainer_base.py, where a batch is kept in another form), and add to _log_rollout_data there, before
self._dump_generations( ... ):
    for name in ("prompts", "responses", "attention_mask", "response_mask",
                 "rollout_log_probs", "old_log_probs", "advantages"):
        reward_extra_infos_to_dump[name] = batch.batch[name].tolist()
Without old_log_probs, give --model and it is scored (at --temperature)."""
_NEEDED = ("responses", "response_mask", "rollout_log_probs")


def files(path: Path) -> list[Path]:
    """Find the step files of a path, in their order."""
    return matching(path, "*.jsonl")


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    return path.suffix == ".jsonl" and first_keys(path, warn, limits) >= {"input", "output", "step"}


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    yield from responses_of(json_lines(path, warn, limits), path.name, warn, limits, _NEEDED, HOW, _renamed)


def _renamed(line: DumpRecord) -> dict[str, Any]:
    exists = line.get("attention_mask")
    width = len(line["responses"])
    if exists is None:  # up to the last token that is trained on
        length = max((place + 1 for place, kept in enumerate(line["response_mask"]) if kept), default=0)
    else:
        length = int(sum(exists[len(exists) - width :]))
    prompt = line.get("prompts")
    if prompt is not None and exists is not None:
        prompt = torch.tensor(prompt)[torch.tensor(exists[: len(prompt)]).bool()]
    renamed = {
        "uid": line.get("uid") or line.get("request_id"),
        "prompt_ids": prompt if exists is not None else None,
        "token_ids": line["responses"][:length],
        "sampled_mask": line["response_mask"][:length],
    }
    for name in ("rollout_log_probs", "old_log_probs", "advantages"):
        renamed[name] = None if line.get(name) is None else line[name][:length]
    return renamed


FORMAT = DumpFormat(name="verl", files=files, recognizes=recognizes, read=read, how=HOW)
