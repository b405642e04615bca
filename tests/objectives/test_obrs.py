"""OBRS against enumeration of the vocabulary in float64: the accepted distribution is built token by token."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.distributions import RTOL, enumerated, few, kl, lams, pairs, tensors
from jackpot.objectives import obrs

# The rule, its normaliser and what it leaves


@few
@given(pairs(), lams)
def test_acceptance_is_the_ratio_over_lam_and_never_above_one(pair, lam):
    expected_acceptance, _, _ = enumerated(*pair, lam)
    acceptance = obrs.acceptance(*tensors(*pair), lam)
    sampled_ids = [index for index, q in enumerate(pair[0]) if q > -math.inf]
    assert acceptance[sampled_ids].tolist() == pytest.approx(
        [expected_acceptance[index] for index in sampled_ids], rel=RTOL
    )


def test_nothing_is_accepted_outside_both_supports():
    zero_log_prob, token_log_prob = torch.tensor([-math.inf]), torch.tensor([-1.0])

    assert obrs.acceptance(zero_log_prob, zero_log_prob, 2.0).item() == 0.0
    assert obrs.acceptance(zero_log_prob, token_log_prob, 2.0).item() == 1.0
    assert obrs.acceptance(token_log_prob, zero_log_prob, 2.0).item() == 0.0

    log_inf, log_target = tensors([0.0, -math.inf, -math.inf], [-math.inf, 0.0, -math.inf])
    assert obrs.post_rejection(log_inf, log_target, 1.0).exp().tolist() == [0.0, 0.0, 0.0]


def test_acceptance_is_1_up_to_the_smallest_ratio():
    log_inf, log_target = tensors(np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.3, 0.6]))
    assert obrs.acceptance(log_inf, log_target, 0.2 - 1e-12).tolist() == [1.0, 1.0, 1.0]
    assert obrs.acceptance(log_inf, log_target, 0.4).tolist() == pytest.approx([0.5, 1.0, 1.0], rel=RTOL)
    assert obrs.acceptance(log_inf, log_target, 6.0).tolist() == pytest.approx([1 / 30, 1 / 6, 0.5], rel=RTOL)


def test_the_coin_accepts_with_probability_a():
    coins = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000

    for a in (0.0, 0.1234, 0.5, 0.9999, 1.0):
        share = obrs.accept(torch.full_like(coins, a), coins).double().mean().item()
        assert share == pytest.approx(a, abs=1e-4)

    zero_coin, largest_coin = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1 - 2**-53, dtype=torch.float64)
    assert not obrs.accept(torch.tensor(0.0), zero_coin)
    assert obrs.accept(torch.tensor(1.0), largest_coin)


@few
@given(pairs(), lams)
def test_z_is_the_expected_acceptance(pair, lam):
    _, z, _ = enumerated(*pair, lam)
    assert obrs.exact_z(*tensors(*pair), lam).item() == pytest.approx(z, rel=RTOL, abs=1e-300)


@few
@given(pairs(), lams)
def test_post_rejection_is_the_distribution_of_accepted_tokens(pair, lam):
    _, z, accepted_probs = enumerated(*pair, lam)
    assume(z > 1e-280)
    assert obrs.post_rejection(*tensors(*pair), lam).exp().tolist() == pytest.approx(
        accepted_probs, rel=RTOL, abs=1e-300
    )


@few
@given(pairs(), lams)
def test_the_weight_is_target_over_accepted_distribution(pair, lam):
    acceptance, z, accepted_probs = enumerated(*pair, lam)
    log_inf, log_target = tensors(*pair)
    weights = obrs.weight(log_inf, log_target, torch.full_like(log_inf, z), lam)

    for x, a in enumerate(acceptance):
        if a > 1e-280:
            assert weights[x].item() == pytest.approx(math.exp(pair[1][x]) / accepted_probs[x], rel=RTOL)


@few
@given(pairs(), lams)
def test_weighing_the_accepted_tokens_gives_the_target_times_z(pair, lam):
    """E[accept * w * f] = Z E_target[f] on the support of p_inf: what makes OBRS a correction."""
    acceptance, z, _ = enumerated(*pair, lam)
    log_inf, log_target = tensors(*pair)
    weights = obrs.weight(log_inf, log_target, torch.full_like(log_inf, z), lam).tolist()
    f = [math.sin(3.0 * x + 1.0) for x in range(len(weights))]
    support = [x for x in range(len(weights)) if pair[0][x] > -math.inf]
    accepted_mean = math.fsum(math.exp(pair[0][x]) * acceptance[x] * weights[x] * f[x] for x in support)
    target_mean = z * math.fsum(math.exp(pair[1][x]) * f[x] for x in support)

    assert accepted_mean == pytest.approx(target_mean, rel=1e-11, abs=1e-15)


@few
@given(pairs(), lams, st.floats(1.0, 50.0))
def test_accepting_and_clipping_is_clipping_z_times_the_ratio(pair, lam, c1):
    """a min(w, c1) = min(Z rho, c1) for every lam and every c1 >= 1: lam enters only through Z."""
    _, z, _ = enumerated(*pair, lam)
    log_inf, log_target = tensors(*pair)
    acceptance = obrs.acceptance(log_inf, log_target, lam)
    weights = obrs.weight(log_inf, log_target, torch.full_like(log_inf, z), lam)
    products = (acceptance * weights.clamp(max=c1)).tolist()

    for x, (q, p) in enumerate(zip(*pair, strict=True)):
        if q > -math.inf:
            assert products[x] == pytest.approx(min(z * math.exp(p - q), c1), rel=RTOL, abs=1e-300)


@few
@given(pairs(), lams)
def test_lam_times_z_is_at_most_one(pair, lam):
    assert lam * obrs.exact_z(*tensors(*pair), lam).item() <= 1.0 + RTOL


@few
@given(pairs())
def test_z_at_lam_one_is_one_minus_total_variation(pair):
    variation = 0.5 * math.fsum(abs(math.exp(q) - math.exp(p)) for q, p in zip(*pair, strict=True))
    assert obrs.exact_z(*tensors(*pair), 1.0).item() == pytest.approx(1.0 - variation, abs=1e-14)


def test_lam_may_be_a_tensor_that_broadcasts():
    log_inf, log_target = tensors(*(np.log(row) for row in ([[0.5, 0.3, 0.2]] * 2, [[0.1, 0.3, 0.6]] * 2)))
    lam = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    z = torch.tensor([[0.7], [0.4]], dtype=torch.float64).expand(2, 3)

    for row, row_lam in enumerate((0.5, 2.0)):
        row_pair = log_inf[row], log_target[row]
        assert torch.equal(obrs.acceptance(log_inf, log_target, lam)[row], obrs.acceptance(*row_pair, row_lam))
        assert torch.equal(obrs.exact_z(log_inf, log_target, lam)[row], obrs.exact_z(*row_pair, row_lam))
        assert torch.equal(obrs.weight(log_inf, log_target, z, lam)[row], obrs.weight(*row_pair, z[row], row_lam))


@pytest.mark.parametrize("lam", [0.0, -1.0, math.nan, torch.tensor([1.0, 0.0]), torch.tensor(math.nan)])
def test_a_lam_that_is_not_above_zero_is_refused(lam):
    with pytest.raises(ValueError, match="above 0"):
        obrs.acceptance(torch.zeros(2), torch.zeros(2), lam)


def test_float32_in_gives_float32_out():
    log_inf, log_target = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    assert obrs.acceptance(log_inf, log_target, 1.0).dtype == torch.float32
    assert obrs.weight(log_inf, log_target, torch.tensor([0.6, 0.6]), 1.0).dtype == torch.float32
    assert obrs.weight(log_inf, log_target, torch.tensor([0.6, 0.6]), 1.0).tolist() == pytest.approx([1.08, 0.6])


def test_without_overlap_everything_is_rejected():
    log_inf, log_target = tensors([0.0, -math.inf], [-math.inf, 0.0])
    z = obrs.exact_z(log_inf, log_target, 1.0)
    assert z.item() == 0.0
    assert obrs.acceptance(log_inf, log_target, 1.0)[0].item() == 0.0
    assert obrs.weight(log_inf[:1], log_target[:1], z, 1.0).item() == 0.0


# Theorem 3.3: how far p~ is from the target


def kl_after(log_inf, log_target, lam):
    """KL(target || accepted tokens)."""
    accepted_probs = obrs.post_rejection(*tensors(log_inf, log_target), lam).exp().tolist()
    return kl([math.exp(x) for x in log_target], accepted_probs)


@few
@given(pairs(2, 6, zeros=False, lowest=-4.0))
def test_kl_to_the_target_falls_between_the_extreme_ratios(pair):
    ratios = sorted(p - q for q, p in zip(*pair, strict=True))
    low, high = ratios[0], ratios[-1]
    assume(high - low > 0.1)

    kl_values = [kl_after(*pair, math.exp(x)) for x in np.linspace(low, high, 6)]

    assert all(next_kl < kl_value for kl_value, next_kl in itertools.pairwise(kl_values))
    assert kl_after(*pair, math.exp(low - 3.0)) == pytest.approx(kl_values[0], abs=1e-13)
    assert [kl_after(*pair, math.exp(high + 3.0)), kl_values[-1]] == pytest.approx([0.0, 0.0], abs=1e-13)


@few
@given(pairs(2, 5, zeros=False, lowest=-4.0), st.floats(0.02, 0.98))
def test_the_derivative_of_the_kl_is_the_corrected_one(pair, fraction):
    """d KL / d lam = (P_target(rho <= lam) / lam) (1 - 1 / (lam Z)), against a central difference of the KL.

    The step h = 1e-5 lam leaves h**2 times a third derivative, and 2**-52 / h of rounding: both below 1e-7 here.
    """
    ratios = sorted(math.exp(p - q) for q, p in zip(*pair, strict=True))
    lam = ratios[0] + fraction * (ratios[-1] - ratios[0])
    step = 1e-5 * lam
    assume(all(abs(rho - lam) > 2 * step for rho in ratios))

    central_difference = (kl_after(*pair, lam + step) - kl_after(*pair, lam - step)) / (2 * step)
    z = obrs.exact_z(*tensors(*pair), lam).item()
    mass_below = math.fsum(math.exp(p) for q, p in zip(*pair, strict=True) if math.exp(p - q) <= lam)

    assert central_difference == pytest.approx(mass_below / lam * (1.0 - 1.0 / (lam * z)), rel=1e-6, abs=1e-7 / lam)
