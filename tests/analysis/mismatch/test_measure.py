"""How far two sides' probabilities of the same tokens are apart, against enumeration in float64."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from jackpot.analysis.mismatch.learner import LearnerScores
from jackpot.analysis.mismatch.measure import MismatchNumbers, mismatch_numbers
from jackpot.analysis.mismatch.tokens import SamplerScores, TokenMismatch, token_mismatch
from jackpot.core.errors import DataError, EngineError

VOCABULARY = 12  # tokens


def distributions(tokens: int, seed: int, spread: float = 1.5) -> np.ndarray:
    """Draw a distribution over the vocabulary for every token: [tokens, VOCABULARY], float64."""
    logits = spread * np.random.default_rng(seed).standard_normal((tokens, VOCABULARY))
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def both(
    p: np.ndarray, q: np.ndarray, ids: np.ndarray, k: int = VOCABULARY, **changes
) -> tuple[SamplerScores, LearnerScores]:
    """One response in whose every state the sampler has p and the learner q, with the k most probable tokens of p."""
    log_p, log_q = np.log(p), np.log(q)
    top = np.argsort(-p, axis=1)[:, :k]
    rows = np.arange(len(p))
    outside = log_q.copy()
    np.put_along_axis(outside, top, np.inf, axis=1)

    by = {
        "uid": "one",
        "sampled": torch.ones(len(p), dtype=torch.bool),
        "log_probs": torch.from_numpy(log_p[rows, ids]),
        "top_ids": torch.from_numpy(top),
        "top_log_probs": torch.from_numpy(np.take_along_axis(log_p, top, 1)),
        "vocabulary": VOCABULARY,
        "truncated": False,
    }
    reading = LearnerScores(
        log_probs=torch.from_numpy(log_q[rows, ids]),
        top_log_probs=torch.from_numpy(np.take_along_axis(log_q, top, 1)),
        lowest=torch.from_numpy(outside.min(1)),
        entropy=torch.from_numpy(-(q * log_q).sum(1)),
    )

    return SamplerScores(**by | changes), reading


def response(length: int, seed: int, distance: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, a q at some distance, and tokens drawn from p."""
    p = distributions(length, seed)
    q = p * np.exp(distance * np.random.default_rng(seed + 1_000).standard_normal(p.shape))
    q /= q.sum(1, keepdims=True)
    draw = np.random.default_rng(seed + 2_000)
    return p, q, np.array([draw.choice(VOCABULARY, p=row) for row in p])


def test_every_token_has_both_probabilities_and_divergences():
    p, q, ids = response(9, seed=0)
    mismatch = token_mismatch(*both(p, q, ids))
    rows = np.arange(9)

    np.testing.assert_allclose(mismatch.sampler, p[rows, ids])
    np.testing.assert_allclose(mismatch.learner, q[rows, ids])
    np.testing.assert_allclose(mismatch.gap, np.abs(p - q)[rows, ids], atol=1e-15)
    np.testing.assert_allclose(mismatch.log_ratio, np.log(q / p)[rows, ids], atol=1e-14)

    kl, variation = (p * np.log(p / q)).sum(1), 0.5 * np.abs(p - q).sum(1)
    for low_or_high in (0, 1):
        np.testing.assert_allclose(mismatch.kl[low_or_high], kl, atol=1e-14)
        np.testing.assert_allclose(mismatch.variation[low_or_high], variation, atol=1e-14)

    np.testing.assert_allclose(mismatch.entropy, -(q * np.log(q)).sum(1))
    assert mismatch.is_exact and mismatch.support is None and mismatch.position.tolist() == list(range(9))


