"""OBRS against enumeration of the vocabulary in float64, and Theorem 3.4 against scipy's optimizer.

Expectations are loops over Python floats: the accepted distribution is built token by token, never by a formula of the
code under test. Logs up to 40 nats in size are exponentiated: float64 is good to 40 * 2**-52, about 1e-14.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from jackpot.ops import obrs

RTOL = 1e-12
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
lams = st.one_of(st.sampled_from([0.2, 1.0, 3.0]), st.floats(1e-3, 1e3))


def normalised(weights):
    weights = np.array(weights, dtype=np.float64)
    return (weights - weights.max() - np.log(np.exp(weights - weights.max()).sum())).tolist()


def log_distributions(size, zeros=True, lowest=-40.0):
    """Log-probs over `size` tokens, with ties, ratios up to e**80 and, if `zeros`, tokens of probability 0."""
    special = [0.0, -1.0, -math.inf] if zeros else [0.0, -1.0]
    weight = st.one_of(st.sampled_from(special), st.floats(lowest, 0.0))
    return st.lists(weight, min_size=size, max_size=size).filter(lambda row: max(row) > -math.inf).map(normalised)


def pairs(smallest=1, largest=6, zeros=True, lowest=-40.0):
    """(log p_inf, log p_target) over one vocabulary."""
    sizes = st.integers(smallest, largest)
    return sizes.flatmap(lambda v: st.tuples(*[log_distributions(v, zeros, lowest)] * 2))


def tensors(*rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def enumerated(log_inf, log_target, lam):
    """(a, Z, p~) by walking through the vocabulary: sample x from p_inf, keep it with probability min(1, rho / lam)."""
    p_inf, p_target = [math.exp(x) for x in log_inf], [math.exp(x) for x in log_target]
    accept = [min(1.0, p / (lam * q)) if q > 0 else 0.0 for q, p in zip(p_inf, p_target, strict=True)]
    joint = [q * a for q, a in zip(p_inf, accept, strict=True)]
    z = math.fsum(joint)
    return accept, z, [mass / z if z > 0 else math.nan for mass in joint]


# The rule, its normaliser and what it leaves


@few
@given(pairs(), lams)
def test_acceptance_is_the_ratio_over_lam_and_never_above_one(pair, lam):
    expected, _, _ = enumerated(*pair, lam)
    a = obrs.acceptance(*tensors(*pair), lam)
    sampled = [index for index, q in enumerate(pair[0]) if q > -math.inf]
    assert a[sampled].tolist() == pytest.approx([expected[index] for index in sampled], rel=RTOL)


def test_acceptance_is_one_up_to_the_smallest_ratio_and_falls_with_lam():
    log_inf, log_target = tensors(np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.3, 0.6]))
    assert obrs.acceptance(log_inf, log_target, 0.2 - 1e-12).tolist() == [1.0, 1.0, 1.0]
    assert obrs.acceptance(log_inf, log_target, 0.4).tolist() == pytest.approx([0.5, 1.0, 1.0], rel=RTOL)
    assert obrs.acceptance(log_inf, log_target, 6.0).tolist() == pytest.approx([1 / 30, 1 / 6, 0.5], rel=RTOL)


def test_the_coin_accepts_with_probability_a_and_is_certain_at_the_ends():
    coins = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    for a in (0.0, 0.1234, 0.5, 0.9999, 1.0):
        share = obrs.accept(torch.full_like(coins, a), coins).double().mean().item()
        assert share == pytest.approx(a, abs=1e-4)
    zero, largest = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1 - 2**-53, dtype=torch.float64)
    assert not obrs.accept(torch.tensor(0.0), zero)
    assert obrs.accept(torch.tensor(1.0), largest)


@few
@given(pairs(), lams)
def test_z_is_the_expected_acceptance(pair, lam):
    _, z, _ = enumerated(*pair, lam)
    assert obrs.exact_z(*tensors(*pair), lam).item() == pytest.approx(z, rel=RTOL, abs=1e-300)


@few
@given(pairs(), lams)
def test_post_rejection_is_the_distribution_of_accepted_tokens(pair, lam):
    _, z, accepted = enumerated(*pair, lam)
    assume(z > 1e-280)
    assert obrs.post_rejection(*tensors(*pair), lam).exp().tolist() == pytest.approx(accepted, rel=RTOL, abs=1e-300)


@few
@given(pairs(), lams)
def test_the_weight_is_target_over_accepted_distribution(pair, lam):
    accept, z, accepted = enumerated(*pair, lam)
    log_inf, log_target = tensors(*pair)
    w = obrs.weight(log_inf, log_target, torch.full_like(log_inf, z), lam)
    for x, a in enumerate(accept):
        if a > 1e-280:
            assert w[x].item() == pytest.approx(math.exp(pair[1][x]) / accepted[x], rel=RTOL)


@few
@given(pairs(), lams)
def test_weighing_the_accepted_tokens_gives_the_target_times_z(pair, lam):
    """E[accept * w * f] = Z E_target[f] on the support of p_inf: what makes OBRS a correction."""
    accept, z, _ = enumerated(*pair, lam)
    log_inf, log_target = tensors(*pair)
    w = obrs.weight(log_inf, log_target, torch.full_like(log_inf, z), lam).tolist()
    f = [math.sin(3.0 * x + 1.0) for x in range(len(w))]
    support = [x for x in range(len(w)) if pair[0][x] > -math.inf]
    left = math.fsum(math.exp(pair[0][x]) * accept[x] * w[x] * f[x] for x in support)
    right = z * math.fsum(math.exp(pair[1][x]) * f[x] for x in support)
    assert left == pytest.approx(right, rel=1e-11, abs=1e-15)


@few
@given(pairs(), lams, st.floats(1.0, 50.0))
def test_accepting_and_clipping_is_clipping_z_times_the_ratio(pair, lam, c1):
    """a min(w, c1) = min(Z rho, c1) for every lam and every c1 >= 1: lam enters only through Z."""
    _, z, _ = enumerated(*pair, lam)
    log_inf, log_target = tensors(*pair)
    a = obrs.acceptance(log_inf, log_target, lam)
    w = obrs.weight(log_inf, log_target, torch.full_like(log_inf, z), lam)
    left = (a * w.clamp(max=c1)).tolist()
    for x, (q, p) in enumerate(zip(*pair, strict=True)):
        if q > -math.inf:
            assert left[x] == pytest.approx(min(z * math.exp(p - q), c1), rel=RTOL, abs=1e-300)


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
    for row, number in enumerate((0.5, 2.0)):
        one = log_inf[row], log_target[row]
        assert torch.equal(obrs.acceptance(log_inf, log_target, lam)[row], obrs.acceptance(*one, number))
        assert torch.equal(obrs.exact_z(log_inf, log_target, lam)[row], obrs.exact_z(*one, number))
        assert torch.equal(obrs.weight(log_inf, log_target, z, lam)[row], obrs.weight(*one, z[row], number))


@pytest.mark.parametrize("lam", [0.0, -1.0, math.nan, torch.tensor([1.0, 0.0]), torch.tensor(math.nan)])
def test_a_lam_that_is_not_above_zero_is_refused(lam):
    with pytest.raises(ValueError, match="above 0"):
        obrs.acceptance(torch.zeros(2), torch.zeros(2), lam)


def test_float32_in_gives_float32_out():
    log_inf, log_target = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    assert obrs.acceptance(log_inf, log_target, 1.0).dtype == torch.float32
    assert obrs.weight(log_inf, log_target, torch.tensor([0.6, 0.6]), 1.0).dtype == torch.float32
    assert obrs.weight(log_inf, log_target, torch.tensor([0.6, 0.6]), 1.0).tolist() == pytest.approx([1.08, 0.6])


def test_without_overlap_everything_is_rejected_and_every_weight_is_zero():
    log_inf, log_target = tensors([0.0, -math.inf], [-math.inf, 0.0])
    z = obrs.exact_z(log_inf, log_target, 1.0)
    assert z.item() == 0.0
    assert obrs.acceptance(log_inf, log_target, 1.0)[0].item() == 0.0
    assert obrs.weight(log_inf[:1], log_target[:1], z, 1.0).item() == 0.0


# Theorem 3.3: how far p~ is from the target


def kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def kl_after(log_inf, log_target, lam):
    left = obrs.post_rejection(*tensors(log_inf, log_target), lam).exp().tolist()
    return kl([math.exp(x) for x in log_target], left)


@few
@given(pairs(2, 6, zeros=False, lowest=-4.0))
def test_kl_to_the_target_falls_strictly_between_the_extreme_ratios_and_is_constant_outside(pair):
    ratios = sorted(p - q for q, p in zip(*pair, strict=True))
    low, high = ratios[0], ratios[-1]
    assume(high - low > 0.1)
    values = [kl_after(*pair, math.exp(x)) for x in np.linspace(low, high, 6)]
    assert all(after < before for before, after in itertools.pairwise(values))
    assert kl_after(*pair, math.exp(low - 3.0)) == pytest.approx(values[0], abs=1e-13)
    assert [kl_after(*pair, math.exp(high + 3.0)), values[-1]] == pytest.approx([0.0, 0.0], abs=1e-13)


@few
@given(pairs(2, 5, zeros=False, lowest=-4.0), st.floats(0.02, 0.98))
def test_the_derivative_of_the_kl_is_the_corrected_one(pair, where):
    """d KL / d lam = (P_target(rho <= lam) / lam) (1 - 1 / (lam Z)), against a central difference of the KL.

    The step h = 1e-5 lam leaves h**2 times a third derivative, and 2**-52 / h of rounding: both below 1e-7 here.
    """
    ratios = sorted(math.exp(p - q) for q, p in zip(*pair, strict=True))
    lam = ratios[0] + where * (ratios[-1] - ratios[0])
    step = 1e-5 * lam
    assume(all(abs(rho - lam) > 2 * step for rho in ratios))
    numeric = (kl_after(*pair, lam + step) - kl_after(*pair, lam - step)) / (2 * step)
    z = obrs.exact_z(*tensors(*pair), lam).item()
    below = math.fsum(math.exp(p) for q, p in zip(*pair, strict=True) if math.exp(p - q) <= lam)
    assert numeric == pytest.approx(below / lam * (1.0 - 1.0 / (lam * z)), rel=1e-6, abs=1e-7 / lam)


# Theorem 3.4: the lam of a budget


def reachable(pair):
    return math.fsum(math.exp(q) for q, p in zip(*pair, strict=True) if p > -math.inf)


@settings(few, max_examples=300)
@given(pairs(), st.floats(1e-6, 1.0))
@example((normalised([0.0, -0.5, -0.9]), normalised([-40.0, 0.0, -0.4])), 1.0)
def test_lam_for_budget_is_accepted_at_exactly_that_rate(pair, share):
    most = reachable(pair)
    assume(most > 1e-12)
    budget = share * min(most, 1.0)
    lam = obrs.lam_for_budget(*tensors(*pair), budget).item()
    assert 0.0 < lam < math.inf
    # Z is a difference of probabilities near 1, so its rounding is absolute; next to a kink lam amplifies nothing.
    assert enumerated(*pair, lam)[1] == pytest.approx(budget, rel=1e-9, abs=2e-14)


def test_lam_for_budget_at_every_boundary_between_two_ratios():
    """Budgets that put lam on, just above and just below each ratio, where a rounding error picks another segment."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        p_inf, p_target = generator.dirichlet([0.1] * 5, 2) + 1e-300
        pair = np.log(p_inf / p_inf.sum()).tolist(), np.log(p_target / p_target.sum()).tolist()
        for q, p in zip(*pair, strict=True):
            if abs(p - q) < 100:
                budget = enumerated(*pair, math.exp(p - q))[1]
                for close in (budget, math.nextafter(budget, 0), math.nextafter(budget, 1)):
                    if 1e-9 < close <= min(1.0, reachable(pair)):
                        lam = obrs.lam_for_budget(*tensors(*pair), close).item()
                        assert enumerated(*pair, lam)[1] == pytest.approx(close, rel=1e-9, abs=2e-14)


