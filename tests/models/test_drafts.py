"""Speculative sampling against its definition in float64, by all drafts and a fine grid of uniforms."""

import numpy as np
import pytest
import torch

from jackpot.models.drafts import tokens_per_verification, verify

P = np.array([0.05, 0.3, 0.15, 0.0, 0.4, 0.1])
Q = np.array([0.2, 0.1, 0.15, 0.25, 0.3, 0.0])  # each model gives 0 to a token of the other
GRID = 4000


def drawn_from(p: np.ndarray, q: np.ndarray, lam: float) -> np.ndarray:
    """Return the distribution of the token that stands in a place, [V], from the shares of a grid of uniforms."""
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    found = np.zeros(len(p))
    for draft, weight in enumerate(q):
        if weight:
            rows = [torch.tensor(one, dtype=torch.float32).expand(GRID, -1) for one in (p, q)]
            drafts = torch.full((GRID,), draft)
            both = torch.stack([grid, grid], dim=1)  # acceptance reads the first, the other token the second
            verdict = verify(rows[0].log(), rows[1], drafts, both, lam)
            accepted = float(verdict.accepted.double().mean())
            others = torch.bincount(verdict.replacements, minlength=len(p)).double().numpy() / GRID
            found += weight * (accepted * np.eye(len(p))[draft] + (1.0 - accepted) * others)
    return found


def one_verdict(p: np.ndarray, q: np.ndarray, lam: float, draft: int = 0):
    return verify(*(torch.tensor(one[None]).float() for one in (np.log(p), q)), torch.tensor([draft]), HALF, lam)


HALF = torch.full((1, 2), 0.5, dtype=torch.float64)


@pytest.mark.parametrize("lam", [1.0, 0.7, 0.25])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_the_reported_distribution_is_the_one_that_draws(lam):
    kept = np.minimum(Q, P / lam)
    residual = np.maximum(P - kept, 0.0)
    expected = kept + (1.0 - kept.sum()) * residual / residual.sum()

    assert drawn_from(P, Q, lam) == pytest.approx(expected, abs=5 / GRID)
    assert one_verdict(P, Q, lam).log_probs[0].exp().numpy() == pytest.approx(expected, abs=1e-7)

    if lam == 1.0:
        assert expected == pytest.approx(P, abs=1e-15)
    else:
        assert np.abs(expected - P).max() > 0.01


def test_a_smaller_lam_accepts_more():
    accepted = [np.minimum(Q, P / lam).sum() for lam in (1.0, 0.7, 0.25)]

    assert accepted == sorted(accepted)
    assert accepted[0] < accepted[-1]

    grid = (torch.arange(1000, dtype=torch.float64) + 0.5)[:, None].expand(-1, 2) / 1000
    for lam, share in ((1.0, 0.25), (0.5, 0.5)):  # of the draft 0, where p / q is 0.25
        rows = [torch.tensor(one).float().expand(1000, -1) for one in (np.log(P + 1e-30), Q)]
        verdict = verify(*rows, torch.zeros(1000, dtype=torch.int64), grid, lam)
        assert float(verdict.accepted.double().mean()) == pytest.approx(share)


@pytest.mark.parametrize("lam", [1.0, 0.5])
@pytest.mark.parametrize("q", [np.zeros(6), np.full(6, np.nan)], ids=["nothing drafted", "broken draft"])
def test_without_a_draft_the_token_is_the_models_own(q, lam):
    p = P + 0.01 * (P == 0.0)
    p /= p.sum()
    verdict = one_verdict(p, q, lam)

    assert not verdict.accepted.any()
    assert torch.isfinite(verdict.log_probs).all()
    assert int(verdict.replacements) == int(np.searchsorted(p.cumsum(), 0.5))
    assert verdict.log_probs[0].exp().numpy() == pytest.approx(p, abs=1e-7)


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_equal_models_accept_everything(lam):
    p = np.full(6, 1 / 6)
    assert one_verdict(p, p, lam).accepted.all()
    assert drawn_from(p, p, lam) == pytest.approx(p, abs=1e-12)
    assert one_verdict(p, p, lam).log_probs[0].exp().numpy() == pytest.approx(p, abs=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_the_tokens_of_a_pass_are_a_geometric_sum(alpha):
    for drafted in (1, 4, 10):
        formula = (1 - alpha ** (drafted + 1)) / (1 - alpha)
        assert tokens_per_verification(alpha, drafted) == pytest.approx(formula)
    assert tokens_per_verification(1.0, 4) == 5.0
