"""What n sampled answers to each of some problems say: mean@k, pass@k, how sure that is.

mean@k is the share of answers that are right. pass@k is the chance that at least one of k answers is right; of n
answers of which c are right it is estimated without bias by

    1 - C(n - c, k) / C(n, k)                  (Chen et al. 2021, arXiv 2107.03374, eq. 1)

the share of the subsets of k answers that hold a right one, in exact integers. "1 - (1 - c/n)^k" is biased.

Intervals are percentile bootstraps over problems: problems are drawn with replacement, as many as there are, each with
all its answers. They say how much another draw of problems would move the number, and that of their answers with it.
Only how often each c occurs matters, so a resample is one multinomial draw: exact, and its cost does not grow with the
number of problems.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from jackpot.core.errors import DataError

RESAMPLES = 10_000
LEVEL = 0.95  # of the intervals
_PERCENTILES = (50.0 * (1.0 - LEVEL), 50.0 * (1.0 + LEVEL))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems with its interval; a single problem has none."""

    value: float
    low: float | None
    high: float | None


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself: the k that pass@k is told for."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def pass_chances(samples: int, k: int) -> NDArray[np.float64]:
    """The estimate of pass@k by c, the number of right answers among `samples`: [samples + 1].

    Raises:
        DataError: k is not among 1 to `samples`.
    """
    if not 1 <= k <= samples:
        raise DataError(
            f"pass@{k} was asked for, but there are {samples} answers to each problem; k can be 1 to {samples}, or "
            f"sample more answers (--k {max(k, 1)})"
        )
    subsets = comb(samples, k)
    return np.array([(subsets - comb(samples - right, k)) / subsets for right in range(samples + 1)])


def estimate(right: NDArray[np.int64], values: NDArray[np.float64], seed: int) -> Estimate:
    """The mean over problems of a number that depends on how many answers are right.

    Args:
        right: [P] right answers to each problem, each from 0 to n.
        values: [n + 1] the number, by right answers.
        seed: of the resamples; the same one draws the same problems whatever `values` is.

    Raises:
        DataError: no problem.
    """
    if not len(right):
        raise DataError("there are no problems, so there is nothing to take a mean of")
    problems = len(right)
    occurrences = np.bincount(right, minlength=len(values))
    mean = float(occurrences @ values) / problems
    if problems == 1:
        return Estimate(value=mean, low=None, high=None)
    draws = np.random.default_rng(seed).multinomial(problems, occurrences / problems, size=RESAMPLES)
    low, high = np.percentile(draws @ values / problems, _PERCENTILES)
    return Estimate(value=mean, low=float(low), high=float(high))


def mean_at_k(right: NDArray[np.int64], samples: int, seed: int) -> Estimate:
    """The share of right answers, n = `samples` to each problem."""
    return estimate(right, np.arange(samples + 1) / samples, seed)


def pass_at_k(right: NDArray[np.int64], samples: int, seed: int) -> dict[int, Estimate]:
    """pass@k for each k of `powers_up_to(samples)`."""
    return {k: estimate(right, pass_chances(samples, k), seed) for k in powers_up_to(samples)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """What became of n answers to each of P problems; every field is [P, n]."""

    correct: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    tokens: NDArray[np.int64]  # of the response
    finishes: NDArray[np.str_]  # stop, length or aborted
    problems: NDArray[np.str_]  # timeout or crash where judging failed, else empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Shares are of all answers. An answer that was given up or could not be judged is wrong, and is counted here; one
    that was cut at the limit is what the task said of it."""

    problems: int
    k: int  # answers to each
    mean_at_k: Estimate
    pass_at_k: Mapping[int, Estimate]
    reward: float
    truncated: float  # cut at the limit
    aborted: float  # given up by the engine
    reward_timeouts: float
    reward_crashes: float
    tokens: float  # of a response, mean
    tokens_median: float
    tokens_p99: float
    tokens_longest: int
    tokens_total: int


def summarize(outcomes: Outcomes, seed: int) -> Summary:
    """All of it; `seed` is that of the bootstrap.

    Raises:
        DataError: no problem, or no answer.
    """
    problems, samples = outcomes.correct.shape
    if not samples:
        raise DataError("there are no answers, so there is nothing to take a mean of")
    right, tokens = outcomes.correct.sum(axis=1), outcomes.tokens
    return Summary(
        problems=problems,
        k=samples,
        mean_at_k=mean_at_k(right, samples, seed),
        pass_at_k=pass_at_k(right, samples, seed),
        reward=float(outcomes.rewards.mean()),
        truncated=float((outcomes.finishes == "length").mean()),
        aborted=float((outcomes.finishes == "aborted").mean()),
        reward_timeouts=float((outcomes.problems == "timeout").mean()),
        reward_crashes=float((outcomes.problems == "crash").mean()),
        tokens=float(tokens.mean()),
        tokens_median=float(np.median(tokens)),
        tokens_p99=float(np.percentile(tokens, 99.0)),
        tokens_longest=int(tokens.max()),
        tokens_total=int(tokens.sum()),
    )
