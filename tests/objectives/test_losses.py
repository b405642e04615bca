"""PPO's surrogate in its four quadrants, its relatives against the papers' equations, and the aggregates by loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.objectives.losses import LOSS_AGG_MODES, SURROGATES, clipped_surrogate, oapl

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
RTOL = 1e-12
MAX_LENGTH = 11  # the longest response that the settings allow


def surrogate_and_slope(ratio, advantage, clip_low=0.2, clip_high=0.3):
    """S and dS / d log p_new where p_new / p_proximal is `ratio`."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    proximal, advantages = torch.full_like(log_probs, -1.0), torch.full_like(log_probs, advantage)
    value = clipped_surrogate(log_probs, proximal, advantages, advantages.bool(), clip_low, clip_high).value
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
def test_the_surrogate_stops_where_the_policy_has_gone_far(ratio, advantage, value, slope):
    actual_value, actual_slope = surrogate_and_slope(ratio, advantage)
    assert actual_value == pytest.approx(value, rel=RTOL)
    assert actual_slope == pytest.approx(slope, rel=RTOL)


@few
@given(st.floats(0.01, 100.0), st.floats(-5.0, 5.0))
def test_without_a_clip_the_surrogate_is_ratio_times_advantage(ratio, advantage):
    value_and_slope = surrogate_and_slope(ratio, advantage, clip_low=math.inf, clip_high=math.inf)
    assert value_and_slope == pytest.approx((ratio * advantage, ratio * advantage), rel=1e-11)


def test_at_the_current_policy_the_gradient_is_that_of_log_p():
    log_probs = torch.tensor([[-0.3, -5.0, -1.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0, 0.0]], dtype=torch.float64)
    clipped_surrogate(log_probs, log_probs.detach(), advantages, advantages.bool(), 0.0, 0.0).value.sum().backward()
    # at the boundary itself torch shares the gradient of min and clamp; the clip must leave all of it
    assert log_probs.grad.tolist() == [[2.0, -3.0, 0.0]]


def test_no_gradient_reaches_the_proximal_point():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    proximal = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    clipped_surrogate(log_probs, proximal, torch.ones(1, 2), mask, 0.2, 0.2).value.sum().backward()

    assert proximal.grad is None
    assert log_probs.grad.abs().sum() > 0


@few
@given(st.floats(0.1, 3.0), st.sampled_from([-2.0, 0.0, 2.0]))
def test_the_surrogate_marks_where_the_gradient_is_gone(ratio, advantage):
    _, slope = surrogate_and_slope(ratio, advantage)
    clip_mark = clipped_surrogate(
        torch.tensor([[math.log(ratio)]], dtype=torch.float64),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
        0.2,
        0.3,
    ).clipped

    assert clip_mark.item() == (slope == 0.0 and advantage != 0.0)


# The other surrogates, against the equations of the papers, which are of whole responses


LOW, HIGH = 0.05, 0.06  # clips that some of the responses pass
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0] * 6, [1, 0, 0, 0, 0, 0]] * 4, dtype=torch.bool)


def responses():
    """Responses with a tool's token, without any token, with one; ratios inside and outside the clips."""
    draw = torch.Generator().manual_seed(1)
    proximal = torch.randn(16, 6, generator=draw, dtype=torch.float64) - 2.0
    log_ratios = 0.2 * torch.randn(16, 6, generator=draw, dtype=torch.float64)
    advantages = torch.randn(16, 1, generator=draw, dtype=torch.float64)
    advantages[7] = 0.0
    return (proximal + log_ratios).requires_grad_(), proximal, advantages.expand(16, 6)


def sequence_objective(name, log_probs, proximal, advantage, low, high):
    """Of the n tokens of a response, with the gradient of the whole: J, and which tokens the clip has changed."""
    ratios = (log_probs - proximal).exp()
    if name == "gspo":  # arXiv 2507.18071 eqs. 5 and 7
        sequence_ratio = ratios.prod() ** (1.0 / len(log_probs))
        value = torch.minimum(sequence_ratio * advantage, sequence_ratio.clamp(1.0 - low, 1.0 + high) * advantage)
        return value, [bool(value < sequence_ratio * advantage)] * len(log_probs)
    if name == "gmpo":  # arXiv 2507.20673
        sign = 1.0 if advantage >= 0 else -1.0
        kept_ratios = [
            sign * min(sign * token_ratio, sign * token_ratio.clamp(1.0 - low, 1.0 + high), key=torch.Tensor.item)
            for token_ratio in ratios
        ]
        clip_marks = [
            bool(advantage != 0 and token_ratio != ratio)
            for token_ratio, ratio in zip(kept_ratios, ratios, strict=True)
        ]
        return torch.stack(kept_ratios).prod() ** (1.0 / len(log_probs)) * advantage, clip_marks
    # arXiv 2506.13585 eqs. 4 and 5
    bounded_ratios = [min(max(token_ratio, 1.0 - low), 1.0 + high) for token_ratio in ratios.tolist()]
    terms = [bound * advantage * log_prob for bound, log_prob in zip(bounded_ratios, log_probs, strict=True)]
    clip_marks = [bound != token_ratio for bound, token_ratio in zip(bounded_ratios, ratios.tolist(), strict=True)]
    return torch.stack(terms).mean(), clip_marks


