"""Tokens are truncated as a plain loop in float64 truncates, drawn as exact fractions say, and have the same log-prob
drawn, scored and trained.
"""

import math
from fractions import Fraction

import pytest
import torch

from jackpot.models.sampling import Draw, draw_tokens, log_probs_at, sample_tokens, sampling_log_probs
from jackpot.objectives.kernels.linear_head import linear_head
from jackpot.objectives.kernels.tiles import Head

LARGEST = 1 - 2**-53  # the largest uniform, just below 1


def truncated_probs(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Return probabilities after temperature, top-k and top-p, computed one token at a time."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    if top_k:
        smallest = sorted(weights)[-min(top_k, len(weights))]
        weights = [weight if weight >= smallest else 0.0 for weight in weights]
    total = sum(weights)
    weights = [weight / total for weight in weights]
    kept_tokens = set()
    mass_before = 0.0
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if top_p == 1.0 or mass_before < top_p:
            kept_tokens.add(token)
        mass_before += weights[token]
    weights = [weight if token in kept_tokens else 0.0 for token, weight in enumerate(weights)]
    total = sum(weights)
    return [weight / total for weight in weights]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 4, 17, 30])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.99, 1.0])
def test_truncation_equals_a_plain_loop(temperature, top_k, top_p):
    logits = 2.0 * torch.randn(6, 17, generator=torch.Generator().manual_seed(1))

    probs = sampling_log_probs(logits, temperature, top_k, top_p).exp()
    expected_probs = torch.tensor([truncated_probs(row, temperature, top_k, top_p) for row in logits.tolist()])

    assert torch.allclose(probs, expected_probs, atol=2e-6)
    assert torch.equal(probs > 0, expected_probs > 0)


def test_the_token_that_crosses_top_p_is_kept():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert sampling_log_probs(logits, temperature=1.0, top_k=0, top_p=0.49).exp().tolist() == [pytest.approx([0, 1, 0])]
    assert sampling_log_probs(logits, temperature=1.0, top_k=0, top_p=0.51).exp().tolist() == [
        pytest.approx([0, 0.625, 0.375])
    ]


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()  # top-k 2 leaves 4/7 and 3/7; 4/7 is above 0.5 and 0.4 is not
    assert sampling_log_probs(logits, temperature=1.0, top_k=2, top_p=0.5).exp().tolist() == [
        pytest.approx([1, 0, 0, 0])
    ]


def test_ties_with_the_last_of_top_k_are_kept_as_vllm_keeps_them():
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    assert sampling_log_probs(logits, temperature=1.0, top_k=2, top_p=1.0).exp().tolist() == [
        pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    ]


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 300])
def test_a_draw_is_the_first_token_above_the_uniform(size):
    """Whole-number weights make the running sums exact, so that every boundary can be tried on both sides."""
    weights = torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(size))
    weights[size // 2] = 3
    total = 1 << int(weights.sum()).bit_length()
    weights[0] += total - int(weights.sum())  # a power of two: boundaries are exact in float64
    lower_edges = torch.arange(total, dtype=torch.float64) / total
    upper_edges = (lower_edges + 1 / total).nextafter(torch.tensor(0.0, dtype=torch.float64))
    uniforms = torch.cat([lower_edges, upper_edges])

    tokens = sample_tokens(weights.float().expand(len(uniforms), -1), uniforms)

    running_sums = weights.cumsum(0).tolist()
    expected_tokens = []
    for uniform in uniforms.tolist():
        goal = Fraction(uniform) * total
        expected_tokens.append(next(token for token, running_sum in enumerate(running_sums) if running_sum > goal))
    assert tokens.tolist() == expected_tokens


@pytest.mark.parametrize("size", [5, 128, 200, 1000])
def test_a_token_of_probability_zero_is_never_drawn(size):
    generator = torch.Generator().manual_seed(size)
    probs = torch.rand(400, size, generator=generator) ** 8
    probs[torch.rand(400, size, generator=generator) < 0.9] = 0.0
    probs[:, -size // 5 :] = 0.0  # nothing at the end, where rounding would run off to
    probs[:, 0] = 0.0
    probs[:, 1] += probs.sum(-1) == 0
    uniforms = torch.rand(400, dtype=torch.float64, generator=generator)
    uniforms[:100] = 0.0
    uniforms[100:200] = LARGEST

    tokens = sample_tokens(probs, uniforms)

    assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_a_goal_between_two_blocks_skips_the_zeros_behind_it():
    """The sum of the blocks before, once as it was and once as a difference, can differ in its last bit."""
    blocks = torch.rand(200, 40, 128, generator=torch.Generator().manual_seed(0)) ** 6
    blocks[:, 1:, :64] = 0.0
    probs = blocks.flatten(1)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    for border in range(39):
        tokens = sample_tokens(probs, sums[:, border] / sums[:, -1])
        assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_a_goal_that_rounding_leaves_above_all_gives_the_last():
    """Sums of 0.1 inside a block fall short of the block's own sum by more than the largest uniform leaves."""
    for size in range(2, 400):
        probs = torch.zeros(1, size)
        probs[0, : size - 1] = 0.1
        token = sample_tokens(probs, torch.tensor([LARGEST], dtype=torch.float64))
        assert token.item() == size - 2


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.05, 0.0, 0.6, 0.25, 0.1])
    uniforms = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    tokens = sample_tokens(probs.expand(100_000, -1), uniforms)
    assert (tokens.bincount(minlength=5) / 100_000).tolist() == pytest.approx(probs.tolist(), abs=2e-5)


