"""The metrics of one iteration: sums over its optimizer steps, numbers derived from the sums, and speed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from jackpot.core.clock import Seconds
from jackpot.core.metrics import ClusteredMean, EffectiveSampleSize, Max, Mean, Sum, Sums, add_sums
from jackpot.core.types import TrainingSample, Version
from jackpot.rollout.sampler import tokens_read
from jackpot.training.components import RunComponents
from jackpot.training.learner import StepResult

WITH_STANDARD_ERROR = ("obrs/acceptance_minus_z", "mismatch/ratio")  # summed over the first epoch only
# Metrics from which the standard error of obrs/acceptance_minus_z is computed.
_BY_RESPONSE, _VARIANCE = "obrs/acceptance_by_response", "obrs/acceptance_variance"
FEWEST_TOKENS = 100  # an effective sample size of fewer is NaN: it would be near their number for all weights
# By name of a metric, the metrics that are derived from it, each with the function that computes its value.
_DERIVED: dict[str, dict[str, Callable[[Any], Tensor]]] = {
    "mismatch/ratio": {
        "mismatch/ratio_stderr": lambda metric: metric.standard_error,  # ratios are uncorrelated between tokens
        "mismatch/ess": lambda metric: _of_many(metric, metric.effective_share),
    },
    "mismatch/log_ratio": {
        f"mismatch/ratio_p{percent:g}": lambda metric, percent=percent: metric.quantile(percent / 100.0).exp()
        for percent in (0.1, 1, 50, 99, 99.9)
    },
    "mismatch/sequence_log_ratio": {"mismatch/sequence_log_ratio_variance": lambda metric: metric.variance},
    "correction/weight": {"correction/ess": lambda metric: _of_many(metric, metric.effective_share)},
}
_PREFIX = "mismatch/prefix_ess_"  # beginning of the names of effective sample sizes of response prefixes
_NOT_SHOWN = (  # metrics that only serve to compute other numbers
    "policy/largest_kept_advantage",
    "policy/largest_advantage",
    "mismatch/log_ratio",
    "critic/error",
    _BY_RESPONSE,
    _VARIANCE,
)


def training_sums(
    samples: Sequence[TrainingSample], results: Sequence[StepResult], components: RunComponents, iteration: int
) -> Sums:
    """Add up the metrics of all optimizer steps of an iteration, and count tokens and FLOPs of training.

    The metrics of `WITH_STANDARD_ERROR`, and so the effective sample size `mismatch/ess` that is computed from one of
    them, are taken from the first epoch only, because a standard error must not count a token twice.
    """
    sums, epochs = _total(results), components.config.batch.ppo_epochs
    first_epoch = _total(results[: len(results) // epochs])  # every epoch has equally many steps
    # The metrics with a standard error, and those from which a standard error is computed.
    from_first = (*WITH_STANDARD_ERROR, _BY_RESPONSE, _VARIANCE)
    sums |= {name: first_epoch[name] for name in from_first if name in first_epoch}
    trained = epochs * sum(len(sample.rollout.token_ids) for sample in samples)
    flops = epochs * sum(components.training_flops(tokens_read(sample.rollout), iteration) for sample in samples)
    return sums | {
        "reward/frac_zero_std": Mean.numbers([not sample.advantages.any() for sample in samples]),
        "tokens/train": Sum.number(trained),
        "flops/train": Sum.number(flops),
    }


def lag_sums(samples: Sequence[TrainingSample], starts: Iterable[Version]) -> Sums:
    """Measure the lag of sampled tokens: how many iterations have updated the model since it generated the token.

    Without samples there are no metrics.

    Args:
        starts: versions of the weights at the start of the newest iterations, oldest first, this iteration's last.
    """
    if not samples:
        return {}

    lags, masks = [], []
    by_role = {role: torch.tensor([getattr(version, role) for version in starts]) for role in Version._fields}
    for rollout in (sample.rollout for sample in samples):
        role = rollout.sampled_by
        assert role, "the sampler names the model of every rollout"
        versions = rollout.versions[:, Version._fields.index(role)]
        # Count the iterations that began with newer weights than those that generated the token.
        lags.append((by_role[role][:, None] > versions).sum(0))
        masks.append(rollout.sampled_mask)

    lag, mask = torch.cat(lags), torch.cat(masks)
    return {"lag/iterations": Mean.of(lag, mask), "lag/iterations_max": Max.of(lag, mask)}


def metric_values(sums: Sums) -> dict[str, float]:
    """Return the value of every metric by name, derived metrics included, from sums on the CPU."""
    # The effective sample sizes of prefixes of responses (`_PREFIX`) become NaN where they are of few tokens.
    values: dict[str, Tensor] = {
        name: _of_many(metric, metric.value)
        if isinstance(metric, EffectiveSampleSize) and _PREFIX in name
        else metric.value
        for name, metric in sums.items()
        if name not in _NOT_SHOWN
    }

    # Add the metrics that are computed from others.
    for name, derived in _DERIVED.items():
        if name in sums:
            values |= {derived_name: compute(sums[name]) for derived_name, compute in derived.items()}
    if _BY_RESPONSE in sums:
        values["obrs/acceptance_minus_z_stderr"] = _acceptance_error(sums)
    if "critic/error" in sums:
        # The share of the variance of the returns that the critic's values explain
        error, returned = (Mean.named(sums, name).variance for name in ("critic/error", "critic/return"))
        values["critic/explained_variance"] = 1.0 - error / returned
    return {name: float(value) for name, value in values.items()}


def _acceptance_error(sums: Sums) -> Tensor:
    """Return the standard error of mean acceptance minus the mean of Z, a token's expected acceptance.

    The error is clustered by response: a Z that leaves out some of the probability errs alike for all tokens of a
    response. It is at least the error of independent acceptances, whose variance is Z (1 - Z) at most: where rejections
    are rare, a batch without any would show no spread at all.
    """
    # `variances` sums up Z (1 - Z) of all tokens.
    by_response, variances = ClusteredMean.named(sums, _BY_RESPONSE), Mean.named(sums, _VARIANCE)
    return torch.maximum(by_response.standard_error, variances.total.sqrt() / variances.count)


def _of_many(metric: Mean | EffectiveSampleSize, share: Tensor) -> Tensor:
    """Return `share`, a metric's effective sample size per token, or NaN for fewer tokens than `FEWEST_TOKENS`."""
    return torch.where(metric.count < FEWEST_TOKENS, torch.nan, share)


