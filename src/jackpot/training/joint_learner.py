"""One optimizer step on both models: measure, all-reduce, apply, backward, step.

The objective is pure and lives in `objectives.joint`; here are the forward passes, the sums over micro-batches and
ranks, and the two optimizers. An accumulated step equals the step on the whole batch: gradients are summed as
numerators and divided once by denominators that cover all micro-batches and ranks, before clipping.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.config.run import Sampling
from jackpot.core.errors import CheckpointError
from jackpot.core.metrics import Max, Mean, Sum, Sums, add_sums, all_reduce_sums
from jackpot.core.types import Role, ScoredRollout, TokenBatch, TrainingSample, Version
from jackpot.models.forward import logit_softcap, output_layer, response_hidden
from jackpot.models.lora import merged_weights, save_model
from jackpot.models.scoring import token_log_probs
from jackpot.objectives.joint import (
    OldLogProbs,
    PolicyObjective,
    RolloutModelObjective,
    TokenScores,
    correction_inputs,
    joint_loss,
    token_scores,
)
from jackpot.objectives.kernels.linear_head import LinearHead
from jackpot.objectives.obrs import ZEstimate
from jackpot.training.advantages import response_advantages
from jackpot.training.batching import batch_to
from jackpot.training.critic import Critic
from jackpot.training.gradients import GradientBank, GradientParts
from jackpot.training.learner import Learner, StepResult
from jackpot.training.optimizer import ModelOptimizer
from jackpot.training.reference import Reference


def by_rollout(batch: TokenBatch, columns: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Columns [B, T, ...] as one row without padding, [T_i, ...], for every rollout uid."""
    lengths = batch.attention_mask.sum(-1).tolist()
    return {
        uid: {name: tensor[row, :length] for name, tensor in columns.items()}
        for row, (uid, length) in enumerate(zip(batch.uids, lengths, strict=True))
    }


def anchor_columns(anchor: OldLogProbs) -> dict[str, Tensor]:
    return {
        "old_log_probs": anchor.old_log_probs,
        "rollout_model_old_log_probs": anchor.rollout_model_old_log_probs,
        **anchor.z._asdict(),
    }


def anchor_from_rows(batch: TokenBatch, rows: dict[str, dict[str, Tensor]]) -> OldLogProbs:
    """The anchor of a micro-batch: in a later epoch it holds other rollouts together than the one that was scored."""
    mine = [rows[uid] for uid in batch.uids]
    padded = {name: pad_sequence([row[name] for row in mine], batch_first=True) for name in mine[0]}
    z = ZEstimate(**{name: padded.pop(name) for name in ZEstimate._fields})
    return OldLogProbs(z=z, **padded)


