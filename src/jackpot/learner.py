"""One optimizer step on both models: measure, all-reduce, apply, backward, step. Layer 4.

The objective is pure and lives in `objectives.joint`; here are the forward passes, the sums over micro-batches and
ranks, and the two optimizers. An accumulated step equals the step on the whole batch: gradients are summed as
numerators and divided once by denominators that cover all micro-batches and ranks, before clipping.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.models.forward import logit_softcap, output_layer, response_hidden
from jackpot.models.lora import merged_weights, save_model
from jackpot.objectives.joint import (
    Anchor,
    PolicyObjective,
    RolloutModelObjective,
    TokenScores,
    anchor_of,
    correction_inputs,
    joint_loss,
    token_scores,
)
from jackpot.ops.linear_head import LinearHead
from jackpot.ops.obrs import ZEstimate
from jackpot.ops.reduce import Mean, Sums, add_sums, all_reduce_sums
from jackpot.optimizer import ModelOptimizer
from jackpot.types import Role, TokenBatch, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Tokens, and their anchor unless this is the first update on them: then the training forward pass is the
    anchor."""

    tokens: TokenBatch
    anchor: Anchor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step has to say."""

    metrics: Sums
    events: tuple[dict[str, Any], ...]  # skipped steps and why
    traces: dict[str, dict[str, Tensor]]  # by rollout uid: per-token columns [T] and [T, K]


class Learner(ABC):
    """Trains the policy and, where there is one, the rollout model."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """Optimizer steps that each model has taken."""

    @abstractmethod
    def anchor(self, steps: Sequence[Sequence[TokenBatch]]) -> list[list[MicroBatch]]:
        """All optimizer steps on one rollout batch, anchored where a later update could move the old policy.

        One step needs no anchor. Several cost one forward pass without gradient over the rollout batch.
        """

    @abstractmethod
    def update(self, micro_batches: Sequence[MicroBatch], trace: bool = True) -> StepResult:
        """One optimizer step of both models; `trace` False leaves out the per-token columns, which nobody may want.

        Raises:
            ValueError: no micro-batch.
        """

    @abstractmethod
    def weights(self, role: Role) -> Iterable[tuple[str, Tensor]]:
        """The current weights of a model by name, tied ones once, an adapter merged in. The rollout model is the policy
        where there is none."""

    @abstractmethod
    def save_model(self, role: Role, folder: Path) -> None:
        """Write a plain `save_pretrained` folder, an adapter merged in and once more by itself in `adapter/`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: optimizers, versions, running sums; loadable with `weights_only`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class JointLearner(Learner):
    """Both models in this process, on one device; several ranks sum their gradients.

    Args:
        policy: trained in place; fp32 weights.
        rollout_model: trained in place where it has an optimizer, only scored where it has none (frozen); None where
            the policy writes for itself.
        objective, rollout_model_objective: eq. 8; the second is None unless the rollout model has an optimizer.
        temperature: of the sampling; every log-prob here uses it.
        num_top_log_probs: K of the policy's own top-k.
        max_length: the sampling limit on response tokens, for `aggregate: constant`.
        faithful: the engine samples from the weights it is sent, neither quantised nor truncated, so that a forward
            pass of the rollout model can stand in for p_inf.
        autocast: dtype of the forward pass; None for the weights' own.
    """

    def __init__(
        self,
        *,
        policy: PreTrainedModel,
        policy_optimizer: ModelOptimizer,
        rollout_model: PreTrainedModel | None,
        rollout_model_optimizer: ModelOptimizer | None,
        objective: PolicyObjective,
        rollout_model_objective: RolloutModelObjective | None,
        temperature: float,
        num_top_log_probs: int,
        max_length: int,
        faithful: bool,
        autocast: torch.dtype | None,
    ) -> None:
        self._models: dict[Role, PreTrainedModel] = {"policy": policy, "rollout_model": rollout_model or policy}
        self._separate = rollout_model is not None
        self._policy_optimizer, self._rollout_optimizer = policy_optimizer, rollout_model_optimizer
        self._objective, self._rollout_objective = objective, rollout_model_objective
        self._temperature, self._top, self._max_length = temperature, num_top_log_probs, max_length
        self._faithful, self._autocast = faithful, autocast
        self._previous: Sums = {}
        self._head = LinearHead(
            output_layer(policy),
            output_layer(rollout_model) if rollout_model else None,
            policy_soft_cap=logit_softcap(policy),
            rollout_model_soft_cap=logit_softcap(rollout_model) if rollout_model else None,
        )
        for model in self._models.values():
            model.eval()  # no dropout: old and current log-probs of equal weights are equal
        if rollout_model is not None and rollout_model_optimizer is None:
            rollout_model.requires_grad_(False)

    @property
    def version(self) -> Version:
        policy = self._policy_optimizer.steps
        if not self._separate:
            return Version(policy, policy)
        return Version(policy, self._rollout_optimizer.steps if self._rollout_optimizer else 0)

    def anchor(self, steps: Sequence[Sequence[TokenBatch]]) -> list[list[MicroBatch]]:
        if len(steps) == 1:
            return [[MicroBatch(tokens=batch, anchor=None) for batch in steps[0]]]
        rows: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for batch in (batch for step in steps for batch in step):
                if not rows.keys() >= set(batch.uids):
                    rows |= _by_rollout(batch, _columns(anchor_of(self._scores(self._to_device(batch)))))
        return [[MicroBatch(tokens=batch, anchor=_from_rows(batch, rows)) for batch in step] for step in steps]

    def update(self, micro_batches: Sequence[MicroBatch], trace: bool = True) -> StepResult:
        if not micro_batches:
            raise ValueError("update got no micro-batch; an optimizer step needs at least one")
        micro_batches = [replace(micro, tokens=self._to_device(micro.tokens)) for micro in micro_batches]
        totals, prepass_seconds = self._totals(micro_batches)
        traces: dict[str, dict[str, Tensor]] = {}
        sums: Sums = {}
        measured: Sums = {}
        for micro in micro_batches:
            scores = self._scores(micro.tokens, micro.anchor)
            anchor = micro.anchor or anchor_of(scores)
            measured = add_sums(measured, self._measure(micro.tokens, anchor, scores.log_probs, scores.z))
            if totals is None:  # the only micro-batch: its own forward pass is the whole step's
                totals = all_reduce_sums(measured)
            loss = joint_loss(
                self._objective, self._rollout_objective, micro.tokens, scores, anchor, totals, self._max_length
            )
            (loss.policy + loss.rollout_model).backward()
            sums = add_sums(sums, loss.metrics)
            if trace:
                traces |= _by_rollout(micro.tokens, {name: column.cpu() for name, column in loss.trace.items()})
        sums = all_reduce_sums(add_sums(sums, {f"obrs/{name}": entry for name, entry in measured.items()}))
        self._previous = {name: sums[f"obrs/{name}"] for name in measured}
        step_metrics, events = self._step(sums)
        step_metrics["seconds/prepass"] = _number(prepass_seconds)
        return StepResult(metrics=sums | step_metrics, events=events, traces=traces)

    def weights(self, role: Role) -> Iterable[tuple[str, Tensor]]:
        return merged_weights(self._models[role])

    def save_model(self, role: Role, folder: Path) -> None:
        save_model(self._models[role], folder)

    def state_dict(self) -> dict[str, Any]:
        rollout = self._rollout_optimizer
        return {
            "policy": self._policy_optimizer.state_dict(),
            "rollout_model": rollout.state_dict() if rollout else None,
            "previous": {name: list(entry) for name, entry in self._previous.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._policy_optimizer.load_state_dict(state["policy"])
        if self._rollout_optimizer:
            self._rollout_optimizer.load_state_dict(state["rollout_model"])
        self._previous = {name: Mean(*entry) for name, entry in state["previous"].items()}

    def _totals(self, micro_batches: Sequence[MicroBatch]) -> tuple[Sums | None, float]:
        """The sums that the correction wants to know before the first backward pass, and the seconds they cost.

        None where the only micro-batch will give them itself. With `target: old` and anchors they are free; else it
        takes one more forward pass without gradient (`kappa: prepass`).
        """
        wanted = self._objective.correction.totals
        if wanted != "prepass":
            return (self._previous if wanted == "previous" else {}), 0.0
        if len(micro_batches) == 1:
            return None, 0.0
        started = time.perf_counter()
        totals: Sums = {}
        with torch.no_grad():
            for micro in micro_batches:
                anchor = micro.anchor
                if self._anchored(anchor):
                    measured = self._measure(micro.tokens, anchor, anchor.old_log_probs, anchor.z)
                else:
                    scores = self._scores(micro.tokens, anchor)
                    measured = self._measure(micro.tokens, anchor or anchor_of(scores), scores.log_probs, scores.z)
                totals = add_sums(totals, measured)
        return all_reduce_sums(totals), time.perf_counter() - started

    def _measure(self, batch: TokenBatch, anchor: Anchor, log_probs: Tensor, z: ZEstimate) -> Sums:
        inputs = correction_inputs(self._objective, batch, anchor, log_probs, z)
        return self._objective.correction.measure(inputs)

    def _anchored(self, anchor: Anchor | None) -> bool:
        """Whether acceptance and Z are those of the anchor, whatever the policy is by now."""
        return anchor is not None and self._objective.target == "old"

    def _scores(self, batch: TokenBatch, anchor: Anchor | None = None) -> TokenScores:
        """One forward pass of both models over a micro-batch, through the joint head.

        Where the anchor's Z is the one in use, the exact Z of now is not asked for: the writing weights may be gone.
        """
        mask = batch.response_mask
        with torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext():
            hidden = {role: response_hidden(model, batch)[mask] for role, model in self._separate_models()}
            head = self._head(
                hidden["policy"],
                hidden.get("rollout_model"),
                batch.response_ids[mask],
                temperature=self._temperature,
                lam=self._objective.correction.lam,
                num_top=self._top,
                gather_ids=batch.top_ids[mask],
            )
        distill = self._rollout_objective.distill if self._rollout_objective else None
        lam = self._objective.correction.lam
        normalizer = "topk" if self._anchored(anchor) else self._objective.normalizer
        return token_scores(head, batch, self._writer_is_current(batch), lam, normalizer, distill)

    def _separate_models(self) -> list[tuple[Role, PreTrainedModel]]:
        return list(self._models.items()) if self._separate else [("policy", self._models["policy"])]

    def _writer_is_current(self, batch: TokenBatch) -> Tensor:
        """[B, T] bool: the rollout model in training is the distribution that the token was sampled from."""
        return (batch.versions[..., 1] == self.version.rollout_model) & self._faithful

    @property
    def _device(self) -> torch.device:
        return self._models["policy"].device

    def _to_device(self, batch: TokenBatch) -> TokenBatch:
        tensors = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "uids"}
        return replace(batch, **{name: tensor.to(self._device) for name, tensor in tensors.items()})

    def _step(self, sums: Sums) -> tuple[Sums, tuple[dict[str, Any], ...]]:
        """Divide, clip and step both optimizers, or say why not. A non-finite gradient skips both models."""
        optimizers = {"policy": self._policy_optimizer}
        if self._rollout_optimizer:
            optimizers["rollout_model"] = self._rollout_optimizer
        norms = {role: optimizer.prepare(float(sums[f"{role}/loss"].count)) for role, optimizer in optimizers.items()}
        metrics: Sums = {f"{role}/grad_norm": _number(norm) for role, norm in norms.items()}
        skipped = {role: reason for role in optimizers if (reason := _reason_to_skip(role, norms, sums))}
        for role, optimizer in optimizers.items():
            metrics[f"{role}/learning_rate"] = _number(optimizer.learning_rate)
            metrics[f"{role}/skipped_steps"] = _number(float(role in skipped))
            if role in skipped:
                optimizer.discard()
            else:
                optimizer.step()
        return metrics, tuple({"event": "skipped_step", "model": role, "why": why} for role, why in skipped.items())


def _reason_to_skip(role: str, norms: dict[str, float], sums: Sums) -> str | None:
    """Why a model's step is not taken. AdamW would move the weights by its momentum even on a zero gradient."""
    if not all(norm < float("inf") for norm in norms.values()):
        return "non-finite gradient"
    if sums["obrs/acceptance"].count == 0:
        return "no token"
    if role == "policy" and not sums["policy/largest_advantage"].value > 0:
        return "all groups have equal rewards"
    if role == "policy" and not sums["policy/largest_kept_advantage"].value > 0:
        return "all tokens with an advantage were rejected"
    if norms[role] == 0.0:
        return "the gradient is zero"
    return None


def _number(value: float) -> Mean:
    value = torch.tensor(value, dtype=torch.float64)
    return Mean(value, value.square(), torch.ones_like(value))


def _by_rollout(batch: TokenBatch, columns: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Columns [B, T, ...] as one row without padding, [T_i, ...], for every rollout uid."""
    lengths = batch.attention_mask.sum(-1).tolist()
    return {
        uid: {name: tensor[row, :length] for name, tensor in columns.items()}
        for row, (uid, length) in enumerate(zip(batch.uids, lengths, strict=True))
    }


def _columns(anchor: Anchor) -> dict[str, Tensor]:
    return {
        "old_log_probs": anchor.old_log_probs,
        "rollout_model_old_log_probs": anchor.rollout_model_old_log_probs,
        **anchor.z._asdict(),
    }


def _from_rows(batch: TokenBatch, rows: dict[str, dict[str, Tensor]]) -> Anchor:
    """The anchor of a micro-batch: in a later epoch it holds other rollouts together than the one that was scored."""
    mine = [rows[uid] for uid in batch.uids]
    padded = {name: pad_sequence([row[name] for row in mine], batch_first=True) for name in mine[0]}
    z = ZEstimate(**{name: padded.pop(name) for name in ZEstimate._fields})
    return Anchor(z=z, **padded)
