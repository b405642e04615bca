"""The top k of long rows, found in two levels and in parts of a row, equals torch.topk of the whole row."""

import pytest
import torch

from jackpot.objectives.kernels.topk import BLOCK, RunningTopK, block_max, top_k


def random_rows(n: int, v: int, kind: str) -> torch.Tensor:
    """Return rows of a kind.

    `ties`: few different numbers. `banned`: most are -inf. `rising`: each part of a row is above those before it.
    """
    rows = torch.randn(n, v, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if kind == "ties":
        rows = rows.round()
    if kind == "banned":
        rows[rows < 1.5] = -torch.inf
    return rows.sort(-1).values if kind == "rising" else rows


def assert_top(values, ids, rows, k):
    """Check the numbers, the id of each, and that no id comes twice. Equal numbers may come in any order."""
    assert values.equal(rows.topk(k).values)
    assert rows.gather(1, ids).equal(values)
    assert all(len(set(row)) == k for row in ids.tolist())


KINDS = ["random", "ties", "banned", "rising"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("v", "k"), [(1, 1), (BLOCK, 3), (257, 5), (40 * BLOCK, 4), (40 * BLOCK + 9, 5), (2000, 0)])
def test_two_levels_find_what_one_finds(v, k, kind):
    rows = random_rows(11, v, kind)
    assert_top(*top_k(rows, k), rows, k)
    assert_top(*top_k(rows, k, block_max(rows)), rows, k)


def test_a_long_row_is_not_searched_as_a_whole(monkeypatch):
    rows = random_rows(3, 64 * BLOCK, "random")
    widths = []
    original_topk = torch.Tensor.topk

    def recorded_topk(self, *arguments, **options):
        widths.append(self.shape[1])
        return original_topk(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "topk", recorded_topk)

    top_k(rows, 2)

    assert widths == [64, 2 * BLOCK]  # the largest of each block, then the two blocks that hold the top


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [5, BLOCK, 3 * BLOCK + 7, 1000])
@pytest.mark.parametrize("k", [0, 1, 20, 90])
def test_parts_give_what_the_whole_row_gives(k, width, kind):
    rows = random_rows(9, 1000, kind)
    companions = random_rows(9, 1000, "random").flip(1)
    top = RunningTopK(k)

    for start in range(0, 1000, width):
        part = slice(start, start + width)
        top.add(rows[:, part], start, block_max(rows[:, part]), [companions[:, part]])

    assert_top(top.values, top.ids, rows, k)
    assert top.companions[0].equal(companions.gather(1, top.ids))


@pytest.mark.parametrize("kind", ["random", "ties", "one rises"])
@pytest.mark.parametrize("width", [1000, 1024])
@pytest.mark.parametrize("k", [1, 4])
def test_long_parts_with_few_of_the_largest_give_the_rows_top(k, width, kind):
    rows = random_rows(50, 8000, kind)
    if kind == "one rises":
        rows[7] = rows[7].sort().values
    top = RunningTopK(k)

    for start in range(0, 8000, width):
        part = rows[:, start : start + width]
        top.add(part, start, block_max(part), [-part])

    assert_top(top.values, top.ids, rows, k)
    assert top.companions[0].equal(-top.values)


def test_ids_of_a_row_of_nans_are_in_range_and_differ():
    rows = random_rows(3, 600, "random")
    rows[1] = torch.nan
    top = RunningTopK(8)

    for start in range(0, 600, 200):
        part = rows[:, start : start + 200]
        top.add(part, start, block_max(part))

    assert len(set(top.ids[1].tolist())) == 8
    assert top.ids[1].min() >= 0
    assert top.ids[1].max() < 600
    other_rows = [0, 2]
    assert_top(top.values[other_rows], top.ids[other_rows], rows[other_rows], 8)


@pytest.mark.parametrize("width", [100, 64 * 20])  # the second in two levels: a rank may get no row of a batch
def test_no_rows_have_an_empty_top(width):
    top = RunningTopK(3)
    for start in (0, width):
        part = torch.zeros(0, width)
        top.add(part, start, block_max(part))

    assert top.values.shape == (0, 3)
    assert top.ids.shape == (0, 3)
