"""Reads signs from saved rollouts that are no metrics: what prompts and responses say, what log-probs agree with.

Each becomes a number of its iteration under a name that begins with `saved/`, or with `engine/` where it says what an
engine reports.
"""

import json
import re
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from jackpot.config.config import Config
from jackpot.training.run_folder.rollouts import (
    UnreadableRollouts,
    flat_column,
    list_rollout_files,
    read_columns,
)

_COLUMNS = (
    "prompt",
    "answer",
    "response",
    "finish",
    "reward",
    "correct",
    "prompt_ids",
    "token_ids",
    "tokens",
    "prompt_uid",
)
_DRAWS = ("rollout_log_probs", "rollout_top_log_probs", "sampled_mask")
_END = re.compile(r"<(/s>|eos|\|?(im_)?end|\|?eot)")  # how tokens begin that end a response
_SCALES = np.round(np.arange(0.3, 2.01, 0.05), 2)  # temperatures of the engine over those that training knows
_EXPLAINS = 0.2  # share of a gap that may be left where something explains it
_SMALL_GAP = 1e-4  # mean |p_engine - p_training| that needs no explanation
_FLOOR = -10.0  # log-prob below which all tokens count alike
_CERTAIN = 1e-6  # variance of the log-prob of a token that is hardly drawn at random
_UNSURE = -0.01  # log-prob below which a number that rounding to bf16 leaves alone is no chance


def read_saved(run: Path, config: Config) -> list[dict[str, Any]]:
    """Return a line for each file of saved rollouts of a run folder; none without files.

    Files that cannot be read are left out.
    """
    files, _ = list_rollout_files(run)
    held_out = _held_out(run)
    answers: dict[Any, set[str]] = defaultdict(set)  # to each prompt, of the held-out problems and of all files
    for text, answer in held_out:
        answers[text].add(answer)

    lines = []
    for file in files:
        with suppress(UnreadableRollouts):
            table = read_columns(file, list(_COLUMNS))
            lines.append({"iteration": file.iteration} | _of_prompts(table, held_out, answers))
            lines[-1] |= _of_responses(table, config) | _of_rewards(table)
            lines[-1] |= _of_draws(read_columns(file, list(_DRAWS)))
            if file.iteration == 1:  # before any update, so that both sides have the same weights
                lines[-1] |= _of_log_probs(read_columns(file))
    return lines


def _held_out(run: Path) -> set[tuple[str, str]]:
    """Return problem and answer of the newest evaluation of the policy, where problems have answers."""
    files = sorted((run / "eval").glob("iteration-*-policy.jsonl"))
    rows = (json.loads(line) for line in files[-1].read_text().splitlines()) if files else ()
    return {(row["prompt"], row["answer"]) for row in rows if row["answer"]}


def _of_prompts(
    table: pa.Table, held_out: set[tuple[str, str]], answers: dict[Any, set[str]]
) -> dict[str, float | None]:
    """Compare prompts with each other and with the held-out problems, and add to the answers of each."""
    rows = table.select(["prompt_uid", "prompt", "answer", "prompt_ids"]).to_pylist()
    asked = {row["prompt_uid"]: (row["prompt"], row["answer"], tuple(row["prompt_ids"])) for row in rows}
    if not all(answer for _, answer, _ in asked.values()):  # of an environment, whose state is no text
        return {}
    for text, answer, ids in asked.values():
        answers[ids].add(answer)
        answers[text].add(answer)
    return {
        "saved/ambiguous_prompts": fmean(
            max(len(answers[ids]), len(answers[text])) > 1 for text, _, ids in asked.values()
        ),
        "saved/repeated_prompts": 1.0 - len({ids for _, _, ids in asked.values()}) / len(asked),
        "saved/held_out": fmean((text, answer) in held_out for text, answer, _ in asked.values()),
    }


def _of_responses(table: pa.Table, config: Config) -> dict[str, float]:
    """Say how alike the responses are, and how they end."""
    rows = table.select(["response", "token_ids", "tokens"]).to_pylist()
    stops = set(config.sampling.stop_token_ids)
    found = {
        "saved/end_inside": fmean(any(map(_END.match, row["tokens"][:-1])) for row in rows),
        "saved/ended_by_stop_ids": fmean(not stops.isdisjoint(row["token_ids"][-1:]) for row in rows),
    }
    if len(set(table.column("prompt").to_pylist())) > 1:
        found["saved/commonest"] = max(Counter(row["response"] for row in rows).values()) / len(rows)
    return found