def throughput(spent: Mapping[str, Seconds], rollout_tokens: float | None, overlaps: bool) -> dict[str, float]:
    """Return the wall and CPU seconds of every phase of an iteration and, if it has rollouts, tokens per second.

    Generated tokens are counted per second of generation and training together, and per second of generation.

    Args:
        spent: seconds by phase.
        rollout_tokens: number of tokens generated in the iteration; None or 0 for an iteration without rollouts.
        overlaps: True where the engine generates while the learner trains, so that the time of generation is unknown
            and its speed is left out.
    """
    timings = {f"seconds/{phase}": seconds.wall for phase, seconds in spent.items()}
    timings |= {f"cpu_seconds/{phase}": seconds.processor for phase, seconds in spent.items()}
    # Seconds of generation and training together
    busy = timings.get("seconds/rollout", 0.0) + timings.get("seconds/train", 0.0)
    if rollout_tokens and busy:
        timings["speed/tokens_per_second"] = rollout_tokens / busy
    if rollout_tokens and not overlaps:
        timings["speed/rollout_tokens_per_second"] = rollout_tokens / timings["seconds/rollout"]
    return timings


def _total(results: Sequence[StepResult]) -> Sums:
    """Add up the metrics of several optimizer steps."""
    return reduce(add_sums, (result.metrics for result in results), {})
