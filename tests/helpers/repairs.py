"""One update of a learner whose gradients are looked at before they are divided and stepped on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helpers.learners import batches
from jackpot.core.types import TrainingSample
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import StepResult
from jackpot.training.old_policy import MicroBatch


def micro_batches_of(items: Sequence[TrainingSample], budget: int = 60) -> list[MicroBatch]:
    return [MicroBatch(tokens=batch, old=None) for batch in batches(items, budget=budget)[0]]


def gradient_of_update(learner: JointLearner, parts: Sequence[MicroBatch]) -> tuple[Tensor, StepResult]:
    """Take one optimizer step; the sum of the policy's gradient on this rank, in a row, and the result."""
    seen: list[Tensor] = []
    step = learner._optimizer.step

    def look(sums, **arguments):
        gradients = [one.grad for one in learner.models["policy"].parameters()]
        seen.append(torch.cat([one.double().flatten().clone() for one in gradients]))
        return step(sums, **arguments)

    learner._optimizer.step = look
    result, _ = learner.update(parts)
    return seen[0], result