def test_a_budget_that_meets_the_mass_above_a_ratio_is_not_lost_to_rounding():
    """budget = P_inf(rho > rho_1), to the last bit: the difference that lam divides by is 0 in floats."""
    generator = np.random.default_rng(0)
    for _ in range(100):
        p_inf, target = generator.dirichlet([1.0] * 4), np.array([1e-30, *generator.dirichlet([1.0] * 3)])
        pair = np.log(p_inf).tolist(), np.log(target).tolist()
        budget = torch.tensor(pair[0], dtype=torch.float64).exp()[1:].flip(0).cumsum(0)[-1].item()
        lam = obrs.lam_for_budget(*tensors(*pair), budget).item()
        assert enumerated(*pair, lam)[1] == pytest.approx(budget, abs=2e-14)


def test_lam_for_the_largest_budget_is_the_smallest_positive_ratio():
    log_inf, log_target = tensors(np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.3, 0.6]))
    assert obrs.lam_for_budget(log_inf, log_target, 1.0).item() == pytest.approx(0.2, rel=RTOL)


def test_lam_for_budget_counts_tokens_that_the_rollout_model_never_writes():
    """p_target on tokens of p_inf = 0 is out of reach: it must not enter the sum."""
    log_inf, log_target = tensors([math.log(0.5), math.log(0.5), -math.inf], np.log([0.1, 0.2, 0.7]))
    lam = obrs.lam_for_budget(log_inf, log_target, 0.3).item()
    assert lam == pytest.approx(0.3 / 0.3, rel=RTOL)
    assert enumerated(log_inf.tolist(), log_target.tolist(), lam)[1] == pytest.approx(0.3, rel=RTOL)


