"""mean@k, pass@k and their intervals, checked against enumeration and against other ways to compute them."""

import itertools
import math

import numpy as np
import pytest

from jackpot.core.errors import DataError
from jackpot.rollout.pass_at_k import (
    ResponseOutcomes,
    estimate_mean,
    pass_at_k,
    pass_probabilities,
    reported_ks,
    standard_error,
    summarize,
)


def share_of_passing_subsets(samples: int, right_count: int, k: int) -> float:
    """Return the share of the subsets of k answers with a right one among them, each subset looked at."""
    answers = [True] * right_count + [False] * (samples - right_count)
    subsets = list(itertools.combinations(answers, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int) -> None:
    for k in range(1, samples + 1):
        expected = [share_of_passing_subsets(samples, right_count, k) for right_count in range(samples + 1)]
        assert pass_probabilities(samples, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    """Its expectation over the answers of a model that is right with chance p is 1 - (1 - p)^k, for every n."""
    for samples, k, chance in itertools.product((4, 7, 16), (1, 3, 4), (0.0, 0.03, 0.4, 0.95, 1.0)):
        probabilities = [
            math.comb(samples, count) * chance**count * (1 - chance) ** (samples - count)
            for count in range(samples + 1)
        ]

        assert np.dot(probabilities, pass_probabilities(samples, k)) == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


def test_pass_at_k_is_the_product_form_of_huge_binomials() -> None:
    """The product of Chen et al.'s figure 3, in logarithms; C(2048, 1024) has no float."""
    samples, k = 2048, 1024
    probabilities = pass_probabilities(samples, k)
    for right_count in (0, 1, 5, 40, 1023, 1024, 2048):
        log_factors = [math.log1p(-k / i) for i in range(samples - right_count + 1, samples + 1) if i > k]
        expected = 1.0 if samples - right_count < k else -math.expm1(math.fsum(log_factors))

        assert probabilities[right_count] == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_pass_at_one_is_the_mean_and_pass_at_n_the_share_of_any() -> None:
    right_counts = np.array([0, 1, 5, 6, 6, 2])
    passes = pass_at_k(right_counts, 6)
    assert passes[1] == estimate_mean(right_counts / 6)
    assert passes[6].value == pytest.approx(5 / 6)
    assert list(passes) == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (17, [1, 2, 4, 8, 16, 17])]
)
def test_k_goes_up_by_powers_of_two_and_ends_at_all_answers(samples: int, ks: list[int]) -> None:
    assert reported_ks(samples) == ks


@pytest.mark.parametrize("k", [0, -1, 5])
def test_a_k_beyond_the_answers_is_refused_with_their_number(k: int) -> None:
    with pytest.raises(DataError, match=rf"pass@{k} was asked for, but there are 4 answers .* 1 to 4"):
        pass_probabilities(4, k)


def test_one_response_a_problem_gives_wilsons_interval() -> None:
    """The bounds solve |m - mean| = t sqrt(m (1 - m) / n), with Student's t of 39 degrees of freedom from a table."""
    problem_count = 40 * 41 / 42  # two problems of the same spread are added

    estimate = estimate_mean(np.array([1.0] * 6 + [0.0] * 34))

    for bound in (estimate.low, estimate.high):
        assert abs(bound - 6 / 40) == pytest.approx(2.0227 * math.sqrt(bound * (1 - bound) / problem_count), rel=1e-3)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.3027), (5, 2.5706), (29, 2.0452)])
def test_few_problems_have_students_quantile(degrees: int, quantile: float) -> None:
    """All wrong: N is the number of problems, and the upper bound t^2 / (N + t^2)."""
    estimate = estimate_mean(np.zeros(degrees + 1, dtype=np.int64) / 4)
    assert (estimate.value, estimate.low) == (0.0, 0.0)
    assert estimate.high == pytest.approx(quantile**2 / (degrees + 1 + quantile**2), rel=0.02)


