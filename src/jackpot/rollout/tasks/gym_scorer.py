"""Scores answers to problems of reasoning-gym, in a worker process.

The library is imported with this file, so that a worker is not ready before: the time limit of an answer is for its
score alone. A first import takes seconds, on a busy machine more than the limit.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym


def score_answer(*, name: str, arguments: Mapping[str, Any], number: int, answer: str) -> float:
    """Return the library's score of an answer to problem `number` of the data set that these arguments make."""
    data = _data_set(name, json.dumps(arguments, sort_keys=True))
    return float(data.score_answer(answer, data[number]))


@cache
def _data_set(name: str, arguments: str) -> Any:
    """Make a data set from its arguments as JSON, once in a process."""
    return reasoning_gym.create_dataset(name, **json.loads(arguments))
