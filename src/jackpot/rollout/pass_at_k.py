"""Estimates of mean@k and pass@k, with confidence intervals, from n sampled responses to each of several problems.

mean@k is the share of correct responses; pass@k is the probability that at least one of k responses is correct.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

from jackpot.core.errors import DataError
from jackpot.core.statistics import Interval, student_t

_PSEUDO_PROBLEMS = 2  # number of made-up problems, of the largest possible variance, that `standard_error` adds


def reported_ks(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: 1, 2, 4, ... and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def pass_probabilities(samples: int, k: int) -> NDArray[np.float64]:
    """Return the estimate of pass@k for every number of correct responses from 0 to `samples`: [samples + 1].

    From n responses of which c are correct the unbiased estimate of pass@k is

        1 - C(n - c, k) / C(n, k)                  (Chen et al. 2021, arXiv 2107.03374, eq. 1)

    the share of the subsets of k responses that contain a correct response, computed in exact integers. The plug-in
    estimate 1 - (1 - c/n)^k is biased.

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


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean of numbers from 0 to 1, one for each problem: [P] -> a number above 0.

    The variance of a few problems is too small whenever rare problems are missing. So `_PSEUDO_PROBLEMS` problems are
    added whose variance is the largest with this mean, mean (1 - mean). Where all values are 0, or all are 1, the mean
    is taken as if there were one more problem of value 0 and one of value 1.
    """
    problems, mean = len(values), float(values.mean())
    largest = mean * (1.0 - mean)  # largest variance that numbers from 0 to 1 with this mean can have
    if largest <= 0.0:
        mean = (float(values.sum()) + 1.0) / (problems + 2.0)
        return sqrt(mean * (1.0 - mean) / problems)
    # The sum of squares around the mean, and its divisor, count the problems that are added.
    squares = float(((values - mean) ** 2).sum()) + _PSEUDO_PROBLEMS * largest
    return sqrt(squares / (problems - 1 + _PSEUDO_PROBLEMS) / problems)


def estimate_mean(values: NDArray[np.float64]) -> Interval:
    """Estimate the mean over problems of numbers from 0 to 1, one for each problem: [P].

    The problems count as a random sample of all such problems. The interval is Wilson's: all m for which
    |m - mean| <= t sqrt(m (1 - m) / N), where t is Student's quantile with P - 1 degrees of freedom. N is the number of
    independent responses whose mean would have the same standard error e, mean (1 - mean) / e^2, or P where all values
    are 0 or all are 1. For few problems with rare correct responses, intervals of a bootstrap would contain the true
    mean far less often than they promise (docs/compare.md). A single problem gets no interval.

    Raises:
        DataError: there are no problems.
    """
    problems = len(values)
    if not problems:
        raise DataError("there are no problems, so there is nothing to take a mean of")

    mean = float(values.mean())
    if problems == 1:
        return Interval(mean, None, None)

    # The bounds are the roots m of (m - mean)^2 = t^2 m (1 - m) / N, where `effective` is N, `t2` is t^2 and `largest`
    # is mean (1 - mean). Both bounds are (`middle` -+ `half`) / (1 + t^2 / N).
    largest, t2 = mean * (1.0 - mean), student_t(problems - 1) ** 2
    effective = largest / standard_error(values) ** 2 if largest > 0.0 else problems
    middle = mean + t2 / (2.0 * effective)
    half = sqrt(t2 * (max(largest, 0.0) / effective + t2 / (4.0 * effective**2)))
    low, high = ((middle + offset) / (1.0 + t2 / effective) for offset in (-half, half))
    # Rounding may move a bound past the mean, or out of 0 to 1.
    return Interval(mean, min(mean, max(0.0, low)), max(mean, min(1.0, high)))


def pass_at_k(correct: NDArray[np.int64], samples: int) -> dict[int, Interval]:
    """Estimate pass@k for each k of `reported_ks(samples)`; `correct` [P] counts right responses to each problem."""
    return {k: estimate_mean(pass_probabilities(samples, k)[correct]) for k in reported_ks(samples)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOutcomes:
    """The outcomes of n responses to each of P problems; every field is [P, n]."""

    correct: NDArray[np.bool_] | None  # None where the task has no verdict
    rewards: NDArray[np.float64]
    tokens: NDArray[np.int64]  # response length, tokens
    finishes: NDArray[np.str_]  # stop, length or aborted
    reward_errors: NDArray[np.str_]  # timeout, crash or invalid where scoring failed, else empty


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSummary:
    """A summary of the responses to the problems of one evaluation set. Every share is a share of all responses.

    Aborted responses, and responses that could not be scored, count as wrong. A response that was cut at the length
    limit counts as the task scored it.
    """

    problems: int  # number of problems
    k: int  # responses to each problem
    mean_at_k: Interval | None  # None where the task has no verdict
    pass_at_k: Mapping[int, Interval]  # by k; empty where the task has no verdict
    reward: float  # mean reward of a response
    truncated: float  # share of responses cut at the length limit
    aborted: float  # share of responses aborted by the engine
    reward_timeouts: float  # share of responses whose scoring took too long
    reward_crashes: float  # share of responses whose reward crashed or was not a valid number
    tokens: float  # mean response length, tokens
    tokens_total: int  # tokens of all responses together


def summarize(outcomes: ResponseOutcomes) -> EvaluationSummary:
    """Compute the summary of one evaluation set from the outcomes of the responses to its problems.

    Raises:
        DataError: there are no problems or no responses.
    """
    problems, samples = outcomes.rewards.shape
    if not samples:
        raise DataError("there are no answers, so there is nothing to take a mean of")
    # [P], number of correct responses to each problem
    correct = None if outcomes.correct is None else outcomes.correct.sum(axis=1)

    return EvaluationSummary(
        problems=problems,
        k=samples,
        mean_at_k=None if correct is None else estimate_mean(correct / samples),
        pass_at_k={} if correct is None else pass_at_k(correct, samples),
        reward=float(outcomes.rewards.mean()),
        truncated=float((outcomes.finishes == "length").mean()),
        aborted=float((outcomes.finishes == "aborted").mean()),
        reward_timeouts=float((outcomes.reward_errors == "timeout").mean()),
        reward_crashes=float(np.isin(outcomes.reward_errors, ("crash", "invalid")).mean()),
        tokens=float(outcomes.tokens.mean()),
        tokens_total=int(outcomes.tokens.sum()),
    )