def test_the_interval_of_many_problems_is_the_normal_one() -> None:
    random_state = np.random.default_rng(5)
    right_counts = random_state.binomial(8, random_state.uniform(size=2000))

    estimate = estimate_mean(right_counts / 8)
    error = np.std(right_counts / 8) / math.sqrt(2000)

    assert standard_error(right_counts / 8) == pytest.approx(error, rel=0.005)
    assert estimate.low == pytest.approx(estimate.value - 1.96 * error, abs=0.05 * error)
    assert estimate.high == pytest.approx(estimate.value + 1.96 * error, abs=0.05 * error)


@pytest.mark.parametrize(("truth", "spread", "k"), [(0.03, 2.0, 4), (0.1, 0.5, 16), (0.2, 2.0, 1), (0.97, 2.0, 4)])
def test_the_interval_of_30_problems_covers_what_it_says(truth: float, spread: float, k: int) -> None:
    """600 sets of problems whose accuracy is known; a percentile bootstrap holds the first truth in 77 of 100 sets."""
    random_state = np.random.default_rng(11)
    chances = random_state.beta(truth * spread, (1.0 - truth) * spread, size=(600, 30))
    estimates = [estimate_mean(right / k) for right in random_state.binomial(k, chances)]
    covered_share = sum(estimate.low <= truth <= estimate.high for estimate in estimates) / len(estimates)

    assert 0.91 <= covered_share <= 0.995


def test_the_interval_lies_within_0_and_1_and_mirrors() -> None:
    random_state = np.random.default_rng(3)
    for values in (random_state.beta(0.1, 1.0, size=20), np.full(20, 0.3), np.ones(5), np.array([0.0, 1.0])):
        estimate, mirrored_estimate = estimate_mean(values), estimate_mean(1.0 - values)

        assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
        assert estimate.low < estimate.high
        assert (estimate.low, estimate.high) == pytest.approx(
            (1.0 - mirrored_estimate.high, 1.0 - mirrored_estimate.low), abs=1e-12
        )
        assert standard_error(values) == pytest.approx(standard_error(1.0 - values))
        assert standard_error(values) > 0.0


def test_a_single_problem_has_no_interval() -> None:
    estimate = estimate_mean(np.array([3]) / 4)
    assert (estimate.value, estimate.low, estimate.high) == (0.75, None, None)


def test_a_mean_of_no_problems_is_refused() -> None:
    with pytest.raises(DataError, match="no problems"):
        estimate_mean(np.zeros(0))


def test_a_summary_without_a_verdict_has_rewards_alone() -> None:
    ones = np.ones((2, 2))
    outcomes = ResponseOutcomes(
        correct=None,
        rewards=np.array([[1.0, 0.5], [0.0, -2.5]]),
        tokens=ones.astype(np.int64),
        finishes=np.full((2, 2), "stop"),
        reward_errors=np.array([["", "invalid"], ["crash", "timeout"]]),
    )

    summary = summarize(outcomes)

    assert (summary.problems, summary.k) == (2, 2)
    assert (summary.mean_at_k, summary.pass_at_k) == (None, {})
    assert summary.reward == -0.25
    assert (summary.reward_timeouts, summary.reward_crashes) == (0.25, 0.5)


def test_a_summary_counts_what_went_wrong() -> None:
    outcomes = ResponseOutcomes(
        correct=np.array([[True, False], [False, False]]),
        rewards=np.array([[1.0, 0.1], [0.0, 0.0]]),
        tokens=np.array([[10, 20], [30, 100]]),
        finishes=np.array([["stop", "length"], ["aborted", "length"]]),
        reward_errors=np.array([["", ""], ["", "timeout"]]),
    )

    summary = summarize(outcomes)

    assert (summary.problems, summary.k) == (2, 2)
    assert (summary.mean_at_k.value, summary.pass_at_k[2].value) == (0.25, 0.5)
    assert (summary.truncated, summary.aborted) == (0.5, 0.25)
    assert (summary.reward_timeouts, summary.reward_crashes) == (0.25, 0.0)
    assert summary.reward == pytest.approx(0.275)
    assert (summary.tokens, summary.tokens_total) == (40.0, 160)
