"""The joint optimizer steps policy, critic and rollout model on their accumulated gradients.

Beside it stands what only the rollout model needs: its gradient added up over several steps and split into its two
losses, and the control of the weight of its distillation.
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
from jackpot.models.parts import read_parts
from jackpot.training.optimizer import ModelOptimizer, sum_over_ranks

NON_FINITE = "non-finite gradient"

# The effective sample size of an optimizer step, over all ranks, as a share of its samples, in (0, 1]: by name of
# `policy.ess_scaling`.
EFFECTIVE_SHARES: dict[str, Callable[[Sums], Tensor]] = {
    "response": lambda sums: sums["mismatch/sequence_ess"].value,
    "token": lambda sums: Mean.named(sums, "correction/weight").effective_share,
}


class JointOptimizer:
    """Divides, clips and applies the gradients of all trained models, or skips a model and says why.

    A non-finite gradient of one model skips all of them. Gradients arrive as sums over micro-batches; they are summed
    over ranks and divided once, by denominators that cover the whole optimizer step.

    Args:
        optimizers: of `policy`, and of `critic` and `rollout_model` where these are trained.
        regularized: the policy has a gradient even where all advantages are 0.
        rollout_model_each_step: the rollout model steps with the policy; else its gradients add up until `step` is
            called with `steps_rollout_model`.
        ess_scaling: key of `EFFECTIVE_SHARES`: the policy's learning rate is multiplied by the square root of that, as
            by VCPO, arXiv 2602.17616 (mit-han-lab/vcpo, verl/workers/actor/megatron_actor.py, commit c7f030f), which
            takes that of responses. None: it is not.
    """

    def __init__(
        self,
        optimizers: Mapping[Role, ModelOptimizer],
        *,
        regularized: bool,
        rollout_model_each_step: bool,
        ess_scaling: str | None = None,
    ) -> None:
        self._optimizers: dict[Role, ModelOptimizer] = dict(optimizers)
        self._regularized = regularized
        self._share = EFFECTIVE_SHARES[ess_scaling] if ess_scaling else None
        self._accumulator: GradientAccumulator | None = None
        if "rollout_model" in optimizers and not rollout_model_each_step:
            self._accumulator = GradientAccumulator(optimizers["rollout_model"])

    def steps(self, role: Role) -> int:
        """Return the number of steps that a model has taken; 0 for one that is not trained."""
        return self._optimizers[role].steps if role in self._optimizers else 0

    def step(
        self, sums: Sums, *, sampled_tokens: Tensor, steps_rollout_model: bool
    ) -> tuple[Sums, tuple[dict[str, Any], ...]]:
        """Step the models on the gradients in their parameters, which are gone after it.

        Whether they step follows from the advantages in `sums`, the tokens and the norms of all gradients, which the
        host reads in one transfer.

        Args:
            sums: metrics of the optimizer step over all micro-batches and ranks, on the device; the count of
                `ROLE/loss` is the denominator of the model's gradient. A model without it has no gradient and stays.
            sampled_tokens: of the optimizer step, a scalar over all ranks; without any no model steps.
            steps_rollout_model: False to add its gradient up further, where the rollout model does not step each time.

        Returns:
            `sums` and the metrics of the step, on the CPU, and an event for every model that was skipped.
        """
        trained: list[Role] = [role for role in self._optimizers if f"{role}/loss" in sums]
        totals: dict[Role, Tensor] = {role: Mean.named(sums, f"{role}/loss").count for role in trained}
        counts = dict(totals)
        if self._accumulator:
            counts.pop("rollout_model", None)
        norms = {role: self._prepare(role, count) for role, count in counts.items()}
        is_finite = torch.stack([norm.isfinite() for norm in norms.values()]).all()

        if self._accumulator and "rollout_model" in totals:
            is_finite = self._accumulator.add(totals["rollout_model"], is_finite)
            if steps_rollout_model:
                counts["rollout_model"] = self._accumulator.pop()
                norms["rollout_model"] = self._prepare("rollout_model", counts["rollout_model"])

        reading: Sums = {f"{role}/grad_norm": Mean.number(gradient_norm) for role, gradient_norm in norms.items()}
        reading |= {f"{role}/denominator": Sum.number(count) for role, count in counts.items()}
        reading["tokens"] = Sum.number(sampled_tokens)
        metrics = to_host({**sums, **reading, "health/non_finite_steps": Sum.of(~is_finite)})
        denominators = {role: float(metrics.pop(f"{role}/denominator").value) for role in counts}
        tokens = float(metrics.pop("tokens").value)
        metrics |= split_numbers(metrics)

        events = []
        for role in counts:
            optimizer, scale = self._optimizers[role], 1.0
            why = self._reason_to_skip(role, metrics, tokens, denominators[role])
            if role == "policy" and self._share and not why:
                share = float(self._share(metrics))  # NaN where no sample has a weight
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
        """Return the state of every optimizer by role, without its moments; None for a model that is not trained."""
        roles: tuple[Role, ...] = ("policy", "rollout_model", "critic")
        return {role: self._optimizers[role].state_dict() if role in self._optimizers else None for role in roles}

    def moments(self) -> Iterator[tuple[Role, Iterator[tuple[str, Tensor]]]]:
        """Yield the moments of every model that is trained, by role."""
        return ((role, optimizer.moments()) for role, optimizer in self._optimizers.items())

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Continue from what `state_dict` returned, and the moments in the parts of `folder`.

        Raises:
            CheckpointError: they cannot be read, or are not those of the models.
        """
        for role, optimizer in self._optimizers.items():
            with read_parts(folder, role) as moments:
                optimizer.load_state_dict(state[role], moments)

    def _prepare(self, role: Role, count: Tensor) -> Tensor:
        """Make a gradient the mean over all ranks, clip it, and return its norm before that."""
        self._optimizers[role].reduce(count)
        return self._optimizers[role].clip().to(count.device)

    def _reason_to_skip(self, role: Role, metrics: Sums, tokens: float, count: float) -> str | None:
        """Say why a model does not step; None where it does. `count` is the denominator of its gradient.

        AdamW would move the weights by its momentum even on a zero gradient.
        """
        accumulates = role == "rollout_model" and self._accumulator is not None  # it holds finite gradients only
        if metrics["health/non_finite_steps"].value > 0 and not accumulates:
            return NON_FINITE
        if (count if accumulates else tokens) == 0:
            return "no token"
        if role == "policy" and not self._regularized:
            if not metrics["policy/largest_advantage"].value > 0:
                return "all groups have equal rewards"
            if not metrics["policy/largest_kept_advantage"].value > 0:
                return "all tokens with an advantage were rejected"
        return "the gradient is zero" if metrics[f"{role}/grad_norm"].value == 0.0 else None


