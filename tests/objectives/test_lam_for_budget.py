"""Theorem 3.4: the lam of a budget, against enumeration and against scipy's optimizer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from helpers.distributions import RTOL, enumerated, few, kl, normalised, pairs, tensors
from helpers.waits import waits
from jackpot.objectives import obrs


def reachable(pair):
    """The mass of p_inf on tokens that the target has too: the largest budget."""
    return math.fsum(math.exp(q) for q, p in zip(*pair, strict=True) if p > -math.inf)


@pytest.mark.seconds
@settings(few, max_examples=80)
@given(pairs(), st.floats(1e-6, 1.0))
@example((normalised([0.0, -0.5, -0.9]), normalised([-40.0, 0.0, -0.4])), 1.0)
def test_at_the_lam_of_a_budget_that_share_is_accepted(pair, share):
    reachable_mass = reachable(pair)
    assume(reachable_mass > 1e-12)
    budget = share * min(reachable_mass, 1.0)

    lam = obrs.lam_for_budget(*tensors(*pair), budget).item()

    assert 0.0 < lam < math.inf
    # Z is a difference of probabilities near 1, so its rounding is absolute; next to a kink lam amplifies nothing.
    assert enumerated(*pair, lam)[1] == pytest.approx(budget, rel=1e-9, abs=2e-14)


def test_lam_for_budget_is_exact_next_to_every_ratio():
    """Budgets that put lam on, just above and just below each ratio, where a rounding error picks another segment."""
    generator = np.random.default_rng(0)

    for _ in range(50):
        p_inf, p_target = generator.dirichlet([0.1] * 5, 2) + 1e-300
        pair = np.log(p_inf / p_inf.sum()).tolist(), np.log(p_target / p_target.sum()).tolist()

        for q, p in zip(*pair, strict=True):
            if abs(p - q) < 100:
                budget = enumerated(*pair, math.exp(p - q))[1]
                for close_budget in (budget, math.nextafter(budget, 0), math.nextafter(budget, 1)):
                    if 1e-9 < close_budget <= min(1.0, reachable(pair)):
                        lam = obrs.lam_for_budget(*tensors(*pair), close_budget).item()

                        assert enumerated(*pair, lam)[1] == pytest.approx(close_budget, rel=1e-9, abs=2e-14)


def test_a_budget_at_the_mass_above_a_ratio_survives_rounding():
    """budget = P_inf(rho > rho_1), to the last bit: the difference that lam divides by is 0 in floats."""
    generator = np.random.default_rng(0)

    for _ in range(100):
        p_inf, target = generator.dirichlet([1.0] * 4), np.array([1e-30, *generator.dirichlet([1.0] * 3)])
        pair = np.log(p_inf).tolist(), np.log(target).tolist()
        budget = torch.tensor(pair[0], dtype=torch.float64).exp()[1:].flip(0).cumsum(0)[-1].item()

        lam = obrs.lam_for_budget(*tensors(*pair), budget).item()

        assert enumerated(*pair, lam)[1] == pytest.approx(budget, abs=2e-14)


def test_the_largest_budget_has_the_smallest_positive_ratio():
    log_inf, log_target = tensors(np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.3, 0.6]))
    assert obrs.lam_for_budget(log_inf, log_target, 1.0).item() == pytest.approx(0.2, rel=RTOL)


def test_lam_for_budget_leaves_out_tokens_never_sampled():
    """p_target on tokens of p_inf = 0 is out of reach: it must not enter the sum."""
    log_inf, log_target = tensors([math.log(0.5), math.log(0.5), -math.inf], np.log([0.1, 0.2, 0.7]))
    lam = obrs.lam_for_budget(log_inf, log_target, 0.3).item()
    assert lam == pytest.approx(0.3 / 0.3, rel=RTOL)  # reachable mass of p_target, 0.1 + 0.2, over the budget
    assert enumerated(log_inf.tolist(), log_target.tolist(), lam)[1] == pytest.approx(0.3, rel=RTOL)


def test_lam_for_budget_takes_any_leading_shape_and_float32():
    log_inf = torch.log_softmax(torch.linspace(-3, 3, 24).view(2, 3, 4).sin(), -1)
    log_target = torch.log_softmax(torch.linspace(-2, 5, 24).view(2, 3, 4).cos(), -1)

    lam = obrs.lam_for_budget(log_inf, log_target, 0.6)

    assert lam.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            log_pair = log_inf[i, j].double().tolist(), log_target[i, j].double().tolist()
            assert enumerated(*log_pair, lam[i, j].item())[1] == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.1, math.nan])
def test_a_budget_outside_zero_to_one_is_refused(budget):
    with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
        obrs.lam_for_budget(torch.zeros(1), torch.zeros(1), budget)


def test_a_budget_above_the_reachable_mass_is_refused():
    log_inf, log_target = tensors([math.log(0.25), math.log(0.75)], [0.0, -math.inf])
    assert obrs.lam_for_budget(log_inf, log_target, 0.25).item() == pytest.approx(4.0, rel=RTOL)
    with pytest.raises(ValueError, match=r"only 0\.25 of p_inf"):
        obrs.lam_for_budget(log_inf, log_target, 0.26)


def test_z_for_budget_never_waits_for_the_gpu(monkeypatch):
    """It makes the assertion itself."""
    log_inf, log_target = tensors([math.log(0.25), math.log(0.75)], [0.0, -math.inf])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    with waits() as wait_list:
        obrs.z_for_budget(log_inf, log_target, 0.25)
        with pytest.raises(RuntimeError, match=r"budget is 0\.26, but less of p_inf"):
            obrs.z_for_budget(log_inf, log_target, 0.26)

    assert not wait_list


@pytest.mark.parametrize("seed", range(12))
def test_obrs_at_the_budgets_lam_is_the_best_rule(seed):
    """Theorem 3.4: min over a in [0, 1]^V of KL(p_target || p_inf a / sum p_inf a), subject to sum p_inf a = budget."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(2, 6))
    p_inf, p_target = generator.dirichlet([1.0] * size, 2)
    budget = float(generator.uniform(0.2, 0.95))

    def objective(acceptance):
        return -(p_target * np.log(np.maximum(acceptance, 1e-300))).sum()

    result = minimize(
        objective,
        x0=np.full(size, budget),
        jac=lambda acceptance: -p_target / np.maximum(acceptance, 1e-300),
        bounds=[(1e-9, 1.0)] * size,
        constraints={
            "type": "eq",
            "fun": lambda acceptance: p_inf @ acceptance - budget,
            "jac": lambda acceptance: p_inf,
        },
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-15},
    )

    assert abs(p_inf @ result.x - budget) < 1e-9

    smallest_kl = kl(p_target, p_inf * result.x / budget)

    log_inf, log_target = tensors(np.log(p_inf), np.log(p_target))
    lam = obrs.lam_for_budget(log_inf, log_target, budget).item()
    acceptance = obrs.acceptance(log_inf, log_target, lam).numpy()

    assert kl(p_target, p_inf * acceptance / (p_inf @ acceptance)) <= smallest_kl + 1e-9
    assert acceptance == pytest.approx(result.x, abs=1e-4)
