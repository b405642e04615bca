"""The joint optimizer, which steps policy, critic and rollout model on their accumulated gradients.

The rollout model's gradient can also be summed over steps, split into its two losses, and steered by a weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackpot.config.schedules import DistillControlConfig
from jackpot.core.metrics import Mean, Sum, Sums, to_host
from jackpot.core.roles import Role
from jackpot.core.shards import local
from jackpot.core.types import Version
from jackpot.models.parts import read_parts
from jackpot.training.optimizer import ModelOptimizer, sum_over_ranks

# For each value of `policy.ess_scaling`, a function that takes the metrics of an optimizer step, over all ranks, and
# returns the effective sample size of the step, as a share of its samples in (0, 1].
EFFECTIVE_SHARES: dict[str, Callable[[Sums], Tensor]] = {
    "response": lambda sums: sums["mismatch/sequence_ess"].value,
    "token": lambda sums: Mean.named(sums, "correction/weight").effective_share,
}


class JointOptimizer:
    """The optimizers of all trained models, which divide, clip and apply gradients, or skip a model and say why.

    A non-finite gradient of one model skips all models. Gradients arrive as sums over micro-batches; they are summed
    over ranks and divided once, by denominators that cover the whole optimizer step.

    Args:
        optimizers: optimizer of `policy`, and of `critic` and `rollout_model` where these are trained.
        regularized: True where the policy has a gradient even if all advantages are 0.
        rollout_model_each_step: True where the rollout model steps with the policy; else its gradients add up until
            `step` is called with `steps_rollout_model`.
        ess_scaling: key of `EFFECTIVE_SHARES`, functions that return the effective sample size of a step as a share of
            its samples. The policy's learning rate is multiplied by the square root of the share, as VCPO does with
            responses as samples, arXiv 2602.17616 (mit-han-lab/vcpo,
            verl/workers/actor/megatron_actor.py, commit c7f030f). None: the learning rate is not scaled.
    """

    def __init__(
        self,
        optimizers: Mapping[Role, ModelOptimizer],
        *,
        regularized: bool,
        rollout_model_each_step: bool,
        ess_scaling: str | None = None,
    ) -> None:
        """Keep the optimizers; unless `rollout_model_each_step`, the rollout model's gradients are added up over steps.

        `regularized`: the policy has a gradient even if all advantages are 0. `ess_scaling`: key of `EFFECTIVE_SHARES`,
        by whose effective sample size the policy's learning rate is scaled; None: it is not scaled.
        """
        self._optimizers: dict[Role, ModelOptimizer] = dict(optimizers)
        self._regularized = regularized
        self._effective_share = EFFECTIVE_SHARES[ess_scaling] if ess_scaling else None
        self._accumulator: GradientAccumulator | None = None
        if "rollout_model" in optimizers and not rollout_model_each_step:
            self._accumulator = GradientAccumulator(optimizers["rollout_model"])

    def steps(self, role: Role) -> int:
        """Return the number of steps that a model has taken; 0 for a model that is not trained."""
        return self._optimizers[role].steps if role in self._optimizers else 0

    def version(self, has_rollout_model: bool) -> Version:
        """Return the version of the weights of both models; without a rollout model the policy's stands for both."""
        policy = self.steps("policy")
        return Version(policy=policy, rollout_model=self.steps("rollout_model") if has_rollout_model else policy)

    def step(
        self, sums: Sums, *, sampled_tokens: Tensor, steps_rollout_model: bool
    ) -> tuple[Sums, tuple[dict[str, Any], ...]]:
        """Step the models on the gradients in their parameters, and clear the gradients; the CPU waits once.

        Args:
            sums: metrics of the optimizer step over all micro-batches and ranks, on the device. The count of
                `ROLE/loss` is the denominator of the model's gradient; a model without this metric does not step.
            sampled_tokens: number of sampled tokens of the optimizer step over all ranks, a scalar; 0: no model steps.
            steps_rollout_model: False to keep adding up the rollout model's gradient, if it does not step every time.

        Returns:
            `sums` and the metrics of the step, on the CPU, and an event for every model that was skipped.
        """
        trained: list[Role] = [role for role in self._optimizers if f"{role}/loss" in sums]
        # The denominators of the gradients of the models that step now; `added_count` is the rollout model's, if its
        # gradient is added up over steps.
        counts: dict[Role, Tensor] = {role: Mean.named(sums, f"{role}/loss").count for role in trained}
        added_count = counts.pop("rollout_model", None) if self._accumulator else None

        # Divide and clip the gradients of the models that step now.
        norms = {role: self._prepare(role, count) for role, count in counts.items()}
        is_finite = torch.stack([norm.isfinite() for norm in norms.values()]).all()

        # Add the rollout model's gradient to its sum over steps, and step on the sum when it is due.
        if self._accumulator and added_count is not None:
            is_finite = self._accumulator.add(added_count, is_finite)
            if steps_rollout_model:
                counts["rollout_model"] = self._accumulator.pop()
                norms["rollout_model"] = self._prepare("rollout_model", counts["rollout_model"])

        # What the CPU reads besides `sums`, to decide which models step.
        reading: Sums = {
            **{f"{role}/grad_norm": Mean.number(gradient_norm) for role, gradient_norm in norms.items()},
            **{f"{role}/denominator": Sum.number(count) for role, count in counts.items()},
            "tokens": Sum.number(sampled_tokens),
            "health/non_finite_steps": Sum.of(~is_finite),
        }
        metrics = to_host(sums | reading)
        denominators = {role: float(metrics.pop(f"{role}/denominator").value) for role in counts}
        tokens = float(metrics.pop("tokens").value)
        metrics |= split_numbers(metrics)  # this call also removes the sums of `GradientSplit`

        events = []
        for role in counts:
            optimizer, scale = self._optimizers[role], 1.0  # `scale`: factor of the learning rate
            why = self._reason_to_skip(role, metrics, tokens, denominators[role])
            if role == "policy" and self._effective_share and not why:
                share = float(self._effective_share(metrics))  # NaN where no sample has a weight
                scale = math.sqrt(share) if share > 0.0 else 0.0
                metrics["policy/ess_scale"] = Mean.number(scale)

            metrics[f"{role}/learning_rate"] = Mean.number(scale * optimizer.learning_rate)
            metrics[f"{role}/skipped_steps"] = Mean.number(float(why is not None))
            if why:
                events.append({"event": "skipped_step", "model": role, "why": why})
                optimizer.discard()
            else:
                optimizer.step(scale)
        return metrics, tuple(events)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every optimizer by role, without moments."""
        return {role: optimizer.state_dict() for role, optimizer in self._optimizers.items()}

    def moments(self) -> Iterator[tuple[Role, Iterator[tuple[str, Tensor]]]]:
        """Yield for each trained model its role, and the moments of its optimizer with their names."""
        return ((role, optimizer.moments()) for role, optimizer in self._optimizers.items())

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Continue from what `state_dict` returned, and from the moments in the files of `folder`.

        Raises:
            CheckpointError: the moments cannot be read, or do not fit the models.
        """
        for role, optimizer in self._optimizers.items():
            with read_parts(folder, role) as moments:
                optimizer.load_state_dict(state[role], moments)

    def _prepare(self, role: Role, count: Tensor) -> Tensor:
        """Divide a model's gradient, summed over ranks, by `count`, clip it, and return the norm before clipping."""
        self._optimizers[role].reduce(count)
        return self._optimizers[role].clip().to(count.device)

    def _reason_to_skip(self, role: Role, metrics: Sums, tokens: float, count: float) -> str | None:
        """Return why a model does not step, or None if it does.

        A zero gradient is a reason, because AdamW would still move the weights by its momentum. `tokens` is the number
        of sampled tokens of this optimizer step. `count` is the denominator of the model's gradient.
        """
        # An accumulated gradient is finite: `GradientAccumulator.add` leaves out steps that are not.
        accumulates = role == "rollout_model" and self._accumulator is not None
        if metrics["health/non_finite_steps"].value > 0 and not accumulates:
            return "non-finite gradient"
        # A gradient added up over steps has no token if all its steps were left out; any other, if this step has none.
        if (count if accumulates else tokens) == 0:
            return "no token"
        if role == "policy" and not self._regularized:
            if not metrics["policy/largest_advantage"].value > 0:
                return "all groups have equal rewards"
            if not metrics["policy/largest_kept_advantage"].value > 0:
                return "all tokens with an advantage were rejected"
        return "the gradient is zero" if metrics[f"{role}/grad_norm"].value == 0.0 else None


