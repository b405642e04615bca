"""Adapts the weight of the distillation, eq. 7, so that policy and rollout model stay equally close."""

import math

from jackpot.config.run import DistillControlConfig
from jackpot.core.metrics import Sums

LARGEST_ERROR = 0.2  # relative error that one step reacts to


def next_distill_weight(control: DistillControlConfig, weight: float, metrics: Sums) -> float:
    """Return the weight of the next step, from what was measured in this one. It changes by a factor

        1 + clip((measured - target) / target, -0.2, 0.2) / horizon

    (arXiv 1909.08593, section 2.2). For the acceptance of what the rollout model sampled both are the shares rejected,
    1 - a, which more distillation lowers as it lowers the KL.

    Args:
        weight: of this step.
        metrics: of this step, over all micro-batches and ranks, so that all ranks return the same.

    Returns:
        A weight from `control.low` to `control.high`; `weight` itself where no finite value was measured.
    """
    target = control.target
    if control.metric == "kl":
        measured = metrics["mismatch/kl_policy_rollout"].value.item()
    else:
        acceptance = metrics.get("obrs/acceptance_by_rollout_model", metrics["obrs/acceptance"])
        measured, target = 1.0 - acceptance.value.item(), 1.0 - target
    if not math.isfinite(measured):
        return weight
    error = min(max((measured - target) / target, -LARGEST_ERROR), LARGEST_ERROR)
    return min(max(weight * (1.0 + error / control.horizon), control.low), control.high)
