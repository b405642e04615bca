"""Checks, made before any correction is judged, whether the saved log-probs allow a recommendation at all."""

import math
from collections.abc import Mapping

from jackpot.analysis.replay.stats import ratio_quantile
from jackpot.core.metrics import Mean, Sums

LEAST_TOKENS = 1_000  # sampled tokens below which there is no recommendation
LARGEST_DEVIATION = 0.03  # deviation of a mean from its expected number that is reported, if it is significant too
LARGEST_TAIL_RATIO = 10.0  # largest 99 % quantile of the ratios at which the mean ratio is reliable
SIGNIFICANT_ERRORS = 5.0  # standard errors from which on a deviation is significant
LEAST_EFFECTIVE_SEQUENCES = 0.2  # share of effective responses below which weights of whole responses are of no use


def few_sequences(run: Sums) -> str:
    """Return a warning not to weigh whole responses, to append to a sentence; "" if enough of them are effective."""
    effective = float(run["mismatch/sequence_ess"].value)
    if effective >= LEAST_EFFECTIVE_SEQUENCES:
        return ""

    return (
        f". Do not weigh whole responses: over {float(run['length'].value):.0f} tokens their ratios leave "
        f"{effective:.1%} of them effective"
    )


def not_finite(run: Sums, sums: Mapping[str, float]) -> str | None:
    """Return a reason against any recommendation if a number is infinite or NaN, else None.

    Args:
        run: sums of the run before any correction.
        sums: for each correction that may be recommended, by its label, one number that is not finite if any of the
            correction's sums is not.
    """
    of_run = {"the run's gap": float(run["total_variation"].value), "the mean of rho": float(run["ratio"].value)}
    names = [name for name, value in (of_run | dict(sums)).items() if not math.isfinite(value)]
    if not names:
        return None

    return (
        f"{', '.join(names)}: the result is not a finite number. Look for log-probs of sampled tokens that are "
        f"hundreds below 0, and set sampled_mask to false there"
    )


def why_not(run: Sums) -> str | None:
    """Return a reason against any recommendation, such as too few tokens; None if there is none."""
    tokens = int(Mean.named(run, "total_variation").count)
    if tokens < LEAST_TOKENS:
        return f"there are {tokens} sampled tokens and {LEAST_TOKENS:,} are needed; save more rollouts"
    if "z" in run and (problem := _lists_do_not_fit(run)):
        return problem
    return _mean_is_not_1(run)


def _mean_is_not_1(run: Sums) -> str | None:
    """Return why no correction can be recommended if the mean of p_policy / p_rollout is not 1, else None.

    The mean is over the sampled tokens whose distributions the top-k lists of the two models do not show. The result is
    None also if there are no such tokens, or their mean is no reliable check.
    """
    # With a heavy tail of ratios the mean depends on a few tokens, and is no reliable check.
    ratio = Mean.named(run, "sampled_only_ratio")
    is_reliable = ratio_quantile(run, "sampled_only_log_ratio", share=0.99) < LARGEST_TAIL_RATIO
    if ratio.count == 0 or not is_reliable or not _is_off(ratio, expected=1.0):
        return None

    return (
        f"the mean of p_policy / p_rollout is {float(ratio.value):.3f} +- {float(ratio.standard_error):.3f} and "
        f"must be 1. {_LOOK_FOR} Or the policy prefers tokens that the rollout model hardly ever samples; top-k "
        f"lists of both models would show it"
    )


def _lists_do_not_fit(run: Sums) -> str | None:
    """Return why no correction can be recommended, judged by both models' top-k lists; None if there is no reason.

    The lists may contradict the log-probs of sampled tokens, or show tokens that only the policy can sample.
    """
    # Both means are 0 if lists and log-probs are of one distribution, and the rollout model can sample every token.
    unreachable, gap = Mean.named(run, "unreachable"), Mean.named(run, "acceptance_minus_z")
    if _is_off(unreachable, expected=0.0):
        return (
            f"{float(unreachable.value):.1%} of the policy's probability is on tokens that the rollout model "
            f"could not sample, by its own lists. {_LOOK_FOR} No correction brings back tokens that are never sampled"
        )
    if _is_off(gap, expected=0.0):
        return (
            f"of 100 sampled tokens {100.0 * float(gap.value):+.1f} more overlap than the top-k lists allow, so the "
            f"lists and the log-probs of the sampled tokens are not of one distribution. {_LOOK_FOR}"
        )
    return None


def _is_off(mean: Mean, expected: float) -> bool:
    """Tell whether a mean differs from the expected number by more than LARGEST_DEVIATION and more than chance."""
    return abs(float(mean.value) - expected) > max(LARGEST_DEVIATION, SIGNIFICANT_ERRORS * float(mean.standard_error))


_LOOK_FOR = (
    "Look for top-p or top-k sampling, another temperature, other weights or another tokenizer, and fix that first."
)
