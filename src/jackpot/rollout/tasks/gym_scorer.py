"""Scoring of answers to problems of reasoning-gym, in a worker process.

A worker counts as ready only once this file, and with it the library, is imported. So the time limit of an answer does
not include that import, which takes seconds, and on a busy machine longer than the limit.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym


def score_answer(*, name: str, arguments: Mapping[str, Any], entry: int, answer: str) -> float:
    """Return the score, 0 to 1, that the library gives an answer to a problem.

    The problem is number `entry` of the data set that the library makes from its `name` and these `arguments`.
    """
    data = _data_set(name, json.dumps(arguments, sort_keys=True))
    return float(data.score_answer(answer, data[entry]))


@cache
def _data_set(name: str, arguments: str) -> Any:
    """Make the data set `name` with `arguments`, given as JSON; a process makes each data set once."""
    return reasoning_gym.create_dataset(name, **json.loads(arguments))
