"""Adapts the weight of the distillation, eq. 7, so that policy and rollout model stay equally close."""

import math
from collections.abc import Mapping

from jackpot.config.run import DistillControlConfig
from jackpot.core.metrics import Sums

LARGEST_ERROR = 0.2  # relative error that one step reacts to


def next_distill_weight(control: DistillControlConfig, weight: float, metrics: Sums) -> float:
    """Return the weight of the next step, from what was measured in this one. It changes by a factor

        1 + clip((measured - target) / target, -0.2, 0.2) / horizon

    (arXiv 1909.08593, section 2.2). For the acceptance both are the shares rejected, 1 - a: what is left of it close to
    1 matters, and more distillation lowers them as it lowers the KL.

    Args:
        weight: of this step.
        metrics: of this step, over all micro-batches and ranks, so that all ranks return the same.

    Returns:
        A weight from `control.low` to `control.high`; `weight` itself where no finite value was measured.
    """
    name, one_minus = MEASURED[control.metric]
    measured, target = metrics[name].value.item(), control.target
    if one_minus:
        measured, target = 1.0 - measured, 1.0 - target
    if not math.isfinite(measured):
        return weight
    error = min(max((measured - target) / target, -LARGEST_ERROR), LARGEST_ERROR)
    return min(max(weight * (1.0 + error / control.horizon), control.low), control.high)


MEASURED: Mapping[str, tuple[str, bool]] = {  # `distill_control.metric` -> metric, and whether 1 - it counts
    "kl": ("mismatch/kl_policy_rollout", False),
    "acceptance": ("obrs/acceptance", True),
}