@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (math.inf, math.inf), (1.5, 0.0)])
@pytest.mark.parametrize("name", ["gspo", "gmpo", "cispo"])
def test_the_mean_of_a_response_is_the_papers_equation(name, low, high):
    log_probs, proximal, advantages = responses()
    result = SURROGATES[name](log_probs, proximal, advantages, MASK, low, high)

    means = torch.where(MASK, result.value, 0.0).sum(-1) / MASK.sum(-1).clamp(min=1)
    (gradient,) = torch.autograd.grad(means.sum(), log_probs)

    expected_gradient = torch.zeros_like(gradient)

    for row, token_mask in enumerate(MASK):
        if token_mask.any():
            response_log_probs = log_probs.detach()[row, token_mask].requires_grad_()
            value, clip_marks = sequence_objective(
                name, response_log_probs, proximal[row, token_mask], advantages[row, 0].item(), low, high
            )
            (expected_gradient[row, token_mask],) = torch.autograd.grad(value, response_log_probs)
            assert means[row].item() == pytest.approx(value.item(), rel=RTOL)
            assert result.clipped[row, token_mask].tolist() == clip_marks

    torch.testing.assert_close(gradient, expected_gradient, rtol=RTOL, atol=1e-15)

    if low == LOW:
        assert 0.1 < result.clipped[MASK].double().mean() < 0.9


@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_tokens_surrogate_has_the_gradient_of_its_log_prob(name):
    """So a correction weighs and rejects single tokens under every surrogate."""
    log_probs, proximal, advantages = responses()
    value = SURROGATES[name](log_probs, proximal, advantages, MASK, math.inf, math.inf).value
    (gradient,) = torch.autograd.grad(value[1, 2], log_probs)
    assert gradient.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("name", list(SURROGATES))
def test_every_surrogate_is_reinforce_at_the_proximal_point(name):
    log_probs, _, advantages = responses()
    value = SURROGATES[name](log_probs, log_probs.detach(), advantages, MASK, 0.0, 0.0).value
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    assert torch.equal(gradient, advantages)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_oapl_regresses_whole_responses_and_no_tools_tokens(beta):
    log_probs, proximal, advantages = responses()
    result = oapl(log_probs, proximal, advantages, MASK, 0.2, 0.2, beta=beta)
    (gradient,) = torch.autograd.grad(result.value[MASK].sum(), log_probs)

    for row, token_mask in enumerate(MASK):
        if token_mask.any():
            log_ratio = math.fsum((log_probs - proximal)[row, token_mask].tolist())
            residual = advantages[row, 0].item() - beta * log_ratio
            assert result.value[row, token_mask].sum().item() == pytest.approx(-(residual**2) / (2.0 * beta), rel=RTOL)
            assert gradient[row, token_mask].tolist() == pytest.approx([residual] * int(token_mask.sum()), rel=RTOL)

    assert gradient[~MASK].abs().max() == 0.0
    assert not result.clipped.any()


# Aggregates


def random_losses(seed=0):
    """Losses that are 0 where nothing counts, a row without tokens, and the weight of each token in the denominator."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    token_weights = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    token_weights[token_weights < 0.3] = 0.0
    token_weights[3] = 0.0
    return torch.where(token_weights > 0, losses, 0.0), token_weights


def aggregate_by_loops(name, losses, token_weights, max_length):
    """Return the numerator and the denominator of an aggregate."""
    rows = list(zip(losses.tolist(), token_weights.tolist(), strict=True))
    if name == "token-mean":
        return sum(map(sum, losses.tolist())), sum(map(sum, token_weights.tolist()))
    if name == "seq-mean-token-sum-norm":
        return sum(map(sum, losses.tolist())), len(rows) * max_length
    filled_rows = [(sum(row), sum(counts)) for row, counts in rows if sum(counts) > 0]
    return sum(loss / count for loss, count in filled_rows), len(filled_rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("weight_kind", ["mask", "coins", "expected"])
def test_an_aggregate_is_what_its_loop_says(name, weight_kind, seed):
    losses, token_weights = random_losses(seed)
    token_weights = token_weights if weight_kind == "expected" else (token_weights > 0).to(losses.dtype)
    if weight_kind == "coins":  # a row of which every token was rejected
        token_weights[1], losses[1] = 0.0, 0.0

    numerator, denominator = LOSS_AGG_MODES[name](losses, token_weights, MAX_LENGTH)
    expected_terms = aggregate_by_loops(name, losses, token_weights, MAX_LENGTH)

    assert (numerator.item(), float(denominator)) == pytest.approx(expected_terms, rel=RTOL)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_numerators_and_denominators_add_up_over_micro_batches(name):
    losses, token_weights = random_losses()
    whole_terms = LOSS_AGG_MODES[name](losses, token_weights, MAX_LENGTH)
    batch_terms = [
        LOSS_AGG_MODES[name](losses[rows], token_weights[rows], MAX_LENGTH) for rows in (slice(0, 2), slice(2, 5))
    ]
    term_sums = [float(sum(column)) for column in zip(*batch_terms, strict=True)]
    assert term_sums == pytest.approx([float(term) for term in whole_terms], rel=RTOL)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_nothing_counted_gives_zero_and_a_finite_gradient(name):
    losses = torch.zeros(2, 3, requires_grad=True)
    numerator, denominator = LOSS_AGG_MODES[name](losses, torch.zeros(2, 3), 4)
    numerator.backward()

    assert numerator.item() == 0.0
    assert losses.grad.isfinite().all()
    # two responses times the longest length of 4
    assert float(denominator) == (8.0 if name == "seq-mean-token-sum-norm" else 0.0)
