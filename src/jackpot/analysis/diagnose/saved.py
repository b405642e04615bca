"""Reads signs from saved rollouts that are no metrics: what prompts and responses say, and what the log-probs agree with.

Each becomes a number of its iteration under a name that begins with `saved/`, or with `engine/` where it says which wrong
log-probs an engine reports.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jackpot.config.config import Config
from jackpot.training.run_folder.rollouts import RolloutFile, flat_column, list_rollout_files, read_columns

_COLUMNS = ("prompt", "answer", "response", "reward", "correct", "prompt_ids", "token_ids", "tokens", "prompt_uid")
_LOG_PROBS = ("rollout_log_probs", "rollout_top_log_probs", "old_log_probs", "rollout_model_log_probs", "sampled_mask")
_END = re.compile(r"<(/s>|eos|\|?(im_)?end|\|?eot)")  # how tokens begin that end a response
_SCALES = np.round(np.arange(0.3, 2.01, 0.05), 2)  # temperatures of the engine over those that training knows
_EXPLAINS = 0.2  # share of a gap that may be left where something explains it
_SMALL_GAP = 1e-4  # mean |p_engine - p_training| that needs no explanation


def read_saved(run: Path, config: Config) -> list[dict[str, Any]]:
    """Return a line for the first and for the newest file of saved rollouts of a run folder; none without files.

    Files that cannot be read are left out.
    """
    files, _ = list_rollout_files(run)
    held_out = _held_out(run)
    lines = []
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
        table = read_columns(file)
        if not table.num_rows or not {*_COLUMNS} <= set(table.column_names):
            continue
        lines.append({"iteration": file.iteration} | _of_texts(table, config, held_out) | _of_rewards(table))
        if file.iteration == 1 and {*_LOG_PROBS[:3]} <= set(table.column_names):
            lines[-1] |= _of_log_probs(table)
    return lines


def _held_out(run: Path) -> set[tuple[str, str]]:
    """Return problem and answer of the newest evaluation of the policy."""
    files = sorted((run / "eval").glob("iteration-*-policy.jsonl"))
    rows = (json.loads(line) for line in files[-1].read_text().splitlines()) if files else ()
    return {(row["prompt"], row["answer"]) for row in rows}


def _of_texts(table: pa.Table, config: Config, held_out: set[tuple[str, str]]) -> dict[str, float | None]:
    """Compare prompts with prompts, their answers and the held-out problems, and responses with each other."""
    rows = table.select(_COLUMNS).to_pylist()
    asked = {row["prompt_uid"]: (row["prompt"], row["answer"], tuple(row["prompt_ids"])) for row in rows}
    answers: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for _, answer, ids in asked.values():
        answers[ids].add(answer)

    responses = Counter(row["response"] for row in rows)
    stops = set(config.sampling.stop_token_ids)
    inside = sum(any(_END.match(token) for token in row["tokens"][:-1]) for row in rows)
    found = {
        "saved/commonest": max(responses.values()) / len(rows) if len(answers) > 1 else None,
        "saved/end_inside": inside / len(rows),
        "saved/ended_by_stop_ids": sum(row["token_ids"][-1:] != [] and row["token_ids"][-1] in stops for row in rows) / len(rows),
    }
    if not all(answer for _, answer, _ in asked.values()):  # of an environment, whose state is no text
        return found
    return found | {
        "saved/ambiguous_prompts": sum(len(answers[ids]) > 1 for _, _, ids in asked.values()) / len(asked),
        "saved/repeated_prompts": 1.0 - len(answers) / len(asked),
        "saved/held_out": sum((text, answer) in held_out for text, answer, _ in asked.values()) / len(asked),
    }


def _of_rewards(table: pa.Table) -> dict[str, float | None]:
    """Compare rewards with verdicts and with lengths."""
    rewards = table.column("reward").to_numpy()
    lengths = np.array([len(ids) for ids in table.column("token_ids").to_pylist()])
    verdicts = table.column("correct").to_pylist()
    spread = np.ptp(rewards)
    found: dict[str, float | None] = {"saved/length_reward": None, "saved/right_earn": None}
    if spread and np.ptp(lengths):
        found["saved/length_reward"] = float(np.corrcoef(rewards, lengths)[0, 1])
    if spread and {True, False} <= set(verdicts):
        right = np.array([bool(verdict) for verdict in verdicts])
        found["saved/right_earn"] = float((rewards[right].mean() - rewards[~right].mean()) / spread)
    return found


def _of_log_probs(table: pa.Table) -> dict[str, float]:
    """Say of an engine whose log-probs are not training's what they do agree with: 1 or the ratio of temperatures."""
    roles = {"policy": "old_log_probs", "rollout_model": "rollout_model_log_probs"}
    writers = set(table.column("sampled_by").to_pylist())
    own = roles[next(iter(writers))] if len(writers) == 1 else ""
    if own not in table.column_names:
        return {}
    engine, trained = flat_column(table, "rollout_log_probs"), flat_column(table, own)
    found = {"engine/bf16": float(np.mean(engine.astype(np.float32).view(np.uint32) & 0xFFFF == 0))}

    def gap(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.abs(np.exp(one) - np.exp(other)).mean())

    if (actual := gap(engine, trained)) <= _SMALL_GAP:
        return found
    others = {f"engine/{role}": flat_column(table, name) for role, name in roles.items() if name in table.column_names}
    known = {name: gap(engine, column) for name, column in others.items() if name != f"engine/{next(iter(writers))}"}
    known |= {"engine/shifted": min(gap(engine[1:], trained[:-1]), gap(engine[:-1], trained[1:]))}

    lists = np.array([row for rows in table.column("rollout_top_log_probs").to_pylist() for row in rows])
    if lists.ndim == 2 and lists.shape[1] > 1:
        scaled = {scale: scale * engine - np.log(np.exp(scale * lists).sum(1)) for scale in _SCALES}
        gaps = {scale: gap(log_probs, trained) for scale, log_probs in scaled.items()}
        best = min(gaps, key=gaps.__getitem__)
        if gaps[best] < _EXPLAINS * actual:
            found["engine/temperature"] = float(best)
    return found | {name: 1.0 for name, left in known.items() if left < _EXPLAINS * actual}