def test_k1_k3_and_the_mean_ratio_are_unbiased():
    """Over all tokens that the sampler could draw at one state, each with its probability."""
    p, q, _ = response(1, seed=3)
    every = np.arange(VOCABULARY)
    mismatch = token_mismatch(*both(p.repeat(VOCABULARY, 0), q.repeat(VOCABULARY, 0), every))
    weight = torch.from_numpy(p[0])
    exact = (p * np.log(p / q)).sum()

    assert float((weight * -mismatch.log_ratio).sum()) == pytest.approx(exact)

    k3 = mismatch.log_ratio.exp() - 1.0 - mismatch.log_ratio
    assert float((weight * k3).sum()) == pytest.approx(exact)
    assert float((weight * mismatch.log_ratio.exp()).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("k", [1, 3, 8, VOCABULARY - 1])
@pytest.mark.parametrize("distance", [0.01, 0.5, 3.0])
def test_bounds_from_the_top_k_hold_the_exact_divergences(k, distance):
    p, q, ids = response(200, seed=k, distance=distance)
    mismatch = token_mismatch(*both(p, q, ids, k))
    exact = {"kl": (p * np.log(p / q)).sum(1), "variation": 0.5 * np.abs(p - q).sum(1)}

    for name, value in exact.items():
        low, high = (bound.numpy() for bound in getattr(mismatch, name))
        assert (low <= value + 1e-12).all() and (value <= high + 1e-12).all() and (low > -1e-12).all()
        assert low.mean() > 0.0 and high.mean() > low.mean()

    assert not mismatch.is_exact


def test_proportional_tails_reach_the_lower_bounds():
    p, q, ids = response(20, seed=5)
    top = np.argsort(-p, axis=1)[:, :4]
    inside = np.zeros(p.shape, bool)
    np.put_along_axis(inside, top, True, axis=1)
    rest_p, rest_q = (np.where(inside, 0.0, x).sum(1, keepdims=True) for x in (p, q))
    q = np.where(inside, q, p * rest_q / rest_p)

    mismatch = token_mismatch(*both(p, q, ids, 4))

    np.testing.assert_allclose(mismatch.kl[0], (p * np.log(p / q)).sum(1), atol=1e-12)
    np.testing.assert_allclose(mismatch.variation[0], 0.5 * np.abs(p - q).sum(1), atol=1e-12)


def _fields(by: SamplerScores) -> dict:
    """Return the scores by name, so that one can be put in another's place."""
    return {name: getattr(by, name) for name in SamplerScores.__dataclass_fields__}


def test_rounding_of_the_samplers_log_probs_is_no_divergence():
    """In float32 a whole distribution sums to 1 up to 1e-7, which sums of p log p/q show."""
    p, _, ids = response(300, seed=7)
    by, reading = both(p, p, ids, log_probs=torch.zeros(300).double())
    rounded = by.top_log_probs.float().double()

    mismatch = token_mismatch(SamplerScores(**{**_fields(by), "top_log_probs": rounded}), reading)
    naive = (rounded.exp() * (rounded - reading.top_log_probs)).sum(1)

    assert float(naive.abs().max()) > 1e-8 and float(mismatch.kl[0].max()) < 1e-13


def test_what_a_tool_wrote_is_not_compared_and_keeps_its_place():
    p, q, ids = response(6, seed=1)
    by, reading = both(p, q, ids, sampled=torch.tensor([True, False, False, True, True, False]))

    mismatch = token_mismatch(by, reading)
    all_sampled = token_mismatch(*both(p, q, ids))

    assert mismatch.position.tolist() == [0, 3, 4] and mismatch.gap.equal(all_sampled.gap[[0, 3, 4]])
    assert mismatch.kl[0].equal(all_sampled.kl[0][[0, 3, 4]]) and mismatch.entropy.equal(all_sampled.entropy[[0, 3, 4]])


def truncated(k: int, top: int) -> tuple[SamplerScores, LearnerScores, np.ndarray, np.ndarray]:
    """A sampler with top_k = `top` that reports k tokens; both distributions on its support."""
    p, q, _ = response(30, seed=11)
    support = np.argsort(-p, axis=1)[:, :top]
    on = np.zeros(p.shape, bool)
    np.put_along_axis(on, support, True, axis=1)
    p = np.where(on, p, 0.0)
    p /= p.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        by, reading = both(p, q, support[:, -1], k, truncated=True)
    return by, reading, p, np.where(on, q, 0.0)


@pytest.mark.parametrize("k", [5, VOCABULARY])
def test_a_truncated_sampler_is_compared_on_its_support(k):
    by, reading, p, q = truncated(k, top=4)
    mismatch = token_mismatch(by, reading)
    mass = q.sum(1, keepdims=True)
    inside = q / mass

    np.testing.assert_allclose(mismatch.support, mass[:, 0])
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(mismatch.kl[0], np.where(p > 0, p * np.log(p / inside), 0.0).sum(1), atol=1e-12)
    np.testing.assert_allclose(mismatch.variation[1], 0.5 * np.abs(p - inside).sum(1), atol=1e-12)

    rows, ids = np.arange(30), np.argsort(-p, axis=1)[:, 3]
    np.testing.assert_allclose(mismatch.learner, inside[rows, ids])
    assert mismatch.is_exact


def test_a_truncated_sampler_of_unknown_support_is_refused():
    by, reading, _, _ = truncated(3, top=4)
    with pytest.raises(EngineError, match=r"more than the 3 tokens.*raise top_log_probs"):
        token_mismatch(by, reading)
    with pytest.raises(EngineError, match=r"single tokens.*name=transformers"):
        token_mismatch(by, LearnerScores(log_probs=reading.log_probs))


def test_a_learner_that_only_scores_leaves_divergences_open():
    p, q, ids = response(5, seed=2)
    by, reading = both(p, q, ids)
    mismatch = token_mismatch(by, LearnerScores(log_probs=reading.log_probs))

    assert mismatch.kl is None and mismatch.variation is None and not mismatch.is_exact
    np.testing.assert_allclose(mismatch.entropy, -(p * np.log(p)).sum(1))  # the sampler's, whose whole is known
    np.testing.assert_allclose(mismatch.gap, np.abs(p - q)[np.arange(5), ids], atol=1e-15)

    with pytest.raises(EngineError, match="one has log-probs that are NaN"):
        token_mismatch(by, LearnerScores(log_probs=reading.log_probs * torch.nan))


def measured(
    responses: list[tuple[np.ndarray, np.ndarray, np.ndarray]], order: list[int] | None = None
) -> MismatchNumbers:
    """Return the numbers of these responses, taken in this order."""
    rows = order or range(len(responses))
    return mismatch_numbers((f"{row}", token_mismatch(*both(*responses[row]))) for row in rows)


def test_all_numbers_are_those_of_the_tokens_put_together():
    responses = [response(length, seed=length, distance=1.0) for length in (1, 3, 5, 17, 40, 80)]
    numbers = measured(responses)

    at = [(p[range(len(ids)), ids], q[range(len(ids)), ids]) for p, q, ids in responses]
    gaps = [np.abs(p - q) for p, q in at]
    ratio = np.concatenate([q / p for p, q in at])

    assert (numbers.responses, numbers.tokens) == (6, 146)
    assert numbers.max_gap == pytest.approx(max(row.max() for row in gaps))
    assert numbers.gap.value == pytest.approx(np.concatenate(gaps).mean())
    assert numbers.response_max_gap.value == pytest.approx(np.mean([row.max() for row in gaps]))
    assert numbers.response_max_gap.error == pytest.approx(np.std([row.max() for row in gaps], ddof=1) / math.sqrt(6))
    assert numbers.response_mean_gap.value == pytest.approx(np.mean([row.mean() for row in gaps]))
    assert numbers.high == sum(row.max() > 0.5 for row in gaps)
    assert numbers.k1.value == pytest.approx(-np.log(ratio).mean())
    assert numbers.k3.value == pytest.approx((ratio - 1 - np.log(ratio)).mean())

    exact = np.concatenate([(p * np.log(p / q)).sum(1) for p, q, _ in responses])
    assert numbers.kl[0].value == numbers.kl[1].value == pytest.approx(exact.mean()) and numbers.kl_is_exact
    assert numbers.ratio.value == pytest.approx(ratio.mean())
    assert numbers.above == pytest.approx((ratio > 2).mean()) and numbers.below == pytest.approx((ratio < 0.5).mean())
    assert numbers.above > 0.0 and numbers.below > 0.0

    for share, value in numbers.quantiles.items():
        assert value == pytest.approx(np.quantile(ratio, float(share), method="inverted_cdf"))

    assert [row.max_gap for row in numbers.each] == pytest.approx([row.max() for row in gaps])
    assert [row.tokens for row in numbers.each] == [1, 3, 5, 17, 40, 80]


def test_bands_share_the_tokens_by_position_entropy_and_length():
    responses = [response(length, seed=length) for length in (1, 3, 5, 17, 40, 80)]
    numbers = measured(responses)
    gaps = [np.abs(p - q)[range(len(ids)), ids] for p, q, ids in responses]

    assert [band.name for band in numbers.bands["position"]] == ["0", "1-3", "4-15", "16-63", "64-255"]

    spans = [(0, 1), (1, 4), (4, 16), (16, 64), (64, 256)]
    for band, (start, end) in zip(numbers.bands["position"], spans, strict=True):
        here = np.concatenate([row[start:end] for row in gaps])
        assert band.tokens == len(here) and band.gap.value == pytest.approx(here.mean())
        assert band.max_gap == pytest.approx(here.max())

    entropy = np.concatenate([-(q * np.log(q)).sum(1) for _, q, _ in responses])
    every = np.concatenate(gaps)
    edges = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, np.inf)
    filled = [(a, b) for a, b in pairwise(edges) if ((entropy >= a) & (entropy < b)).any()]

    assert len(filled) == len(numbers.bands["entropy"]) > 1

    for band, (start, end) in zip(numbers.bands["entropy"], filled, strict=True):
        here = (entropy >= start) & (entropy < end)
        assert band.name == f"{start:g}-{end:g}" and band.gap.value == pytest.approx(every[here].mean())

    by_length = numbers.bands["length"]
    assert [(band.name, band.tokens) for band in by_length] == [("1-3", 4), ("4-15", 5), ("16-63", 57), ("64-255", 80)]
    assert by_length[2].gap.value == pytest.approx(np.concatenate(gaps[3:5]).mean())
    assert by_length[2].max_gap == pytest.approx(max(gaps[3].max(), gaps[4].max()))


