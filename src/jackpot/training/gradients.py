"""The rollout model's gradient: summed over several steps, and where it comes from."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.core.metrics import Mean, Sums
from jackpot.training.optimizer import ModelOptimizer, sum_over_ranks


class GradientBank:
    """Adds up a gradient over the optimizer steps of others, for `rollout_model.update: iteration`."""

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._saved: list[Tensor] | None = None
        self._count = 0.0

    def close_step(self, count: float, others_are_finite: bool) -> bool:
        """Take in the gradient of one step and its denominator, or drop both unless everything was finite everywhere.

        Returns whether it was.
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

    def withdraw(self) -> float:
        """Give the sum to the parameters as their gradient; returns its denominator."""
        for parameter, grad in zip(self._parameters, self._saved or [None] * len(self._parameters), strict=True):
            parameter.grad = grad
        count, self._saved, self._count = self._count, None, 0.0
        return count


class GradientParts:
    """The parts of the rollout model's gradient: eq. 6 alone, and by subtraction eq. 7.

    They cost one more copy of the gradient, and for a moment that of one parameter.
    """

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._ppo: list[Tensor | None] | None = None  # None for a parameter that no token has reached

    def add(self, loss: Tensor, wanted: bool) -> None:
        """Before the backward pass of the micro-batch: adds the gradient of eq. 6's numerator."""
        if not wanted or not loss.requires_grad:
            return
        whole = [parameter.grad for parameter in self._parameters]
        self._give(self._ppo or [None] * len(whole))  # autograd adds in place what it would return beside it
        loss.backward(retain_graph=True, inputs=self._parameters)
        self._ppo = [parameter.grad for parameter in self._parameters]
        self._give(whole)

    def measure(self, denominator: float) -> Sums:
        """After `reduce` and before `clip`: norms of both parts and the cosine between them; empty where not wanted."""
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
