"""Scores answers to problems of reasoning-gym, in a worker process.

The library is imported with this file, so that a worker is not ready before: the time limit of an answer is for its
score alone. A first import takes seconds, on a busy machine more than the limit.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym

PROBLEMS = 20_000  # problems that a data set is asked for, the most that all of them generate


def score_answer(*, name: str, kwargs: Mapping[str, Any], number: int, answer: str) -> float:
    """Return the library's score of an answer to problem `number` of a data set."""
    data = data_set(name, json.dumps(kwargs, sort_keys=True))
    return float(data.score_answer(answer, data[number]))


@cache
def data_set(name: str, kwargs: str) -> Any:
    """Make a data set from its settings as JSON, once in a process."""
    return reasoning_gym.create_dataset(name, **{"seed": 0, "size": PROBLEMS, **json.loads(kwargs)})
