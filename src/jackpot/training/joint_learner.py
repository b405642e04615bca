"""The joint learner, which trains policy and rollout model in one process or as one of several ranks.

Status: supported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.sampling import Sampling
from jackpot.core.errors import CheckpointError
from jackpot.core.files import cause_of, flushed_checksum
from jackpot.core.metrics import Mean, Sum, Sums, add_sums, all_reduce_sums
from jackpot.core.roles import Role
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample, Version
from jackpot.models.forward import can_pack
from jackpot.models.gathered import Gathered, gather
from jackpot.models.lora import merged_weights, model_writer
from jackpot.models.parts import WHOLE, Dealer, write_part
from jackpot.models.scoring import list_log_probs
from jackpot.objectives.joint import (
    OldLogProbs,
    PolicyObjective,
    RolloutModelObjective,
    joint_loss,
    measured_inputs,
    policy_report,
)
from jackpot.objectives.metrics import lag
from jackpot.training.advantages import Critic, response_advantages
from jackpot.training.gap_evidence import token_gaps
from jackpot.training.joint_forward import JointForward
from jackpot.training.joint_optimizer import GradientSplit, JointOptimizer, next_distill_weight
from jackpot.training.kappa import BeforeBackward, HiddenNorms, KappaRepair, PolicyPass, StepTotals
from jackpot.training.learner import Learner, StepResult, TrainResult
from jackpot.training.learner_options import LearnerOptions
from jackpot.training.old_policy import (
    KeptWeights,
    MicroBatch,
    OldPolicySnapshot,
    column_on_host,
    first_readings,
    rows_on_host,
)
from jackpot.training.optimizer import ModelOptimizer
from jackpot.training.reference import Reference

_MOMENTS = "moments"  # folder of the optimizers' moments in a checkpoint

GapColumns = list[tuple[TokenBatch, Tensor]]  # micro-batches, on the CPU, with the gaps of their tokens, on the device


@dataclass(frozen=True, kw_only=True, slots=True)
class _BackwardPass:
    """The results of a micro-batch's backward pass, beside the gradients."""

    policy: PolicyPass
    measured: Sums  # the micro-batch's part of the totals that the policy's correction needs, such as the sum of Z
    metrics: Sums  # all metrics of the micro-batch except those of `policy_report`, which need the final correction
    gaps: Tensor  # |p_engine - p_training| of each token, [B, T], as `token_gaps` returns it
    trace: dict[str, Tensor]  # per-token columns of saved rollouts


