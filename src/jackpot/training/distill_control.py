"""Adapts the weight of the distillation, eq. 7, so that policy and rollout model stay equally close."""

import math

from jackpot.config.config import DistillControlConfig

LARGEST_ERROR = 0.2  # relative error that one step reacts to


def next_distill_weight(control: DistillControlConfig, weight: float, *, kl: float, acceptance: float) -> float:
    """Return the weight of the next step, from what was measured in this one. It changes by a factor

        1 + clip((measured - target) / target, -0.2, 0.2) / horizon

    (arXiv 1909.08593, section 2.2). For the acceptance both are the shares rejected, 1 - a, which more distillation
    lowers as it lowers the KL.

    Args:
        weight: of this step.
        kl: KL(policy || rollout model) in this step, over all micro-batches and ranks, so that all ranks return the
            same.
        acceptance: of what the rollout model sampled, in the same way.

    Returns:
        A weight from `control.low` to `control.high`; `weight` itself where what decides is not finite.
    """
    measured, target = (kl, control.target) if control.metric == "kl" else (1.0 - acceptance, 1.0 - control.target)
    if not math.isfinite(measured):
        return weight
    error = min(max((measured - target) / target, -LARGEST_ERROR), LARGEST_ERROR)
    return min(max(weight * (1.0 + error / control.horizon), control.low), control.high)