def test_equal_sides_are_0_and_the_order_does_not_matter():
    same = [(p, p, ids) for p, _, ids in (response(length, seed=length) for length in (2, 9, 33))]
    numbers = measured(same)

    assert numbers.max_gap == numbers.gap.value == numbers.gap.error == numbers.k1.value == numbers.k3.value == 0.0
    assert numbers.kl[0].value == numbers.variation[1].value == 0.0 and set(numbers.quantiles.values()) == {1.0}
    assert all(p == q for p, q in numbers.drawn) and numbers.above == numbers.below == 0.0

    apart = [response(length, seed=length) for length in (2, 9, 33)]
    first, second = measured(apart), measured(apart, [2, 0, 1])
    assert first.gap.value == pytest.approx(second.gap.value) and first.quantiles == second.quantiles
    assert first.gap.error == pytest.approx(second.gap.error)


def test_nothing_sampled_is_nothing_to_compare():
    p, q, ids = response(3, seed=0)
    tokens = token_mismatch(*both(p, q, ids, sampled=torch.zeros(3, dtype=torch.bool)))
    with pytest.raises(DataError, match="no token was sampled"):
        mismatch_numbers([("tool", tokens)])


def test_the_picture_has_the_worst_token(monkeypatch):
    monkeypatch.setattr("jackpot.analysis.mismatch.measure.DRAWN_TOKENS", 10)
    p, q, ids = response(95, seed=4)
    numbers = measured([(p, q, ids)])
    gaps = np.abs(p - q)[range(95), ids]
    assert len(numbers.drawn) <= 11 and max(abs(a - b) for a, b in numbers.drawn) == pytest.approx(gaps.max(), rel=1e-6)


