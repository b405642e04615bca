"""Estimates mean@k and pass@k, with confidence intervals, from n sampled responses to each of several problems.

mean@k is the share of correct responses. pass@k is the probability that at least one of k responses is correct; from n
responses of which c are correct its unbiased estimate is

    1 - C(n - c, k) / C(n, k)                  (Chen et al. 2021, arXiv 2107.03374, eq. 1)

the share of the subsets of k responses that contain a correct one, computed in exact integers. The plug-in estimate
1 - (1 - c/n)^k is biased.

Intervals are percentile bootstraps over problems: as many problems as there are, drawn with replacement, each with all
its responses. They show how far another draw of problems, and of responses to them, would move the number. The estimate
depends only on how often each c occurs, so one resample is one multinomial draw for any number of problems.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from jackpot.core.errors import DataError

RESAMPLES = 10_000
CONFIDENCE = 0.95  # coverage of the intervals
_PERCENTILES = (50.0 * (1.0 - CONFIDENCE), 50.0 * (1.0 + CONFIDENCE))


@dataclass(frozen=True, kw_only=True, slots=True)
class BootstrapEstimate:
    """Holds a mean over problems and its confidence interval, which is None for a single problem."""

    value: float  # the mean
    low: float | None  # bounds of the interval
    high: float | None


def reported_ks(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: 1, 2, 4, ... and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def pass_probabilities(samples: int, k: int) -> NDArray[np.float64]:
    """Return the estimate of pass@k for every number of correct responses from 0 to `samples`: [samples + 1].

    Raises:
        DataError: k is not between 1 and `samples`.
    """
    if not 1 <= k <= samples:
        raise DataError(
            f"pass@{k} was asked for, but there are {samples} answers to each problem; k can be 1 to {samples}, or "
            f"sample more answers (--k {max(k, 1)})"
        )
    subsets = comb(samples, k)
    return np.array([(subsets - comb(samples - correct, k)) / subsets for correct in range(samples + 1)])


def bootstrap_mean(correct: NDArray[np.int64], values: NDArray[np.float64], seed: int) -> BootstrapEstimate:
    """Estimate the mean over problems of a number that depends on how many responses are correct.

    Args:
        correct: [P] number of correct responses to each problem, each from 0 to n.
        values: [n + 1] the number to average, indexed by correct responses.
        seed: seed of the resamples; the same seed draws the same problems for all `values`.

    Raises:
        DataError: there are no problems.
    """
    if not len(correct):
        raise DataError("there are no problems, so there is nothing to take a mean of")
    problems = len(correct)
    occurrences = np.bincount(correct, minlength=len(values))
    mean = float(occurrences @ values) / problems
    if problems == 1:
        return BootstrapEstimate(value=mean, low=None, high=None)
    draws = np.random.default_rng(seed).multinomial(problems, occurrences / problems, size=RESAMPLES)
    low, high = np.percentile(draws @ values / problems, _PERCENTILES)
    return BootstrapEstimate(value=mean, low=float(low), high=float(high))


def mean_at_k(correct: NDArray[np.int64], samples: int, seed: int) -> BootstrapEstimate:
    """Estimate the share of correct responses from `samples` responses to each problem."""
    return bootstrap_mean(correct, np.arange(samples + 1) / samples, seed)


def pass_at_k(correct: NDArray[np.int64], samples: int, seed: int) -> dict[int, BootstrapEstimate]:
    """Estimate pass@k for each k of `reported_ks(samples)`."""
    return {k: bootstrap_mean(correct, pass_probabilities(samples, k), seed) for k in reported_ks(samples)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOutcomes:
    """Holds the outcomes of n responses to each of P problems; every field is [P, n]."""

    correct: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    tokens: NDArray[np.int64]  # response length, tokens
    finishes: NDArray[np.str_]  # stop, length or aborted
    reward_errors: NDArray[np.str_]  # timeout or crash where scoring failed, else empty


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSummary:
    """Summarizes the responses to one evaluated set; shares are of all responses.

    Aborted responses and those that could not be scored count as wrong; those cut at the limit count as the task scored
    them.
    """

    problems: int  # number of problems
    k: int  # responses to each problem
    mean_at_k: BootstrapEstimate
    pass_at_k: Mapping[int, BootstrapEstimate]  # by k
    reward: float  # mean
    truncated: float  # share cut at the length limit
    aborted: float  # share aborted by the engine
    reward_timeouts: float  # share whose scoring took too long
    reward_crashes: float  # share whose scoring failed
    tokens: float  # mean response length, tokens
    tokens_median: float
    tokens_p99: float
    tokens_longest: int
    tokens_total: int


def summarize(outcomes: ResponseOutcomes, seed: int) -> EvaluationSummary:
    """Compute all numbers of one evaluated set; `seed` seeds the bootstrap.

    Raises:
        DataError: there are no problems or no responses.
    """
    problems, samples = outcomes.correct.shape
    if not samples:
        raise DataError("there are no answers, so there is nothing to take a mean of")
    correct, tokens = outcomes.correct.sum(axis=1), outcomes.tokens
    return EvaluationSummary(
        problems=problems,
        k=samples,
        mean_at_k=mean_at_k(correct, samples, seed),
        pass_at_k=pass_at_k(correct, samples, seed),
        reward=float(outcomes.rewards.mean()),
        truncated=float((outcomes.finishes == "length").mean()),
        aborted=float((outcomes.finishes == "aborted").mean()),
        reward_timeouts=float((outcomes.reward_errors == "timeout").mean()),
        reward_crashes=float((outcomes.reward_errors == "crash").mean()),
        tokens=float(tokens.mean()),
        tokens_median=float(np.median(tokens)),
        tokens_p99=float(np.percentile(tokens, 99.0)),
        tokens_longest=int(tokens.max()),
        tokens_total=int(tokens.sum()),
    )
