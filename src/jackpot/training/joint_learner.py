"""The joint learner trains policy and rollout model, in one process or as one of several ranks.

It runs the forward and backward passes of an optimizer step. What comes before a step is in `old_policy` (log-probs
before the first update on a rollout batch) and `kappa` (sums that the correction needs first), and the step of the
optimizers is in `joint_optimizer`. The objective, a pure function, is in `objectives.joint`.

An accumulated step equals the step on the whole batch: gradients are summed as numerators and divided once, before
clipping, by denominators that cover all micro-batches and ranks.

Status: supported.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.sampling import Sampling
from jackpot.config.schedules import DistillControlConfig
from jackpot.core.errors import CheckpointError
from jackpot.core.files import cause_of, flushed_checksum
from jackpot.core.metrics import Max, Mean, Sum, Sums, add_sums, all_reduce_sums
from jackpot.core.roles import Role
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample, Version
from jackpot.models.forward import can_pack, logit_softcap, output_layer, response_hidden
from jackpot.models.gathered import Gathered, gather
from jackpot.models.lora import merged_weights, model_writer
from jackpot.models.parts import WHOLE, Dealer, write_part
from jackpot.models.scoring import list_log_probs
from jackpot.objectives.joint import (
    OldLogProbs,
    PolicyObjective,
    RolloutModelObjective,
    TokenScores,
    check_exact,
    joint_loss,
    measured_inputs,
    on_support,
    policy_report,
    scores_on_support,
    token_scores,
)
from jackpot.objectives.kernels.autograd import DEFAULT_OPTIONS, HeadOptions
from jackpot.objectives.kernels.linear_head import HeadOutput, JointOutput, LinearHead
from jackpot.objectives.metrics import lag
from jackpot.objectives.obrs import known_z
from jackpot.training.advantages import Critic, response_advantages
from jackpot.training.batching import batch_to
from jackpot.training.joint_optimizer import GradientSplit, JointOptimizer, next_distill_weight
from jackpot.training.kappa import BeforeBackward, HiddenNorms, KappaRepair, PolicyPass, StepTotals
from jackpot.training.learner import Learner, StepResult
from jackpot.training.old_policy import (
    KeptWeights,
    MicroBatch,
    OldPolicySnapshot,
    first_readings,
    holds_target,
    rows_on_host,
)
from jackpot.training.optimizer import ModelOptimizer
from jackpot.training.reference import Reference

_Result = TypeVar("_Result")
_MOMENTS = "moments"  # folder of the optimizers' moments in a checkpoint


class _Read(NamedTuple):
    """The outputs of the models at the N tokens of a micro-batch."""

    hidden: dict[Role, Tensor]  # states that predict the tokens, [N, H]
    head: HeadOutput | JointOutput
    reference_kl: Tensor | None  # [N] KL to the reference; None where there is no reference
    budgeted: tuple[Tensor, Tensor] | None  # Z and lam that a budget chooses, [N] float64; None without a budget


@dataclass(frozen=True, kw_only=True, slots=True)
class _BackwardPass:
    """The results of a micro-batch's backward pass, beside the gradients."""

    policy: PolicyPass
    measured: Sums  # sums that the policy's correction measured
    metrics: Sums  # metrics of everything but the correction
    trace: dict[str, Tensor]  # per-token columns: `engine_gap` and, where wanted, those of saved rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerOptions:
    """The settings of a joint learner, beside its models, optimizers and objectives."""

    temperature: float
    """Temperature of the sampling; every log-prob of the learner uses it."""
    num_top_log_probs: int
    """K of the policy's own top-k."""
    max_length: int
    """The sampling limit on response tokens, for `loss_agg_mode: seq-mean-token-sum-norm`."""
    advantage: str
    """Key of `objectives.advantages.ADVANTAGES`; a critic takes its place."""
    within_model: bool = False
    """As in `response_advantages`."""
    beta: float = 1.0
    """As in `response_advantages`."""
    on_support: bool = False
    """Whether both models' log-probs are renormalized on the tokens that a truncated sampler kept, which its lists
    name. Entropies and divergences stay those of the whole vocabulary."""
    exact_engines: Collection[Role] = ()
    """Models whose engine samples from the weights it is sent, neither quantized nor truncated, so that their
    forward pass can stand in for p_inf."""
    is_mixed: bool = False
    """Whether the policy generates some of the rollouts beside a rollout model."""
    autocast: torch.dtype | None = None
    """Dtype of the forward pass; None for the weights' own."""
    rollout_model_each_step: bool = True
    """Whether the rollout model steps with the policy; else once for each rollout batch, on the gradient of all its
    steps."""
    distill_control: DistillControlConfig | None = None
    """Adapts the objective's `distill_weight` after every step of the rollout model; None for a constant weight."""
    ess_scaling: str | None = None
    """As in `JointOptimizer`."""
    head: HeadOptions = DEFAULT_OPTIONS
    """How the joint head is computed."""