def _of_rewards(table: pa.Table) -> dict[str, float]:
    """Compare rewards with verdicts, with lengths, and with those of responses that were cut."""
    rewards, columns = table.column("reward").to_numpy(), table.select(["correct", "finish", "token_ids"]).to_pydict()
    right, wrong = (np.array([one is verdict for one in columns["correct"]]) for verdict in (True, False))
    cut, lengths = np.array(columns["finish"]) == "length", np.array([*map(len, columns["token_ids"])])
    found, width = {}, float(np.ptp(rewards))
    if width and np.ptp(lengths):
        found["saved/length_reward"] = float(np.corrcoef(rewards, lengths)[0, 1])
    if width and right.any() and wrong.any():
        found["saved/right_earn"] = float(rewards[right].mean() - rewards[wrong].mean()) / width
    if cut.any():
        found["saved/cut_earn"] = float(rewards[cut].mean() - rewards.min())
    return found


def _of_draws(table: pa.Table) -> dict[str, float]:
    """Return how many standard errors the log-probs of the drawn tokens are above what the engine's lists expect."""
    drawn = flat_column(table, "rollout_log_probs")
    top = np.maximum(_lists(table, len(drawn)), _FLOOR)
    if not top.size:
        return {}
    probs, outside = np.exp(top), top.min(1)
    rest = np.maximum(1.0 - probs.sum(1), 0.0)
    mean = (probs * top).sum(1) + rest * outside
    variance = (probs * top**2).sum(1) + rest * outside**2 - mean**2
    chosen = flat_column(table, "sampled_mask").astype(bool) & (variance > _CERTAIN)
    errors = float(np.sqrt(variance[chosen].sum()))
    return {"engine/draws": float((np.maximum(drawn, outside) - mean)[chosen].sum()) / errors} if errors else {}


def _lists(table: pa.Table, tokens: int) -> np.ndarray:
    """Return the engine's top log-probs, [tokens, k]."""
    return table.column("rollout_top_log_probs").combine_chunks().flatten().flatten().to_numpy().reshape(tokens, -1)


def _of_log_probs(table: pa.Table) -> dict[str, float]:
    """Say what the log-probs of an engine agree with where they are not training's."""
    names = {"policy": "old_log_probs", "rollout_model": "rollout_model_log_probs"}
    trained = {role: flat_column(table, name) for role, name in names.items() if name in table.column_names}
    writer, *others = set(table.column("sampled_by").to_pylist())
    engine = flat_column(table, "rollout_log_probs")
    unsure = engine[engine < _UNSURE].astype(np.float32).view(np.uint32)
    found = {"engine/bf16": float((unsure & 0xFFFF == 0).mean())} if len(unsure) else {}
    if others or writer not in trained:
        return found

    def gap(log_probs: np.ndarray, of: np.ndarray = trained[writer]) -> float:
        return float(np.abs(np.exp(log_probs) - np.exp(of)).mean())

    limit = _EXPLAINS * gap(engine)
    if gap(engine) <= _SMALL_GAP:
        return found
    lengths = [len(row) for row in table.column("token_ids").to_pylist()]
    inner = np.setdiff1d(np.arange(1, len(engine)), np.cumsum(lengths))  # tokens behind another one of their response
    both = ((inner, inner - 1), (inner - 1, inner))
    nearby = min(gap(engine[here], trained[writer][there]) for here, there in both)
    found["engine/off_by_one"] = float(nearby < limit)
    found["engine/of_other_model"] = float(
        any(gap(engine, trained[role]) < limit for role in trained if role != writer)
    )

    top = _lists(table, len(engine))
    if top.shape[1] > 1:
        gaps = {scale: gap(scale * engine - np.log(np.exp(scale * top).sum(1))) for scale in _SCALES}
        best = min(gaps, key=gaps.__getitem__)
        found["engine/temperature"] = float(best) if gaps[best] < limit else 1.0
    return found
