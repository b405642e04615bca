"""Packs saved rollouts for the page's token inspector: whole responses, one pack for each saved iteration.

A pack is compressed JSON of columns, in which the tokens of the responses follow each other; the page unpacks it when
the reader opens the iteration.
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

TOP = 8  # entries of each top-k list that the page carries
MAX_TOKENS = 100_000  # most saved tokens that the page carries
FEW = 4  # responses that must fit from each iteration, else the page carries fewer iterations
_RESPONSE_COLUMNS = ("uid", "prompt", "answer", "finish", "reward", "correct")
_TOKEN_COLUMNS = {  # name in the page: column of the file
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
_FILE_COLUMNS = [  # columns of the file that the page needs
    *_RESPONSE_COLUMNS,
    *_TOKEN_COLUMNS.values(),
    *("token_ids", "tokens", "sampled_mask", "accept_mask", "versions"),
    *("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs"),
]


def inspector_data(
    runs: Sequence[tuple[Run, Sequence[RolloutFile]]], max_tokens: int = MAX_TOKENS
) -> tuple[InspectorData, list[str]]:
    """Choose at most `max_tokens` tokens of whole responses, evenly over runs and iterations.

    If there is no room for a few responses of every iteration, the page carries fewer iterations (`spread_files`). One
    response longer than `max_tokens` is carried nevertheless, unless `max_tokens` is 0.

    Args:
        runs: the runs, each with its files of saved rollouts.
        max_tokens: most tokens to choose.

    Returns:
        The data of the inspector, and a sentence about each file that cannot be read.
    """
    packing = _Packing(max_tokens)
    carried: dict[int, dict[str, Any]] = {}  # what the page says of each run with packed tokens, by the run's index
    by_size = sorted(range(len(runs)), key=lambda index: sum(saved.tokens for saved in runs[index][1]))

    for done, index in enumerate(by_size):  # short runs first: the others get the tokens that these do not need
        run, files = runs[index]
        words = TokenTexts()  # the tokens of this run that the page shows
        best_iteration = best_rollouts(run.folder, [saved.iteration for saved in files])
        share = max(packing.room, 0) // (len(runs) - done)  # tokens, an equal part of the room that is left
        if iterations := packing.add(files, share, words, best_iteration):
            packing.packs[f"words-{index}"] = packed(texts_of(words, run.folder, run.config))
            carried[index] = {"name": run.name, "words": f"words-{index}", "iterations": iterations}

    data = InspectorData(
        index={"top": TOP, "max_tokens": max_tokens, "runs": [carried[index] for index in sorted(carried)]},
        packs=packing.packs,
        left_out=_left_out(runs, carried, packing),
    )
    return data, sorted(packing.unreadable.values())


class _Packing:
    """The packs of rollouts that a page carries, and the room that is left for more."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.room = max_tokens  # tokens that still fit; below 0 if the only response is longer than `max_tokens`
        self.packs: dict[str, str] = {}
        self.unreadable: dict[Path, str] = {}  # an error text for each file that cannot be read

    def add(
        self, files: Sequence[RolloutFile], share: int, words: TokenTexts, best: int | None
    ) -> list[dict[str, Any]]:
        """Pack about `share` tokens of a run; return a dict for each packed iteration: its pack and its size.

        Args:
            files: files of the run, by iteration.
            words: gets the ids and texts of the packed tokens.
            best: iteration with the rollouts of the best policy, which is packed if more than two iterations are.
        """
        iterations: list[dict[str, Any]] = []
        chosen = with_best(spread_files(files, share), files, best)
        # Small files first, which leave room to the large ones; of equally large ones the newest first.
        chosen.sort(key=lambda saved: (saved.tokens, -saved.iteration))

        for index, saved in enumerate(chosen):
            try:
                table = read_columns(saved, _FILE_COLUMNS)
                # Only the first response of the run may be longer than the run's share.
                longest = share if iterations else self._longest_response()
                budget = max(share, 0) // (len(chosen) - index)  # tokens, an equal part of the share that is left
                rows = spread_rows(_lengths(table), budget, longest)
                if not rows and table.num_rows:  # there is no room for a response of this file
                    continue
                columns = _columns(table.take(rows), words)
            except UnreadableRollouts as error:
                self.unreadable[saved.path] = str(error)
                continue

            name = f"tokens-{len(self.packs)}"
            tokens = sum(columns["lengths"])
            self.packs[name] = packed(columns)
            self.room -= tokens
            share -= tokens
            iterations.append(
                {
                    "iteration": saved.iteration,
                    "pack": name,
                    "best": saved.iteration == best,
                    "responses": len(rows),
                    "of_responses": saved.responses,
                    "tokens": tokens,
                    "of_tokens": saved.tokens,
                }
            )
        return sorted(iterations, key=lambda iteration: iteration["iteration"])

    def _longest_response(self) -> float:
        """Return the largest number of tokens that the first packed response of a run may have.

        The response may exceed the run's share and take all the room that is left. The first response of the page may
        have any length, unless `max_tokens` is 0.
        """
        return self.room if self.packs or not self.room else math.inf


