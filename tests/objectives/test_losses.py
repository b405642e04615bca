"""PPO's surrogate in its four quadrants, and the three aggregates against loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.objectives.losses import LOSS_AGG_MODES, clip_share, clipped_surrogate

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
RTOL = 1e-12


def surrogate_and_slope(ratio, advantage, clip_low=0.2, clip_high=0.3):
    """S and dS / d log p_new where p_new / p_proximal is `ratio`."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    proximal, advantages = torch.full_like(log_probs, -1.0), torch.full_like(log_probs, advantage)
    value = clipped_surrogate(log_probs, proximal, advantages, clip_low, clip_high)
    value.sum().backward()
    return value.item(), log_probs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, 2.2, 2.2),  # inside: r A, whichever the sign
        (1.1, -2.0, -2.2, -2.2),
        (1.5, 2.0, 2.6, 0.0),  # above and good: stop at (1 + 0.3) A
        (1.5, -2.0, -3.0, -3.0),  # above and bad: push it down
        (0.5, 2.0, 1.0, 1.0),  # below and good: pull it up
        (0.5, -2.0, -1.6, 0.0),  # below and bad: stop at (1 - 0.2) A
    ],
)
def test_the_surrogate_stops_only_where_the_policy_has_gone_far_enough(ratio, advantage, value, slope):
    found_value, found_slope = surrogate_and_slope(ratio, advantage)
    assert found_value == pytest.approx(value, rel=RTOL)
    assert found_slope == pytest.approx(slope, rel=RTOL)


@few
@given(st.floats(0.01, 100.0), st.floats(-5.0, 5.0))
def test_without_a_clip_the_surrogate_is_the_ratio_times_the_advantage(ratio, advantage):
    found = surrogate_and_slope(ratio, advantage, math.inf, math.inf)
    assert found == pytest.approx((ratio * advantage, ratio * advantage), rel=1e-11)


def test_at_the_detached_current_policy_the_gradient_is_that_of_log_p_and_the_clip_does_nothing():
    log_probs = torch.tensor([[-0.3, -5.0, -1.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0, 0.0]], dtype=torch.float64)
    clipped_surrogate(log_probs, log_probs.detach(), advantages, 0.0, 0.0).sum().backward()
    # at the boundary itself torch shares the gradient of min and clamp; the clip must leave all of it
    assert log_probs.grad.tolist() == [[2.0, -3.0, 0.0]]


def test_no_gradient_reaches_the_proximal_point():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    proximal = torch.zeros(1, 2, requires_grad=True)
    clipped_surrogate(log_probs, proximal, torch.ones(1, 2), 0.2, 0.2).sum().backward()
    assert proximal.grad is None and log_probs.grad.abs().sum() > 0


@few
@given(st.floats(0.1, 3.0), st.sampled_from([-2.0, 0.0, 2.0]))
def test_the_clip_share_marks_where_the_clip_takes_the_gradient_away(ratio, advantage):
    _, slope = surrogate_and_slope(ratio, advantage)
    marked = clip_share(
        torch.tensor([[math.log(ratio)]], dtype=torch.float64),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([[advantage]], dtype=torch.float64),
        0.2,
        0.3,
    )
    assert marked.item() == (slope == 0.0 and advantage != 0.0)


# Aggregates


def random_losses(seed=0):
    """Losses that are 0 where nothing counts, a row without tokens, and the weight of each token in the denominator."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    counted = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    counted[counted < 0.3] = 0.0
    counted[3] = 0.0
    return torch.where(counted > 0, losses, 0.0), counted


def by_hand(name, losses, counted, max_length):
    rows = list(zip(losses.tolist(), counted.tolist(), strict=True))
    if name == "token-mean":
        return sum(map(sum, losses.tolist())), sum(map(sum, counted.tolist()))
    if name == "seq-mean-token-sum-norm":
        return sum(map(sum, losses.tolist())), len(rows) * max_length
    present = [(sum(row), sum(counts)) for row, counts in rows if sum(counts) > 0]
    return sum(loss / count for loss, count in present), len(present)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("kind", ["mask", "coins", "expected"])
def test_an_aggregate_is_what_its_loop_says(name, kind, seed):
    losses, counted = random_losses(seed)
    counted = counted if kind == "expected" else (counted > 0).to(losses.dtype)
    if kind == "coins":  # a row of which every token was rejected
        counted[1], losses[1] = 0.0, 0.0
    numerator, denominator = LOSS_AGG_MODES[name](losses, counted, 11)
    expected = by_hand(name, losses, counted, 11)
    assert (numerator.item(), float(denominator)) == pytest.approx(expected, rel=RTOL)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_numerators_and_denominators_add_up_over_micro_batches(name):
    losses, counted = random_losses()
    whole = LOSS_AGG_MODES[name](losses, counted, 11)
    parts = [LOSS_AGG_MODES[name](losses[rows], counted[rows], 11) for rows in (slice(0, 2), slice(2, 5))]
    added = [float(sum(column)) for column in zip(*parts, strict=True)]
    assert added == pytest.approx([float(part) for part in whole], rel=RTOL)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_nothing_counted_gives_a_zero_numerator_and_a_finite_gradient(name):
    losses = torch.zeros(2, 3, requires_grad=True)
    numerator, denominator = LOSS_AGG_MODES[name](losses, torch.zeros(2, 3), 4)
    numerator.backward()
    assert numerator.item() == 0.0 and losses.grad.isfinite().all()
    assert float(denominator) == (8.0 if name == "seq-mean-token-sum-norm" else 0.0)
