"""Metrics kept as sums have numpy's values, whether taken at once, added up of parts, or held by two ranks."""

import math
import multiprocessing
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.sums import assert_equal_sums
from helpers.waits import waits
from jackpot.core.metrics import (
    ClusteredMean,
    EffectiveSampleSize,
    Histogram,
    Max,
    Mean,
    Sum,
    add_sums,
    all_reduce_sums,
    means,
    to_host,
)
from jackpot.core.statistics import Estimate


def sample(seed=0, shape=(3, 5)):
    """Draw values, and a mask of about 60 % of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values, torch.rand(shape, generator=generator) < 0.6


def test_a_mean_and_its_error_are_of_the_masked_entries():
    values, mask = sample()
    inside = values.numpy()[mask.numpy()]
    entry = Mean.of(values, mask)

    assert entry.count.item() == len(inside)
    assert entry.value.item() == pytest.approx(inside.mean(), rel=1e-13)
    assert entry.standard_error.item() == pytest.approx(inside.std() / math.sqrt(len(inside)), rel=1e-12)


def test_a_clustered_mean_is_the_ratio_estimator_of_responses():
    values, mask = sample(shape=(40, 7))
    mask[3] = False  # a response without a token counts as none
    values += 3.0 * torch.randn(40, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, n = (values * mask).sum(-1).numpy(), mask.sum(-1).numpy()
    mean = y.sum() / n.sum()
    responses = np.count_nonzero(n)
    error = math.sqrt(responses / (responses - 1) * ((y - mean * n) ** 2).sum()) / n.sum()

    entry = ClusteredMean.of(values[:9], mask[:9]) + ClusteredMean.of(values[9:], mask[9:])

    assert entry.value.item() == pytest.approx(mean, rel=1e-12)
    assert entry.standard_error.item() == pytest.approx(error, rel=1e-10)
    assert error > 1.5 * Mean.of(values, mask).standard_error  # tokens of a response are alike here
    assert ClusteredMean.of(values[:1], mask[:1]).standard_error == 0.0
    assert entry.estimate == Estimate(entry.value.item(), entry.standard_error.item())


def test_a_clustered_mean_of_one_response_has_no_error():
    values, mask = sample(shape=(1, 7))
    entry = ClusteredMean.of(values, mask)

    assert entry.estimate.error is None
    assert entry.estimate.value == pytest.approx(values[mask].mean().item(), rel=1e-12)
    assert ClusteredMean.of(values[0], mask[0]) == entry
    assert ClusteredMean.of(values, torch.zeros_like(mask)).estimate is None


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_does_not_leak(garbage):
    values, mask = sample()
    dirty = torch.where(mask, values, garbage)
    assert Mean.of(dirty, mask).total.item() == pytest.approx(values.numpy()[mask.numpy()].sum(), rel=1e-13)
    assert all(torch.equal(*pair) for pair in zip(Mean.of(dirty, mask), Mean.of(values, mask), strict=True))
    assert Max.of(dirty, mask).value.item() == values.numpy()[mask.numpy()].max()


def test_sums_are_taken_in_float64():
    """2**24 + 1 is no float32: a float32 sum would lose the ones."""
    values = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert Mean.of(values, torch.ones(4, dtype=torch.bool)).total.item() == 2.0**24 + 3
    assert Mean.of(values, torch.ones(4, dtype=torch.bool)).total.dtype == torch.float64


def test_parts_add_up_to_the_whole():
    values, mask = sample(1, (8, 6))
    for kind in (Mean, Max, EffectiveSampleSize):
        at_once = kind.of(values, mask)
        parts = kind.of(values[:3], mask[:3]) + kind.of(values[3:], mask[3:])
        assert [x.item() for x in parts] == pytest.approx([x.item() for x in at_once], rel=1e-13)


def test_nothing_counted_is_nan_or_minus_infinity():
    for shape in ((2, 3), (2, 0)):
        values, mask = torch.ones(shape), torch.zeros(shape, dtype=torch.bool)
        assert math.isnan(Mean.of(values, mask).value) and math.isnan(Mean.of(values, mask).standard_error)
        assert Mean.of(values, mask).total.item() == 0.0
        assert Max.of(values, mask).value.item() == -math.inf


def test_a_metric_carries_no_gradient():
    values = torch.ones(3, requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    assert not any(entry.requires_grad for entry in (*Mean.of(values, mask), *Max.of(values, mask)))


def test_sums_are_added_by_name_and_others_kept():
    small, large = Mean(*torch.tensor([1.0, 1.0, 1.0])), Mean(*torch.tensor([4.0, 16.0, 1.0]))
    first, second = {"a": small, "b": large}, {"b": small, "c": Max(torch.tensor(3.0))}
    merged = add_sums(first, second)
    assert {name: entry.value.item() for name, entry in merged.items()} == {"a": 1.0, "b": 2.5, "c": 3.0}
    assert set(first) == {"a", "b"} and first["b"] is large


def test_without_ranks_the_sums_stay_as_they_are():
    sums = {"a": Mean.of(*sample())}
    assert all_reduce_sums(sums) is sums


# Counts, effective sizes and histograms


def effective(log_weights):
    """(sum w)^2 / (n sum w^2), scaled so that nothing overflows: it does not depend on the scale."""
    weights = np.exp(log_weights - np.max(log_weights))
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def test_a_total_counts_what_is_true_and_adds():
    _, mask = sample()
    counted = int(mask.numpy().sum())
    assert (Sum.of(mask) + Sum.of(~mask)).value.item() == mask.numel() and Sum.of(mask).value.item() == counted


@pytest.mark.parametrize("scale", [0.1, 1.0, 400.0])
def test_the_effective_size_is_of_weights_of_any_size(scale):
    values, mask = sample(2, (40, 6))
    inside = scale * values.numpy()[mask.numpy()]

    size = EffectiveSampleSize.of(scale * values, mask)
    assert size.value.item() == pytest.approx(effective(inside), rel=1e-9)
    assert 0.0 < size.value.item() <= 1.0 and size.count.item() == len(inside)

    parts = EffectiveSampleSize.of(scale * values[:7], mask[:7]) + EffectiveSampleSize.of(scale * values[7:], mask[7:])
    assert parts.value.item() == pytest.approx(size.value.item(), rel=1e-9)


def test_equal_weights_count_fully_and_a_heavy_weight_as_1():
    ones = torch.ones(8, dtype=torch.bool)
    assert EffectiveSampleSize.of(torch.full((8,), 700.0), ones).value.item() == pytest.approx(1.0, rel=1e-12)
    assert EffectiveSampleSize.of(torch.tensor([900.0] + 7 * [0.0]), ones).value.item() == pytest.approx(
        1 / 8, rel=1e-12
    )


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_sizes_and_histograms_ignore_what_is_masked(garbage):
    values, mask = sample()
    dirty = torch.where(mask, values, garbage)
    for kind in (EffectiveSampleSize, Histogram):
        assert all(torch.equal(*pair) for pair in zip(kind.of(dirty, mask), kind.of(values, mask), strict=True))


def test_metrics_without_entries_are_nan_and_add_nothing():
    values, mask = sample()
    for kind in (EffectiveSampleSize, Histogram):
        nothing, something = kind.of(values, mask & False), kind.of(values, mask)
        assert math.isnan(nothing.value)
        assert (nothing + something).value.item() == something.value.item()
        assert math.isnan((nothing + nothing).value)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.9, 1.0])
def test_a_quantile_is_within_the_promised_resolution_of_numpys(scale, share):
    values, mask = sample(5, (200, 50))
    expected = np.quantile(scale * values.numpy()[mask.numpy()], share, method="inverted_cdf")
    quantile = Histogram.of(scale * values, mask).quantile(share).item()
    assert quantile == pytest.approx(expected, rel=0.015, abs=2e-6)


@pytest.mark.parametrize("value", [0.0, 1e-6, -3e-5, 0.02, -1.5, 39.0, -39.0])
def test_a_single_value_comes_back_within_the_resolution(value):
    median = Histogram.of(torch.tensor([value], dtype=torch.float64), torch.ones(1, dtype=torch.bool)).value.item()
    assert median == pytest.approx(value, rel=0.015, abs=2e-6)


def test_distant_values_are_in_the_outer_bins_and_nan_in_none():
    values = torch.tensor([math.inf, 1e9, -math.inf, -400.0, math.nan, 0.5], dtype=torch.float64)
    counts = Histogram.of(values, torch.ones(6, dtype=torch.bool)).counts
    assert counts[0] == 2.0 and counts[-1] == 2.0 and counts.sum() == 5.0


def test_histograms_of_parts_add_up_to_that_of_the_whole():
    values, mask = sample(6, (30, 9))
    parts = Histogram.of(values[:4], mask[:4]) + Histogram.of(values[4:], mask[4:])
    assert torch.equal(parts.counts, Histogram.of(values, mask).counts) and parts.counts.sum() == mask.sum()


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_means_of_many_columns_and_masks_are_those_of_each(garbage):
    values, mask = sample(3, (6, 9))
    columns = {"value": torch.where(mask, values, garbage), "sign": values > 0}
    masks = {"": mask, "_positive": mask & (values > 0), "_none": mask & False}

    table = means(columns, masks)

    assert table.keys() == {column + name for column in columns for name in masks}
    for column, entries in columns.items():
        for name, of in masks.items():
            for mine, theirs in zip(table[column + name], Mean.of(entries, of), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=0.0)


def test_the_host_waits_only_to_read_all_metrics_at_once():
    values, mask = sample()
    kinds = (Mean, ClusteredMean, Max, EffectiveSampleSize, Histogram)

    with waits() as waiting:
        sums = {kind.__name__: kind.of(values, mask) for kind in kinds} | {"Sum": Sum.of(mask)}
        merged = add_sums(sums | means({"some": values}, {"": mask}), sums, {"Mean": sums["Mean"]})
        assert waiting == []
        read = to_host(merged)
        assert len(waiting) == 1
        assert read["Mean"].count > 0 and math.isfinite(float(read["Max"].value))
    assert len(waiting) == 1 and to_host({}) == {}
    assert_equal_sums(dict(sorted(read.items())), dict(sorted(merged.items())))


def rank_sums(rank):
    """Take every kind of metric of a rank's sample."""
    values, mask = sample(rank)
    # another order on every rank: names, not places, say what is added
    entries = {"mean": Mean.of(values, mask), "other": Mean.of(values + 1, mask), "largest": Max.of(values, mask)}
    entries |= {"total": Sum.of(mask), "share": EffectiveSampleSize.of(400.0 + 2.0 * values, mask)}
    entries |= {"clustered": ClusteredMean.of(values, mask)}
    entries |= {"spread": Histogram.of(values, mask), "nothing": EffectiveSampleSize.of(values, mask & False)}
    return entries if rank == 0 else dict(reversed(entries.items()))


