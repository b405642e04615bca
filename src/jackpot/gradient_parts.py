"""The rollout model's gradient: summed over several steps, and where it comes from. Layer 4."""

import torch
from torch import Tensor

from jackpot.ops.reduce import Mean, Sums
from jackpot.optimizer import ModelOptimizer, sum_over_ranks


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
    """The parts of the rollout model's gradient: eq. 6 alone, and by subtraction eq. 7."""

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._ppo: list[Tensor] | None = None

    def add(self, loss: Tensor, wanted: bool) -> None:
        """Before the backward pass of the micro-batch: adds the gradient of eq. 6's numerator."""
        if not wanted or not loss.requires_grad:
            return
        grads = torch.autograd.grad(loss, self._parameters, retain_graph=True, allow_unused=True)
        self._ppo = self._ppo or [torch.zeros_like(parameter) for parameter in self._parameters]
        for total, grad in zip(self._ppo, grads, strict=True):
            if grad is not None:
                total += grad

    def measure(self, denominator: float) -> Sums:
        """After `reduce` and before `clip`: norms of both parts and the cosine between them; empty where not wanted."""
        if self._ppo is None:
            return {}
        ppo, self._ppo = self._ppo, None
        sum_over_ranks(ppo)
        torch._foreach_div_(ppo, denominator or 1.0)
        distill = [parameter.grad - part for parameter, part in zip(self._parameters, ppo, strict=True)]
        norms = [torch.stack(torch._foreach_norm(part)).norm().double() for part in (ppo, distill)]
        product = sum((one * other).sum().double() for one, other in zip(ppo, distill, strict=True))
        values = {
            "rollout_model/ppo_grad_norm": norms[0],
            "rollout_model/distill_grad_norm": norms[1],
            "rollout_model/grad_cosine": product / (norms[0] * norms[1]),
        }
        return {name: Mean.number(float(value)) for name, value in values.items() if value.isfinite()}
