"""Theorems 3.3 and 3.4 as `jackpot simulate` checks them, against hand calculation and a convex solver."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from jackpot.analysis.simulate.families import FAMILIES, states_of
from jackpot.analysis.simulate.states import States, divergence, joined, rejected_divergence
from jackpot.analysis.simulate.theorems import BUDGETS, check_derivative, contraction, optimality, rho_range, shortened
from jackpot.objectives import obrs

NAMES = [family.name for family in FAMILIES]


def states(name: str, gap: float = 0.6, count: int = 4, vocabulary: int = 200) -> States:
    family = next(one for one in FAMILIES if one.name == name)
    return states_of(family, gap, count, seed=5, vocabulary=vocabulary)


def of(rollout: list[float], target: list[float]) -> States:
    rows = [torch.tensor([row], dtype=torch.float64).log() for row in (rollout, target)]
    return States(rollout=rows[0], target=rows[1], token_ids=torch.zeros(1, 0, dtype=torch.int64))


def test_the_derivative_of_two_tokens_is_what_the_hand_gives_and_the_printed_one_is_not() -> None:
    """p_inf (0.5, 0.5), p_target (0.8, 0.2): rho (1.6, 0.4). For 0.4 < lam < 1.6, Z = 0.5 + 0.2 / lam and
    G = 0.8 log(1.6 Z) + 0.2 log(lam Z), so G' = Z'/Z + 0.2 / lam with Z' = -0.2 / lam^2."""
    found = contraction("two", of([0.5, 0.5], [0.8, 0.2]))
    assert found.min_rho == pytest.approx(0.4) and found.max_rho == pytest.approx(1.6)
    assert found.lam[0] == pytest.approx(0.08) and found.lam[-1] == pytest.approx(8.0)
    inside = [place for place, lam in enumerate(found.lam) if 0.4 < lam < 1.6]
    assert len(inside) > 10
    for place in inside:
        lam = found.lam[place]
        z = 0.5 + 0.2 / lam
        assert found.acceptance[place] == pytest.approx(z, rel=1e-12)
        assert found.kl[place] == pytest.approx(0.8 * math.log(1.6 * z) + 0.2 * math.log(lam * z), abs=1e-12)
        derivative = -0.2 / lam**2 / z + 0.2 / lam
        assert found.derivative[place] == pytest.approx(derivative, rel=1e-9) and derivative < 0
        assert found.printed_derivative[place] == pytest.approx(derivative - 0.2 / lam, rel=1e-9)
    above = [place for place, lam in enumerate(found.lam) if lam > 1.6]
    assert all(abs(found.derivative[place]) < 1e-12 and found.kl[place] < 1e-12 for place in above)
    assert all(found.printed_derivative[place] * found.lam[place] == pytest.approx(-1.0) for place in above)


@pytest.mark.parametrize("name", NAMES)
def test_the_kl_falls_between_the_smallest_and_the_largest_rho_and_is_constant_outside(name: str) -> None:
    found = contraction(name, states(name))
    for (lam, kl), (after, kl_after) in zip(
        zip(found.lam, found.kl, strict=True), zip(found.lam[1:], found.kl[1:], strict=False), strict=False
    ):
        if after <= found.min_rho:
            assert kl_after == pytest.approx(found.kl_before, abs=1e-12) == kl
        elif lam >= found.max_rho:
            assert abs(kl) < 1e-12 and abs(kl_after) < 1e-12
        else:
            assert kl_after < kl
    assert found.lam[0] < found.min_rho or found.lam[0] == pytest.approx(1e-9)
    assert found.lam[-1] > found.max_rho


@pytest.mark.parametrize("name", NAMES)
def test_the_derivative_holds_at_every_place_and_the_printed_one_does_not(name: str) -> None:
    found = check_derivative(states(name))
    assert found.places >= 8 and found.error < 1e-9 and found.printed_error > 0.1
    assert (found.rises, found.moves, found.above_before) == (0, 0, 0)


def test_tokens_that_the_target_lacks_are_rejected_at_any_lam_and_the_kl_stays_as_it_is_below_the_smallest_rho() -> (
    None
):
    state = of([0.4, 0.2, 0.2, 0.2], [0.6, 0.3, 0.1, 0.0])
    low, high = rho_range(state)
    assert low.item() == pytest.approx(0.5) and high.item() == pytest.approx(1.5)
    tiny, small = (rejected_divergence(state, lam).item() for lam in (1e-6, 0.49))
    without = [0.5, 0.25, 0.25]
    expected = sum(p * math.log(p / q) for p, q in zip([0.6, 0.3, 0.1], without, strict=True))
    assert tiny == pytest.approx(expected, rel=1e-12) and small == pytest.approx(expected, rel=1e-12)
    assert expected < divergence(state.target, state.rollout).item()
    found = check_derivative(state)
    assert (found.rises, found.moves, found.above_before) == (0, 0, 0) and found.error < 1e-9


def test_what_only_the_target_has_leaves_the_kl_infinite() -> None:
    state = of([0.5, 0.5, 0.0], [0.2, 0.3, 0.5])
    found = contraction("lacking", state)
    assert found.max_rho == math.inf and found.kl_before == math.inf and set(found.kl) == {math.inf}


