"""Add up the rollout model's gradient over several optimizer steps, and split it into its two losses."""

import math

import torch
from torch import Tensor

from jackpot.core.metrics import Mean, Sum, Sums
from jackpot.core.shards import local
from jackpot.training.optimizer import ModelOptimizer, sum_over_ranks


class GradientAccumulator:
    """Adds up the rollout model's gradient over several optimizer steps, for `rollout_model.update: iteration`."""

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._saved: list[Tensor] | None = None
        self._count: Tensor | float = 0.0

    def add(self, count: Tensor, others_are_finite: Tensor) -> Tensor:
        """Add the gradient of one optimizer step and its denominator, and clear it in the parameters.

        A step with a non-finite gradient, of this model on any rank or of another model, adds nothing. All scalars are
        on the device, so that nothing waits for it.

        Args:
            count: denominator of the gradient, a scalar.
            others_are_finite: bool scalar, no other model's gradient is non-finite.

        Returns:
            Bool scalar, True where the step was added.
        """
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        broken = [~local(grad).isfinite().all() for grad in grads if grad is not None]
        bad = torch.stack([~others_are_finite, *(one.to(count.device) for one in broken)]).any().double()
        sum_over_ranks([bad])
        is_added = bad == 0
        self._saved = self._saved or [torch.zeros_like(parameter) for parameter in self._parameters]
        for saved, grad in zip(self._saved, grads, strict=True):
            if grad is not None:
                part = local(grad)
                local(saved).add_(part.masked_fill_(~is_added.to(part.device), 0.0))
        self._count = self._count + torch.where(is_added, count, 0.0)
        return is_added

    def pop(self) -> Tensor:
        """Move the sum into the parameters as their gradient, and return its denominator, a scalar.

        After at least one `add`.
        """
        for parameter, grad in zip(self._parameters, self._saved, strict=True):
            parameter.grad = grad
        count, self._saved, self._count = self._count, None, 0.0
        return count


class GradientSplit:
    """Measures how the rollout model's gradient splits into that of PPO (eq. 6) and that of distillation (eq. 7).

    It is the gradient of the hidden states [N, H] that the head reads, where the two losses meet: the backbone passes
    on nothing but their sum. The PPO part takes a backward pass through the head alone; the other part is what is left
    of the whole when the backward pass of both comes to the hidden states.

    Args:
        ppo: numerator of eq. 6.
        hidden: that the head has read, with gradient; the backward pass of both losses is still to come.
    """

    def __init__(self, ppo: Tensor, hidden: Tensor) -> None:
        (self._ppo,) = torch.autograd.grad(ppo, hidden, retain_graph=True)
        self.sums: Sums = {}  # over the tokens, for `split_numbers`; known after the backward pass of both losses
        hidden.register_hook(self._measure)

    def _measure(self, whole: Tensor) -> None:
        ppo, distill = self._ppo.float(), whole.float() - self._ppo
        products = {"ppo": ppo * ppo, "distill": distill * distill, "product": ppo * distill}
        self.sums = {f"{_SPLIT}/{name}": Sum(one.sum(dtype=torch.float64)) for name, one in products.items()}


_SPLIT = "rollout_model/split"


def split_numbers(sums: Sums) -> Sums:
    """Take the sums of `GradientSplit` out of those of an optimizer step, and return the numbers that they make.

    These are the norms of both parts over the denominator of the step, and the cosine between them, which is left out
    where a part is 0. Nothing is returned where nothing was measured.

    Args:
        sums: on the CPU, over all micro-batches and ranks.
    """
    parts = {name: sums.pop(f"{_SPLIT}/{name}", None) for name in ("ppo", "distill", "product")}
    if parts["ppo"] is None:
        return {}
    ppo, distill, product = (float(part.total) for part in parts.values())
    first, second, count = math.sqrt(ppo), math.sqrt(distill), float(sums["rollout_model/loss"].count) or 1.0
    values = {
        "rollout_model/ppo_grad_norm": first / count,
        "rollout_model/distill_grad_norm": second / count,
        "rollout_model/grad_cosine": product / (first * second) if first * second else math.nan,
    }
    return {name: Mean.number(value) for name, value in values.items() if math.isfinite(value)}