def test_most_probable_tokens_are_compared_where_sampled():
    p, q, ids = response(40, seed=3)
    sampled = torch.arange(40) % 3 > 0
    by, reading = both(p, q, ids, k=2, sampled=sampled)
    differs = p.argmax(1) != q.argmax(1)

    assert differs[~sampled.numpy()].any() and differs[sampled.numpy()].any()

    for known, expected in ((torch.from_numpy(q.argmax(1)), differs[sampled.numpy()]), (None, None)):
        other_token = token_mismatch(by, replace(reading, most_probable=known)).other_token
        assert other_token is None if expected is None else other_token.tolist() == expected.tolist()


def test_a_certain_token_falls_into_the_lowest_band():
    """Rounding can leave an entropy of a little less than 0."""
    certain = torch.ones(1, dtype=torch.float64)
    tokens = TokenMismatch(
        position=torch.zeros(1, dtype=torch.int64),
        sampler=certain,
        learner=certain,
        log_ratio=certain - 1,
        kl=None,
        variation=None,
        is_exact=False,
        support=None,
        entropy=-1e-17 * certain,
    )

    numbers = mismatch_numbers([("one", tokens)])
    [band] = numbers.bands["entropy"]

    assert band.name == "0-0.01" and band.kl is None and not numbers.kl_is_exact
