"""Problems by index: what is left out and counted, and that a stream is the same problems without holding them."""

import tracemalloc
from pathlib import Path

import pytest

from helpers.texts import write_problems
from jackpot.config.tasks import ColumnsConfig, DataConfig
from jackpot.core.errors import DataError
from jackpot.rollout.tasks import data
from jackpot.rollout.tasks.data import Problems, PromptSize, RowCounts, StreamedProblems, find_source

ANSWERS = [None if number % 10 == 3 else number for number in range(1000)]  # every tenth has none


def source(path: Path, **settings):
    return find_source(DataConfig(source=str(path), **settings), "train")


LIMIT = 100


def all_fit(rows):
    return [PromptSize(LIMIT, False)] * len(rows)


def without_sevens(rows):
    return [PromptSize(LIMIT + ("7" in row.problem), False) for row in rows]


KEPT = [str(number) for number in range(1000) if number % 10 != 3 and "7" not in str(number)]
TALLY = RowCounts(rows=1000, without_answer=100, too_long=900 - len(KEPT))


@pytest.fixture(scope="module")
def thousand(tmp_path_factory) -> Path:
    return write_problems(tmp_path_factory.mktemp("data") / "thousand.jsonl", ANSWERS)


def test_rows_that_cannot_be_used_are_counted_by_reason(thousand):
    found = Problems(source(thousand), without_sevens, LIMIT)
    assert found.size == len(KEPT) and [found[n].answers[0] for n in range(found.size)] == KEPT
    assert found.counts == TALLY and found.counts.kept == len(KEPT)


def test_rows_with_an_answer_too_long_to_verify_are_counted(tmp_path):
    path = write_problems(tmp_path / "some.jsonl", ["1", "9" * 2_000, "9" * 2_001, None, "x" * 10_000_000])
    found = Problems(source(path), all_fit, LIMIT)
    assert [len(found[n].answers[0]) for n in range(found.size)] == [1, 2_000]
    assert found.counts == RowCounts(rows=5, without_answer=1, long_answer=2) and found.counts.kept == 2
    with pytest.raises(DataError, match="1 have an answer of more than 2,000 characters"):
        Problems(source(write_problems(tmp_path / "none.jsonl", ["x" * 2_001])), all_fit, LIMIT)


def test_a_stream_is_the_same_problems_in_their_order(thousand):
    found = StreamedProblems(source(thousand), without_sevens, LIMIT)
    assert found.size is None and [found[n].answers[0] for n in range(len(KEPT))] == KEPT
    assert found.counts == TALLY


def test_a_stream_begins_anew_with_ids_of_its_own(thousand):
    found, size = StreamedProblems(source(thousand), without_sevens, LIMIT), len(KEPT)
    whole = [found[n] for n in range(3 * size)]
    assert [row.answers[0] for row in whole] == 3 * KEPT
    assert len({row.uid for row in whole}) == 3 * size
    assert [whole[n * size + 5].uid for n in range(3)] == ["6", "6+1", "6+2"]
    assert found.counts == TALLY  # each row once


def test_any_problem_of_a_stream_is_found_from_anywhere(thousand, monkeypatch):
    monkeypatch.setattr(data, "BUFFER", 10)
    found, size = StreamedProblems(source(thousand), without_sevens, LIMIT), len(KEPT)
    for index in (500, 491, 490, 3, 2 * size + 1, 0, size, size - 1, 9):
        assert found[index].answers[0] == KEPT[index % size]
        assert found[index].uid.endswith(f"+{index // size}") or index < size
    assert found.counts == TALLY


def test_a_stream_does_not_hold_what_it_has_read(tmp_path, monkeypatch):
    """3,000 problems of 2,000 characters are 6 MB; a batch, its filtered rows and the buffer are not half of it."""
    monkeypatch.setattr(data, "BUFFER", 100)
    path = write_problems(tmp_path / "long.jsonl", [1] * 3000, problem=[f"{n} {'x' * 2000}" for n in range(3000)])
    found = StreamedProblems(source(path), all_fit, LIMIT)
    tracemalloc.start()
    try:
        assert found[2999].problem.startswith("2999 ")
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()


def test_a_stream_reads_no_further_than_it_must(tmp_path):
    path = write_problems(tmp_path / "a.jsonl", range(300))
    with path.open("a") as file:
        file.write("not JSON\n")
    found = StreamedProblems(source(path), all_fit, LIMIT)
    assert found[200].answers[0] == "200"
    with pytest.raises(DataError, match="line 301 cannot be read"):
        found[299]


def test_ids_that_are_there_twice_are_refused_with_both_rows(tmp_path):
    path = write_problems(tmp_path / "a.jsonl", [1, 2, 3], id=["x", "y", "x"])
    with pytest.raises(DataError) as error:
        Problems(source(path), all_fit, LIMIT)
    assert f"{path} line 3 has the id 'x', as {path} line 1 has" in str(error.value)
    assert Problems(source(path, columns=ColumnsConfig(uid="row")), all_fit, LIMIT).size == 3
    assert Problems(source(path, limit=2), all_fit, LIMIT).size == 2


@pytest.mark.parametrize("kind", [Problems, StreamedProblems])
def test_data_without_a_problem_left_is_refused_with_reasons(kind, tmp_path):
    path = write_problems(tmp_path / "a.jsonl", [None, 7, 7])
    with pytest.raises(
        DataError,
        match=r"left of 3 rows: 1 have no answer .*, 2 have a prompt of more than 100 tokens",
    ):
        kind(source(path), lambda rows: [PromptSize(101, False)] * len(rows), LIMIT)[0]
