"""Z from the top k, as research/topk.py estimates it, has the values and bounds of Python loops and numpy."""

import math

import numpy as np
import pytest
import torch

from jackpot.analysis.simulate.distributions import RECIPE_LAM, StatePairs, measure_states
from research.families import FAMILIES, sample_states
from research.topk import (
    acceptance_variance,
    topk_numbers,
    topk_section,
    topk_sizes,
    topk_source,
    topk_summary,
)

NAMES = [family.name for family in FAMILIES]
SMALL = 400  # tokens


def states(name: str, gap: float, count: int = 6, vocabulary: int = SMALL) -> StatePairs:
    """Sample states of a family with this gap."""
    family = next(family for family in FAMILIES if family.name == name)
    return sample_states(family, gap, count, seed=3, vocabulary=vocabulary)


def brute_force_z(pair: StatePairs, row: int, k: int, fill_in: bool) -> float:
    """Sum the smaller probability of the tokens in the rollout model's top k, and in the policy's to fill in."""
    p_inf, p_target = pair.rollout[row].exp().numpy(), pair.target[row].exp().numpy()
    known = set(np.argsort(-p_inf)[:k]) | (set(np.argsort(-p_target)[:k]) if fill_in else set())
    return math.fsum(min(p_inf[token], p_target[token]) for token in known)


@pytest.mark.parametrize("fill_in", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_z_from_the_top_k_hold_the_exact_z(name: str, fill_in: bool) -> None:
    pair = states(name, 0.6)
    estimate, exact = topk_numbers(pair, fill_in), measure_states(pair).acceptance[:, RECIPE_LAM]

    for index, k in enumerate(topk_sizes(SMALL)):
        expected = [brute_force_z(pair, row, k, fill_in) for row in range(len(pair))]
        np.testing.assert_allclose(estimate.value[:, index].numpy(), expected, rtol=1e-11)
    assert (estimate.lower <= exact[:, None] + 1e-12).all() and (exact[:, None] <= estimate.upper + 1e-12).all()
    assert (estimate.value.diff(dim=1) >= -1e-12).all() and (
        (estimate.upper - estimate.lower).diff(dim=1) <= 1e-12
    ).all()


def test_sizes_stop_at_the_vocabulary() -> None:
    assert (
        topk_sizes(32) == (2, 5, 10, 20, 32)
        and topk_sizes(20) == (2, 5, 10, 20)
        and topk_sizes(160) == (2, 5, 10, 20, 40, 80, 160)
    )
    assert topk_sizes(32_768) == (2, 5, 10, 20, 40, 80, 160)

    last = topk_numbers(states("noise", 1.0, vocabulary=32), fill_in=False)
    exact = measure_states(states("noise", 1.0, vocabulary=32)).acceptance[:, RECIPE_LAM]
    np.testing.assert_allclose(last.value[:, -1].numpy(), exact.numpy(), rtol=1e-12)
    np.testing.assert_allclose(last.upper[:, -1].numpy(), exact.numpy(), rtol=1e-12)


def test_a_summary_has_kappa_with_its_error() -> None:
    pair = states("noise", 1.5, count=10)
    numbers, exact = topk_numbers(pair, fill_in=True), measure_states(pair)
    z, z_k = exact.acceptance[:, RECIPE_LAM].numpy(), numbers.value[:, 2].numpy()
    accept = np.minimum(1.0, pair.rho.numpy())

    kappas = []
    draw = np.random.default_rng(0)
    for _ in range(1_500):
        sampled = np.stack([draw.choice(accept[row], size=4, p=pair.rollout[row].exp().numpy()) for row in range(10)])
        kappas.append(sampled.sum() / (4 * z_k.sum()))

    row = topk_summary(numbers, exact, acceptance_variance(pair), torch.from_numpy(sampled), SMALL, fill_in=True)[2]

    assert row.k == 10 and row.fill_in and row.outside == 0
    assert row.z_share == pytest.approx((z_k / z).mean(), rel=1e-12)
    assert row.z_share_low == pytest.approx(np.quantile(z_k / z, 0.01), rel=1e-12)
    assert row.width == pytest.approx((numbers.upper - numbers.lower)[:, 2].numpy().mean(), rel=1e-12)
    assert row.captured == pytest.approx(numbers.captured[:, 2].numpy().mean(), rel=1e-12)
    assert row.kappa == pytest.approx(kappas[-1], rel=1e-12)
    assert row.kappa_exact == pytest.approx(z.sum() / z_k.sum(), rel=1e-12)
    assert row.corrected == pytest.approx(kappas[-1] * z_k.mean() / z.mean(), rel=1e-12)
    assert np.mean(kappas) == pytest.approx(row.kappa_exact, abs=4 * row.kappa_error / math.sqrt(1_500))
    assert np.std(kappas) == pytest.approx(row.kappa_error, rel=0.1)


def test_the_variance_of_the_acceptance_is_a_sum_over_tokens() -> None:
    pair = states("noise", 1.0)
    p_inf, accept = pair.rollout.exp().numpy(), np.minimum(1.0, pair.rho.numpy())
    mean = (p_inf * accept).sum(1, keepdims=True)
    expected = (p_inf * (accept - mean) ** 2).sum(1)
    np.testing.assert_allclose(acceptance_variance(pair).numpy(), expected, rtol=1e-9)


def test_the_estimates_do_not_depend_on_the_chunks_and_are_shown() -> None:
    pair = states("noise", 1.0, count=20)
    source = topk_source("a", [pair])
    assert source == topk_source("a", [pair.pick(torch.arange(start, start + 5)) for start in range(0, 20, 5)])
    assert len(source.rows) == 14 and source.vocabulary == SMALL

    row = next(row for row in source.rows if row.k == 20 and row.fill_in)
    assert f"{row.z_share:.4f}" in str(topk_section([source]))
