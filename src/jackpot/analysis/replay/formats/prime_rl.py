"""Reads and writes prime-rl's token exports, and reads the traces that it writes anyway.

`trainer.enable_token_export` writes token_exports/step_N/rank_R.jsonl, one sequence a line (`TokenExporter`, read at
559b447). Without it there are rollouts/step_N/train/effective/traces.jsonl, one episode a line (`FileMonitor` there,
`Episode.to_record` of verifiers, read at a60a606): trees of messages with token ids and the engine's log-probs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpRecord,
    DumpWriter,
    ReadLimits,
    SavedIteration,
    Warn,
    first_keys,
    first_line,
    json_lines,
    matching,
    responses_of,
    write_lines,
)
from jackpot.analysis.replay.responses import DamagedRecord, SavedResponse

HOW = """Run prime-rl with trainer.enable_token_export = true: token_exports/step_N/rank_R.jsonl has the log-probs of
the engine and of the trainer. rollouts/step_N/train/effective/traces.jsonl, always written, has only the engine's:
give --model, and the policy's are scored (at --temperature)."""
_EXPORT = ("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")
_TRACE = ("token_ids", "mask", "logprobs")


def files(path: Path) -> list[Path]:
    """Find the token exports of a path, or where there are none its traces of training, in their order."""
    if found := matching(path, "rank_*.jsonl"):
        return found
    traces = matching(path, "traces.jsonl")
    return traces if path.is_file() else [file for file in traces if file.parts[-3:-1] == ("train", "effective")]


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    keys = first_keys(path, warn, limits) if path.suffix == ".jsonl" else set()
    return keys >= {"trainer_logprobs", "micro_step"} or keys >= {"traces", "task"}


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    is_trace = path.name == "traces.jsonl"
    step = next((name for name in reversed(path.parts[:-1]) if name.startswith("step_")), path.parent.name)
    lines = json_lines(path, warn, limits)
    records = _branches_of(lines, f"{step}/{path.name}", warn) if is_trace else lines
    needed, rename = (_TRACE, _from_trace) if is_trace else (_EXPORT, _from_export)
    yield from responses_of(records, f"{step}/{path.name}", warn, limits, needed, HOW, rename)


def _from_export(record: DumpRecord) -> dict[str, Any]:
    """Rename the columns; a token of weight 0 in the policy's loss is not trained on. None is what was not finite."""
    weights = record.get("rl_weights") or [None]
    mask = record["loss_mask"]
    if weights[0] is not None:
        mask = [kept and weight != 0.0 for kept, weight in zip(mask, weights, strict=True)]
    uid = "/".join(str(record.get(name)) for name in ("step", "rank", "export_sequence_idx"))
    columns = {
        "rollout_log_probs": record["inference_logprobs"],
        "log_probs": record["trainer_logprobs"],
        "advantages": record.get("advantages"),
    }
    return _response(uid, record["token_ids"], mask, columns)


def _from_trace(branch: DumpRecord) -> dict[str, Any]:
    columns = {"rollout_log_probs": branch["logprobs"], "advantages": branch.get("advantages")}
    return _response(branch["uid"], branch["token_ids"], branch["mask"], columns)


