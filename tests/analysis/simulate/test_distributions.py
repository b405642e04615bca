"""The numbers that `jackpot simulate` computes at one state of two models are those of Python loops and numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from helpers.distributions import enumerated, few, kl, pairs
from jackpot import correct
from jackpot.analysis.simulate.distributions import (
    LAMS,
    StatePairs,
    divergence,
    measure_states,
    rejected_divergence,
    weight_moments,
)


def of(rollout: list[list[float]], target: list[list[float]]) -> StatePairs:
    """Build StatePairs from probabilities."""
    parts = [torch.tensor(rows, dtype=torch.float64).log() for rows in (rollout, target)]
    return StatePairs(rollout=parts[0], target=parts[1], token_ids=torch.zeros(len(rollout), 1, dtype=torch.int64))


@few
@given(pairs(smallest=2))
def test_every_number_of_a_state_is_that_of_a_loop(pair) -> None:
    log_inf, log_target = pair
    rows = [torch.tensor([row], dtype=torch.float64) for row in pair]
    measured = measure_states(
        StatePairs(rollout=rows[0], target=rows[1], token_ids=torch.zeros(1, 1, dtype=torch.int64))
    )
    p_inf, p_target = [math.exp(x) for x in log_inf], [math.exp(x) for x in log_target]

    def divergence(p: list[float], q: list[float]) -> float:
        if any(a > 0 and not b > 0 for a, b in zip(p, q, strict=True)):
            return math.inf
        return kl(p, q)

    assert measured.kl.item() == pytest.approx(divergence(p_target, p_inf), rel=1e-9, abs=1e-12)
    assert measured.reverse_kl.item() == pytest.approx(divergence(p_inf, p_target), rel=1e-9, abs=1e-12)
    for index, lam in enumerate(LAMS):
        _, z, kept = enumerated(log_inf, log_target, lam)
        assert measured.acceptance[0, index].item() == pytest.approx(z, rel=1e-12)
        after = divergence(p_target, kept) if z > 0 else math.inf
        assert measured.kl_after[0, index].item() == pytest.approx(after, rel=1e-9, abs=1e-12)


def test_moments_of_weights_are_those_of_the_corrections() -> None:
    """Every token of the vocabulary stands for a sampled one, weighted by how often it would be."""
    random = torch.Generator().manual_seed(3)
    rollout, target = (torch.randn(40, 7, generator=random, dtype=torch.float64).mul(2).log_softmax(-1) for _ in "pq")
    z = torch.minimum(rollout.exp(), target.exp()).sum(-1, keepdim=True).expand_as(rollout)
    columns = {"rollout_log_probs": rollout, "target_log_probs": target, "response_mask": torch.ones_like(z).bool()}

    tis = correct("tis", **columns, cap=3.0).weights
    obrs = correct("obrs", **columns, z=z, mask="expected", c1=3.0, kappa="none")
    drawn, expected = obrs.weights, obrs.weights * obrs.accept_mask

    moments = [tis, tis.square(), expected, expected * drawn, expected.square(), tis * expected]
    expected_moments = torch.stack([(rollout.exp() * moment).sum(-1) for moment in moments], -1)
    states = StatePairs(rollout=rollout, target=target, token_ids=torch.zeros(40, 1, dtype=torch.int64))

    torch.testing.assert_close(weight_moments(states), expected_moments)
    assert (tis == 3.0).any() and (drawn == 3.0).any() and not (drawn == 3.0).all()


def test_equal_models_have_no_gap_and_disjoint_ones_no_overlap() -> None:
    measured = measure_states(of([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]], [[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]))
    assert measured.kl.tolist() == [pytest.approx(0.0, abs=1e-15), math.inf]
    assert measured.acceptance.tolist() == [pytest.approx([1.0, 1.0, 0.5]), [0.0, 0.0, 0.0]]
    assert measured.kl_after[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)
    assert measured.kl_after[1].tolist() == [math.inf] * 3


def test_a_lam_below_every_rho_leaves_the_kl() -> None:
    generator = torch.Generator().manual_seed(3)
    rollout, noise = torch.randn(2, 4, 200, generator=generator, dtype=torch.float64)
    rows = [logits.log_softmax(-1) for logits in (rollout, rollout + 0.6 * noise)]
    state = StatePairs(rollout=rows[0], target=rows[1], token_ids=torch.zeros(4, 1, dtype=torch.int64))
    lam = state.rho.min(-1, keepdim=True).values * 0.999

    before = measure_states(state).kl
    np.testing.assert_allclose(rejected_divergence(state, lam).numpy(), before.numpy(), rtol=1e-10)


def test_tokens_that_the_target_lacks_are_rejected_at_any_lam() -> None:
    state = of([[0.4, 0.2, 0.2, 0.2]], [[0.6, 0.3, 0.1, 0.0]])
    expected = sum(p * math.log(p / q) for p, q in zip([0.6, 0.3, 0.1], [0.5, 0.25, 0.25], strict=True))
    for lam in (1e-6, 0.49):  # below the smallest rho of the others, 0.5
        assert rejected_divergence(state, lam).item() == pytest.approx(expected, rel=1e-12)
    assert expected < divergence(state.target, state.rollout).item()


def test_what_only_the_target_has_leaves_the_kl_infinite() -> None:
    state = of([[0.5, 0.5, 0.0]], [[0.2, 0.3, 0.5]])
    assert [rejected_divergence(state, lam).item() for lam in (0.1, 1.0, 10.0)] == [math.inf] * 3