def test_a_lam_below_every_rho_accepts_everything() -> None:
    state = states("noise")
    lam = rho_range(state)[0][:, None] * 0.999
    assert obrs.exact_z(state.rollout, state.target, lam).tolist() == pytest.approx([1.0] * 4, rel=1e-12)
    before = divergence(state.target, state.rollout)
    np.testing.assert_allclose(rejected_divergence(state, lam).numpy(), before.numpy(), rtol=1e-10)


@pytest.mark.parametrize("budget", [0.3, 0.7])
def test_a_convex_solver_finds_no_better_rule(budget: float) -> None:
    for seed in range(4):
        draw = np.random.default_rng(seed)
        p_inf, p_target = draw.dirichlet(np.ones(5)), draw.dirichlet(np.ones(5))
        state = of(p_inf.tolist(), p_target.tolist())
        solved = minimize(
            lambda a, p=p_target: -(p * np.log(a)).sum(),
            np.full(5, budget),
            jac=lambda a, p=p_target: -p / a,
            bounds=[(1e-9, 1.0)] * 5,
            constraints={"type": "eq", "fun": lambda a, p=p_inf: p @ a - budget, "jac": lambda a, p=p_inf: p},
            options={"ftol": 1e-14, "maxiter": 1_000},
        )
        kept = p_inf * solved.x / budget
        best = (p_target * np.log(p_target / kept)).sum()
        lam = obrs.lam_for_budget(state.rollout, state.target, budget)[:, None]
        found = rejected_divergence(state, lam).item()
        assert solved.success and found == pytest.approx(best, abs=1e-6)
        rule = obrs.acceptance(state.rollout, state.target, lam)[0].numpy()
        np.testing.assert_allclose(rule, solved.x, atol=1e-3)


def test_no_other_rule_with_the_same_budget_comes_closer() -> None:
    small = joined([shortened(states(name)) for name in NAMES])
    found, curves = optimality(NAMES, small, seed=0)
    assert found.states == 16 and found.alternatives == 16 * len(BUDGETS) * 6 * 400
    assert found.better == 0 and found.smallest_margin > -1e-12 and found.median_margin > 0.01
    assert found.budget_error < 1e-12
    for one in curves:
        for ours, root, bound in zip(one.obrs, one.root, one.bound, strict=True):
            assert bound - 1e-12 <= ours <= root + 1e-12 and ours <= one.kl_before + 1e-12
        at = dict(zip([round(budget, 3) for budget in one.budget], one.obrs, strict=True))
        assert all(best >= at[budget] - 1e-12 for budget, best in zip(one.at, one.best_other, strict=True))
        assert list(one.obrs) == sorted(one.obrs)


def test_the_rule_that_obrs_is_drawn_beside_accepts_by_the_root_of_rho() -> None:
    state = states("noise", count=1, vocabulary=20)
    p_inf, p_target = (part[0].exp().numpy() for part in (state.rollout, state.target))
    _, [found] = optimality(["noise"], state, seed=0)
    for budget, root in zip(found.budget, found.root, strict=True):
        scales = np.geomspace(1e-3, 1e4, 200_001)
        low, high = 0, len(scales) - 1
        while high - low > 1:  # the acceptance grows with the scale
            middle = (low + high) // 2
            accepted = (p_inf * np.minimum(1.0, scales[middle] * np.sqrt(p_target / p_inf))).sum()
            low, high = (middle, high) if accepted < budget else (low, middle)
        kept = p_inf * np.minimum(1.0, scales[low] * np.sqrt(p_target / p_inf))
        assert root == pytest.approx((p_target * np.log(p_target / kept * kept.sum())).sum(), abs=1e-3)


def test_the_search_finds_better_rules_where_obrs_is_given_the_wrong_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself works: against OBRS that keeps too much, many rules are closer."""
    right = obrs.lam_for_budget

    def wrong(rollout, target, budget):
        return right(rollout, target, budget) * (0.5 if rollout.dim() == 2 else 1.0)

    monkeypatch.setattr(obrs, "lam_for_budget", wrong)
    found, _ = optimality(["noise"], states("noise", vocabulary=30), seed=0)
    assert found.better > 1_000 and found.smallest_margin < -0.001 and found.budget_error > 0.05


def test_a_budget_above_what_can_be_accepted_is_refused() -> None:
    state = of([0.5, 0.5], [1.0, 0.0])
    assert obrs.lam_for_budget(state.rollout, state.target, 0.5).item() == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"0\.6.*only 0\.5"):
        obrs.lam_for_budget(state.rollout, state.target, 0.6)


@pytest.mark.parametrize("name", NAMES)
def test_shortened_states_are_distributions_with_nearly_the_same_gap(name: str) -> None:
    one = states(name, vocabulary=4_096)
    small = shortened(one)
    assert small.rollout.shape == (4, 64)
    for part in (small.rollout, small.target):
        np.testing.assert_allclose(part.exp().sum(-1).numpy(), 1.0, rtol=1e-12)
    before, after = divergence(one.target, one.rollout), divergence(small.target, small.rollout)
    assert (after <= before + 1e-12).all() and (after >= 0.9 * before).all()  # merging never adds to a KL
    heaviest = torch.maximum(one.rollout.max(-1).values, one.target.max(-1).values)
    assert torch.maximum(small.rollout.max(-1).values, small.target.max(-1).values).allclose(heaviest)
    whole = states(name, vocabulary=64)
    assert shortened(whole).rollout.equal(whole.rollout)
