"""Problems of a source by index: which rows are left out, how they are counted, which sources are refused."""

from pathlib import Path

import pytest

from helpers.texts import write_problems
from jackpot.config.tasks import ColumnsConfig, DataConfig
from jackpot.core.errors import DataError
from jackpot.rollout.tasks.data import Problems, PromptSize, RowCounts, find_source

ANSWERS = [None if index % 10 == 3 else index for index in range(1000)]  # every tenth has none


def source_of(path: Path, **settings):
    """Return a file as the source of training problems."""
    return find_source(DataConfig(source=str(path), **settings), "train")


LIMIT = 100  # tokens of a prompt


def all_fit(rows):
    """Measure every prompt as exactly as long as the limit."""
    return [PromptSize(LIMIT, has_unknown=False)] * len(rows)


def without_sevens(rows):
    """Measure prompts with a 7 in them as one token too long."""
    return [PromptSize(LIMIT + ("7" in row.problem), has_unknown=False) for row in rows]


KEPT = [str(index) for index in range(1000) if index % 10 != 3 and "7" not in str(index)]
TALLY = RowCounts(rows=1000, without_answer=100, too_long=900 - len(KEPT))


@pytest.fixture(scope="module")
def thousand_problems(tmp_path_factory) -> Path:
    """Return a file with the rows of `ANSWERS`."""
    return write_problems(tmp_path_factory.mktemp("data") / "thousand.jsonl", ANSWERS)


def test_rows_that_cannot_be_used_are_counted_by_reason(thousand_problems):
    problems = Problems(source_of(thousand_problems), without_sevens, LIMIT)
    assert [row.answers[0] for row in problems.rows] == KEPT
    assert problems.counts == TALLY
    assert problems.counts.kept == len(KEPT)


def test_rows_with_an_answer_too_long_to_verify_are_counted(tmp_path):
    path = write_problems(tmp_path / "some.jsonl", ["1", "9" * 2_000, "9" * 2_001, None, "x" * 10_000_000])

    problems = Problems(source_of(path), all_fit, LIMIT)

    assert [len(row.answers[0]) for row in problems.rows] == [1, 2_000]
    assert problems.counts == RowCounts(rows=5, without_answer=1, long_answer=2)
    assert problems.counts.kept == 2

    with pytest.raises(DataError, match="1 have an answer of more than 2,000 characters"):
        Problems(source_of(write_problems(tmp_path / "none.jsonl", ["x" * 2_001])), all_fit, LIMIT)


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_a_huge_problem_is_left_out_before_it_is_tokenized(limit, tmp_path):
    path = write_problems(tmp_path / "some.jsonl", [1, 2, 3], problem=["x" * 1_000_001, "x" * 1_000_000, "1+1?"])
    measured_lengths = []

    def measure(rows):
        measured_lengths.extend(len(row.problem) for row in rows)
        return all_fit(rows)

    problems = Problems(source_of(path), measure, limit)
    assert measured_lengths == [1_000_000, 4]
    assert problems.counts == RowCounts(rows=3, too_long=1)

    path = write_problems(tmp_path / "none.jsonl", [1], problem=["x" * 10_000_000])
    limit_text = "100 tokens" if limit else "1,000,000 characters"
    with pytest.raises(DataError, match=f"1 have a prompt of more than {limit_text}"):
        Problems(source_of(path), all_fit, limit)


def test_ids_that_are_there_twice_are_refused_with_both_rows(tmp_path):
    path = write_problems(tmp_path / "a.jsonl", [1, 2, 3], id=["x", "y", "x"])

    with pytest.raises(DataError) as error:
        Problems(source_of(path), all_fit, LIMIT)
    assert f"{path} line 3 has the id 'x', as {path} line 1 has" in str(error.value)

    assert len(Problems(source_of(path, columns=ColumnsConfig(uid="row")), all_fit, LIMIT).rows) == 3
    assert len(Problems(source_of(path, limit=2), all_fit, LIMIT).rows) == 2


def test_data_without_a_problem_left_is_refused_with_reasons(tmp_path):
    path = write_problems(tmp_path / "a.jsonl", [None, 7, 7])

    with pytest.raises(
        DataError,
        match=r"left of 3 rows: 1 have no answer .*, 2 have a prompt of more than 100 tokens",
    ):
        Problems(source_of(path), lambda rows: [PromptSize(101, has_unknown=False)] * len(rows), LIMIT)