def test_lam_for_budget_takes_any_leading_shape_and_float32():
    log_inf = torch.log_softmax(torch.linspace(-3, 3, 24).view(2, 3, 4).sin(), -1)
    log_target = torch.log_softmax(torch.linspace(-2, 5, 24).view(2, 3, 4).cos(), -1)
    lam = obrs.lam_for_budget(log_inf, log_target, 0.6)
    assert lam.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = log_inf[i, j].double().tolist(), log_target[i, j].double().tolist()
            assert enumerated(*one, lam[i, j].item())[1] == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.1, math.nan])
def test_a_budget_outside_zero_to_one_is_refused(budget):
    with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
        obrs.lam_for_budget(torch.zeros(1), torch.zeros(1), budget)


def test_a_budget_above_the_reachable_mass_is_refused_and_says_what_is_reachable():
    log_inf, log_target = tensors([math.log(0.25), math.log(0.75)], [0.0, -math.inf])
    assert obrs.lam_for_budget(log_inf, log_target, 0.25).item() == pytest.approx(4.0, rel=RTOL)
    with pytest.raises(ValueError, match=r"only 0\.25 of p_inf"):
        obrs.lam_for_budget(log_inf, log_target, 0.26)


@pytest.mark.parametrize("seed", range(12))
def test_obrs_at_the_budgets_lam_is_the_best_rule_with_that_budget(seed):
    """Theorem 3.4: min over a in [0, 1]^V of KL(p_target || p_inf a / sum p_inf a), subject to sum p_inf a = budget."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(2, 6))
    p_inf, p_target = generator.dirichlet([1.0] * size, 2)
    budget = float(generator.uniform(0.2, 0.95))

    def objective(a):
        return -(p_target * np.log(np.maximum(a, 1e-300))).sum()

    result = minimize(
        objective,
        x0=np.full(size, budget),
        jac=lambda a: -p_target / np.maximum(a, 1e-300),
        bounds=[(1e-9, 1.0)] * size,
        constraints={"type": "eq", "fun": lambda a: p_inf @ a - budget, "jac": lambda a: p_inf},
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-15},
    )
    assert abs(p_inf @ result.x - budget) < 1e-9
    best = kl(p_target, p_inf * result.x / budget)
    log_inf, log_target = tensors(np.log(p_inf), np.log(p_target))
    lam = obrs.lam_for_budget(log_inf, log_target, budget).item()
    a = obrs.acceptance(log_inf, log_target, lam).numpy()
    assert kl(p_target, p_inf * a / (p_inf @ a)) <= best + 1e-9
    assert a == pytest.approx(result.x, abs=1e-4)


# Z from the two top-k sets


@st.composite
def adversarial_cases(draw):
    """Two distributions, perhaps with p_inf truncated and renormalised, and what two top-k lists show of them."""
    size = draw(st.integers(1, 8))
    log_inf, log_target = draw(log_distributions(size, zeros=False)), draw(log_distributions(size, zeros=True))
    kept = draw(st.integers(1, size)) if draw(st.booleans()) else size
    k, k_target, fill_valid = draw(st.integers(0, size)), draw(st.integers(0, size)), draw(st.booleans())
    return topk_case(log_inf, log_target, kept, k, k_target, fill_valid, draw(lams))


def random_case(seed):
    """The same from distributions as they come, with everything on at once more often."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(2, 9))
    log_inf, log_target = np.log(generator.dirichlet([0.5] * size, 2) + 1e-12).tolist()
    kept = int(generator.integers(1, size + 1)) if generator.random() < 0.3 else size
    k, k_target = generator.integers(0, size + 1, 2).tolist()
    lam = math.exp(generator.uniform(-1.5, 1.5))
    return topk_case(
        normalised(log_inf), normalised(log_target), kept, k, k_target, bool(generator.random() < 0.5), lam
    )


