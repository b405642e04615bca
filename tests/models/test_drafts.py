"""Speculative sampling draws from the distribution that it reports, by all drafts and a fine grid of uniforms.

`lam` makes acceptance easier: a draft of share q is accepted with p / (lam q), where p is the model's share.
"""

import numpy as np
import pytest
import torch

from jackpot.models.drafts import tokens_per_verification, verify

P = np.array([0.05, 0.3, 0.15, 0.0, 0.4, 0.1])
Q = np.array([0.2, 0.1, 0.15, 0.25, 0.3, 0.0])  # each model gives 0 to a token of the other
HALF = torch.full((1, 2), 0.5, dtype=torch.float64)  # the uniforms of one verdict
GRID = 4000  # uniforms, evenly spaced


def distribution_drawn(p: np.ndarray, q: np.ndarray, lam: float) -> np.ndarray:
    """Return the distribution of the token that a verification writes, [V], from the shares of a grid of uniforms."""
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    distribution = np.zeros(len(p))
    for draft, weight in enumerate(q):
        if weight:
            p_rows = torch.tensor(p, dtype=torch.float32).expand(GRID, -1)
            q_rows = torch.tensor(q, dtype=torch.float32).expand(GRID, -1)
            drafts = torch.full((GRID,), draft)
            uniforms = torch.stack([grid, grid], dim=1)  # acceptance reads the first, the other token the second
            verdict = verify(p_rows.log(), q_rows, drafts, uniforms, lam)
            accepted = float(verdict.accepted.double().mean())
            others = torch.bincount(verdict.replacements, minlength=len(p)).double().numpy() / GRID
            distribution += weight * (accepted * np.eye(len(p))[draft] + (1.0 - accepted) * others)
    return distribution


def single_verdict(p: np.ndarray, q: np.ndarray, lam: float):
    """Return the verdict on draft 0 with uniforms of a half."""
    log_p = torch.tensor(np.log(p)[None]).float()
    return verify(log_p, torch.tensor(q[None]).float(), torch.tensor([0]), HALF, lam)


@pytest.mark.parametrize("lam", [1.0, 0.7, 0.25])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_the_reported_distribution_is_the_one_that_draws(lam):
    accepted_shares = np.minimum(Q, P / lam)
    residual = np.maximum(P - accepted_shares, 0.0)
    expected_probs = accepted_shares + (1.0 - accepted_shares.sum()) * residual / residual.sum()

    reported_probs = single_verdict(P, Q, lam).log_probs[0].exp().numpy()

    assert distribution_drawn(P, Q, lam) == pytest.approx(expected_probs, abs=5 / GRID)
    assert reported_probs == pytest.approx(expected_probs, abs=1e-7)
    assert np.allclose(reported_probs, P, atol=1e-7) == (lam == 1.0)  # below 1 it is not the model's own


def test_a_smaller_lam_accepts_more():
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5)[:, None].expand(-1, 2) / 1000
    for lam, share in ((1.0, 0.25), (0.5, 0.5), (0.25, 1.0), (0.1, 1.0)):  # of the draft 0, where p / q is 0.25
        log_p_rows = torch.tensor(np.log(P + 1e-30)).float().expand(1000, -1)
        q_rows = torch.tensor(Q).float().expand(1000, -1)
        verdict = verify(log_p_rows, q_rows, torch.zeros(1000, dtype=torch.int64), grid, lam)
        assert float(verdict.accepted.double().mean()) == pytest.approx(share)


@pytest.mark.parametrize("lam", [1.0, 0.5])
@pytest.mark.parametrize("q", [np.zeros(6), np.full(6, np.nan)], ids=["nothing drafted", "broken draft"])
def test_without_a_draft_the_token_is_the_models_own(q, lam):
    p = P + 0.01 * (P == 0.0)
    p /= p.sum()

    verdict = single_verdict(p, q, lam)

    assert not verdict.accepted.any()
    assert torch.isfinite(verdict.log_probs).all()
    assert int(verdict.replacements) == int(np.searchsorted(p.cumsum(), 0.5))
    assert verdict.log_probs[0].exp().numpy() == pytest.approx(p, abs=1e-7)


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_equal_models_accept_everything(lam):
    p = np.full(6, 1 / 6)
    assert single_verdict(p, p, lam).accepted.all()
    assert distribution_drawn(p, p, lam) == pytest.approx(p, abs=1e-12)
    assert single_verdict(p, p, lam).log_probs[0].exp().numpy() == pytest.approx(p, abs=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_the_tokens_of_a_pass_are_a_geometric_sum(alpha):
    for draft_count in (1, 4, 10):
        formula = (1 - alpha ** (draft_count + 1)) / (1 - alpha)
        assert tokens_per_verification(alpha, draft_count) == pytest.approx(formula)
    assert tokens_per_verification(1.0, 4) == 5.0
