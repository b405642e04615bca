"""Reads and writes verl's `trainer.rollout_data_dir`: one STEP.jsonl for each step, a line for each response.

verl writes `input, output, gts, score, step` and every list of `reward_extra_infos_dict` that has an entry for each
response (`_write_generations`; read at 1dda039, version 0.10.0.dev). None of them has log-probs, so verl's trainer
needs added lines. The tensors of ray_trainer.py are padded: prompts [P] on the left, responses [R] on the right,
`attention_mask` has [P + R] entries. Those of v1/trainer_base.py, the default, are nested: not padded.
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
    first_keys,
    json_lines,
    matching,
    responses_of,
    write_lines,
)
from jackpot.analysis.replay.responses import SavedResponse

HOW = """verl's rollout_data_dir has only text and scores. Set actor_rollout_ref.rollout.calculate_log_probs=True, and
add to _log_rollout_data in verl/trainer/ppo/v1/trainer_base.py, before self._dump_generations( ... ):
    names = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "advantages"]
    more = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    for name in names:
        reward_extra_infos_dict[name] = [more[name][row].tolist() for row in sorted_indices]
With trainer.use_v1=False, add to that of verl/trainer/ppo/ray_trainer.py, in the same place:
    for name in ("prompts", "responses", "attention_mask", "response_mask",
                 "rollout_log_probs", "old_log_probs", "advantages"):
        reward_extra_infos_to_dump[name] = batch.batch[name].tolist()
Without old_log_probs, give --model and it is scored (at --temperature)."""
_TOKENS = ("rollout_log_probs", "old_log_probs", "advantages")
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
    if exists is None:  # not padded, or at least up to the last token that is trained on
        length = max((place + 1 for place, kept in enumerate(line["response_mask"]) if kept), default=0)
    else:
        length = int(sum(exists[len(exists) - width :]))
    prompt = line.get("prompts")
    if prompt is not None and exists is not None:
        prompt = torch.tensor(prompt)[torch.tensor(exists[: len(prompt)]).bool()]
    renamed = {
        "uid": line.get("uid") or line.get("request_id"),
        "prompt_ids": prompt,
        "token_ids": line["responses"][:length],
        "sampled_mask": line["response_mask"][:length],
    }
    for name in _TOKENS:
        renamed[name] = None if line.get(name) is None else line[name][:length]
    return renamed


def file_name(iteration: int) -> str:
    """Return the file of an iteration."""
    return f"{iteration}.jsonl"


def write(saved: SavedIteration, path: Path) -> None:
    """Write an iteration with verl's columns and those of the first hint, padded as ray_trainer.py has them."""
    columns = ("uid", "prompt", "answer", "response", "reward", "prompt_ids", "token_ids", "sampled_mask", *_TOKENS)
    write_lines(path, (_line(saved, row) for row in saved.rows(columns)))


def _line(saved: SavedIteration, row: DumpRecord) -> dict[str, Any]:
    prompt, ids = row["prompt_ids"], row["token_ids"]
    before, behind = [0] * (saved.prompt_width - len(prompt)), [0] * (saved.width - len(ids))
    return {
        "input": row["prompt"],
        "output": row["response"],
        "gts": row["answer"],
        "score": row["reward"],
        "step": saved.number,
        "uid": row["uid"],
        "prompts": before + prompt,
        "responses": ids + behind,
        "attention_mask": before + [1] * (len(prompt) + len(ids)) + behind,
        "response_mask": [*map(int, row["sampled_mask"]), *behind],
    } | {name: row[name] + [0.0] * len(behind) for name in _TOKENS}


FORMAT = DumpFormat(
    name="verl",
    files=files,
    recognizes=recognizes,
    read=read,
    how=HOW,
    writer=DumpWriter(file_name=file_name, write=write, lost="top-k lists, log_probs at the update"),
)