def topk_case(log_inf, log_target, kept, k, k_target, fill_valid, lam):
    if kept < len(log_inf):
        smallest = sorted(log_inf)[-kept]
        log_inf, fill_valid = normalised([x if x >= smallest else -math.inf for x in log_inf]), False
    rollout_ids = sorted(range(len(log_inf)), key=lambda x: -log_inf[x])[:k]
    target_ids = sorted(range(len(log_inf)), key=lambda x: -log_target[x])[:k_target]
    return log_inf, log_target, rollout_ids, target_ids, fill_valid, lam


def topk_cases():
    return st.one_of(adversarial_cases(), st.integers(0, 2**32).map(random_case))


def complete(case):
    """The same case with lists long enough to know all of p_inf."""
    log_inf, log_target, rollout_ids, target_ids, fill_valid, lam = case
    everything = list(range(len(log_inf)))
    if fill_valid:
        return log_inf, log_target, rollout_ids, everything, True, lam
    return log_inf, log_target, [x for x in everything if log_inf[x] > -math.inf], target_ids, False, lam


def estimate(log_inf, log_target, rollout_ids, target_ids, fill_valid, lam):
    """`topk_z` on what the case shows; without a valid fill-in the forward pass says nothing true."""
    log_inf, log_target = tensors(log_inf, log_target)
    fill_ins = log_inf[target_ids] if fill_valid else torch.full((len(target_ids),), math.nan, dtype=torch.float64)
    return obrs.topk_z(
        rollout_top_log_probs=log_inf[rollout_ids],
        target_at_rollout_top=log_target[rollout_ids],
        rollout_top_ids=torch.tensor(rollout_ids, dtype=torch.int64),
        target_top_ids=torch.tensor(target_ids, dtype=torch.int64),
        target_top_log_probs=log_target[target_ids],
        fill_ins=fill_ins,
        fill_valid=torch.tensor(fill_valid),
        lam=lam,
    )


