"""Saved rollouts as data for the page's token inspector: whole responses, packed by saved iteration. Layer 6.

A pack is JSON of columns, all tokens of the chosen responses behind each other, compressed; the page unpacks one when
it is looked at. Numbers have four significant digits, top-k probabilities three.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from jackpot.report.runs import Run
from jackpot.report.saved import Saved, UnreadableRollouts, flat, read_columns
from jackpot.report.words import Words, words_of

TOP = 8  # entries of each top-k that the page carries
MAX_TOKENS = 100_000
_OF_RESPONSES = ("uid", "prompt", "answer", "finish", "reward", "correct")
_OF_TOKENS = {  # as the page calls it: column of the file
    "rollout": "rollout_log_probs",
    "old": "old_log_probs",
    "current": "log_probs",
    "rescored": "rollout_model_log_probs",
    "acceptance": "acceptance",
    "weight": "weights",
    "z": "z",
    "kl": "kl_rollout_policy",
    "advantage": "advantages",
}
_NEEDED = [
    *_OF_RESPONSES,
    *_OF_TOKENS.values(),
    *("token_ids", "tokens", "sampled_mask", "accept_mask", "versions"),
    *("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What the inspector shows. `index` says what is there and what was left out, `packs` has the rest by name."""

    index: Mapping[str, Any]
    packs: Mapping[str, str]  # gzip in base64


def inspector_data(
    runs: Sequence[tuple[Run, Sequence[Saved]]], max_tokens: int = MAX_TOKENS
) -> tuple[Tokens, list[str]]:
    """At most `max_tokens` tokens of all runs together, evenly over runs and iterations; sentences about bad files."""
    files = [(run, saved) for run, of_run in runs for saved in of_run]
    budgets = even_shares([saved.tokens for _, saved in files], max_tokens)
    packs: dict[str, str] = {}
    unreadable: list[str] = []
    listed: dict[str, list[dict[str, Any]]] = {}
    words = {run.name: Words() for run, _ in runs}
    for number, ((run, saved), budget) in enumerate(zip(files, budgets, strict=True)):
        try:
            lengths = _lengths(read_columns(saved, ["token_ids"]), "token_ids")
            rows = spread_rows(lengths.tolist(), budget)
            columns = _columns(read_columns(saved, _NEEDED, rows), words[run.name])
        except UnreadableRollouts as error:
            unreadable.append(str(error))
            continue
        packs[f"tokens-{number}"] = packed(columns)
        listed.setdefault(run.name, []).append(
            {
                "iteration": saved.iteration,
                "pack": f"tokens-{number}",
                "responses": len(rows),
                "of_responses": saved.responses,
                "tokens": sum(columns["lengths"]),
                "of_tokens": saved.tokens,
            }
        )
    shown = []
    for number, (run, _) in enumerate(runs):
        if run.name in listed:
            packs[f"words-{number}"] = packed(words_of(words[run.name], run.folder, run.config))
            shown.append({"name": run.name, "words": f"words-{number}", "iterations": listed[run.name]})
    return Tokens(index={"top": TOP, "max_tokens": max_tokens, "runs": shown}, packs=packs), unreadable


def even_shares(sizes: Sequence[int], most: int) -> list[int]:
    """At most `most` in all, as even as sizes allow: what a small one does not need, the larger ones share."""
    shares, left = [0] * len(sizes), most
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    for place, number in enumerate(order):
        shares[number] = min(sizes[number], left // (len(order) - place))
        left -= shares[number]
    return shares


def spread_rows(lengths: Sequence[int], budget: int) -> list[int]:
    """Rows whose tokens fit into the budget, from all over the file, in the file's order.

    Steps of the golden section visit a file evenly however many rows are taken, so neither its beginning nor short
    responses come first.
    """
    if sum(lengths) <= budget:
        return list(range(len(lengths)))
    golden = (5**0.5 - 1.0) / 2.0
    chosen = []
    for row in sorted(range(len(lengths)), key=lambda row: row * golden % 1.0):
        if lengths[row] <= budget:
            chosen.append(row)
            budget -= lengths[row]
    return sorted(chosen)


def packed(value: Any) -> str:
    """JSON, compressed, as text that can stand in HTML. Equal values are packed equally."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def significant(values: np.ndarray, digits: int) -> list[float | None]:
    """Rounded to so many significant digits; None where not finite."""
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values) & (values != 0.0)
    power = np.zeros_like(values)
    power[finite] = digits - 1 - np.floor(np.log10(np.abs(values[finite])))
    up, down = 10.0 ** np.clip(power, 0, 300), 10.0 ** np.clip(-power, 0, 300)
    with np.errstate(invalid="ignore"):
        rounded = np.rint(values * up / down) / up * down
    return [value if ok else None for value, ok in zip(rounded.tolist(), np.isfinite(values).tolist(), strict=True)]


def _columns(table: pa.Table, words: Words) -> dict[str, Any]:
    """Of one file, for the chosen rows; also notes which tokens need words."""
    ids = flat(table, "token_ids")
    words.see(ids, flat(table, "tokens").tolist())
    columns: dict[str, Any] = {name: table.column(name).to_pylist() for name in _OF_RESPONSES}
    columns |= {name: significant(flat(table, column), 4) for name, column in _OF_TOKENS.items()}
    ratio = np.exp(flat(table, "old_log_probs") - flat(table, "rollout_log_probs"))
    for model in ("rollout", "policy"):
        columns |= _top(table, model, words)
    pairs = np.array(flat(table, "versions").tolist(), dtype=np.int64).reshape(-1, 2)
    return columns | {
        "lengths": _lengths(table, "token_ids").tolist(),
        "id": ids.tolist(),
        "sampled": flat(table, "sampled_mask").astype(int).tolist(),
        "accepted": significant(flat(table, "accept_mask"), 4),
        "ratio": significant(ratio, 4),
        "policy_version": pairs[:, 0].tolist(),
        "rollout_model_version": pairs[:, 1].tolist(),
    }


def _lengths(table: pa.Table, column: str) -> np.ndarray:
    """[rows] tokens of each response."""
    return np.array([len(row) for row in table.column(column)], dtype=np.int64)


def _top(table: pa.Table, model: str, words: Words) -> dict[str, Any]:
    """The first `TOP` entries of each token's top-k as flat columns, and how many there are of how many."""
    ids, log_probs = (_matrix(flat(table, f"{model}_top_{what}")) for what in ("ids", "log_probs"))
    of = ids.shape[1]
    count = min(of, TOP)
    kept_ids, kept = ids[:, :count].astype(np.int64).ravel(), log_probs[:, :count].ravel()
    words.need(kept_ids)
    return {
        f"{model}_top_ids": kept_ids.tolist(),
        f"{model}_top": significant(np.exp(kept), 3),
        f"{model}_top_count": count,
        f"{model}_top_of": of,
    }


def _matrix(rows: np.ndarray) -> np.ndarray:
    """[tokens, K] of an array of lists; K is 0 without tokens."""
    return np.stack(rows.tolist()) if len(rows) else np.empty((0, 0))