class JointLearner(Learner):
    """A learner that trains both models on one device; several ranks, each with a learner, sum their gradients.

    A step on several micro-batches equals a step on all their tokens at once: gradients are summed as numerators and
    divided once, before clipping, by denominators that cover all micro-batches and ranks.

    Ranks may hold shards of the models (`gathered`). Then all ranks make equal calls, with equally many micro-batches
    (`batching.deal`). `weights` gives the first rank whole tensors, and other ranks nothing. Each rank saves a part of
    the models; a checkpoint can be loaded by another number of ranks.

    Args:
        models: `policy`, with fp32 weights, and `rollout_model` unless the policy generates its own rollouts. Models
            with an optimizer are trained in place; a model without is frozen.
        optimizers: optimizers of the trained models.
        objective, rollout_model_objective: the losses of the two models, whose sum is eq. 8 of Jackpot, arXiv
            2602.06107; the second is None unless the rollout model is trained.
        options: further settings.
        critic: critic of PPO; None for advantages that need rewards alone.
        reference: reference model of the objective's `kl_loss_coef`; None without one.
        gathered: holder of all models, with critic and reference, where they are sharded over ranks; the parameters of
            the optimizers are then sharded too. None: this process holds whole models.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        optimizers: Mapping[Role, ModelOptimizer],
        objective: PolicyObjective,
        rollout_model_objective: RolloutModelObjective | None,
        options: LearnerOptions,
        *,
        critic: Critic | None = None,
        reference: Reference | None = None,
        gathered: Gathered | None = None,  # holds the models where they are sharded over ranks
    ) -> None:
        """Freeze the models without an optimizer; build the forward pass, the optimizer and the repair of gradients."""
        policy, rollout_model = models["policy"], models.get("rollout_model")
        self.models: dict[Role, PreTrainedModel] = {"policy": policy, "rollout_model": rollout_model or policy}
        self._objective = objective
        self._rollout_objective = rollout_model_objective
        self._options = options
        self.critic = critic
        self._gathered = gathered

        for role, model in self.models.items():
            model.eval()  # no dropout: old and current log-probs of equal weights are equal
            # Without a rollout model, `models` has the policy in both roles, and the second one must not freeze it.
            if role not in optimizers and (role == "policy" or rollout_model is not None):
                model.requires_grad_(False)

        self._optimizer = JointOptimizer(
            {**optimizers, **({"critic": critic.optimizer} if critic else {})},
            regularized=objective.is_regularized,
            rollout_model_each_step=options.rollout_model_each_step,
            ess_scaling=options.ess_scaling,
        )

        self._forward = JointForward(
            self.models,
            objective,
            distill=rollout_model_objective.distill if rollout_model_objective else None,
            options=options,
            version=partial(self._optimizer.version, has_rollout_model=rollout_model is not None),
            reference=reference,
            gathered=gathered,
        )

        # The sums from which OBRS's kappa is computed, and the repair of a gradient with the kappa of an earlier step.
        self._totals = StepTotals(objective)
        self._repair = KappaRepair(
            objective,
            parameters=[weight for weight in policy.parameters() if weight.requires_grad],
            log_probs=self._forward.policy_log_probs,
            max_length=options.max_length,
            pads=not can_pack(policy),
        )

        self._old_version = Version(policy=0, rollout_model=0)  # version of the weights that gave the old log-probs
        self._kept_weights: dict[Role, KeptWeights] = {}  # by model, the copy that `keep_weights` made
        # True where the rollout model's distillation is the only loss: no term needs the old policy.
        self._only_distils = "policy" not in optimizers and not (
            rollout_model_objective and rollout_model_objective.ppo_weight
        )

    @property
    def version(self) -> Version:
        """Return the number of optimizer steps of each model; without a rollout model the policy's stands for both."""
        return self._optimizer.version(self._forward.is_separate)

    @property
    def pads(self) -> bool:
        """Return whether some model, critic and reference included, cannot read a micro-batch without padding."""
        models = [*self.models.values()]
        models += [holder.model for holder in (self.critic, self._forward.reference) if holder]
        return not all(map(can_pack, models))

    def compute_advantages(self, scored: Sequence[ScoredRollout]) -> list[TrainingSample]:
        """Compute the advantage of every token: by the critic or, without one, from the rewards alone."""
        if self.critic:
            return self.critic.compute_advantages(scored, self.values(self.critic.batches(scored)))
        return response_advantages(self._options.advantage, scored, self._options.within_model, self._options.beta)

    def values(self, batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
        """Compute the critic's value of the state before each response token, by rollout uid: [T] float32, CPU."""
        assert self.critic, "only a learner with a critic is asked for values"
        return self._forward.column(batches, self.critic.values)

    def train(
        self, mini_batches: Sequence[Sequence[TokenBatch]], trace: bool, with_rollout_model: bool = True
    ) -> TrainResult:
        """Take all optimizer steps on one rollout batch; `mini_batches` has the micro-batches of each step.

        `trace` is as in `update`. Without `with_rollout_model` the policy runs and trains alone.
        """
        # Whether the rollout model runs and trains on this rollout batch, beside the policy.
        self._forward.runs_both = self._forward.is_separate and with_rollout_model
        steps = self.compute_old_log_probs(mini_batches)
        results: list[StepResult] = []
        gaps: GapColumns = []

        for index, micro_batches in enumerate(steps):
            # With `rollout_model.update: iteration` this model steps once, at the end, on the sum of its gradients.
            steps_rollout_model = self._options.rollout_model_each_step or index == len(steps) - 1
            result, step_gaps = self.update(micro_batches, trace, steps_rollout_model)
            results.append(result)
            # Newest step first: `column_on_host` keeps the last of equal uids, so a rollout's first step counts.
            gaps = step_gaps + gaps

        # All gaps come in one transfer, so that no step waits for the device.
        return TrainResult(steps=results, engine_gaps=column_on_host(gaps))

    def compute_old_log_probs(self, mini_batches: Sequence[Sequence[TokenBatch]]) -> list[list[MicroBatch]]:
        """Return the micro-batches with their old log-probs, under the weights before the first update on the batch.

        They cost a forward pass without gradient over the rollout batch. The pass is left out, and `old` is None, for a
        single optimizer step, whose training pass gives the log-probs, and for steps that only distil.
        """
        self._old_version = self.version  # version of the weights that give the old log-probs
        if len(mini_batches) == 1 or self._only_distils:
            return [[MicroBatch(tokens=batch, old=None) for batch in mini_batch] for mini_batch in mini_batches]

        snapshot = OldPolicySnapshot()
        batches = [batch for mini_batch in mini_batches for batch in mini_batch]
        # Read each rollout once, though each epoch has it anew, and fetch the log-probs that other ranks have computed.
        with torch.no_grad():
            for batch in first_readings(batches):
                snapshot.add(batch, OldLogProbs.of(self._forward(self._forward.send(batch, None))))
        snapshot.fetch(batches)

        return [
            [MicroBatch(tokens=batch, old=snapshot.look_up(batch)) for batch in mini_batch]
            for mini_batch in mini_batches
        ]

    def update(
        self, micro_batches: Sequence[MicroBatch], trace: bool = True, steps_rollout_model: bool = True
    ) -> tuple[StepResult, GapColumns]:
        """Take one optimizer step of policy and critic and, with `steps_rollout_model`, of the rollout model.

        Args:
            micro_batches: at least one, which may be without sequences.
            trace: also return what costs extra: per-token columns for saved rollouts, and how the rollout model's
                gradient splits into the gradients of its two losses.
            steps_rollout_model: False to keep adding up the rollout model's gradient instead of stepping it.

        Returns:
            The result of the step, and |p_engine - p_training| of its tokens, which `column_on_host` fetches.
        """
        # Find the totals over the step that the policy's correction needs, as far as they are known by now.
        on_device = [replace(micro, tokens=self._forward.send(micro.tokens, micro.old)) for micro in micro_batches]
        known = self._totals.before_backward(on_device, self._forward)

        backward_passes = [
            self._backward(on_host.tokens, micro, known, trace)
            for on_host, micro in zip(micro_batches, on_device, strict=True)
        ]
        totals = all_reduce_sums(add_sums(*(backward.measured for backward in backward_passes)))
        metrics = [backward.metrics for backward in backward_passes]
        passes = [backward.policy for backward in backward_passes]

        if known.are_provisional:  # totals of an earlier step: the policy's gradient is adapted to those of this step
            passes, repair_metrics = self._repair.apply(passes, totals)
            metrics.append(repair_metrics)

        # Report each micro-batch's correction with the totals by which its weights are scaled: those of this step, or
        # the empty ones (`known.totals`) of a correction whose `kappa` is "none".
        used_totals = totals if known.totals is None or known.are_provisional else known.totals
        reports = [
            policy_report(self._objective, micro.terms, micro.correction, used_totals, self._options.max_length)
            for micro in passes
        ]

        sums = all_reduce_sums(add_sums(*metrics, *(report.metrics for report in reports))) | totals
        sampled_tokens = Mean.named(totals, "obrs/acceptance").count  # this metric counts every sampled token
        step_metrics, events = self._optimizer.step(
            sums, sampled_tokens=sampled_tokens, steps_rollout_model=steps_rollout_model
        )
        if all(event["model"] != "policy" for event in events):  # the policy was not skipped
            self._totals.keep(totals)

        step_metrics["seconds/prepass"] = Sum.number(known.seconds)
        step_metrics |= self._adapt_distillation(step_metrics, steps_rollout_model)

        traces: dict[str, dict[str, Tensor]] = {}
        if trace:
            columns = [backward.trace | report.trace for backward, report in zip(backward_passes, reports, strict=True)]
            traces = rows_on_host([(micro.batch, named) for micro, named in zip(passes, columns, strict=True)])
        gaps = [(backward.policy.batch, backward.gaps) for backward in backward_passes]
        return StepResult(metrics=step_metrics, events=events, traces=traces), gaps

    def _backward(self, on_host: TokenBatch, micro: MicroBatch, known: BeforeBackward, trace: bool) -> _BackwardPass:
        """Run the forward and backward pass of a micro-batch, which adds to the gradients of all models.

        Args:
            on_host: tokens of the micro-batch, on the CPU.
            micro: the micro-batch, on the device.
            known: totals of the step, or of an earlier one where they are provisional; where its `totals` are None,
                this micro-batch gives them, summed over the ranks.
            trace: whether to return per-token columns, and how the rollout model's gradient splits.
        """
        batch = micro.tokens
        outputs = self._forward.outputs(batch, micro.old, is_trained=True)
        # Records the gradient's norm at each hidden state, by which `KappaRepair` estimates the error that it leaves.
        norms = HiddenNorms(outputs.hidden["policy"]) if known.are_provisional else None

        scores = self._forward.scores(batch, outputs, micro.old)
        old = micro.old or OldLogProbs.of(scores)  # `micro.old` is None in a single step, or if only distilling
        # `inputs` is what the policy's correction reads, `measured` this micro-batch's part of the totals.
        inputs, measured = measured_inputs(self._objective, batch, old, OldLogProbs.of(scores))
        # If no totals are known, this is the only micro-batch of the rank: sums over the ranks are the step's totals.
        totals = all_reduce_sums(measured) if known.totals is None else known.totals

        loss = joint_loss(
            policy=self._objective,
            rollout_model=self._active_objective,
            batch=batch,
            scores=scores,
            old=old,
            inputs=inputs,
            totals=totals,
            max_length=self._options.max_length,
        )
        measures_split = trace and loss.rollout_model_ppo.requires_grad
        split = GradientSplit(loss.rollout_model_ppo, outputs.hidden["rollout_model"]) if measures_split else None
        (loss.policy + loss.rollout_model).backward()

        # The weights that gave `old`: those before the first update or, in the first update itself, the current ones.
        gaps, gap_metrics = token_gaps(batch, old, self._old_version if micro.old else self.version)
        metrics = loss.metrics | gap_metrics | lag(batch, self.version) | self._critic_backward(batch)
        return _BackwardPass(
            policy=PolicyPass(
                batch=on_host, terms=loss.terms, correction=loss.correction, norms=norms and norms.spread(batch)
            ),
            measured=measured,
            metrics=metrics | (split.sums if split else {}),
            gaps=gaps,
            trace=loss.trace if trace else {},
        )

    def keep_weights(self, role: Role) -> None:
        """Copy a model's weights to the host's memory, for `score`; the copy replaces an earlier copy."""
        if role not in self._kept_weights:
            self._kept_weights[role] = KeptWeights(self.models[role].parameters())
        self._kept_weights[role].keep()

    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, from_copy: bool = False
    ) -> dict[str, Tensor]:
        """Compute the log-probs of tokens and `top_ids` under `sampling`, [T, 1 + K] by rollout uid, on the CPU.

        With `from_copy` the weights are those of the last `keep_weights`, not the current ones.
        """
        with self._kept_weights[role].in_place() if from_copy else nullcontext():
            return self._forward.column(batches, partial(list_log_probs, self.models[role], sampling=sampling))

    def weights(self, role: Role, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        """Yield a model's weights by name, adapters merged and shards gathered; `dtype`: what they will be cast to."""
        merged = merged_weights(self.models[role], dtype)
        return self._gathered.keep(merged) if self._gathered else merged

    def release_memory(self) -> None:
        """Release the GPU memory that torch keeps cached (not run on a GPU so far)."""
        if self._forward.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, folder: Path, roles: Sequence[Role]) -> dict[str, Any]:
        """Write this rank's part of the models and moments to `folder`; return checksums by the files' paths in it."""
        files, failed = {}, None
        for write in self._writers(folder, roles):
            try:
                files |= {path.relative_to(folder).as_posix(): flushed_checksum(path) for path in write()}
            except Exception as error:  # libraries have no common error class; go on, since other ranks wait
                failed = failed or error
        if failed:
            raise CheckpointError(cause_of(failed)) from failed
        return files

    def _writers(self, folder: Path, roles: Sequence[Role]) -> Iterator[Callable[[], list[Path]]]:
        """Yield functions, each of which writes this rank's part of a model or of its moments and returns the files."""
        part = self._gathered.part if self._gathered else WHOLE
        for role in roles:
            model = self.critic.model if self.critic and role == "critic" else self.models[role]
            yield model_writer(model, folder / role, part)
        # Each tensor of moments is gathered on one rank, the one with the fewest bytes so far.
        for role, moments in self._optimizer.moments():
            tensors = {name: moment.cpu() for name, moment in gather(moments, Dealer(part.size))}
            yield partial(write_part, part.path(folder / _MOMENTS, role), tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return what a learner needs to continue beside the files of `save`; its "reference" may be None."""
        objective, reference = self._rollout_objective, self._forward.reference
        return self._optimizer.state_dict() | {
            "reference": reference.digest if reference else None,
            "totals": self._totals.state_dict(),
            "distill_weight": objective.distill_weight if objective and self._options.distill_control else None,
        }

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote to `folder` and `state_dict` returned; models were loaded from there already.

        Raises:
            CheckpointError: the run began with another reference model, or the moments do not fit the models.
        """
        if (reference := self._forward.reference) and reference.digest != state["reference"]:
            raise CheckpointError(
                "the weights of objective.reference are not those that the run began with; put the model back where "
                "objective.reference.path (or policy.path) leads, or begin a new run"
            )
        self._optimizer.load_state_dict(state, folder / _MOMENTS)
        self._totals.load_state_dict(state["totals"])
        if self._rollout_objective and self._options.distill_control:
            self._rollout_objective = replace(self._rollout_objective, distill_weight=state["distill_weight"])

    @property
    def _active_objective(self) -> RolloutModelObjective | None:
        """Return the rollout model's objective; None where the rollout model is not trained on this rollout batch."""
        return self._rollout_objective if self._forward.runs_both else None

    def _adapt_distillation(self, metrics: Sums, steps_rollout_model: bool) -> Sums:
        """Report this step's weight of the distillation and, with `distill_control`, set the next step's weight.

        There is no such weight, and no metric, where the rollout model is not trained on this rollout batch.
        """
        objective, control = self._active_objective, self._options.distill_control
        if objective is None:
            return {}
        if control and steps_rollout_model:
            # Where the policy generates some of the rollouts, only those of the rollout model count.
            acceptance = metrics.get("obrs/acceptance_by_rollout_model", metrics["obrs/acceptance"])
            weight = next_distill_weight(
                control,
                objective.distill_weight,
                kl=metrics["mismatch/kl_policy_rollout"].value.item(),
                acceptance=acceptance.value.item(),
            )
            self._rollout_objective = replace(objective, distill_weight=weight)
        return {"rollout_model/distill_weight": Mean.number(objective.distill_weight)}

    def _critic_backward(self, batch: TokenBatch) -> Sums:
        """Run the critic, if any, forward and backward over a micro-batch; return its loss's metrics, else {}."""
        critic = self.critic
        if critic is None:
            return {}
        loss, metrics = self._forward.run(lambda: critic.loss(batch))
        loss.backward()
        return metrics