def _response(uid: str, ids: Sequence[int], mask: Sequence[bool], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Divide a sequence before the first token that is trained on."""
    start = next((place for place, kept in enumerate(mask) if kept), len(ids))
    renamed = {"uid": uid, "prompt_ids": ids[:start], "token_ids": ids[start:], "sampled_mask": mask[start:]}
    for name, column in columns.items():
        if column is not None:
            renamed[name] = [math.nan if value is None else value for value in column[start:]]
    return renamed


def _branches_of(lines: Iterator[tuple[int, DumpRecord]], where: str, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield every branch of every trace, numbered, and warn of damaged episodes."""
    number = 0
    for line, episode in lines:
        try:
            found = [
                branch | {"uid": f"{episode.get('id')}/{place}/{branch['uid']}"}
                for place, trace in enumerate(episode["traces"])
                for branch in _branches(trace["nodes"])
            ]
        except Exception as error:  # a stranger's file may hold anything in place of a tree
            warn(f"{where} line {line}: {type(error).__name__}: {first_line(error)}; left out")
            continue
        for branch in found:
            yield number, branch
            number += 1


def _branches(nodes: Sequence[DumpRecord]) -> Iterator[dict[str, Any]]:
    """Yield the path from the root to each leaf; what several paths share is trained on in the first one only."""
    parents = [node.get("parent") for node in nodes]
    if any(parent is not None and not 0 <= parent < place for place, parent in enumerate(parents)):
        raise DamagedRecord("a message stands before the one that it answers")
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path, place = [], leaf
        while place is not None:
            path.append(place)
            place = parents[place]
        branch = _joined([(nodes[place], place in trained) for place in reversed(path)])
        trained.update(path)
        if any(branch.get("mask") or [True]):
            yield branch | {"uid": leaf}


def _joined(path: Sequence[tuple[DumpRecord, bool]]) -> dict[str, Any]:
    """Join messages to columns [T]; log-probs and advantages stand at sampled tokens only. No tokens: no columns."""
    columns: dict[str, list[Any]] = {"token_ids": [], "mask": [], "logprobs": [], "advantages": []}
    for node, is_trained in path:
        mask = node.get("mask") or []
        columns["token_ids"] += node.get("token_ids") or []
        columns["mask"] += [False] * len(mask) if is_trained else mask
        for name in ("logprobs", "advantages"):
            values = iter(node.get(name) or ())
            columns[name] += [next(values, None) if sampled else 0.0 for sampled in mask]
    if not columns["token_ids"]:
        return {}
    sampled = [value for value, kept in zip(columns["advantages"], columns["mask"], strict=False) if kept]
    return columns | {"advantages": None} if None in sampled else columns


def file_name(iteration: int) -> str:
    """Return the file of an iteration."""
    return f"token_exports/step_{iteration}/rank_0.jsonl"


def write(saved: SavedIteration, path: Path) -> None:
    """Write an iteration as the token export of one rank, without entropies and masks of prime-rl's own loss."""
    names = ("prompt_ids", "token_ids", "sampled_mask", "advantages", "rollout_log_probs", "log_probs")
    rows = enumerate(saved.rows(names))
    write_lines(path, (_record(saved.number, number, row) for number, row in rows))


def _record(step: int, number: int, row: DumpRecord) -> dict[str, Any]:
    prompt = [0.0] * len(row["prompt_ids"])
    ids = row["prompt_ids"] + row["token_ids"]
    mask = [False] * len(prompt) + row["sampled_mask"]
    inference, trainer = prompt + row["rollout_log_probs"], prompt + row["log_probs"]
    log_ratio = [new - old if kept else 0.0 for new, old, kept in zip(trainer, inference, mask, strict=True)]
    absent = dict.fromkeys(
        ("entropy", "is_masked", "is_masked_high", "is_masked_low", "rl_weights", "ce_weights", "ref_kl_weights"),
        [None] * len(ids),
    )
    return {
        "schema_version": 1,
        "step": step,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": number,
        "export_sequence_idx": number,
        "env_name": "jackpot",
        "token_ids": ids,
        "position_ids": list(range(len(ids))),
        "loss_mask": mask,
        "advantages": prompt + row["advantages"],
        "inference_logprobs": inference,
        "trainer_logprobs": trainer,
        "mismatch_kl": [math.expm1(one) - one for one in log_ratio],
        "log_importance_ratio": log_ratio,
        "importance_ratio": [math.exp(one) for one in log_ratio],
        "prob_delta": [math.exp(new) - math.exp(old) for new, old in zip(trainer, inference, strict=True)],
    } | absent


FORMAT = DumpFormat(
    name="prime_rl",
    files=files,
    recognizes=recognizes,
    read=read,
    how=HOW,
    writer=DumpWriter(file_name=file_name, write=write, lost="top-k lists, old_log_probs, rewards, text"),
)
