"""Z from the two top-k sets: its bounds against the whole vocabulary, and its documented formula."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.distributions import RTOL, enumerated, few, lams, log_distributions, normalised, tensors
from jackpot.objectives import obrs


class Case(NamedTuple):
    """Two distributions over a vocabulary, and what an engine and the head tell of them."""

    log_inf: list[float]
    log_target: list[float]
    rollout_ids: list[int]  # the top k of p_inf
    target_ids: list[int]  # the top k of p_target
    fill_valid: bool  # whether p_inf is known of the latter too
    lam: float


@st.composite
def adversarial_cases(draw):
    """Draw two distributions, perhaps with p_inf truncated and renormalized, and the top-k lists of both."""
    size = draw(st.integers(1, 8))
    log_inf, log_target = draw(log_distributions(size, zeros=False)), draw(log_distributions(size, zeros=True))
    support_size = draw(st.integers(1, size)) if draw(st.booleans()) else size
    k, k_target = draw(st.integers(0, size)), draw(st.integers(0, size))
    fill_valid = draw(st.booleans())
    return topk_case(log_inf, log_target, support_size, k, k_target, fill_valid, draw(lams))


def random_case(seed):
    """Draw a case from random distributions, with truncation and fill-ins at once more often."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(2, 9))
    log_inf, log_target = np.log(generator.dirichlet([0.5] * size, 2) + 1e-12).tolist()
    support_size = int(generator.integers(1, size + 1)) if generator.random() < 0.3 else size
    k, k_target = generator.integers(0, size + 1, 2).tolist()
    lam = math.exp(generator.uniform(-1.5, 1.5))
    return topk_case(
        normalised(log_inf), normalised(log_target), support_size, k, k_target, bool(generator.random() < 0.5), lam
    )


def topk_case(log_inf, log_target, support_size, k, k_target, fill_valid, lam):
    """Cut p_inf to its `support_size` most probable tokens, without fill-ins then, and list the top k of both."""
    if support_size < len(log_inf):
        smallest_log_prob = sorted(log_inf)[-support_size]
        log_inf, fill_valid = normalised([x if x >= smallest_log_prob else -math.inf for x in log_inf]), False
    rollout_ids = sorted(range(len(log_inf)), key=lambda x: -log_inf[x])[:k]
    target_ids = sorted(range(len(log_inf)), key=lambda x: -log_target[x])[:k_target]
    return Case(log_inf, log_target, rollout_ids, target_ids, fill_valid, lam)


def topk_cases():
    """Draw adversarial and random cases."""
    return st.one_of(adversarial_cases(), st.integers(0, 2**32).map(random_case))


def complete(case):
    """Return the case with lists long enough to know all of p_inf."""
    all_tokens = list(range(len(case.log_inf)))
    if case.fill_valid:
        return case._replace(target_ids=all_tokens)
    return case._replace(rollout_ids=[x for x in all_tokens if case.log_inf[x] > -math.inf])


def estimate(log_inf, log_target, rollout_ids, target_ids, fill_valid, lam):
    """Compute `topk_z` of the case; where a fill-in is not valid its log-prob is a wrong number."""
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
    """Compute (lower, upper, rollout mass, target mass) token by token, by the docstring of `topk_z`."""
    q, p = [math.exp(x) for x in log_inf], [math.exp(x) for x in log_target]
    fill_in_tokens = [x for x in target_ids if x not in rollout_ids]
    known_tokens = rollout_ids + (fill_in_tokens if fill_valid else [])
    lower = math.fsum(min(q[x], p[x] / lam) for x in known_tokens)
    mass_left = 1.0 - math.fsum(q[x] for x in known_tokens)
    smallest_listed_mass = min((q[x] for x in rollout_ids), default=math.inf)
    hidden_tokens = [] if fill_valid else fill_in_tokens
    tail = 1.0 - math.fsum(p[x] for x in {*rollout_ids, *target_ids})
    missing_mass = min(
        mass_left, math.fsum(min(smallest_listed_mass, p[x] / lam) for x in hidden_tokens) + min(mass_left, tail / lam)
    )
    upper = min(lower + missing_mass, max(1.0, lower), max(1.0 / lam, lower))
    counted_tokens = [x for x in known_tokens if log_inf[x] > -math.inf or x not in rollout_ids]
    return lower, upper, math.fsum(q[x] for x in known_tokens), math.fsum(p[x] for x in counted_tokens)


