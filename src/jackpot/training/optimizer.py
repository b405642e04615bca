"""The optimizer of one model: AdamW with clipping and a learning-rate schedule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jackpot.config.run import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` of `total_steps`, counted from 0: warm-up, then the schedule.

    Linear and cosine reach 0 one step after the last, so the last step still moves.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    return config.learning_rate * SCHEDULES[config.schedule](min((step - config.warmup_steps) / span, 1.0))


SCHEDULES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Sum tensors over all ranks, in place; does nothing where torch.distributed is not initialized."""
    if dist.is_available() and dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)


class ModelOptimizer:
    """Steps the parameters of one model. Gradients arrive as sums; `reduce` makes means of them.

    Args:
        total_steps: number of optimizer steps of the whole run, where the schedule ends.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, total_steps: int) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config, self._total_steps = config, total_steps
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,  # in place: no temporaries of the size of the weights
        )
        self.steps = 0

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total_steps)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return self._parameters

    def reduce(self, denominator: float) -> None:
        """Sum the gradients over ranks and divide them by `denominator`.

        A denominator of 0 means that no token was counted, so all gradients are 0; they stay 0.
        """
        for parameter in self._parameters:
            if parameter.grad is None:  # no token reached it on this rank
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters]
        sum_over_ranks(gradients)
        torch._foreach_div_(gradients, denominator or 1.0)

    def clip(self) -> float:
        """Clip the gradients to `max_grad_norm`, and return their norm before that."""
        return float(nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))

    def step(self) -> None:
        """Take one AdamW step at the scheduled learning rate, and drop the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        self.steps += 1
        self.discard()

    def discard(self) -> None:
        """Drop the gradients without a step."""
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self._adamw.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]
