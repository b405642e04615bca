"""Synthetic problems: their answers are right, each index has its own, and they are read like any data set."""

import json
import re
from pathlib import Path

from jackpot.config.tasks import DataConfig
from jackpot.rollout.tasks.data import find_source
from jackpot.rollout.tasks.synthetic import synthetic_problem, synthetic_rows


def test_answers_are_right_and_each_index_has_its_own_problem() -> None:
    for index in range(200):
        problem, answer = synthetic_problem(index)
        first, second = map(int, re.findall(r"\d+", problem))
        assert int(answer) == (first - second if "left in the box" in problem else first + second)

    assert len({synthetic_problem(index) for index in range(200)}) == 200
    assert synthetic_problem(7) == synthetic_problem(7)


def test_synthetic_rows_are_read_as_a_file_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in synthetic_rows(first=5, count=3)))

    read_rows = list(find_source(DataConfig(source=str(path)), "test").rows())

    assert [(row.problem, *row.answers) for row in read_rows] == [synthetic_problem(index) for index in (5, 6, 7)]
    assert len({row.uid for row in read_rows}) == 3