class JointLearner(Learner):
    """A learner that trains both models on one device; several ranks, each with a learner, sum their gradients.

    Ranks may hold shards of the models (`gathered`). Then all ranks make equal calls, with equally many micro-batches
    (`batching.deal`). `weights` gives the first rank whole tensors, and other ranks nothing. Each rank saves a part of
    the models; a checkpoint can be loaded by another number of ranks.

    Args:
        models: `policy`, with fp32 weights, and `rollout_model` unless the policy generates its own rollouts. Models
            with an optimizer are trained in place; a model without is frozen.
        optimizers: optimizers of the trained models.
        objective, rollout_model_objective: the parts of eq. 8; the second is None unless the rollout model is trained.
        options: further settings.
        critic: critic of PPO; None for advantages that need rewards alone.
        reference: reference model of the objective's `kl_loss_coef`; None without one.
        gathered: all models, with critic and reference, where they are sharded over ranks, as the optimizers'
            parameters then are. None: this process holds whole models.
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
        gathered: Gathered | None = None,
    ) -> None:
        policy, rollout_model = models["policy"], models.get("rollout_model")
        self.models: dict[Role, PreTrainedModel] = {"policy": policy, "rollout_model": rollout_model or policy}
        self._separate = rollout_model is not None
        self._runs_both = self._separate  # whether both models run on the rollout batch that is trained on
        self._objective = objective
        self._rollout_objective = rollout_model_objective
        self._options = options
        self._critic, self._reference = critic, reference
        self._gathered = gathered

        for role, model in self.models.items():
            model.eval()  # no dropout: old and current log-probs of equal weights are equal
            if role not in optimizers and (role == "policy" or rollout_model is not None):
                model.requires_grad_(False)
        self._device = gathered.device if gathered else policy.device

        self._optimizer = JointOptimizer(
            {**optimizers, **({"critic": critic.optimizer} if critic else {})},
            regularized=objective.is_regularized,
            rollout_model_each_step=options.rollout_model_each_step,
            ess_scaling=options.ess_scaling,
        )

        self._totals = StepTotals(objective)
        self._repair = KappaRepair(
            objective,
            [weight for weight in policy.parameters() if weight.requires_grad],
            self._policy_log_probs,
            max_length=options.max_length,
            pads=not can_pack(policy),
        )

        self._old_version = Version(0, 0)  # version of the weights that gave the old log-probs
        self._kept: dict[Role, KeptWeights] = {}
        self._only_distils = "policy" not in optimizers and not (
            rollout_model_objective and rollout_model_objective.ppo_weight
        )

        self._head = LinearHead(
            output_layer(policy),
            output_layer(rollout_model) if rollout_model else None,
            policy_soft_cap=logit_softcap(policy),
            rollout_model_soft_cap=logit_softcap(rollout_model) if rollout_model else None,
            options=options.head,
        )

    @property
    def version(self) -> Version:
        policy = self._optimizer.steps("policy")
        return Version(policy, self._optimizer.steps("rollout_model") if self._separate else policy)

    @property
    def critic(self) -> Critic | None:
        """Return the critic, or None without one."""
        return self._critic

    @property
    def pads(self) -> bool:
        others = [part.model for part in (self._critic, self._reference) if part]
        return not all(map(can_pack, (*self.models.values(), *others)))

    def compute_advantages(self, scored: Sequence[ScoredRollout]) -> list[TrainingSample]:
        if self._critic:
            return self._critic.compute_advantages(scored, self.values(self._critic.batches(scored)))
        return response_advantages(self._options.advantage, scored, self._options.within_model, self._options.beta)

    @torch.no_grad()
    def values(self, batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
        """Compute the critic's value of the state before each response token, by rollout uid: [T] float32, CPU."""
        assert self._critic, "only a learner with a critic is asked for values"
        estimate = self._critic.values
        columns = [{"values": self._run(partial(estimate, batch_to(batch, self._device)))} for batch in batches]
        rows = rows_on_host(list(zip(batches, columns, strict=True)))
        return {uid: row["values"] for uid, row in rows.items()}

    def train(
        self, mini_batches: Sequence[Sequence[TokenBatch]], trace: bool, with_rollout_model: bool = True
    ) -> list[StepResult]:
        self._runs_both = self._separate and with_rollout_model
        steps, last = self.compute_old_log_probs(mini_batches), len(mini_batches) - 1
        results, columns = [], []
        for index, micro_batches in enumerate(steps):
            result, traced = self._step(micro_batches, trace, self._options.rollout_model_each_step or index == last)
            results.append(replace(result, traces=rows_on_host(traced)) if trace else result)
            columns += traced

        if results and not trace:  # one copy, so one wait; of a token the columns of its first step count
            results[0] = replace(results[0], traces=rows_on_host(columns[::-1]))
        return results

    def compute_old_log_probs(self, mini_batches: Sequence[Sequence[TokenBatch]]) -> list[list[MicroBatch]]:
        """Compute the policy's log-probs of a rollout batch before the first update on the batch.

        They cost a forward pass without gradient over the rollout batch. The pass is left out for a single optimizer
        step, whose training pass gives the log-probs, and for steps that only distil.
        """
        self._old_version = self.version
        if len(mini_batches) == 1 or self._only_distils:
            return [[MicroBatch(tokens=batch, old=None) for batch in mini_batch] for mini_batch in mini_batches]
        snapshot, batches = OldPolicySnapshot(), [batch for mini_batch in mini_batches for batch in mini_batch]
        with torch.no_grad():
            for batch in first_readings(batches):
                snapshot.add(batch, OldLogProbs.of(self._forward(self._sent(batch, None))))
        snapshot.fetch(batches)
        return [
            [MicroBatch(tokens=batch, old=snapshot.look_up(batch)) for batch in mini_batch]
            for mini_batch in mini_batches
        ]

    def update(
        self, micro_batches: Sequence[MicroBatch], trace: bool = True, steps_rollout_model: bool = True
    ) -> StepResult:
        """Take one optimizer step of policy and critic, and of the rollout model where it steps too.

        The order is: find the totals that the correction needs, as far as they are known; run a forward and a backward
        pass over each micro-batch; if the totals were those of an earlier step, adapt the policy's gradient to the
        totals of this step; compute the metrics of the correction; step the optimizers.

        Args:
            trace: as in `train`.
            steps_rollout_model: False to keep adding up the rollout model's gradient instead of stepping it.

        Returns:
            The result of the step; without `trace` it has no per-token columns, which `train` adds.

        Raises:
            ValueError: `micro_batches` is empty.
        """
        result, traced = self._step(micro_batches, trace, steps_rollout_model)
        return replace(result, traces=rows_on_host(traced)) if trace else result

    def _step(
        self, micro_batches: Sequence[MicroBatch], trace: bool, steps_rollout_model: bool
    ) -> tuple[StepResult, list[tuple[TokenBatch, Mapping[str, Tensor]]]]:
        """Take a step as `update` does; return the result without columns, and the columns for `rows_on_host`."""
        if not micro_batches:
            raise ValueError("update got no micro-batch; an optimizer step needs at least one")
        on_device = [replace(micro, tokens=self._sent(micro.tokens, micro.old)) for micro in micro_batches]
        known = self._totals.before_backward(on_device, self._forward)
        done = [
            self._backward(dealt.tokens, micro, known, trace)
            for dealt, micro in zip(micro_batches, on_device, strict=True)
        ]
        totals = all_reduce_sums(add_sums(*(backward.measured for backward in done)))
        parts, passes = [backward.metrics for backward in done], [backward.policy for backward in done]
        traced: list[tuple[TokenBatch, Mapping[str, Tensor]]] = [(one.policy.batch, one.trace) for one in done]

        if known.are_provisional:
            passes, repaired = self._repair.apply(passes, totals)
            parts.append(repaired)
        reported = totals if known.totals is None or known.are_provisional else known.totals
        for one in passes:
            report = policy_report(self._objective, one.terms, one.correction, reported, self._options.max_length)
            parts.append(report.metrics)
            if trace:
                traced.append((one.batch, report.trace))

        sums = all_reduce_sums(add_sums(*parts)) | totals
        metrics, events = self._optimizer.step(
            sums,
            sampled_tokens=Mean.named(totals, "obrs/acceptance").count,
            steps_rollout_model=steps_rollout_model,
        )
        if all(event["model"] != "policy" for event in events):
            self._totals.keep(totals)

        metrics["seconds/prepass"] = Sum.number(known.seconds)
        metrics |= self._adapt_distillation(metrics, steps_rollout_model)
        return StepResult(metrics=metrics, events=events, traces={}), traced

    def _backward(self, dealt: TokenBatch, micro: MicroBatch, known: BeforeBackward, trace: bool) -> _BackwardPass:
        """Run the forward and backward pass of a micro-batch, which adds to the gradients of all models.

        Args:
            dealt: tokens of the micro-batch, on the CPU.
            micro: the micro-batch, on the device.
            known: totals of the step, as far as they are known.
            trace: as in `train`.
        """
        batch = micro.tokens
        read = self._run(lambda: self._read(batch, micro.old, is_trained=True))

        norms = HiddenNorms(read.hidden["policy"]) if known.are_provisional else None
        scores = self._scores(batch, read, micro.old)
        old = micro.old or OldLogProbs.of(scores)
        inputs, measured = measured_inputs(self._objective, batch, old, OldLogProbs.of(scores))
        totals = all_reduce_sums(measured) if known.totals is None else known.totals  # None: no others

        loss = joint_loss(
            self._objective, self._active_objective, batch, scores, old, inputs, totals, self._options.max_length
        )
        splits = trace and loss.rollout_model_ppo.requires_grad
        split = GradientSplit(loss.rollout_model_ppo, read.hidden["rollout_model"]) if splits else None
        (loss.policy + loss.rollout_model).backward()

        gap, of_engine = self._engine_gap(micro, old)
        metrics = loss.metrics | of_engine | lag(batch, self.version) | self._critic_backward(batch)
        return _BackwardPass(
            policy=PolicyPass(dealt, loss.terms, loss.correction, norms and norms.spread(batch)),
            measured=measured,
            metrics=metrics | (split.sums if split else {}),
            trace={"engine_gap": gap, **(loss.trace if trace else {})},
        )

    def keep_weights(self, role: Role) -> None:
        if role not in self._kept:
            self._kept[role] = KeptWeights(self.models[role].parameters())
        self._kept[role].keep()

    @torch.no_grad()
    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, kept: bool = False
    ) -> dict[str, Tensor]:
        if kept:
            with self._kept[role].in_place():
                return self.score(role, batches, sampling)
        score = partial(list_log_probs, self.models[role], sampling=sampling)
        columns = [{"all": self._run(partial(score, batch_to(batch, self._device)))} for batch in batches]
        rows = rows_on_host(list(zip(batches, columns, strict=True)))
        return {uid: row["all"] for uid, row in rows.items()}

    def weights(self, role: Role, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        merged = merged_weights(self.models[role], dtype)
        return self._gathered.keep(merged) if self._gathered else merged

    def release_memory(self) -> None:
        """Release the GPU memory that torch keeps cached (not run on a GPU so far)."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, folder: Path, roles: Sequence[Role]) -> dict[str, Any]:
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
        """Yield functions that write this rank's part of each model, and of each optimizer's moments."""
        part = self._gathered.part if self._gathered else WHOLE
        for role in roles:
            model = self._critic.model if self._critic and role == "critic" else self.models[role]
            yield model_writer(model, folder / role, part)
        for role, moments in self._optimizer.moments():
            own = {name: moment.cpu() for name, moment in gather(moments, Dealer(part.size))}
            yield partial(write_part, part.path(folder / _MOMENTS, role), own)

    def state_dict(self) -> dict[str, Any]:
        objective = self._rollout_objective
        return self._optimizer.state_dict() | {
            "reference": self._reference.digest if self._reference else None,
            "totals": self._totals.state_dict(),
            "distill_weight": objective.distill_weight if objective and self._options.distill_control else None,
        }

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote to `folder` and `state_dict` returned; models were loaded from there already.

        Raises:
            CheckpointError: the run began with another reference model, or the moments do not fit the models.
        """
        if self._reference and self._reference.digest != state["reference"]:
            raise CheckpointError(
                "the weights of objective.reference are not those that the run began with; put the model back where "
                "objective.reference.path (or policy.path) leads, or begin a new run"
            )
        self._optimizer.load_state_dict(state, folder / _MOMENTS)
        self._totals.load_state_dict(state["totals"])
        if self._rollout_objective and self._options.distill_control:
            self._rollout_objective = replace(self._rollout_objective, distill_weight=state["distill_weight"])

    def _sent(self, batch: TokenBatch, old: OldLogProbs | None) -> TokenBatch:
        """Check a micro-batch while it is on the CPU, where no check waits for the device, and copy it to the device.

        Raises:
            ConfigError: as `check_exact`.
        """
        if not self._options.is_mixed:
            batch = replace(batch, by_policy=None)
        if self._normalizer(old) == "exact":
            check_exact(self._generated_by(self.version, batch), batch.response_mask)
        return batch_to(batch, self._device)

    @property
    def _active_objective(self) -> RolloutModelObjective | None:
        """Return the rollout model's objective; None where the rollout model is not trained on this rollout batch."""
        return self._rollout_objective if self._runs_both else None

    def _normalizer(self, old: OldLogProbs | None) -> str:
        """Return the name of the way to estimate Z, which is not `exact` where `old` already holds the Z in use."""
        return "topk" if holds_target(old, self._objective) else self._objective.normalizer

    def _forward(self, batch: TokenBatch, old: OldLogProbs | None = None) -> TokenScores:
        """Run both models and the joint head over a micro-batch."""
        return self._scores(batch, self._run(lambda: self._read(batch, old)), old)

    def _read(self, batch: TokenBatch, old: OldLogProbs | None, is_trained: bool = False) -> _Read:
        """Run the backbones and the joint head over a micro-batch; called inside `_run`.

        Where `old` has the Z in use, the exact Z of the current policy is not computed, because the weights that
        generated the rollouts may no longer exist.

        Args:
            is_trained: True to compute also what only a backward pass and its metrics need.
        """
        roles: tuple[Role, ...] = ("policy", "rollout_model") if self._runs_both else ("policy",)
        hidden: dict[Role, Tensor] = {role: response_hidden(self.models[role], batch) for role in roles}
        pair = (hidden["policy"], hidden.get("rollout_model"))

        is_exact = self._normalizer(old) == "exact"
        budget = self._objective.budget if is_exact else None
        head = self._head(
            *pair,
            batch.at_sampled(batch.response_ids),
            temperature=self._options.temperature,
            lam=self._objective.correction.lam if is_exact and budget is None else None,
            num_top=self._options.num_top_log_probs,
            gather_ids=batch.at_sampled(batch.top_ids),
            only_log_probs=not is_trained,
        )

        log_probs = head.policy.log_probs if self._runs_both else head.log_probs
        wanted = self._reference if is_trained else None
        reference_kl = wanted.kl(batch, hidden["policy"], log_probs) if wanted else None

        if self._options.on_support:
            head = on_support(head, self._head.heads(*pair), batch, self._options.temperature)

        budgeted = (
            self._head.z_for_budget(*pair, temperature=self._options.temperature, budget=budget) if budget else None
        )
        return _Read(hidden, head, reference_kl, budgeted)

    def _scores(self, batch: TokenBatch, read: _Read, old: OldLogProbs | None) -> TokenScores:
        """Return the outputs of the models as columns of the micro-batch, [B, T]."""
        objective = self._objective
        distill = self._active_objective.distill if self._active_objective else None

        current = self._generated_by(self.version, batch)
        normalizer = "topk" if read.budgeted else self._normalizer(old)
        scores = token_scores(
            read.head, batch, current, objective.correction.lam, normalizer, distill, read.reference_kl
        )

        if read.budgeted is None or objective.budget is None:
            return scores

        z, lam = (batch.spread(one.to(scores.log_probs.dtype)) for one in read.budgeted)
        if batch.by_policy is not None:  # every ratio of the policy's own rollouts is 1
            own = batch.by_policy[:, None] & batch.response_mask
            z, lam = torch.where(own, objective.budget, z), torch.where(own, 1.0 / objective.budget, lam)
        return replace(scores, z=known_z(z), lam=lam)

    def _adapt_distillation(self, metrics: Sums, steps_rollout_model: bool) -> Sums:
        """Report this step's weight of the distillation and, with `distill_control`, set the next step's weight."""
        objective, control = self._active_objective, self._options.distill_control
        if objective is None:
            return {}
        if control and steps_rollout_model:
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
        """Run the critic forward and backward over a micro-batch, and return the metrics of its loss."""
        critic = self._critic
        if critic is None:
            return {}
        loss, metrics = self._run(lambda: critic.loss(batch))
        loss.backward()
        return metrics

    def _engine_gap(self, micro: MicroBatch, old: OldLogProbs) -> tuple[Tensor, Sums]:
        """Measure |p_engine - p_training| of the tokens that the weights of the old log-probs generated, else NaN.

        The metrics have the mean of p_training / p_engine over these tokens, which is the mass that top-p and top-k
        keep: p_engine is normalized on the kept tokens, and the untruncated p_training sums to that mass on them.
        """
        batch, log_probs = micro.tokens, old.rollout_model_old_log_probs
        if batch.by_policy is not None:
            log_probs = torch.where(batch.by_policy[:, None], old.old_log_probs, log_probs)
        gap = (log_probs.exp() - batch.rollout_log_probs.exp()).abs()
        own = batch.response_mask & _has_version(batch, self._old_version if micro.old else self.version)
        kept = (log_probs - batch.rollout_log_probs).exp()
        return gap.masked_fill(~own, torch.nan), {
            "mismatch/engine_gap": Mean.of(gap, own),
            "mismatch/engine_gap_max": Max.of(gap, own),
            "mismatch/kept_mass": Mean.of(kept, own),
        }

    def _generated_by(self, version: Version, batch: TokenBatch) -> Tensor:
        """Mark tokens whose model sampled them, at this version, as training computes its distribution: [B, T] bool."""
        only = "rollout_model" if self._separate else "policy"
        is_exact: bool | Tensor = only in self._options.exact_engines
        if batch.by_policy is not None:
            is_exact = torch.where(batch.by_policy[:, None], "policy" in self._options.exact_engines, is_exact)
        return _has_version(batch, version) & is_exact

    def _policy_log_probs(self, batch: TokenBatch) -> Tensor:
        """Run the policy alone over a batch; return log-probs of the tokens, [B, T] with gradient, 0 where masked."""

        def read() -> Tensor:
            hidden, temperature = response_hidden(self.models["policy"], batch), self._options.temperature
            if self._options.on_support:
                return scores_on_support(self._head.heads(hidden, None)[0], batch, temperature)[0]
            ids = batch.at_sampled(batch.response_ids)
            return self._head(hidden, None, ids, temperature=temperature, only_log_probs=True).log_probs

        return batch.spread(self._run(read))

    def _run(self, work: Callable[[], _Result]) -> _Result:
        """Call `work`, part of a forward pass, in the precision of the settings and with sharded weights gathered.

        Autocast keeps no copies of sharded weights, which would outlive the gathered weights.
        """
        keeps = torch.is_autocast_cache_enabled() and self._gathered is None
        precision = (
            torch.autocast(self._device.type, self._options.autocast, cache_enabled=keeps)
            if self._options.autocast
            else None
        )
        with precision or nullcontext():
            return self._gathered(work) if self._gathered else work()


def _has_version(batch: TokenBatch, version: Version) -> Tensor:
    """Mark the tokens that were sampled with the weights of `version` of the model that sampled them: [B, T] bool."""
    by_rollout_model = batch.versions[..., 1] == version.rollout_model
    if batch.by_policy is None:
        return by_rollout_model
    return torch.where(batch.by_policy[:, None], batch.versions[..., 0] == version.policy, by_rollout_model)