class GradientAccumulator:
    """The sum of the rollout model's gradient over several optimizer steps, for `rollout_model.update: iteration`."""

    def __init__(self, optimizer: ModelOptimizer) -> None:
        """Begin with an empty sum for the parameters of `optimizer`."""
        self._parameters = optimizer.parameters
        self._sums: list[Tensor] = []  # sum of the gradients of each parameter; empty before the first step
        self._count = torch.zeros((), dtype=torch.float64)  # denominator of the sum

    def add(self, count: Tensor, others_are_finite: Tensor) -> Tensor:
        """Move the gradient of one optimizer step from the parameters into the sum; add its denominator to the sum's.

        A step with a non-finite gradient, of this model on any rank or of another model, adds nothing. All scalars stay
        on the device, so that the CPU does not wait.

        Args:
            count: denominator of this step's gradient, a scalar.
            others_are_finite: bool scalar, True where the gradients of all other models are finite.

        Returns:
            Bool scalar, True where the step was added.
        """
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

        # Find on how many ranks some gradient is not finite: 0 or 1 on this rank, summed over the ranks.
        are_broken = [~local(grad).isfinite().all().to(count.device) for grad in grads if grad is not None]
        num_broken_ranks = torch.stack([~others_are_finite, *are_broken]).any().double()
        sum_over_ranks([num_broken_ranks])
        is_added = num_broken_ranks == 0

        self._sums = self._sums or [torch.zeros_like(parameter) for parameter in self._parameters]
        for gradient_sum, grad in zip(self._sums, grads, strict=True):
            if grad is not None:
                shard = local(grad)  # this rank's part of a sharded gradient
                local(gradient_sum).add_(shard.masked_fill_(~is_added.to(shard.device), 0.0))
        self._count = self._count + torch.where(is_added, count, 0.0)
        return is_added

    def pop(self) -> Tensor:
        """Move the sum of the gradients back into the parameters, and return its denominator, a scalar.

        The next sum begins at 0. Call `add` at least once before.
        """
        for parameter, gradient_sum in zip(self._parameters, self._sums, strict=True):
            parameter.grad = gradient_sum
        count = self._count
        self._sums = []
        self._count = torch.zeros((), dtype=torch.float64)
        return count