def expected_estimate(log_inf, log_target, rollout_ids, target_ids, fill_valid, lam):
    """(lower, upper, rollout mass, target mass) token by token, after the docstring of `topk_z`."""
    q, p = [math.exp(x) for x in log_inf], [math.exp(x) for x in log_target]
    new = [x for x in target_ids if x not in rollout_ids]
    known = rollout_ids + (new if fill_valid else [])
    lower = math.fsum(min(q[x], p[x] / lam) for x in known)
    left = 1.0 - math.fsum(q[x] for x in known)
    smallest = min((q[x] for x in rollout_ids), default=math.inf)
    hidden = [] if fill_valid else new
    tail = 1.0 - math.fsum(p[x] for x in {*rollout_ids, *target_ids})
    missing = min(left, math.fsum(min(smallest, p[x] / lam) for x in hidden) + min(left, tail / lam))
    upper = min(lower + missing, max(1.0, lower), max(1.0 / lam, lower))
    return lower, upper, math.fsum(q[x] for x in known), math.fsum(p[x] for x in known)


@settings(few, max_examples=300)
@given(topk_cases())
def test_topk_bounds_hold_the_exact_z_between_them(case):
    _, z, _ = enumerated(case[0], case[1], case[-1])
    found = estimate(*case)
    assert found.lower.item() <= z + 1e-14
    assert found.upper.item() >= z - 1e-14


@settings(few, max_examples=300)
@given(topk_cases())
def test_topk_bounds_and_masses_are_the_documented_ones_and_the_value_is_the_lower_bound(case):
    lower, upper, rollout_mass, target_mass = expected_estimate(*case)
    found = estimate(*case)
    assert found.value.item() == found.lower.item()
    assert found.lower.item() == pytest.approx(lower, rel=RTOL, abs=1e-300)
    assert found.upper.item() == pytest.approx(upper, rel=RTOL, abs=1e-13)
    assert found.rollout_mass.item() == pytest.approx(min(rollout_mass, 1.0), rel=RTOL)
    assert found.target_mass.item() == pytest.approx(min(target_mass, 1.0), rel=RTOL)


@few
@given(topk_cases().map(complete))
def test_topk_bounds_meet_at_the_exact_z_when_all_of_p_inf_is_captured(case):
    _, z, _ = enumerated(case[0], case[1], case[-1])
    found = estimate(*case)
    assert found.lower.item() == pytest.approx(z, rel=RTOL, abs=1e-300)
    assert found.upper.item() == pytest.approx(z, abs=1e-14)


