"""The joint optimizer steps policy, critic and rollout model on their accumulated gradients."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jackpot.core.metrics import Mean, Sum, Sums
from jackpot.core.types import Role
from jackpot.training.gradients import GradientAccumulator, GradientDecomposition
from jackpot.training.optimizer import ModelOptimizer

NON_FINITE = "non-finite gradient"


class JointOptimizer:
    """Divides, clips and applies the gradients of all trained models, or skips a model and says why.

    A non-finite gradient of one model skips all of them. Gradients arrive as sums over micro-batches; they are summed
    over ranks and divided once, by denominators that cover the whole optimizer step.

    Args:
        optimizers: of `policy`, and of `critic` and `rollout_model` where these are trained.
        regularized: the policy has a gradient even where all advantages are 0.
        rollout_model_each_step: the rollout model steps with the policy; else its gradients add up until `step` is
            called with `steps_rollout_model`.
    """

    def __init__(
        self, optimizers: Mapping[Role, ModelOptimizer], *, regularized: bool, rollout_model_each_step: bool
    ) -> None:
        self._optimizers, self._regularized = dict(optimizers), regularized
        rollout_model = self._optimizers.get("rollout_model")
        self._decomposition = GradientDecomposition(rollout_model) if rollout_model else None
        waits = rollout_model is not None and not rollout_model_each_step
        self._accumulator = GradientAccumulator(rollout_model) if waits else None

    def steps(self, role: Role) -> int:
        """Return the number of steps that a model has taken; 0 for one that is not trained."""
        return self._optimizers[role].steps if role in self._optimizers else 0

    def decompose(self, rollout_model_ppo: Tensor, wanted: bool) -> None:
        """Split off the gradient of the rollout model's PPO loss, where `wanted`; before the backward pass."""
        if self._decomposition:
            self._decomposition.add(rollout_model_ppo, wanted)

    def step(self, sums: Sums, steps_rollout_model: bool) -> tuple[Sums, tuple[dict[str, Any], ...]]:
        """Step the models on the gradients in their parameters, which are gone after it.

        Args:
            sums: metrics of the optimizer step over all micro-batches and ranks; the count of `ROLE/loss` is the
                denominator of the model's gradient.
            steps_rollout_model: False to add its gradient up further, where the rollout model does not step each time.

        Returns:
            Metrics of the step, and an event for every model that was skipped.
        """
        active = {
            role: one for role, one in self._optimizers.items() if role != "rollout_model" or not self._accumulator
        }
        counts = {role: float(sums[f"{role}/loss"].count) for role in active}
        metrics: Sums = {}
        norms = {role: self._prepare(role, counts[role], metrics) for role in active}
        is_finite = all(norm < float("inf") for norm in norms.values())
        if self._accumulator:
            is_finite = self._accumulator.add(float(sums["rollout_model/loss"].count), is_finite)
            if steps_rollout_model:
                active["rollout_model"] = self._optimizers["rollout_model"]
                counts["rollout_model"] = self._accumulator.pop()
                norms["rollout_model"] = self._prepare("rollout_model", counts["rollout_model"], metrics)
        skipped = {}
        for role, optimizer in active.items():
            why = self._reason_to_skip(role, norms[role], sums, counts[role], is_finite)
            metrics[f"{role}/learning_rate"] = Mean.number(optimizer.learning_rate)
            metrics[f"{role}/skipped_steps"] = Mean.number(float(why is not None))
            if why:
                skipped[role] = why
                optimizer.discard()
            else:
                optimizer.step()
        metrics["health/non_finite_steps"] = Sum.number(float(not is_finite))
        return metrics, tuple({"event": "skipped_step", "model": role, "why": why} for role, why in skipped.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every optimizer by role; None for a model that is not trained."""
        roles: tuple[Role, ...] = ("policy", "rollout_model", "critic")
        return {role: self._optimizers[role].state_dict() if role in self._optimizers else None for role in roles}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for role, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state[role])

    def _prepare(self, role: Role, count: float, metrics: Sums) -> float:
        """Make a gradient the mean over all ranks, clip it, and return its norm before that; adds to `metrics`."""
        optimizer = self._optimizers[role]
        optimizer.reduce(count)
        if role == "rollout_model" and self._decomposition:
            metrics |= self._decomposition.measure(count)
        norm = optimizer.clip()
        metrics[f"{role}/grad_norm"] = Mean.number(norm)
        return norm

    def _reason_to_skip(self, role: Role, norm: float, sums: Sums, count: float, is_finite: bool) -> str | None:
        """Say why a model does not step; None where it does.

        AdamW would move the weights by its momentum even on a zero gradient.
        """
        accumulates = role == "rollout_model" and self._accumulator is not None  # it holds finite gradients only
        if not is_finite and not accumulates:
            return NON_FINITE
        if (count if accumulates else float(sums["obrs/acceptance"].count)) == 0:
            return "no token"
        if role == "policy" and not self._regularized:
            if not sums["policy/largest_advantage"].value > 0:
                return "all groups have equal rewards"
            if not sums["policy/largest_kept_advantage"].value > 0:
                return "all tokens with an advantage were rejected"
        return "the gradient is zero" if norm == 0.0 else None