class GradientSplit:
    """A measure of how the rollout model's gradient splits into its PPO part and its distillation part.

    The parts are the gradients of eqs. 6 and 7 of Jackpot, arXiv 2602.06107, with their weights in the loss.

    The split is measured in the gradient of the hidden states [N, H] that the head reads: both losses reach the
    backbone through them, as a sum. The PPO part takes a backward pass through the head alone. The distillation part is
    the rest of the gradient that arrives at the hidden states in the backward pass of both losses.

    Args:
        ppo: numerator of eq. 6, a scalar with gradient.
        hidden: [N, H] hidden states that the head has read, with gradient, before the backward pass of both losses.
    """

    def __init__(self, ppo: Tensor, hidden: Tensor) -> None:
        """Compute the PPO part now, and have the backward pass through `hidden` measure both parts."""
        (self._ppo,) = torch.autograd.grad(ppo, hidden, retain_graph=True)
        self.sums: Sums = {}  # sums over tokens for `split_numbers`, set by the backward pass
        hidden.register_hook(self._measure)

    def _measure(self, gradient: Tensor) -> None:
        """Split a gradient into PPO part and distillation part; sum the squares of each and their products into `sums`.

        `gradient`, [N, H], is the gradient of both losses together at the hidden states.
        """
        ppo, distill = self._ppo.float(), gradient.float() - self._ppo
        products = {"ppo": ppo * ppo, "distill": distill * distill, "product": ppo * distill}
        self.sums = {f"{_SPLIT}/{name}": Sum(values.sum(dtype=torch.float64)) for name, values in products.items()}


_SPLIT = "rollout_model/split"


def split_numbers(sums: Sums) -> Sums:
    """Remove from the sums of an optimizer step what `GradientSplit` added, and return metrics computed from it.

    The metrics are the norms of PPO part and distillation part, divided by the denominator of the step, and the cosine
    between the parts, which is left out where a part is 0. Without sums of `GradientSplit` there are no metrics.

    Args:
        sums: on the CPU, over all micro-batches and ranks.
    """
    if f"{_SPLIT}/ppo" not in sums:
        return {}
    # Sums over the hidden states: squares of the PPO part, squares of the distillation part, and products of both.
    ppo, distill, product = (float(sums.pop(f"{_SPLIT}/{name}").value) for name in ("ppo", "distill", "product"))
    count = float(Mean.named(sums, "rollout_model/loss").count) or 1.0  # without tokens all sums are 0: divide by 1
    norms = math.sqrt(ppo) * math.sqrt(distill)
    values = {
        "rollout_model/ppo_grad_norm": math.sqrt(ppo) / count,
        "rollout_model/distill_grad_norm": math.sqrt(distill) / count,
        "rollout_model/grad_cosine": product / norms if norms else math.nan,
    }
    return {name: Mean.number(value) for name, value in values.items() if math.isfinite(value)}


LARGEST_ERROR = 0.2  # a larger relative error between the measured number and its target counts as this one


def next_distill_weight(control: DistillControlConfig, weight: float, *, kl: float, acceptance: float) -> float:
    """Return the weight of distillation for the next step, from the KL or the acceptance that this step measured.

    The weight changes by the factor

        1 + clip((measured - target) / target, -0.2, 0.2) / horizon

    (arXiv 1909.08593, section 2.2). Where the target is an acceptance, both numbers are replaced by the rejected share,
    1 - acceptance, because more distillation lowers that share as it lowers the KL.

    Args:
        weight: weight of this step.
        kl: KL(policy || rollout model) in this step, over all micro-batches and ranks, so that all ranks agree.
        acceptance: acceptance of what the rollout model sampled, over all micro-batches and ranks.

    Returns:
        A weight from `control.low` to `control.high`; `weight` itself where the measured number is not finite.
    """
    measured, target = (kl, control.target) if control.metric == "kl" else (1.0 - acceptance, 1.0 - control.target)
    if not math.isfinite(measured):
        return weight
    error = min(max((measured - target) / target, -LARGEST_ERROR), LARGEST_ERROR)
    return min(max(weight * (1.0 + error / control.horizon), control.low), control.high)
