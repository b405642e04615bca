"""Synthetic problems: their answers are correct, and they are read like the rows of any data set."""

import json
import re
from pathlib import Path

import pytest

from jackpot.config.tasks import DataConfig
from jackpot.rollout.tasks.benchmarks import BENCHMARKS
from jackpot.rollout.tasks.data import DATA_FOLDER, find_source
from jackpot.rollout.tasks.synthetic import synthetic_problem, synthetic_rows


def test_the_answers_are_right() -> None:
    for number in range(200):
        problem, answer = synthetic_problem(number)
        first, second = map(int, re.findall(r"\d+", problem))
        assert int(answer) == (first - second if "left in the box" in problem else first + second)
    assert len({synthetic_problem(number) for number in range(200)}) == 200
    assert synthetic_problem(7) == synthetic_problem(7)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_they_are_read_as_any_benchmark_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    benchmark = BENCHMARKS[name]
    data = DataConfig(source=name)
    rows = synthetic_rows(benchmark, first=5, count=3)
    assert set(rows[0]) >= {benchmark.problem[0], next(iter(benchmark.answer))}
    (tmp_path / (benchmark.test or benchmark.train).file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = list(find_source(data, "test").rows())
    assert [(row.problem, *row.answers) for row in read] == [synthetic_problem(number) for number in (5, 6, 7)]
    assert len({row.uid for row in read}) == 3