def test_many_sets_of_metrics_add_up_as_two_and_two_do():
    first, second = rank_sums(0), rank_sums(1) | {"more": Sum.number(2.0)}
    pairs = add_sums(add_sums(first, second), first)
    assert pairs["more"].value == 2.0 and pairs["mean"].count == 2 * first["mean"].count + second["mean"].count

    many = add_sums(first, {}, second, first)
    assert many.keys() == pairs.keys()
    for name in pairs:
        for mine, theirs in zip(many[name], pairs[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=0.0, equal_nan=True)


def run_rank(rank, folder):
    """Add up the sums of two ranks, in a process of its own, and save the outcome."""
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

        clustered = ClusteredMean.of(torch.cat([values, more]), torch.cat([mask, mask_too]))
        assert torch.stack(reduced["clustered"]).tolist() == pytest.approx(
            [float(entry) for entry in clustered], rel=1e-13
        )
        assert Mean(*reduced["other"]).value.item() == pytest.approx(both.mean() + 1, rel=1e-13)
        assert Max(*reduced["largest"]).value.item() == both.max()
        assert Sum(*reduced["total"]).value.item() == len(both)
        assert EffectiveSampleSize(*reduced["share"]).value.item() == pytest.approx(effective(2.0 * both), rel=1e-9)
        assert math.isnan(EffectiveSampleSize(*reduced["nothing"]).value)

        for share in (0.1, 0.5, 0.9):
            expected = np.quantile(both, share, method="inverted_cdf")
            assert Histogram(*reduced["spread"]).quantile(share).item() == pytest.approx(expected, rel=0.015, abs=2e-6)


def test_a_metric_of_another_kind_is_refused_by_its_name():
    sums = {"tokens": Sum.number(3.0), "ratio": Mean.number(2.0)}
    assert Mean.named(sums, "ratio") is sums["ratio"]
    with pytest.raises(TypeError, match="tokens is a Sum; what reads it here needs a Mean"):
        Mean.named(sums, "tokens")
