"""The optimizer of one model: AdamW with clipping and a learning-rate schedule."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from jackpot.config.config import OptimizerConfig
from jackpot.core.errors import CheckpointError
from jackpot.core.shards import is_sharded, locals_of, norm, part_like


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` of `total_steps`, counted from 0: warm-up, then the schedule.

    The schedules `linear` and `cosine` reach 0 one step after the last, so that the last step still moves the weights.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    # The schedule's argument is the share of the steps after the warm-up, `span`, that were taken.
    span = max(total_steps - config.warmup_steps, 1)
    return config.learning_rate * SCHEDULES[config.schedule](min((step - config.warmup_steps) / span, 1.0))


SCHEDULES = {  # factor on the learning rate, by the progress after the warm-up, from 0 to 1
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments
_MESSAGE = 2**26  # most bytes of tensors that are sent in one message; a larger tensor is sent alone


def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Sum tensors over all ranks, in place, many in one message; without torch.distributed do nothing.

    Sharded tensors are left alone, because FSDP has already summed them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    # Divide the tensors into messages of one dtype and of _MESSAGE bytes at most, then sum each message.
    by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}  # for each dtype, the tensors of each message
    for tensor in (tensor for tensor in tensors if not is_sharded(tensor)):
        messages = by_dtype.setdefault(tensor.dtype, [[]])
        if messages[-1] and sum(member.nbytes for member in (*messages[-1], tensor)) > _MESSAGE:
            messages.append([])
        messages[-1].append(tensor)
    for message in (message for messages in by_dtype.values() for message in messages):
        flat = _flatten_dense_tensors(message)
        dist.all_reduce(flat)
        torch._foreach_copy_(message, list(_unflatten_dense_tensors(flat, message)))


class ModelOptimizer:
    """The optimizer of one model: AdamW, clipping and the learning rate. Gradients arrive as sums over micro-batches.

    Args:
        parameters: parameters of the model; those that require a gradient are trained.
        total_steps: number of optimizer steps of the whole run, where the schedule ends.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, total_steps: int) -> None:
        """Begin at step 0, without moments, with the parameters that require a gradient."""
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config, self._total_steps = config, total_steps
        self._adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,  # works in place, without temporaries of the weights' size
        )
        self.steps = 0

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total_steps)

    def reduce(self, denominator: Tensor) -> None:
        """Sum the gradients over ranks and divide them by `denominator`, a scalar on the device of the gradients.

        A denominator of 0 means that no token was counted, so that all gradients are 0; they stay 0.
        """
        for parameter in self.parameters:
            if parameter.grad is None:  # no token of this rank reached the parameter
                parameter.grad = torch.zeros_like(parameter)
        sum_over_ranks(self._gradients())
        gradients = locals_of(self._gradients())
        torch._foreach_div_(gradients, torch.where(denominator == 0, 1.0, denominator).to(gradients[0]))

    def clip(self) -> Tensor:
        """Clip the gradients to `max_grad_norm`; return their norm before that, a float64 scalar on their device."""
        gradient_norm = norm(self._gradients())
        gradients = locals_of(self._gradients())
        scale = (self._config.max_grad_norm / (gradient_norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        torch._foreach_mul_(gradients, scale.to(gradients[0]))
        return gradient_norm

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of all trained parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def step(self, scale: float = 1.0) -> None:
        """Take one AdamW step at `scale` times the scheduled learning rate, and drop the gradients.

        With `weights_dtype: bf16` the weights are then rounded to values of bf16; their dtype stays.
        """
        for group in self._adamw.param_groups:
            group["lr"] = scale * self.learning_rate
        self._adamw.step()
        if self._config.weights_dtype == "bf16":
            for weight in locals_of(self.parameters):
                weight.detach().copy_(weight.detach().bfloat16())
        self.steps += 1
        self.discard()

    def discard(self) -> None:
        """Drop the gradients without a step."""
        self._adamw.zero_grad(set_to_none=True)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield AdamW's moments of each parameter, named INDEX.MOMENT, such as 0.exp_avg; none before the first step.

        The moments of a sharded parameter are sharded too.
        """
        for index, parameter in enumerate(self.parameters):
            state = self._adamw.state.get(parameter, {})
            yield from ((f"{index}.{name}", state[name]) for name in _MOMENTS if name in state)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to continue, equal on all ranks: AdamW's settings and the number of steps."""
        return {"groups": self._adamw.state_dict()["param_groups"], "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any], moments: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` and `moments` returned, even if parameters are now sharded in another way.

        Args:
            moments: whole moments by their names in `moments()`, as tensors or as slices of a file (`part_like`).

        Raises:
            CheckpointError: the moments do not fit the parameters.
        """
        self.steps = state["steps"]
        numbered_parameters = enumerate(self.parameters) if self.steps else ()  # no moments before the first step
        # AdamW's state of each parameter, by the parameter's index: its moments and the number of steps.
        states = {index: self._state(index, parameter, moments) for index, parameter in numbered_parameters}
        self._adamw.load_state_dict({"state": states, "param_groups": state["groups"]})

    def _state(self, index: int, parameter: nn.Parameter, moments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Make AdamW's state of one parameter from the saved moments and the number of steps."""
        try:
            state = {name: part_like(moments[f"{index}.{name}"], parameter) for name in _MOMENTS}
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the moments of parameter {index} do not fit the model: {error}") from error
        return state | {"step": torch.tensor(float(self.steps))}
