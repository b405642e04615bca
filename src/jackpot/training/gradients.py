"""Add up the rollout model's gradient over several optimizer steps, and split it into its two losses."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.core.metrics import Mean, Sums
from jackpot.training.optimizer import ModelOptimizer, sum_over_ranks


class GradientAccumulator:
    """Adds up the rollout model's gradient over several optimizer steps, for `rollout_model.update: iteration`."""

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._saved: list[Tensor] | None = None
        self._count = 0.0

    def add(self, count: float, others_are_finite: bool) -> bool:
        """Add the gradient of one optimizer step and its denominator, and clear it in the parameters.

        A step with a non-finite gradient, of this model on any rank or of another model, is dropped.

        Args:
            count: denominator of the gradient.
            others_are_finite: no other model's gradient is non-finite.

        Returns:
            True where the step was added.
        """
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        present = [grad for grad in grads if grad is not None]
        broken = torch.stack([~grad.isfinite().all() for grad in present]).any() if present else torch.zeros(())
        bad = broken.double()
        sum_over_ranks([bad])
        if bad > 0 or not others_are_finite:
            return False
        self._saved = self._saved or [torch.zeros_like(parameter) for parameter in self._parameters]
        for saved, grad in zip(self._saved, grads, strict=True):
            if grad is not None:
                saved += grad
        self._count += count
        return True

    def pop(self) -> float:
        """Move the sum into the parameters as their gradient, and return its denominator."""
        for parameter, grad in zip(self._parameters, self._saved or [None] * len(self._parameters), strict=True):
            parameter.grad = grad
        count, self._saved, self._count = self._count, None, 0.0
        return count


class GradientDecomposition:
    """Measures how the rollout model's gradient splits into that of PPO (eq. 6) and that of distillation (eq. 7).

    The PPO part is computed alone, the other by subtraction. That takes one more copy of the gradient, and for a moment
    a copy of one parameter.
    """

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._ppo: list[Tensor | None] | None = None  # None for a parameter that no token has reached

    def add(self, loss: Tensor, wanted: bool) -> None:
        """Add the gradient of eq. 6's numerator, where `wanted`; before the backward pass of the micro-batch."""
        if not wanted or not loss.requires_grad:
            return
        whole = [parameter.grad for parameter in self._parameters]
        self._give(self._ppo or [None] * len(whole))  # autograd adds in place, so the other gradient is put away
        loss.backward(retain_graph=True, inputs=self._parameters)
        self._ppo = [parameter.grad for parameter in self._parameters]
        self._give(whole)

    def measure(self, denominator: float) -> Sums:
        """Return the norms of both parts and the cosine between them; empty where they were not wanted.

        Between `reduce` and `clip` of the optimizer, with the same denominator.
        """
        if self._ppo is None:
            return {}
        ppo = [
            torch.zeros_like(parameter) if part is None else part
            for parameter, part in zip(self._parameters, self._ppo, strict=True)
        ]
        self._ppo = None
        sum_over_ranks(ppo)
        torch._foreach_div_(ppo, denominator or 1.0)
        norms, product = torch.zeros(2, len(ppo), dtype=torch.float64), 0.0
        for index, (parameter, part) in enumerate(zip(self._parameters, ppo, strict=True)):
            rest = parameter.grad - part
            norms[0, index], norms[1, index] = part.norm(), rest.norm()
            product += float((part * rest).sum().double())
        first, second = norms.norm(dim=1).tolist()
        values = {
            "rollout_model/ppo_grad_norm": first,
            "rollout_model/distill_grad_norm": second,
            "rollout_model/grad_cosine": product / (first * second) if first * second else math.nan,
        }
        return {name: Mean.number(value) for name, value in values.items() if math.isfinite(value)}

    def _give(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