class GradientAccumulator:
    """Adds up the rollout model's gradient over several optimizer steps, for `rollout_model.update: iteration`."""

    def __init__(self, optimizer: ModelOptimizer) -> None:
        self._parameters = optimizer.parameters
        self._saved: list[Tensor] = []  # none before the first step
        self._count = torch.zeros((), dtype=torch.float64)

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
        count = self._count
        self._saved = []
        self._count = torch.zeros((), dtype=torch.float64)
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
    if f"{_SPLIT}/ppo" not in sums:
        return {}
    ppo, distill, product = (float(sums.pop(f"{_SPLIT}/{name}").value) for name in ("ppo", "distill", "product"))
    count = float(Mean.named(sums, "rollout_model/loss").count) or 1.0
    both = math.sqrt(ppo) * math.sqrt(distill)
    values = {
        "rollout_model/ppo_grad_norm": math.sqrt(ppo) / count,
        "rollout_model/distill_grad_norm": math.sqrt(distill) / count,
        "rollout_model/grad_cosine": product / both if both else math.nan,
    }
    return {name: Mean.number(value) for name, value in values.items() if math.isfinite(value)}


LARGEST_ERROR = 0.2  # relative error that one step reacts to


def next_distill_weight(control: DistillControlConfig, weight: float, *, kl: float, acceptance: float) -> float:
    """Return the weight of the next step, from what was measured in this one. It changes by a factor

        1 + clip((measured - target) / target, -0.2, 0.2) / horizon

    (arXiv 1909.08593, section 2.2). For the acceptance both are the shares rejected, 1 - a, which more distillation
    lowers as it lowers the KL.

    Args:
        weight: of this step.
        kl: KL(policy || rollout model) in this step, over all micro-batches and ranks, so that all ranks return the
            same.
        acceptance: of what the rollout model sampled, in the same way.

    Returns:
        A weight from `control.low` to `control.high`; `weight` itself where what decides is not finite.
    """
    measured, target = (kl, control.target) if control.metric == "kl" else (1.0 - acceptance, 1.0 - control.target)
    if not math.isfinite(measured):
        return weight
    error = min(max((measured - target) / target, -LARGEST_ERROR), LARGEST_ERROR)
    return min(max(weight * (1.0 + error / control.horizon), control.low), control.high)