@pytest.mark.seconds
@settings(few, max_examples=150)
@given(topk_cases())
def test_topk_bounds_are_the_documented_ones_around_z(case):
    lower, upper, rollout_mass, target_mass = expected_estimate(*case)
    _, z, _ = enumerated(case.log_inf, case.log_target, case.lam)

    bounds = estimate(*case)

    assert bounds.lower.item() <= z + 1e-14
    assert bounds.upper.item() >= z - 1e-14
    assert bounds.value.item() == bounds.lower.item()
    assert bounds.lower.item() == pytest.approx(lower, rel=RTOL, abs=1e-300)
    assert bounds.upper.item() == pytest.approx(upper, rel=RTOL, abs=1e-13)
    assert bounds.rollout_mass.item() == pytest.approx(min(rollout_mass, 1.0), rel=RTOL)
    assert bounds.target_mass.item() == pytest.approx(min(target_mass, 1.0), rel=RTOL)


@few
@given(topk_cases().map(complete))
def test_topk_bounds_meet_when_all_of_p_inf_is_captured(case):
    _, z, _ = enumerated(case.log_inf, case.log_target, case.lam)
    bounds = estimate(*case)
    assert bounds.lower.item() == pytest.approx(z, rel=RTOL, abs=1e-300)
    assert bounds.upper.item() == pytest.approx(z, abs=1e-14)


@pytest.mark.parametrize(("fill_valid", "lower", "mass"), [(False, 0.25, 0.3), (True, 0.35, 0.4)])
def test_topk_bounds_on_a_worked_example(fill_valid, lower, mass):
    """K = {0, 1}, N = {2}: if unknown, it may add min(q_2, p_target) = min(0.1, 0.15), and the rest 0.02."""
    p_inf, p_target = [0.2, *[0.1] * 8], [0.78, 0.05, 0.15, 0.02, *[0.0] * 5]
    with np.errstate(divide="ignore"):
        pair = np.log(p_inf).tolist(), np.log(p_target).tolist()

    bounds = estimate(*pair, rollout_ids=[0, 1], target_ids=[0, 2], fill_valid=fill_valid, lam=1.0)

    assert bounds.lower.item() == bounds.value.item()
    assert bounds.value.item() == pytest.approx(lower, rel=RTOL)
    assert bounds.upper.item() == pytest.approx(0.37, rel=RTOL)
    assert bounds.rollout_mass.item() == pytest.approx(mass, rel=RTOL)
    assert bounds.target_mass.item() == pytest.approx(0.98 if fill_valid else 0.83, rel=RTOL)
    assert bounds.union.item() == float(fill_valid)


def test_ids_outside_a_truncated_support_change_nothing():
    """An engine breaks ties of log-probs of -inf as it likes."""
    log_inf = [math.log(0.6), math.log(0.4), -math.inf, -math.inf]
    log_target = np.log([0.4, 0.3, 0.25, 0.05]).tolist()

    estimates = [
        estimate(log_inf, log_target, rollout_ids, target_ids=[0, 1], fill_valid=False, lam=1.0)
        for rollout_ids in ([0, 1, 2], [0, 1, 3])
    ]

    for name in ("value", "lower", "upper", "rollout_mass", "target_mass"):
        assert torch.equal(*(getattr(z, name) for z in estimates)), name


