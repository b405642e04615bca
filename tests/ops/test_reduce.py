"""Sums against numpy, and against one process where two ranks hold a part each."""

import math
import multiprocessing
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from jackpot.ops.reduce import Max, Mean, add_sums, all_reduce_sums, masked_sum


def sample(seed=0, shape=(3, 5)):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values, torch.rand(shape, generator=generator) < 0.6


def test_a_mean_and_its_standard_error_are_those_of_the_masked_entries():
    values, mask = sample()
    inside = values.numpy()[mask.numpy()]
    entry = Mean.of(values, mask)
    assert entry.count.item() == len(inside)
    assert entry.value.item() == pytest.approx(inside.mean(), rel=1e-13)
    assert entry.standard_error.item() == pytest.approx(inside.std() / math.sqrt(len(inside)), rel=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_does_not_leak(garbage):
    values, mask = sample()
    dirty = torch.where(mask, values, garbage)
    assert masked_sum(dirty, mask).item() == pytest.approx(values.numpy()[mask.numpy()].sum(), rel=1e-13)
    assert all(torch.equal(*pair) for pair in zip(Mean.of(dirty, mask), Mean.of(values, mask), strict=True))
    assert Max.of(dirty, mask).value.item() == values.numpy()[mask.numpy()].max()


def test_sums_are_taken_in_float64():
    """2**24 + 1 is no float32: a float32 sum would lose the ones."""
    values = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert Mean.of(values, torch.ones(4, dtype=torch.bool)).total.item() == 2.0**24 + 3
    assert masked_sum(values, torch.ones(4, dtype=torch.bool)).dtype == torch.float64


def test_parts_add_up_to_the_whole():
    values, mask = sample(1, (8, 6))
    for kind in (Mean, Max):
        whole, parts = kind.of(values, mask), kind.of(values[:3], mask[:3]) + kind.of(values[3:], mask[3:])
        assert [x.item() for x in parts] == pytest.approx([x.item() for x in whole], rel=1e-13)


def test_shares_of_a_bool_count_as_means():
    entry = Mean.of(torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False]))
    assert entry.value.item() == pytest.approx(2 / 3, rel=1e-15)


def test_nothing_counted_is_nan_for_a_mean_and_minus_infinity_for_a_max():
    for shape in ((2, 3), (2, 0)):
        values, mask = torch.ones(shape), torch.zeros(shape, dtype=torch.bool)
        assert math.isnan(Mean.of(values, mask).value) and math.isnan(Mean.of(values, mask).standard_error)
        assert Mean.of(values, mask).total.item() == 0.0
        assert Max.of(values, mask).value.item() == -math.inf


def test_a_metric_carries_no_gradient():
    values = torch.ones(3, requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    assert not any(part.requires_grad for part in (*Mean.of(values, mask), *Max.of(values, mask)))


def test_sums_of_different_names_are_kept_and_of_equal_names_added():
    one, two = Mean(*torch.tensor([1.0, 1.0, 1.0])), Mean(*torch.tensor([4.0, 16.0, 1.0]))
    first, second = {"a": one, "b": two}, {"b": one, "c": Max(torch.tensor(3.0))}
    merged = add_sums(first, second)
    assert {name: entry.value.item() for name, entry in merged.items()} == {"a": 1.0, "b": 2.5, "c": 3.0}
    assert set(first) == {"a", "b"} and first["b"] is two


def test_without_ranks_the_sums_stay_as_they_are():
    sums = {"a": Mean.of(*sample())}
    assert all_reduce_sums(sums) is sums


def rank_sums(rank):
    values, mask = sample(rank)
    # another order on every rank: names, not places, say what is added
    entries = {"mean": Mean.of(values, mask), "other": Mean.of(values + 1, mask), "largest": Max.of(values, mask)}
    return entries if rank == 0 else dict(reversed(entries.items()))


def run_rank(rank, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    reduced = all_reduce_sums(rank_sums(rank))
    torch.save({name: list(entry) for name, entry in reduced.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_hold_the_sums_of_both(tmp_path):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(90)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (values, mask), (more, mask_too) = sample(0), sample(1)
    both = np.concatenate([values[mask].numpy(), more[mask_too].numpy()])
    for rank in (0, 1):
        reduced = torch.load(tmp_path / f"{rank}.pt")
        assert Mean(*reduced["mean"]).value.item() == pytest.approx(both.mean(), rel=1e-13)
        assert Mean(*reduced["mean"]).standard_error.item() == pytest.approx(both.std() / len(both) ** 0.5, rel=1e-12)
        assert Mean(*reduced["other"]).value.item() == pytest.approx(both.mean() + 1, rel=1e-13)
        assert Max(*reduced["largest"]).value.item() == both.max()
