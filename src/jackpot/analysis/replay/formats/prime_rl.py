"""Reads and writes prime-rl's token exports, and reads the traces that it writes anyway.

`trainer.enable_token_export` writes token_exports/step_N/rank_R.jsonl, one sequence a line (`TokenExporter`, read at
559b447). Without it there are rollouts/step_N/train/effective/traces.jsonl, one episode a line (`FileMonitor` there,
`Episode.to_record` of verifiers, read at a60a606): trees of messages with token ids and the engine's log-probs.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jackpot.analysis.replay.formats.base import DumpFormat, DumpWriter, SavedIteration
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, first_line, json_lines, matching
from jackpot.analysis.replay.responses import DamagedRecord

HOW = """Run prime-rl with trainer.enable_token_export = true: token_exports/step_N/rank_R.jsonl has the log-probs of
the engine and of the trainer. rollouts/step_N/train/effective/traces.jsonl, always written, has only the engine's:
give --model, and the policy's are scored (at --temperature)."""


def files(path: Path) -> list[Path]:
    """Find the token exports of a path, or where there are none its traces of training, in their order."""
    if exports := matching(path, "rank_*.jsonl"):
        return exports
    traces = matching(path, "traces.jsonl")
    return traces if path.is_file() else [file for file in traces if file.parts[-3:-1] == ("train", "effective")]


def where(path: Path) -> str:
    """Name a file by its step."""
    step = next((name for name in reversed(path.parts[:-1]) if name.startswith("step_")), path.parent.name)
    return f"{step}/{path.name}"


def records(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield the lines of a token export, or the branches of traces with the columns of one."""
    lines = json_lines(path, warn)
    return _branches_of(lines, where(path), warn) if path.name == "traces.jsonl" else lines


def _branches_of(lines: Iterator[tuple[int, DumpRecord]], where: str, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield every branch of every trace, numbered, and warn of damaged episodes."""
    number = 0
    for line, episode in lines:
        try:
            branches = [
                branch | {"uid": f"{episode.get('id')}/{index}/{branch['uid']}"}
                for index, trace in enumerate(episode["traces"])
                for branch in _branches(trace["nodes"])
            ]
        except Exception as error:  # a stranger's file may hold anything in place of a tree
            warn(f"{where} line {line}: {type(error).__name__}: {first_line(error)}; left out")
            continue
        for branch in branches:
            yield number, branch
            number += 1


def _branches(nodes: Sequence[DumpRecord]) -> Iterator[dict[str, Any]]:
    """Yield the path from the root to each leaf; what several paths share is trained on in the first one only."""
    parents = [node.get("parent") for node in nodes]
    if any(parent is not None and not 0 <= parent < index for index, parent in enumerate(parents)):
        raise DamagedRecord("a message stands before the one that it answers")
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path, index = [], leaf
        while index is not None:
            path.append(index)
            index = parents[index]
        branch = _joined([(nodes[index], index in trained) for index in reversed(path)])
        trained.update(path)
        if any(branch.get("loss_mask") or [True]):
            yield branch | {"uid": leaf}


def _joined(path: Sequence[tuple[DumpRecord, bool]]) -> dict[str, Any]:
    """Join messages to columns [T]; log-probs and advantages stand at sampled tokens only. No tokens: no columns."""
    ids, kept = [], []
    columns: dict[str, list[Any]] = {"logprobs": [], "advantages": []}
    for node, is_trained in path:
        mask = node.get("mask") or []
        ids += node.get("token_ids") or []
        kept += [False] * len(mask) if is_trained else mask
        for name, column in columns.items():
            values = iter(node.get(name) or ())
            column += [next(values, None) if sampled else 0.0 for sampled in mask]

    if not ids:
        return {}
    branch = {"token_ids": ids, "loss_mask": kept, "inference_logprobs": columns["logprobs"]}
    trained = [value for value, sampled in zip(columns["advantages"], kept, strict=False) if sampled]
    return branch if None in trained else branch | {"advantages": columns["advantages"]}


def record(saved: SavedIteration, number: int, row: DumpRecord) -> dict[str, Any]:
    """Write a response as the token export of one rank has it, without entropies and masks of prime-rl's own loss."""
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
        "step": saved.number,
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
        "mismatch_kl": [math.expm1(value) - value for value in log_ratio],
        "log_importance_ratio": log_ratio,
        "importance_ratio": [math.exp(value) for value in log_ratio],
        "prob_delta": [math.exp(new) - math.exp(old) for new, old in zip(trainer, inference, strict=True)],
    } | absent


FORMAT = DumpFormat(
    name="prime_rl",
    files=files,
    records=records,
    marks=(frozenset({"trainer_logprobs", "micro_step"}), frozenset({"loss_mask", "inference_logprobs"})),
    needed=("token_ids", "loss_mask", "inference_logprobs"),
    how=HOW,
    columns=Columns(
        ids="token_ids",
        masks=("loss_mask", "rl_weights"),  # a token of weight 0 in the policy's loss is not trained on
        rollout_log_probs="inference_logprobs",
        old_log_probs="",
        log_probs="trainer_logprobs",
        uid=("step", "rank", "export_sequence_idx", "uid"),
        begins_sampled=True,
    ),
    where=where,
    writer=DumpWriter(
        file_name="token_exports/step_{}/rank_0.jsonl",
        columns=("prompt_ids", "token_ids", "sampled_mask", "advantages", "rollout_log_probs", "log_probs"),
        lost="top-k lists, old_log_probs, rewards, text",
        record=record,
    ),
)