def test_topk_without_lists_knows_only_the_range_of_z():
    even_log_probs = np.log([0.5, 0.5]).tolist()
    case = Case(even_log_probs, even_log_probs, rollout_ids=[], target_ids=[], fill_valid=False, lam=0.5)

    # value, lower and upper bound, the two masses, the union
    assert [x.item() for x in estimate(*case)] == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [x.item() for x in estimate(*case._replace(lam=4.0))] == [0.0, 0.0, 0.25, 0.0, 0.0, 0.0]


def test_topk_rows_are_independent_and_lam_may_be_one_per_row():
    generator = np.random.default_rng(1)
    cases = []
    for row in range(6):
        q, p = np.log(generator.dirichlet([0.5] * 7, 2)).tolist()
        rollout_ids, target_ids = np.argsort(q)[::-1][:3].tolist(), np.argsort(p)[::-1][:2].tolist()
        lam = float(generator.uniform(0.3, 3.0))
        cases.append(Case(q, p, rollout_ids, target_ids, fill_valid=row % 2 == 0, lam=lam))

    log_inf, log_target = tensors([case.log_inf for case in cases], [case.log_target for case in cases])
    rollout_ids = torch.tensor([case.rollout_ids for case in cases])
    target_ids = torch.tensor([case.target_ids for case in cases])

    bounds = obrs.topk_z(
        rollout_top_log_probs=log_inf.gather(1, rollout_ids),
        target_at_rollout_top=log_target.gather(1, rollout_ids),
        rollout_top_ids=rollout_ids,
        target_top_ids=target_ids,
        target_top_log_probs=log_target.gather(1, target_ids),
        fill_ins=log_inf.gather(1, target_ids),
        fill_valid=torch.tensor([case.fill_valid for case in cases]),
        lam=torch.tensor([[case.lam] for case in cases], dtype=torch.float64),
    )

    for row, case in enumerate(cases):
        lower, upper, rollout_mass, target_mass = expected_estimate(*case)
        values = [bounds.lower, bounds.upper, bounds.rollout_mass, bounds.target_mass]
        assert [value[row].item() for value in values] == pytest.approx([lower, upper, rollout_mass, target_mass])


def test_a_known_z_has_no_bound_width_and_captures_everything():
    z = torch.tensor([0.3, 0.9])
    estimate = obrs.known_z(z)
    assert all(torch.equal(bound, z) for bound in (estimate.value, estimate.lower, estimate.upper))
    assert torch.equal(estimate.rollout_mass, torch.ones(2))
    assert torch.equal(estimate.target_mass, torch.ones(2))


# kappa


def test_kappa_is_the_ratio_of_the_sums():
    a, z = tensors(0.3, 0.6)
    assert obrs.kappa(a, z).item() == pytest.approx(0.5, rel=RTOL)


def test_kappa_is_one_where_no_z_was_counted():
    assert obrs.kappa(*tensors(0.0, 0.0)).item() == 1.0
    assert obrs.kappa(*tensors(0.0, 0.25)).item() == 0.0


def test_kappa_restores_the_mean_of_a_truncated_z():
    """Over the enumerated vocabulary: E[a] = Z, so kappa Z_k averages to the exact Z whatever the top-k left out."""
    distribution_pairs = [np.log(np.random.default_rng(seed).dirichlet([0.3] * 9, 2)) for seed in range(4)]
    exact_z = [enumerated(*(row.tolist() for row in pair), 1.0)[1] for pair in distribution_pairs]
    truncated_z = []
    for q, p in distribution_pairs:
        top = np.argsort(q)[::-1][:2].tolist()
        truncated_z.append(estimate(q.tolist(), p.tolist(), top, target_ids=[], fill_valid=False, lam=1.0).value.item())

    a, z_k = tensors(math.fsum(exact_z), math.fsum(truncated_z))

    assert math.fsum(truncated_z) < math.fsum(exact_z)
    assert math.fsum((obrs.kappa(a, z_k) * z).item() for z in truncated_z) == pytest.approx(
        math.fsum(exact_z), rel=RTOL
    )
