"""Signs of faults that no metric shows, found by comparing saved prompts, responses and rewards with each other.

Each sign is a number for an iteration, under a name that begins with `saved/`.
"""

import re
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from jackpot.config.config import Config
from jackpot.core.foreign import parse_json, read_foreign
from jackpot.training.run_folder.saved_rollouts import UnreadableRollouts, list_rollout_files, read_columns

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
_END = re.compile(r"<(/s>|eos|\|?(im_)?end|\|?eot)")  # beginning of a token that ends a response


def read_saved(run: Path, config: Config) -> list[dict[str, Any]]:
    """Return signs of faults in a run's saved rollouts: for each readable file its iteration, and each sign by name."""
    files, _ = list_rollout_files(run)
    held_out = _held_out(run)
    # All right answers to each prompt that was read so far, by the prompt's text; for saved prompts also by token ids.
    answers_of: dict[Any, set[str]] = defaultdict(set)
    for text, answer in held_out:
        answers_of[text].add(answer)

    signs_by_file = []
    for file in files:
        with suppress(UnreadableRollouts):
            table = read_columns(file, list(_COLUMNS))
            signs = _prompt_signs(table, held_out, answers_of) | _response_signs(table, config) | _reward_signs(table)
            signs_by_file.append({"iteration": file.iteration} | signs)
    return signs_by_file


def _held_out(run: Path) -> set[tuple[str, str]]:
    """Return (problem, answer) for the problems of the policy's newest evaluation that have an answer.

    The set is empty without an evaluation, or if its file cannot be read.
    """
    files = sorted((run / "eval").glob("iteration-*-policy.jsonl"))
    if not files:
        return set()

    try:
        rows = [parse_json(line, dict) for line in read_foreign(files[-1], inside=run).splitlines()]
    except (OSError, ValueError):
        return set()

    problems = [(row.get("prompt"), row.get("answer")) for row in rows]
    return {
        (prompt, answer)
        for prompt, answer in problems
        if isinstance(prompt, str) and answer and isinstance(answer, str)
    }


def _prompt_signs(
    table: pa.Table, held_out: set[tuple[str, str]], answers_of: dict[Any, set[str]]
) -> dict[str, float | None]:
    """Return the signs from comparing prompts with each other and with held-out problems; update `answers_of`.

    If a problem has no answer, there are no signs ({}), and `answers_of` stays as it is.

    Args:
        table: one file of saved rollouts.
        held_out: (problem, answer) of the held-out problems.
        answers_of: all answers to a prompt in the files before, by the prompt's text and also by its token ids; the
            answers of this file are added.
    """
    rows = table.select(["prompt_uid", "prompt", "answer", "prompt_ids"]).to_pylist()
    by_uid = {row["prompt_uid"]: (row["prompt"], row["answer"], tuple(row["prompt_ids"])) for row in rows}
    prompts = by_uid.values()
    # Problems without an answer are of an environment, whose state the prompt's text does not show.
    if not all(answer for _, answer, _ in prompts):
        return {}

    for text, answer, ids in prompts:
        answers_of[ids].add(answer)
        answers_of[text].add(answer)

    return {
        "saved/ambiguous_prompts": fmean(
            max(len(answers_of[ids]), len(answers_of[text])) > 1 for text, _, ids in prompts
        ),
        "saved/repeated_prompts": 1.0 - len({ids for _, _, ids in prompts}) / len(prompts),
        "saved/held_out": fmean((text, answer) in held_out for text, answer, _ in prompts),
    }


def _response_signs(table: pa.Table, config: Config) -> dict[str, float]:
    """Return the signs from the ends of responses, and from the share of the most frequent response."""
    rows = table.select(["response", "token_ids", "tokens"]).to_pylist()  # `tokens`: each token as text
    stops = set(config.sampling.stop_token_ids)
    # Shares of the responses: with an end token before their last token, and ended by one of the run's stop ids.
    signs = {
        "saved/end_inside": fmean(any(map(_END.match, row["tokens"][:-1])) for row in rows),
        # [-1:]: the last token, or none of an empty response
        "saved/ended_by_stop_ids": fmean(not stops.isdisjoint(row["token_ids"][-1:]) for row in rows),
    }
    if len(set(table.column("prompt").to_pylist())) > 1:  # equal responses to one prompt are no sign of a fault
        signs["saved/commonest"] = max(Counter(row["response"] for row in rows).values()) / len(rows)
    return signs


def _reward_signs(table: pa.Table) -> dict[str, float]:
    """Return the signs from rewards: correlation with length, whether right answers earn more, and cut responses.

    A sign is left out where it cannot be computed, for example if all rewards or all lengths are equal.
    """
    rewards = table.column("reward").to_numpy()
    columns = table.select(["correct", "finish", "token_ids"]).to_pydict()
    # A verdict of None is neither right nor wrong.
    right = np.array([verdict is True for verdict in columns["correct"]])
    wrong = np.array([verdict is False for verdict in columns["correct"]])
    cut = np.array(columns["finish"]) == "length"
    lengths = np.array([*map(len, columns["token_ids"])])

    signs = {}
    width = float(np.ptp(rewards))  # largest minus smallest reward
    if width and np.ptp(lengths):
        signs["saved/length_reward"] = float(np.corrcoef(rewards, lengths)[0, 1])
    if width and right.any() and wrong.any():
        signs["saved/right_earn"] = float(rewards[right].mean() - rewards[wrong].mean()) / width
    if cut.any():  # how much more cut responses earn than the worst response
        signs["saved/cut_earn"] = float(rewards[cut].mean() - rewards.min())
    return signs