def spread_files(files: Sequence[RolloutFile], budget: int) -> list[RolloutFile]:
    """Return files evenly spaced from first to last, as many as fit into `budget` with `FEW` responses of each.

    A response counts with its file's mean length. If not even two files fit: the first and the last if one response of
    each fits, else the last.

    Args:
        files: files of one run, by iteration.
        budget: the room, tokens.
    """
    for count in range(len(files), 1, -1):
        # `count` indices at equal distances from 0 to the last one.
        spread = [files[round(index * (len(files) - 1) / (count - 1))] for index in range(count)]
        if sum(_typical_tokens(saved, FEW) for saved in spread) <= budget:
            return spread
    ends = [files[0], files[-1]] if len(files) > 1 else list(files)
    return ends if sum(_typical_tokens(saved, 1) for saved in ends) <= budget else ends[-1:]


def with_best(chosen: list[RolloutFile], files: Sequence[RolloutFile], best: int | None) -> list[RolloutFile]:
    """Return the chosen files with that of iteration `best`, which replaces the nearest one.

    The first and the last file stay. Nothing changes if fewer than three files are chosen or `best` has no file.
    """
    best_file = next((saved for saved in files if saved.iteration == best), None)
    if best_file is None or best_file in chosen or len(chosen) < 3:
        return chosen
    nearest = min(chosen[1:-1], key=lambda saved: abs(saved.iteration - best_file.iteration))
    return [best_file if saved is nearest else saved for saved in chosen]


def _typical_tokens(saved: RolloutFile, count: int) -> float:
    """Return how many tokens `count` responses of mean length have; all tokens if the file has fewer responses."""
    return saved.tokens * min(count / max(saved.responses, 1), 1.0)


def _left_out(
    runs: Sequence[tuple[Run, Sequence[RolloutFile]]], carried: Mapping[int, dict[str, Any]], packing: _Packing
) -> Table:
    """Return a table of the runs that have saved iterations for which the page has no room; no rows if there is none.

    If the page carries a single response, which is longer than all its room, every run is listed.
    """
    rows = []
    for index, (run, files) in enumerate(runs):
        iterations = carried[index]["iterations"] if index in carried else []
        readable = [saved for saved in files if saved.path not in packing.unreadable]
        if len(iterations) < len(readable) or packing.room < 0:
            responses = sum(iteration["responses"] for iteration in iterations)
            of_responses = sum(saved.responses for saved in readable)
            rows.append((run.name, f"{len(iterations)} of {len(readable)}", f"{responses} of {of_responses}"))

    note = f"The page carries at most {packing.max_tokens:,} tokens (--max-tokens), whole responses."
    if packing.room < 0:
        note += f" The only response carried is longer: {packing.max_tokens - packing.room:,} tokens."
    return Table(
        title="Saved rollouts for which the token inspector has no room",
        columns=("run", "iterations carried", "responses carried"),
        rows=tuple(rows),
        note=note,
    )


