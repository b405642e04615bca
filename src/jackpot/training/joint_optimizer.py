"""The joint optimizer steps policy, critic and rollout model on their accumulated gradients."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackpot.core.metrics import Mean, Sum, Sums, to_host
from jackpot.core.roles import Role
from jackpot.models.parts import read_parts
from jackpot.training.gradients import GradientAccumulator, split_numbers
from jackpot.training.optimizer import ModelOptimizer

NON_FINITE = "non-finite gradient"

# The effective sample size of an optimizer step, over all ranks, as a share of its samples, in (0, 1]: by name of
# `policy.ess_scaling`.
EFFECTIVE_SHARES: dict[str, Callable[[Sums], Tensor]] = {
    "response": lambda sums: sums["mismatch/sequence_ess"].value,
    "token": lambda sums: sums["correction/weight"].effective_share,
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
        self._optimizers, self._regularized = dict(optimizers), regularized
        self._share = EFFECTIVE_SHARES[ess_scaling] if ess_scaling else None
        rollout_model = self._optimizers.get("rollout_model")
        waits = rollout_model is not None and not rollout_model_each_step
        self._accumulator = GradientAccumulator(rollout_model) if waits else None

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
        trained = [role for role in self._optimizers if f"{role}/loss" in sums]
        active = [role for role in trained if role != "rollout_model" or not self._accumulator]
        counts = {role: sums[f"{role}/loss"].count for role in active}
        norms = {role: self._prepare(role, counts[role]) for role in active}
        is_finite = torch.stack([norm.isfinite() for norm in norms.values()]).all()
        if self._accumulator and "rollout_model" in trained:
            is_finite = self._accumulator.add(sums["rollout_model/loss"].count, is_finite)
            if steps_rollout_model:
                active.append("rollout_model")
                counts["rollout_model"] = self._accumulator.pop()
                norms["rollout_model"] = self._prepare("rollout_model", counts["rollout_model"])
        reading = {f"{role}/grad_norm": Mean.number(norms[role]) for role in active}
        reading |= {f"{role}/denominator": Sum.number(counts[role]) for role in active}
        reading["tokens"] = Sum.number(sampled_tokens)
        metrics = to_host({**sums, **reading, "health/non_finite_steps": Sum.of(~is_finite)})
        denominators = {role: float(metrics.pop(f"{role}/denominator").total) for role in active}
        tokens = float(metrics.pop("tokens").total)
        metrics |= split_numbers(metrics)
        events = []
        for role in active:
            optimizer, why = self._optimizers[role], self._reason_to_skip(role, metrics, tokens, denominators[role])
            scale = 1.0
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
        if metrics["health/non_finite_steps"].total > 0 and not accumulates:
            return NON_FINITE
        if (count if accumulates else tokens) == 0:
            return "no token"
        if role == "policy" and not self._regularized:
            if not metrics["policy/largest_advantage"].largest > 0:
                return "all groups have equal rewards"
            if not metrics["policy/largest_kept_advantage"].largest > 0:
                return "all tokens with an advantage were rejected"
        return "the gradient is zero" if metrics[f"{role}/grad_norm"].total == 0.0 else None