NON_FINITE = "non-finite gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Tokens, and their anchor unless this is the first update on them: then the training forward pass is the
    anchor."""

    tokens: TokenBatch
    anchor: OldLogProbs | None


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
        faithful: the engine samples from the weights it is sent, neither quantized nor truncated, so that a forward
            pass of the rollout model can stand in for p_inf.
        autocast: dtype of the forward pass; None for the weights' own.
        rollout_model_each_step: the rollout model steps with the policy; else once for each rollout batch, on the
            gradient of all its steps.
        advantage: key of `objectives.advantages.ADVANTAGES`; a critic takes its place.
        critic: of PPO; None for advantages that the rewards alone give.
        reference: that the objective's `kl_loss_coef` pulls towards; None for none.
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
        advantage: str,
        rollout_model_each_step: bool = True,
        critic: Critic | None = None,
        reference: Reference | None = None,
    ) -> None:
        self._models: dict[Role, PreTrainedModel] = {"policy": policy, "rollout_model": rollout_model or policy}
        self._separate = rollout_model is not None
        self._policy_optimizer, self._rollout_optimizer = policy_optimizer, rollout_model_optimizer
        self._objective, self._rollout_objective = objective, rollout_model_objective
        self._temperature, self._top, self._max_length = temperature, num_top_log_probs, max_length
        self._faithful, self._autocast = faithful, autocast
        self._rollout_model_each_step = rollout_model_each_step
        self._advantage, self._critic, self._reference = advantage, critic, reference
        self._parts = GradientParts(rollout_model_optimizer) if rollout_model_optimizer else None
        waits = rollout_model_optimizer is not None and not rollout_model_each_step
        self._bank = GradientBank(rollout_model_optimizer) if waits else None
        self._previous: Sums = {}
        self._anchored_at = Version(0, 0)
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

    def compute_advantages(self, scored: Sequence[ScoredRollout]) -> list[TrainingSample]:
        if self._critic:
            return self._critic.compute_advantages(scored, self._precision())
        return response_advantages(self._advantage, scored)

    def train(self, steps: Sequence[Sequence[TokenBatch]], trace: bool) -> list[StepResult]:
        anchored, last = self.anchor(steps), len(steps) - 1
        return [
            self.update(micro_batches, trace, self._rollout_model_each_step or index == last)
            for index, micro_batches in enumerate(anchored)
        ]

    def anchor(self, steps: Sequence[Sequence[TokenBatch]]) -> list[list[MicroBatch]]:
        """All optimizer steps on one rollout batch, anchored where a later update could move the old policy.

        One step needs no anchor. Several cost one forward pass without gradient over the rollout batch.
        """
        self._anchored_at = self.version
        if len(steps) == 1:
            return [[MicroBatch(tokens=batch, anchor=None) for batch in steps[0]]]
        rows: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for batch in (batch for step in steps for batch in step):
                if not rows.keys() >= set(batch.uids):
                    rows |= by_rollout(
                        batch, anchor_columns(OldLogProbs.of(self._scores(batch_to(batch, self._device))))
                    )
        return [[MicroBatch(tokens=batch, anchor=anchor_from_rows(batch, rows)) for batch in step] for step in steps]

    def update(
        self, micro_batches: Sequence[MicroBatch], trace: bool = True, steps_rollout_model: bool = True
    ) -> StepResult:
        """One optimizer step of policy and critic; of the rollout model too unless its gradient is to add up further.

        Raises:
            ValueError: no micro-batch.
        """
        if not micro_batches:
            raise ValueError("update got no micro-batch; an optimizer step needs at least one")
        micro_batches = [replace(micro, tokens=batch_to(micro.tokens, self._device)) for micro in micro_batches]
        totals, prepass_seconds = self._totals(micro_batches)
        traces: dict[str, dict[str, Tensor]] = {}
        sums: Sums = {}
        measured: Sums = {}
        for micro in micro_batches:
            scores = self._scores(micro.tokens, micro.anchor, with_reference=True)
            anchor = micro.anchor or OldLogProbs.of(scores)
            measured = add_sums(measured, self._measure(micro.tokens, anchor, scores.log_probs, scores.z))
            if totals is None:  # the only micro-batch: its own forward pass is the whole step's
                totals = all_reduce_sums(measured)
            loss = joint_loss(
                self._objective, self._rollout_objective, micro.tokens, scores, anchor, totals, self._max_length
            )
            if self._parts:
                self._parts.add(loss.rollout_model_ppo, trace)
            (loss.policy + loss.rollout_model).backward()
            about_engine = self._engine_gap(micro, anchor) | self._lag(micro.tokens)
            sums = add_sums(sums, loss.metrics | about_engine | self._critic_backward(micro.tokens))
            if trace:
                traces |= by_rollout(micro.tokens, {name: column.cpu() for name, column in loss.trace.items()})
        sums = all_reduce_sums(add_sums(sums, {f"obrs/{name}": entry for name, entry in measured.items()}))
        if sums["obrs/acceptance"].total.isfinite() and sums["obrs/z"].total > 0:
            self._previous = {name: sums[f"obrs/{name}"] for name in measured}
        step_metrics, events = self._step(sums, steps_rollout_model)
        step_metrics["seconds/prepass"] = Sum.number(prepass_seconds)
        return StepResult(metrics=sums | step_metrics, events=events, traces=traces)

    @torch.no_grad()
    def score(self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling) -> dict[str, Tensor]:
        model, scores = self._models[role], {}
        for batch in (batch_to(batch, self._device) for batch in batches):
            exists = batch.attention_mask
            with self._precision():
                hidden, ids = response_hidden(model, batch)[exists], batch.response_ids[exists]
                log_probs = token_log_probs(model, hidden, ids, sampling.temperature, sampling.top_k, sampling.top_p)
            spread = torch.zeros(exists.shape, device=self._device).masked_scatter(exists, log_probs)
            scores |= {uid: row["all"] for uid, row in by_rollout(batch, {"all": spread.cpu()}).items()}
        return scores

    def weights(self, role: Role) -> Iterable[tuple[str, Tensor]]:
        return merged_weights(self._models[role])

    def save_model(self, role: Role, folder: Path) -> None:
        model = self._critic.model if role == "critic" else self._models[role]
        save_model(model, folder)

    def state_dict(self) -> dict[str, Any]:
        rollout = self._rollout_optimizer
        return {
            "policy": self._policy_optimizer.state_dict(),
            "rollout_model": rollout.state_dict() if rollout else None,
            "critic": self._critic.optimizer.state_dict() if self._critic else None,
            "reference": self._reference.digest if self._reference else None,
            "previous": {name: list(entry) for name, entry in self._previous.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError where the reference is no longer the one that the run began with."""
        if self._reference and not self._reference.has_digest(state["reference"]):
            raise CheckpointError(
                "the weights of objective.reference are not those that the run began with; put the model back where "
                "objective.reference.path (or policy.path) leads, or begin a new run"
            )
        self._policy_optimizer.load_state_dict(state["policy"])
        if self._rollout_optimizer:
            self._rollout_optimizer.load_state_dict(state["rollout_model"])
        if self._critic:
            self._critic.optimizer.load_state_dict(state["critic"])
        self._previous = {name: Mean(*entry) for name, entry in state["previous"].items()}

    def _totals(self, micro_batches: Sequence[MicroBatch]) -> tuple[Sums | None, float]:
        """The sums that the correction wants to know before the first backward pass, and the seconds they cost.

        None where the only micro-batch will give them itself. With `target: old` and anchors they are free; else this
        step's take one more forward pass without gradient (`kappa: prepass`), which `auto` does at the first step and
        spares itself by the sums of the step before at every later one.
        """
        wanted = self._objective.correction.kappa
        is_free = len(micro_batches) == 1 or all(self._anchored(micro.anchor) for micro in micro_batches)
        if wanted == "auto":
            wanted = "previous" if self._previous and _on_any_rank(not is_free) else "prepass"
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
                    measured = self._measure(micro.tokens, anchor or OldLogProbs.of(scores), scores.log_probs, scores.z)
                totals = add_sums(totals, measured)
        return all_reduce_sums(totals), time.perf_counter() - started

    def _measure(self, batch: TokenBatch, anchor: OldLogProbs, log_probs: Tensor, z: ZEstimate) -> Sums:
        inputs = correction_inputs(self._objective, batch, anchor, log_probs, z)
        return self._objective.correction.measure(inputs)

    def _anchored(self, anchor: OldLogProbs | None) -> bool:
        """Whether acceptance and Z are those of the anchor, whatever the policy is by now."""
        return anchor is not None and self._objective.target == "old"

    def _scores(
        self, batch: TokenBatch, anchor: OldLogProbs | None = None, with_reference: bool = False
    ) -> TokenScores:
        """One forward pass of both models over a micro-batch, through the joint head.

        Where the anchor's Z is the one in use, the exact Z of now is not asked for: the writing weights may be gone.
        """
        mask, lam = batch.response_mask, self._objective.correction.lam
        normalizer = "topk" if self._anchored(anchor) else self._objective.normalizer
        with self._precision():
            hidden = {role: response_hidden(model, batch)[mask] for role, model in self._separate_models()}
            head = self._head(
                hidden["policy"],
                hidden.get("rollout_model"),
                batch.response_ids[mask],
                temperature=self._temperature,
                lam=lam if normalizer == "exact" else None,
                num_top=self._top,
                gather_ids=batch.top_ids[mask],
            )
            log_probs = head.policy.log_probs if self._separate else head.log_probs
            wanted = self._reference if with_reference else None
            reference_kl = wanted.kl(batch, hidden["policy"], log_probs) if wanted else None
        distill = self._rollout_objective.distill if self._rollout_objective else None
        return token_scores(head, batch, self._writer_is_current(batch), lam, normalizer, distill, reference_kl)

    def _critic_backward(self, batch: TokenBatch) -> Sums:
        """Add the critic's gradient on a micro-batch; its metrics."""
        if not self._critic:
            return {}
        with self._precision():
            loss, metrics = self._critic.loss(batch)
        loss.backward()
        return metrics

    def _engine_gap(self, micro: MicroBatch, anchor: OldLogProbs) -> Sums:
        """How far training is from the engine in probability, on tokens of the weights that the anchor came from."""
        batch, at = micro.tokens, self._anchored_at if micro.anchor else self.version
        gap = (anchor.rollout_model_old_log_probs.exp() - batch.rollout_log_probs.exp()).abs()
        own = batch.response_mask & (batch.versions[..., 1] == at.rollout_model)
        return {"mismatch/engine_gap": Mean.of(gap, own), "mismatch/engine_gap_max": Max.of(gap, own)}

    def _lag(self, batch: TokenBatch) -> Sums:
        """How many optimizer steps the models have gone on since each token was written."""
        sums: Sums = {}
        for role, now, then in zip(Version._fields, self.version, batch.versions.unbind(-1), strict=True):
            lag = (now - then).double()
            sums[f"lag/{role}"] = Mean.of(lag, batch.response_mask)
            sums[f"lag/{role}_max"] = Max.of(lag, batch.response_mask)
        return sums

    def _separate_models(self) -> list[tuple[Role, PreTrainedModel]]:
        return list(self._models.items()) if self._separate else [("policy", self._models["policy"])]

    def _writer_is_current(self, batch: TokenBatch) -> Tensor:
        """[B, T] bool: the rollout model in training is the distribution that the token was sampled from."""
        return (batch.versions[..., 1] == self.version.rollout_model) & self._faithful

    @property
    def _device(self) -> torch.device:
        return self._models["policy"].device

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext()

    def _step(self, sums: Sums, steps_rollout_model: bool) -> tuple[Sums, tuple[dict[str, Any], ...]]:
        """Divide, clip and step the optimizers, or say why not. A non-finite gradient skips all models."""
        optimizers: dict[str, ModelOptimizer] = {"policy": self._policy_optimizer}
        if self._critic:
            optimizers["critic"] = self._critic.optimizer
        if self._rollout_optimizer and not self._bank:
            optimizers["rollout_model"] = self._rollout_optimizer
        counts = {role: float(sums[f"{role}/loss"].count) for role in optimizers}
        metrics: Sums = {}
        norms = {role: self._prepare(role, optimizers[role], counts[role], metrics) for role in optimizers}
        is_finite = all(norm < float("inf") for norm in norms.values())
        if self._bank:
            is_finite = self._bank.close_step(float(sums["rollout_model/loss"].count), is_finite)
            if steps_rollout_model:
                optimizers["rollout_model"] = self._rollout_optimizer
                counts["rollout_model"] = self._bank.withdraw()
                norms["rollout_model"] = self._prepare(
                    "rollout_model", self._rollout_optimizer, counts["rollout_model"], metrics
                )
        skipped = {}
        for role, optimizer in optimizers.items():
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

    def _prepare(self, role: str, optimizer: ModelOptimizer, count: float, metrics: Sums) -> float:
        """Make the gradient the mean over all ranks and clip it; its norm before that, which `metrics` gets too."""
        optimizer.reduce(count)
        if role == "rollout_model" and self._parts:
            metrics |= self._parts.measure(count)
        norm = optimizer.clip()
        metrics[f"{role}/grad_norm"] = Mean.number(norm)
        return norm

    def _reason_to_skip(self, role: str, norm: float, sums: Sums, count: float, is_finite: bool) -> str | None:
        """Why a model's step is not taken. AdamW would move the weights by its momentum even on a zero gradient."""
        has_bank = role == "rollout_model" and self._bank is not None  # it holds the finite steps alone
        if not is_finite and not has_bank:
            return NON_FINITE
        if (count if has_bank else float(sums["obrs/acceptance"].count)) == 0:
            return "no token"
        if role == "policy" and not self._objective.is_regularized:
            if not sums["policy/largest_advantage"].value > 0:
                return "all groups have equal rewards"
            if not sums["policy/largest_kept_advantage"].value > 0:
                return "all tokens with an advantage were rejected"
        return "the gradient is zero" if norm == 0.0 else None


def _on_any_rank(happens: bool) -> bool:
    """The same answer on all ranks, which must take the same passes."""
    return bool(all_reduce_sums({"happens": Max.number(float(happens))})["happens"].value)
