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
    """Return the micro-batches of a step, with at most `budget` tokens each where a response has fewer."""
    return [MicroBatch(tokens=batch, old=None) for batch in batches(items, budget=budget)[0]]


def gradient_of_update(learner: JointLearner, parts: Sequence[MicroBatch]) -> tuple[Tensor, StepResult]:
    """Take one optimizer step; return the sum of the policy's gradients on this rank, as one vector, and the result."""
    sums_of_gradients: list[Tensor] = []
    step = learner._optimizer.step

    def recording_step(sums, **arguments):
        gradients = [parameter.grad for parameter in learner.models["policy"].parameters()]
        sums_of_gradients.append(torch.cat([gradient.double().flatten().clone() for gradient in gradients]))
        return step(sums, **arguments)

    learner._optimizer.step = recording_step
    result, _ = learner.update(parts)
    return sums_of_gradients[0], result