@pytest.mark.parametrize(("fill_valid", "lower", "mass"), [(False, 0.25, 0.3), (True, 0.35, 0.4)])
def test_topk_bounds_on_a_worked_example(fill_valid, lower, mass):
    """K = {0, 1}, N = {2}: if unknown, it may add min(q_2, p_target) = min(0.1, 0.15), and the rest 0.02."""
    p_inf, p_target = [0.2, *[0.1] * 8], [0.78, 0.05, 0.15, 0.02, *[0.0] * 5]
    with np.errstate(divide="ignore"):
        pair = np.log(p_inf).tolist(), np.log(p_target).tolist()
    found = estimate(*pair, [0, 1], [0, 2], fill_valid, 1.0)
    assert found.lower.item() == found.value.item() == pytest.approx(lower, rel=RTOL)
    assert found.upper.item() == pytest.approx(0.37, rel=RTOL)
    assert found.rollout_mass.item() == pytest.approx(mass, rel=RTOL)
    assert found.target_mass.item() == pytest.approx(0.98 if fill_valid else 0.83, rel=RTOL)


def test_topk_without_lists_knows_only_that_z_is_between_zero_and_one():
    case = (np.log([0.5, 0.5]).tolist(), np.log([0.5, 0.5]).tolist(), [], [], False)
    assert [x.item() for x in estimate(*case, 0.5)] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert [x.item() for x in estimate(*case, 4.0)] == [0.0, 0.0, 0.25, 0.0, 0.0]


def test_topk_rows_are_independent_and_lam_may_be_one_per_row():
    generator = np.random.default_rng(1)
    cases = []
    for row in range(6):
        q, p = np.log(generator.dirichlet([0.5] * 7, 2)).tolist()
        rollout_ids, target_ids = np.argsort(q)[::-1][:3].tolist(), np.argsort(p)[::-1][:2].tolist()
        cases.append((q, p, rollout_ids, target_ids, row % 2 == 0, float(generator.uniform(0.3, 3.0))))
    log_inf, log_target = tensors([case[0] for case in cases], [case[1] for case in cases])
    rollout_ids, target_ids = (torch.tensor([case[i] for case in cases]) for i in (2, 3))
    found = obrs.topk_z(
        rollout_top_log_probs=log_inf.gather(1, rollout_ids),
        target_at_rollout_top=log_target.gather(1, rollout_ids),
        rollout_top_ids=rollout_ids,
        target_top_ids=target_ids,
        target_top_log_probs=log_target.gather(1, target_ids),
        fill_ins=log_inf.gather(1, target_ids),
        fill_valid=torch.tensor([case[4] for case in cases]),
        lam=torch.tensor([[case[5]] for case in cases], dtype=torch.float64),
    )
    for row, case in enumerate(cases):
        lower, upper, rollout_mass, target_mass = expected_estimate(*case)
        values = [found.lower, found.upper, found.rollout_mass, found.target_mass]
        assert [value[row].item() for value in values] == pytest.approx([lower, upper, rollout_mass, target_mass])


def test_a_known_z_has_no_bound_width_and_captures_everything():
    z = torch.tensor([0.3, 0.9])
    estimate = obrs.known_z(z)
    assert all(torch.equal(part, z) for part in (estimate.value, estimate.lower, estimate.upper))
    assert torch.equal(estimate.rollout_mass, torch.ones(2)) and torch.equal(estimate.target_mass, torch.ones(2))


# kappa


def test_kappa_is_the_ratio_of_the_sums():
    a, z = tensors(0.3, 0.6)
    assert obrs.kappa(a, z).item() == pytest.approx(0.5, rel=RTOL)


def test_kappa_is_one_where_no_z_was_counted():
    assert obrs.kappa(*tensors(0.0, 0.0)).item() == 1.0
    assert obrs.kappa(*tensors(0.0, 0.25)).item() == 0.0


def test_kappa_restores_the_mean_of_a_truncated_z():
    """Over the enumerated vocabulary: E[a] = Z, so kappa Z_k averages to the exact Z whatever the top-k left out."""
    pairs_ = [np.log(np.random.default_rng(seed).dirichlet([0.3] * 9, 2)) for seed in range(4)]
    exact = [enumerated(*(row.tolist() for row in pair), 1.0)[1] for pair in pairs_]
    lower = []
    for q, p in pairs_:
        top = np.argsort(q)[::-1][:2].tolist()
        lower.append(estimate(q.tolist(), p.tolist(), top, [], False, 1.0).value.item())
    a, z_k = tensors(math.fsum(exact), math.fsum(lower))
    assert math.fsum(lower) < math.fsum(exact)
    assert math.fsum((obrs.kappa(a, z_k) * z).item() for z in lower) == pytest.approx(math.fsum(exact), rel=RTOL)