def spread_rows(lengths: Sequence[int], budget: int, longest: float = 0) -> list[int]:
    """Return the indices of responses from all over a file whose tokens fit into a budget, in the file's order.

    Steps of the golden ratio visit the file evenly, however many responses fit. The first response that does not fit
    ends the choice: taking only shorter responses after it would over-represent them.

    Args:
        lengths: tokens of each response of the file.
        budget: most tokens to choose.
        longest: the first response is taken even if it exceeds the budget, up to this many tokens.
    """
    if sum(lengths) <= budget:
        return list(range(len(lengths)))
    golden = (5**0.5 - 1.0) / 2.0
    chosen: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: row * golden % 1.0):
        if lengths[row] > (budget if chosen else max(budget, longest)):
            break
        chosen.append(row)
        budget -= lengths[row]
    return sorted(chosen)


def significant(values: np.ndarray, digits: int) -> list[float | None]:
    """Round to this many significant digits; a value that is not finite becomes None."""
    text = f"{{:.{digits}g}}".format
    floats = np.asarray(values, dtype=np.float64).tolist()
    return [float(text(value)) if math.isfinite(value) else None for value in floats]


def _columns(table: pa.Table, words: TokenTexts) -> dict[str, Any]:
    """Return the page's columns of the chosen responses of one file, and add their tokens to `words`."""
    ids = flat_column(table, "token_ids")
    words.add_known(ids, flat_column(table, "tokens").tolist())
    versions = np.array(flat_column(table, "versions").tolist(), dtype=np.int64).reshape(-1, 2)  # policy, rollout model

    columns: dict[str, Any] = {name: table.column(name).to_pylist() for name in _RESPONSE_COLUMNS}
    columns |= {name: significant(flat_column(table, column), digits=4) for name, column in _TOKEN_COLUMNS.items()}
    # The ratio of each token: its probability under the old policy divided by that under the engine.
    ratio = np.exp(flat_column(table, "old_log_probs") - flat_column(table, "rollout_log_probs"))
    columns |= _top(table, "rollout", words) | _top(table, "policy", words)

    return columns | {
        "lengths": _lengths(table),
        "id": ids.tolist(),
        "sampled": flat_column(table, "sampled_mask").astype(int).tolist(),
        "accepted": significant(flat_column(table, "accept_mask"), digits=4),
        "ratio": significant(ratio, digits=4),
        "policy_version": versions[:, 0].tolist(),
        "rollout_model_version": versions[:, 1].tolist(),
    }


def _lengths(table: pa.Table) -> list[int]:
    """Return the number of tokens of each response."""
    return [len(ids) for ids in table.column("token_ids")]


def _top(table: pa.Table, model: str, words: TokenTexts) -> dict[str, Any]:
    """Return the first `TOP` entries of each token's top-k list as flat columns, and add their ids to `words`.

    MODEL_top has the entries' probabilities. MODEL_top_count is the number of entries returned for each token,
    MODEL_top_of that of entries in the file.
    """
    ids = _matrix(flat_column(table, f"{model}_top_ids"))[:, :TOP].astype(np.int64)
    log_probs = _matrix(flat_column(table, f"{model}_top_log_probs"))
    words.add_needed(ids)
    return {
        f"{model}_top_ids": ids.ravel().tolist(),
        f"{model}_top": significant(np.exp(log_probs[:, :TOP].ravel()), digits=3),
        f"{model}_top_count": ids.shape[1],
        f"{model}_top_of": log_probs.shape[1],
    }


def _matrix(rows: np.ndarray) -> np.ndarray:
    """Stack an array of lists of K entries into [tokens, K]; without tokens K is 0."""
    return np.stack(rows.tolist()) if len(rows) else np.empty((0, 0))