def draw_of(logits: torch.Tensor, uniforms: torch.Tensor, num_top: int = 5, **settings: float) -> Draw:
    """Draw tokens with plain sampling, but for the settings that are given."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    return draw_tokens(logits, uniforms, num_top_log_probs=num_top, **settings)


@pytest.mark.parametrize("size", [5, 128, 129, 700])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8, "temperature": 1.3}])
def test_a_draw_is_the_inverse_cdf_of_a_plain_softmax(size, settings):
    generator = torch.Generator().manual_seed(size)
    rows = 20 if size < 200 else 4
    logits = 4 * torch.randn(rows, size, generator=generator)
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator)

    draw = draw_of(logits, uniforms, **settings)

    all_settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    probs = torch.tensor([truncated_probs(row, **all_settings) for row in logits.tolist()], dtype=torch.float64)
    expected_tokens = torch.searchsorted(probs.cumsum(-1), uniforms[:, None], right=True)[:, 0].clamp(max=size - 1)
    assert torch.equal(draw.tokens, expected_tokens)
    assert torch.allclose(draw.log_probs.double(), probs.gather(1, draw.tokens[:, None])[:, 0].log(), atol=5e-6)
    assert torch.allclose(draw.top_log_probs.double(), probs.topk(5).values.log(), atol=5e-6)
    assert torch.allclose(draw.top_log_probs.double(), probs.gather(1, draw.top_ids).log(), atol=5e-6)


@pytest.mark.parametrize("size", [10_240, 10_241, 20_000])
@pytest.mark.parametrize("where", ["anywhere", "in one block", "at the end", "equal"])
def test_the_most_probable_tokens_are_found_wherever_they_stand(size, where):
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size))
    spans = {"anywhere": slice(0, 0), "in one block": slice(256, 384), "at the end": slice(-30, None)}
    logits[:, spans.get(where, slice(None))] += 0.0 if where == "equal" else 50.0
    logits = logits.round() if where == "equal" else logits

    draw = draw_of(logits, torch.full((6,), 0.5, dtype=torch.float64), num_top=20)

    expected_log_probs = logits.double().log_softmax(-1)
    assert torch.allclose(draw.top_log_probs.double(), expected_log_probs.topk(20).values, atol=1e-6)
    assert torch.allclose(draw.top_log_probs.double(), expected_log_probs.gather(1, draw.top_ids), atol=1e-6)
    assert all(len(set(row)) == 20 for row in draw.top_ids.tolist())


def test_what_truncation_dropped_stands_last_with_no_probability():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()

    draw = draw_of(logits, torch.tensor([LARGEST], dtype=torch.float64), num_top=3, top_k=2)

    assert draw.tokens.tolist() == [3]
    assert draw.top_ids[0, :2].tolist() == [3, 2]
    # 0.4 and 0.3 of the 0.7 that top-k 2 leaves
    assert draw.top_log_probs.exp().tolist() == [pytest.approx([4 / 7, 3 / 7, 0.0])]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("size", [6, 300])
def test_a_row_without_a_distribution_spoils_no_other(value, size):
    logits = torch.zeros(2, size)
    logits[1, 3] = value

    draw = draw_of(logits, torch.tensor([0.9, 0.9], dtype=torch.float64), num_top=2)

    assert draw.log_probs.isfinite().tolist() == [True, False]
    assert (draw.tokens < size).all()


def test_log_probs_in_a_large_vocabulary_lose_no_digits():
    logits = torch.randn(2, 150_001, generator=torch.Generator().manual_seed(0))
    draw = draw_of(logits, torch.tensor([0.1, 0.9], dtype=torch.float64))
    exact_log_probs = logits.double().log_softmax(-1).gather(1, draw.tokens[:, None])[:, 0]
    assert (draw.log_probs - exact_log_probs).abs().max() < 2e-6


@pytest.mark.parametrize("size", [32, 5_000, 152_000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 0.9)])
def test_a_tokens_log_prob_is_the_same_drawn_scored_and_trained(size, temperature, top_k, top_p):
    """Scoring has the formula of the draw, the head one of its own that differs in the last bit."""
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(16, size, generator=generator)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    uniforms = torch.rand(16, dtype=torch.float64, generator=generator)
    draw = draw_tokens(logits, uniforms, **settings, num_top_log_probs=5)
    ids = torch.cat([draw.tokens[:, None], draw.top_ids], dim=1)

    scored_log_probs = log_probs_at(logits, ids, **settings)

    assert torch.equal(scored_log_probs, torch.cat([draw.log_probs[:, None], draw.top_log_probs], dim=1))

    if not top_k:
        exact_log_probs = (logits / temperature).double().log_softmax(-1).gather(1, ids)
        assert (scored_log_probs - exact_log_probs).abs().max() < 1e-6

        head = Head(hidden=torch.eye(16), weight=logits.T.contiguous())  # whose products do not round
        trained_log_probs = linear_head(head, draw.tokens, temperature=temperature).log_probs
        assert (trained_log_probs - draw.log_probs).abs().max() < 1e-6
