"""Packs saved rollouts for the page's token inspector: whole responses, one pack for each saved iteration.

A pack is compressed JSON of columns with the tokens of the chosen responses one after another; the page unpacks it when
the reader opens it. Numbers have four significant digits, top-k probabilities three.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jackpot.training.run_folder.saved_rollouts import (
    RolloutFile,
    UnreadableRollouts,
    best_rollouts,
    flat_column,
    read_columns,
)
from jackpot.ui.charts import Table
from jackpot.ui.html import InspectorData, packed
from jackpot.ui.report.runs import Run
from jackpot.ui.report.token_text import TokenTexts, texts_of

TOP = 8  # entries of each top-k that the page carries
MAX_TOKENS = 100_000  # saved tokens that the page carries
FEW = 4  # responses of an iteration; without room for so many the page carries fewer iterations
_OF_RESPONSES = ("uid", "prompt", "answer", "finish", "reward", "correct")
_OF_TOKENS = {  # name in the page: column of the file
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


def inspector_data(
    runs: Sequence[tuple[Run, Sequence[RolloutFile]]], max_tokens: int = MAX_TOKENS
) -> tuple[InspectorData, list[str]]:
    """Choose at most `max_tokens` tokens, evenly over runs and iterations; return them and an error text for bad files.

    Responses are whole. Without room for a few responses of every iteration the page carries fewer iterations, see
    `spread_files`. A single response longer than `max_tokens` is carried nevertheless, unless that is 0.
    """
    packing = _Packing(max_tokens)
    carried: dict[int, dict[str, Any]] = {}
    by_size = sorted(range(len(runs)), key=lambda number: sum(saved.tokens for saved in runs[number][1]))
    for order, number in enumerate(by_size):  # what a short run does not need is left for the others
        run, files = runs[number]
        words = TokenTexts()
        best = best_rollouts(run.folder, [saved.iteration for saved in files])
        if iterations := packing.add(files, max(packing.left, 0) // (len(runs) - order), words, best):
            packing.packs[f"words-{number}"] = packed(texts_of(words, run.folder, run.config))
            carried[number] = {"name": run.name, "words": f"words-{number}", "iterations": iterations}

    index = {"top": TOP, "max_tokens": max_tokens, "runs": [carried[number] for number in sorted(carried)]}
    left_out = _left_out(runs, carried, packing)
    return InspectorData(index=index, packs=packing.packs, left_out=left_out), sorted(packing.unreadable)


class _Packing:
    """Packs responses until the room is used up."""

    def __init__(self, max_tokens: int) -> None:
        self.most = max_tokens
        self.left = max_tokens  # tokens; below 0 if the only response is longer than all the room
        self.packs: dict[str, str] = {}
        self.unreadable: list[str] = []
        self.bad: set[Path] = set()

    def add(
        self, files: Sequence[RolloutFile], share: int, words: TokenTexts, best: int | None
    ) -> list[dict[str, Any]]:
        """Pack about `share` tokens of a run; return the counts of each packed iteration.

        Args:
            best: iteration with the rollouts of the best policy, which is packed where more than two are.
        """
        listed: list[dict[str, Any]] = []
        chosen = with_best(spread_files(files, share), files, best)
        chosen.sort(key=lambda saved: (saved.tokens, -saved.iteration))  # the large ones share what small ones leave
        for index, saved in enumerate(chosen):
            room = share if listed else self.left if self.packs else math.inf if self.left else 0
            try:
                table = read_columns(saved, _NEEDED)
                lengths = _lengths(table, "token_ids").tolist()
                rows = spread_rows(lengths, max(share, 0) // (len(chosen) - index), room)
                if not rows and lengths:
                    continue
                columns = _columns(table.take(rows), words)
            except UnreadableRollouts as error:
                self.unreadable.append(str(error))
                self.bad.add(saved.path)
                continue

            name, tokens = f"tokens-{len(self.packs)}", sum(columns["lengths"])
            self.packs[name] = packed(columns)
            self.left -= tokens
            share -= tokens
            counts = {"responses": len(rows), "of_responses": saved.responses}
            counts |= {"tokens": tokens, "of_tokens": saved.tokens}
            listed.append({"iteration": saved.iteration, "pack": name, "best": saved.iteration == best} | counts)
        return sorted(listed, key=lambda one: one["iteration"])


def spread_files(files: Sequence[RolloutFile], budget: int) -> list[RolloutFile]:
    """Return as many files, evenly spaced with the first and the last, as have room for `FEW` typical responses each.

    Without room for two such files: the first and the last if one response of each has room, else the last.
    """
    for count in range(len(files), 1, -1):
        spread = [files[round(index * (len(files) - 1) / (count - 1))] for index in range(count)]
        if sum(_of_responses(saved, FEW) for saved in spread) <= budget:
            return spread
    ends = [files[0], files[-1]] if len(files) > 1 else list(files)
    return ends if sum(_of_responses(saved, 1) for saved in ends) <= budget else ends[-1:]


def with_best(chosen: list[RolloutFile], files: Sequence[RolloutFile], best: int | None) -> list[RolloutFile]:
    """Return the chosen files with that of iteration `best` in place of the nearest one between the two ends."""
    found = [saved for saved in files if saved.iteration == best and saved not in chosen]
    if not found or len(chosen) < 3:
        return chosen
    nearest = min(chosen[1:-1], key=lambda saved: abs(saved.iteration - found[0].iteration))
    return [found[0] if saved is nearest else saved for saved in chosen]


def _of_responses(saved: RolloutFile, count: int) -> float:
    """Return the tokens of so many typical responses of a file."""
    return saved.tokens * min(count / max(saved.responses, 1), 1.0)


def _left_out(
    runs: Sequence[tuple[Run, Sequence[RolloutFile]]], carried: Mapping[int, dict[str, Any]], packing: _Packing
) -> Table:
    rows = []
    for number, (run, files) in enumerate(runs):
        here = carried[number]["iterations"] if number in carried else []
        whole = [saved for saved in files if saved.path not in packing.bad]
        if len(here) < len(whole) or packing.left < 0:
            responses = sum(one["responses"] for one in here)
            of_responses = sum(saved.responses for saved in whole)
            rows.append((run.name, f"{len(here)} of {len(whole)}", f"{responses} of {of_responses}"))

    note = f"The page carries at most {packing.most:,} tokens (--max-tokens), whole responses."
    if packing.left < 0:
        note += f" The only response carried is longer: {packing.most - packing.left:,} tokens."
    return Table(
        title="Saved rollouts for which the token inspector has no room",
        columns=("run", "iterations carried", "responses carried"),
        rows=tuple(rows),
        note=note,
    )


def spread_rows(lengths: Sequence[int], budget: int, most: float = 0) -> list[int]:
    """Return rows from all over the file whose tokens fit into the budget, in the file's order.

    Steps of the golden ratio visit the file evenly for any number of rows. The first row that does not fit
    ends the choice: taking only shorter rows after it would over-represent short responses.

    Args:
        most: a first row longer than the budget is taken if it has at most this many tokens.
    """
    if sum(lengths) <= budget:
        return list(range(len(lengths)))
    golden = (5**0.5 - 1.0) / 2.0
    chosen: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: row * golden % 1.0):
        if lengths[row] > (budget if chosen else max(budget, most)):
            break
        chosen.append(row)
        budget -= lengths[row]
    return sorted(chosen)


def significant(values: np.ndarray, digits: int) -> list[float | None]:
    """Round to so many significant digits; a value that is not finite becomes None."""
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values) & (values != 0.0)
    power = np.zeros_like(values)
    power[finite] = digits - 1 - np.floor(np.log10(np.abs(values[finite])))
    up, down = 10.0 ** np.clip(power, 0, 300), 10.0 ** np.clip(-power, 0, 300)
    with np.errstate(invalid="ignore"):
        rounded = np.rint(values * up / down) / up * down
    return [value if ok else None for value, ok in zip(rounded.tolist(), np.isfinite(values).tolist(), strict=True)]


def _columns(table: pa.Table, words: TokenTexts) -> dict[str, Any]:
    """Return the page's columns of the chosen rows of one file, and add their tokens to `words`."""
    ids = flat_column(table, "token_ids")
    words.add_known(ids, flat_column(table, "tokens").tolist())

    columns: dict[str, Any] = {name: table.column(name).to_pylist() for name in _OF_RESPONSES}
    columns |= {name: significant(flat_column(table, column), 4) for name, column in _OF_TOKENS.items()}
    ratio = np.exp(flat_column(table, "old_log_probs") - flat_column(table, "rollout_log_probs"))
    for model in ("rollout", "policy"):
        columns |= _top(table, model, words)
    pairs = np.array(flat_column(table, "versions").tolist(), dtype=np.int64).reshape(-1, 2)

    return columns | {
        "lengths": _lengths(table, "token_ids").tolist(),
        "id": ids.tolist(),
        "sampled": flat_column(table, "sampled_mask").astype(int).tolist(),
        "accepted": significant(flat_column(table, "accept_mask"), 4),
        "ratio": significant(ratio, 4),
        "policy_version": pairs[:, 0].tolist(),
        "rollout_model_version": pairs[:, 1].tolist(),
    }


def _lengths(table: pa.Table, column: str) -> np.ndarray:
    """Return [rows] the number of tokens of each response."""
    return np.array([len(row) for row in table.column(column)], dtype=np.int64)


def _top(table: pa.Table, model: str, words: TokenTexts) -> dict[str, Any]:
    """Return the first `TOP` entries of each token's top-k as flat columns, with their number and K."""
    ids, log_probs = (_matrix(flat_column(table, f"{model}_top_{what}")) for what in ("ids", "log_probs"))
    of = ids.shape[1]
    count = min(of, TOP)
    kept_ids, kept = ids[:, :count].astype(np.int64).ravel(), log_probs[:, :count].ravel()
    words.add_needed(kept_ids)
    return {
        f"{model}_top_ids": kept_ids.tolist(),
        f"{model}_top": significant(np.exp(kept), 3),
        f"{model}_top_count": count,
        f"{model}_top_of": of,
    }


def _matrix(rows: np.ndarray) -> np.ndarray:
    """Stack an array of lists into [tokens, K]; K is 0 without tokens."""
    return np.stack(rows.tolist()) if len(rows) else np.empty((0, 0))
