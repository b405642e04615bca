"""The joint objective of policy and rollout model on one micro-batch: eq. 8 of Jackpot, arXiv 2602.06107.

    L(theta, omega) = L_PPO-OBRS(theta) + ppo_weight L_PPO(omega) + distill_weight L_distill(omega)

theta is the policy and omega the rollout model. The first term is eq. 5 with any correction. The other two, eqs. 6 and
7, run over all response tokens, rejected ones too. The two models share no parameter, so each term is returned as
(numerator, denominator), and the learner divides the gradients once, when it knows the denominators of the whole
optimizer step.

Shapes: `B` sequences, `T` response tokens, `N` response tokens of the micro-batch in one row, `K` top-k; nats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jackpot.core.errors import ConfigError
from jackpot.core.metrics import Mean, Sums
from jackpot.core.types import TokenBatch
from jackpot.objectives import obrs
from jackpot.objectives.corrections import Correction, CorrectionFn, CorrectionInputs, measured
from jackpot.objectives.corrections.base import split_by_model
from jackpot.objectives.kernels.linear_head import HeadOutput, JointOutput
from jackpot.objectives.kernels.support import support_log_probs
from jackpot.objectives.kernels.tiles import Head
from jackpot.objectives.losses import Aggregate, Distillation, Surrogate, SurrogateFn, clipped_surrogate
from jackpot.objectives.metrics import correction_metrics, health, mismatch, update_kl


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """The policy's objective, eq. 5, with its coefficients. The loss of a token is

        - accept_mask * weights * surrogate + kl_loss_coef * KL(policy || reference) - entropy_coeff * entropy

    The two regularizers, KL and entropy, act on all response tokens and share the surrogate's denominator.
    """

    correction: CorrectionFn
    target: str  # key of `references`: the distribution that the correction's weights align to
    proximal: str  # key of `references`: the point that PPO's ratio is taken from
    normalizer: str  # key of `NORMALIZERS`: how Z is estimated
    budget: float | None  # expected acceptance at which each token's lam is chosen; None: the correction's lam
    surrogate: SurrogateFn  # a value of `SURROGATES`
    clip_low: float  # the surrogate's clip of the ratio at 1 - clip_low; math.inf: no clip
    clip_high: float  # the surrogate's clip of the ratio at 1 + clip_high; math.inf: no clip
    aggregate: Aggregate  # function: token losses [B, T] -> (numerator, denominator) of the loss
    count: str  # key of `COUNTS`: which tokens the denominator counts
    entropy_coeff: float  # weight of the entropy bonus, whose entropy is in nats
    kl_loss_coef: float  # weight of KL(policy || reference), which is in nats
    kappa_tolerance: float  # largest relative error of the gradient that `kappa: auto` leaves (`KappaRepair`)
    regresses: bool = False  # whether the surrogate has a gradient even where the advantage is 0, as that of `oapl`

    @property
    def is_regularized(self) -> bool:
        """Tell whether the policy has a gradient even if all advantages are 0."""
        return self.entropy_coeff > 0.0 or self.kl_loss_coef > 0.0 or self.regresses

    def surrogate_of(self, log_probs: Tensor, proximal_log_probs: Tensor, batch: TokenBatch) -> Surrogate:
        """Compute the surrogate of every token from log-probs of the policy and of the proximal point, [B, T] each."""
        mask, clips = batch.response_mask, (self.clip_low, self.clip_high)
        return self.surrogate(log_probs, proximal_log_probs, batch.advantages, mask, *clips)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutModelObjective:
    """The rollout model's objective, eqs. 6 and 7, with its coefficients.

    The target of its correction is the rollout model itself, as training scores it. So the correction is only for the
    difference between training and engine: for the ratio of the model's probability in training to that in the engine.
    """

    correction: CorrectionFn
    proximal: str  # key of `references`: the point that PPO's ratio is taken from
    clip_low: float  # PPO's clip of the ratio at 1 - clip_low; math.inf: no clip
    clip_high: float  # PPO's clip of the ratio at 1 + clip_high; math.inf: no clip
    ppo_weight: float  # weight of the PPO loss, eq. 6
    distill_weight: float  # weight of the distillation loss, eq. 7: the paper's lambda_distill
    distill: Distillation  # a value of `DISTILLATIONS`: returns the divergence of eq. 7, [N]
    aggregate: Aggregate  # function: token losses [B, T] -> (numerator, denominator) of the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """The results of one forward pass of both models on the sampled tokens. All [B, T], 0 where masked; nats.

    Where the head computed log-probs only, entropies and divergences are 0.
    """

    log_probs: Tensor  # log-probs under the policy, carry its gradient
    entropy: Tensor  # entropy of the policy's distribution, carries its gradient
    reference_kl: Tensor  # an estimate of KL(policy || reference), carries the policy's gradient; 0 without reference
    rollout_model_log_probs: Tensor  # log-probs under the rollout model, carry its gradient if it is trained
    rollout_model_entropy: Tensor  # entropy of the rollout model's distribution, detached
    distill_kl: Tensor  # the divergence of eq. 7, carries the rollout model's gradient
    kl_policy_rollout: Tensor  # KL(policy || rollout model), exact, detached
    kl_rollout_policy: Tensor  # KL(rollout model || policy), exact, detached
    z: obrs.ZEstimate  # expected acceptance Z of p_inf and the current policy, detached
    policy_top_ids: Tensor  # [B, T, K] the policy's most probable tokens
    policy_top_log_probs: Tensor  # [B, T, K] their log-probs
    lam: Tensor | None = None  # lam of each token where a budget chooses it; Z is taken at this lam; detached


@dataclass(frozen=True, kw_only=True, slots=True)
class OldLogProbs:
    """The log-probs of both models before the first update on a batch. All [B, T], detached, nats."""

    old_log_probs: Tensor  # log p_old, under the policy
    rollout_model_old_log_probs: Tensor  # log-probs under the rollout model, as training computes them
    z: obrs.ZEstimate  # expected acceptance Z of p_inf and the old policy
    lam: Tensor | None = None  # lam of each token where a budget chooses it; None: the correction's lam

    @classmethod
    def of(cls, scores: TokenScores) -> "OldLogProbs":
        """Take log-probs, and Z with its lam, detached, from the scores of a forward pass.

        They are the old ones only if the pass came before the first update on the batch.
        """
        return cls(
            old_log_probs=scores.log_probs.detach(),
            rollout_model_old_log_probs=scores.rollout_model_log_probs.detach(),
            z=scores.z,
            lam=scores.lam,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerms:
    """The terms of the policy's loss on a micro-batch that do not depend on the correction. All [B, T].

    The correction may depend on sums over the optimizer step that are known only after the backward passes. So the
    terms are kept without their graph (`detach`), until `policy_report` reads them with the final correction.
    """

    inputs: CorrectionInputs
    surrogate: Tensor  # surrogate S of each token, PPO's clip included; carries the policy's gradient until `detach`
    regularizer: Tensor  # kl_loss_coef * KL - entropy_coeff * entropy; carries the policy's gradient until `detach`
    clipped: Tensor  # bool, True where the surrogate's clip changes the gradient

    def detach(self) -> "PolicyTerms":
        """Return the terms without autograd's graph, so that they keep no activations."""
        return replace(self, surrogate=self.surrogate.detach(), regularizer=self.regularizer.detach())


@dataclass(frozen=True, kw_only=True, slots=True)
class JointLoss:
    """The numerators of one micro-batch's losses; each is divided by its denominator's sum over the optimizer step."""

    policy: Tensor  # scalar numerator of eq. 5, with gradient
    rollout_model_ppo: Tensor  # scalar numerator of eq. 6, with gradient; 0 where no rollout model is trained
    rollout_model_distill: Tensor  # scalar numerator of eq. 7, with gradient; 0 where no rollout model is trained
    terms: PolicyTerms  # terms of the policy's numerator, detached
    correction: Correction  # the correction that the policy's numerator contains
    metrics: Sums  # metrics of both models; the count of `rollout_model/loss` is the denominator
    trace: dict[str, Tensor]  # columns of saved rollouts by name, [B, T] or [B, T, K], detached

    @property
    def rollout_model(self) -> Tensor:
        """Return the sum of the rollout model's two numerators, those of eqs. 6 and 7, a scalar."""
        return self.rollout_model_ppo + self.rollout_model_distill


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """The metrics of the policy's loss and its correction on one micro-batch, and a trace: tensors of single tokens."""

    metrics: Sums  # the count of `policy/loss` is the denominator of the policy's loss
    trace: dict[str, Tensor]  # columns of saved rollouts by name, [B, T], detached


def token_scores(
    head: JointOutput | HeadOutput,
    batch: TokenBatch,
    rollout_weights_are_current: Tensor,
    lam: float,
    normalizer: str,
    distill: Distillation | None,
    reference_kl: Tensor | None = None,
) -> TokenScores:
    """Arrange the head's outputs [N] as [B, T] and estimate Z. Without a rollout model, the policy is taken for it.

    Args:
        head: output for the N tokens of the response mask, in row-major order.
        rollout_weights_are_current: [B, T] bool, True where the model that generated the token still has, in training,
            the weights that generated it, and the engine samples from them unquantized and untruncated. Only there do
            the log-probs of that model equal log p_inf.
        lam: the lam in Z = sum_x min(p_inf(x), p_policy(x) / lam).
        normalizer: key of `NORMALIZERS`; "exact" only if `check_exact` passes.
        distill: a value of `DISTILLATIONS`; None where no rollout model is trained.
        reference_kl: [N], None where there is no reference.

    Raises:
        ValueError: normalizer "exact", but the joint head was not given `lam`.
    """
    spread, at = batch.spread, batch.at_sampled  # functions that turn [N] into [B, T], and back

    # Without a rollout model the policy stands for it; at tokens that the policy sampled, it does so in Z alone.
    joint = head if isinstance(head, JointOutput) else _paired_with_itself(head, lam)
    if joint is head and batch.by_policy is not None:
        by_policy = batch.by_policy[:, None].expand_as(batch.response_mask)  # [B, T]
        joint = _with_own_z(joint, at(by_policy), lam)

    z = NORMALIZERS[normalizer](joint, at(batch.top_ids), at(batch.top_log_probs), at(rollout_weights_are_current), lam)
    nothing = torch.zeros_like(joint.policy.log_probs.detach())  # [N]

    def spread_or_0(values: Tensor | None) -> Tensor:
        """Arrange values [N] as [B, T]; return zeros for None."""
        return spread(nothing if values is None else values)

    return TokenScores(
        log_probs=spread(joint.policy.log_probs),
        entropy=spread_or_0(joint.policy.entropy),
        reference_kl=spread_or_0(reference_kl),
        rollout_model_log_probs=spread(joint.rollout_model.log_probs),
        rollout_model_entropy=spread_or_0(joint.rollout_model.entropy).detach(),
        distill_kl=spread_or_0(distill(joint) if distill else None),
        kl_policy_rollout=spread_or_0(joint.forward_kl).detach(),
        kl_rollout_policy=spread_or_0(joint.reverse_kl).detach(),
        z=obrs.ZEstimate(*map(spread, z)),  # the estimate and its bounds, field by field
        policy_top_ids=spread(joint.policy.top_ids),
        policy_top_log_probs=spread(joint.policy.top_log_probs),
    )


def scores_on_support(head: Head, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute log-probs under a head, renormalized at each position on ids that the engine gives a probability above 0.

    Args:
        head: head over the N tokens of the response mask.

    Returns:
        The log-probs of the sampled tokens, [N] with gradient, and of the engine's top-k ids, [N, K] without gradient.
    """
    sampled_ids, top_ids = batch.at_sampled(batch.response_ids), batch.at_sampled(batch.top_ids)
    is_kept = batch.at_sampled(batch.top_log_probs) > -torch.inf  # False also for NaN, which stands for no log-prob
    return support_log_probs(head, sampled_ids, top_ids, is_kept, temperature)


def on_support(
    output: HeadOutput | JointOutput, heads: Sequence[Head], batch: TokenBatch, temperature: float
) -> HeadOutput | JointOutput:
    """Return `output` with log-probs that are renormalized, at each position, on the ids that the engine could sample.

    These are the log-probs of sampled ids and, in `gathered`, of the engine's top-k ids (`scores_on_support`). Entropy,
    the head's own top-k and KLs stay those of the whole vocabulary.

    Args:
        heads: head of the policy, and that of the rollout model where `output` has both.
    """
    outputs = [output.policy, output.rollout_model] if isinstance(output, JointOutput) else [output]
    renormalized = []
    for whole, head in zip(outputs, heads, strict=True):
        log_probs, top_log_probs = scores_on_support(head, batch, temperature)
        renormalized.append(replace(whole, log_probs=log_probs, gathered=top_log_probs))

    if isinstance(output, JointOutput):
        return replace(output, policy=renormalized[0], rollout_model=renormalized[1])
    return renormalized[0]


def _paired_with_itself(head: HeadOutput, lam: float) -> JointOutput:
    """Pair a model with a detached copy of its outputs.

    The KLs are 0, and Z, OBRS's expected acceptance, is sum_x min(p(x), p(x) / lam) = min(1, 1 / lam).
    """
    nothing = torch.zeros_like(head.log_probs)
    entropy = None if head.entropy is None else head.entropy.detach()
    itself = replace(head, log_probs=head.log_probs.detach(), entropy=entropy)
    return JointOutput(
        policy=head,
        rollout_model=itself,
        forward_kl=nothing,
        reverse_kl=nothing,
        exact_z=torch.full_like(nothing, min(1.0, 1.0 / lam)),
        fill_ins=itself.top_log_probs,  # the copy's log-probs at the policy's top-k ids
    )


def _with_own_z(joint: JointOutput, by_policy: Tensor, lam: float) -> JointOutput:
    """Replace the rollout model by the policy in Z, the expected acceptance, at tokens that the policy sampled.

    `by_policy` [N] bool is True at these tokens.
    """
    # Where the policy sampled, p_inf is p_policy: Z is min(1, 1 / lam), and fill-ins are the policy's own log-probs.
    itself = joint.policy.top_log_probs
    exact_z = None if joint.exact_z is None else joint.exact_z.masked_fill(by_policy, min(1.0, 1.0 / lam))
    return replace(joint, fill_ins=torch.where(by_policy[:, None], itself, joint.fill_ins), exact_z=exact_z)


def _topk(joint: JointOutput, top_ids: Tensor, top_log_probs: Tensor, current: Tensor, lam: float) -> obrs.ZEstimate:
    """Estimate Z = sum_x min(p_inf(x), p_policy(x) / lam) at N tokens from both models' top k.
    `top_ids` and `top_log_probs` [N, K] are the engine's; `current` [N] is `rollout_weights_are_current`."""
    policy = joint.policy
    return obrs.topk_z(
        rollout_top_log_probs=top_log_probs,
        target_at_rollout_top=policy.gathered,  # the policy's log-probs at the engine's top-k ids
        rollout_top_ids=top_ids,
        target_top_ids=policy.top_ids,
        target_top_log_probs=policy.top_log_probs,
        fill_ins=joint.fill_ins,  # training's log-probs of the model that sampled, at the policy's top-k ids
        fill_valid=current,  # True where `fill_ins` are also log p_inf, the engine's log-probs
        lam=lam,
    )


def check_exact(rollout_weights_are_current: Tensor, response_mask: Tensor) -> None:
    """Refuse `normalizer: exact` unless every token was sampled from the distribution that training computes now.

    Both tensors are still on the CPU, so nothing waits for a GPU.

    Args:
        rollout_weights_are_current: [B, T] bool, as in `token_scores`.
        response_mask: [B, T].

    Raises:
        ConfigError: some tokens were not.
    """
    stale, count = (response_mask & ~rollout_weights_are_current).sum(), response_mask.sum()
    if stale:
        raise ConfigError(
            f"normalizer 'exact': {int(stale)} of {int(count)} tokens were not sampled from the "
            f"weights that the rollout model has in training (older weights, or a quantized or truncated engine); use "
            f"normalizer: topk"
        )


def _exact(joint: JointOutput, top_ids: Tensor, top_log_probs: Tensor, current: Tensor, lam: float) -> obrs.ZEstimate:
    """Return the Z of N tokens that the joint head summed over the whole vocabulary; only `joint` is read."""
    if joint.exact_z is None:
        raise ValueError("normalizer 'exact', but joint.exact_z is None: give lam to the joint head, or use 'topk'")
    return obrs.known_z(joint.exact_z)


NORMALIZERS = {"topk": _topk, "exact": _exact}  # the ways to estimate Z, by the setting `normalizer`

# The weight of each token in a loss's denominator, [B, T], by the setting `count`: functions of a correction and the
# response mask.
COUNTS: dict[str, Callable[[Correction, Tensor], Tensor]] = {
    "proposed": lambda correction, mask: mask.to(correction.accept_mask.dtype),
    "accepted": lambda correction, mask: correction.accept_mask,
}


def references(old: Tensor, current: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Return the log-probs that the settings `target` and `proximal` choose from, by name, detached: [B, T] each."""
    return {"old": old, "new": current.detach(), "rollout": rollout}


def measured_inputs(
    objective: PolicyObjective, batch: TokenBatch, old: OldLogProbs, now: OldLogProbs
) -> tuple[CorrectionInputs, Sums]:
    """Return the inputs of the policy's correction on a micro-batch, and the sums that `measured` takes of them.

    Args:
        now: log-probs and Z under the current weights, by `OldLogProbs.of`; it may be `old` itself where neither
            `objective.target` nor `objective.proximal` is "new".
    """
    by_name = references(old.old_log_probs, now.old_log_probs, batch.rollout_log_probs)  # keys: "old", "new", "rollout"
    target = old if objective.target == "old" else now  # has the Z and the lam for `objective.target`

    inputs = CorrectionInputs(
        rollout_log_probs=batch.rollout_log_probs,
        target_log_probs=by_name[objective.target],
        proximal_log_probs=by_name[objective.proximal],
        response_mask=batch.response_mask,
        uniforms=batch.uniforms,
        advantages=batch.advantages,
        z=target.z,
        lam=target.lam,
        by_policy=batch.by_policy,
    )
    return inputs, measured(objective.correction, inputs)


def policy_terms(
    objective: PolicyObjective, batch: TokenBatch, scores: TokenScores, inputs: CorrectionInputs
) -> PolicyTerms:
    """Compute the terms of the policy's loss on a micro-batch, with their gradient."""
    surrogate = objective.surrogate_of(scores.log_probs, inputs.proximal_log_probs, batch)

    regularizer = torch.zeros_like(batch.advantages)
    if objective.kl_loss_coef:
        regularizer = regularizer + objective.kl_loss_coef * scores.reference_kl
    if objective.entropy_coeff:
        regularizer = regularizer - objective.entropy_coeff * scores.entropy

    return PolicyTerms(
        inputs=inputs,
        surrogate=surrogate.value,
        regularizer=regularizer,
        clipped=surrogate.clipped,
    )


def policy_loss(
    objective: PolicyObjective, terms: PolicyTerms, correction: Correction, max_length: int
) -> tuple[Tensor, Tensor]:
    """Return numerator and denominator of the policy's loss, eq. 5, on a micro-batch: two scalars.

    A gradient flows from the numerator into `terms`, unless they are detached.
    """
    losses = terms.regularizer - correction.accept_mask * correction.weights * terms.surrogate
    # `COUNTS` gives each token's weight in the denominator: the response mask or the acceptance mask.
    return objective.aggregate(losses, COUNTS[objective.count](correction, terms.inputs.response_mask), max_length)


def joint_loss(
    policy: PolicyObjective,
    rollout_model: RolloutModelObjective | None,
    batch: TokenBatch,
    scores: TokenScores,
    old: OldLogProbs,
    inputs: CorrectionInputs,
    totals: Sums,
    max_length: int,
) -> JointLoss:
    """Compute the terms of eq. 8 on one micro-batch: the policy's loss and the rollout model's two losses.

    Each is a numerator with its own model's gradient; the learner divides it by the optimizer step's denominator.

    Args:
        rollout_model: the rollout model's objective; None where no rollout model is trained.
        inputs: inputs of the policy's correction, as `measured_inputs` returns them.
        totals: sums over an optimizer step, for the correction; {} where there are none yet.
        max_length: the most tokens that a response may have, for `loss_agg_mode: seq-mean-token-sum-norm`.
    """
    terms = policy_terms(policy, batch, scores, inputs)
    correction = policy.correction.apply(inputs, totals)
    policy_sum, _ = policy_loss(policy, terms, correction, max_length)  # the denominator is not used here
    ppo, distill, rollout_metrics = rollout_model_loss(rollout_model, batch, scores, old, max_length)

    return JointLoss(
        policy=policy_sum,
        rollout_model_ppo=ppo,
        rollout_model_distill=distill,
        terms=terms.detach(),
        correction=correction,
        metrics=rollout_metrics | _model_metrics(batch, scores, old),
        trace={  # columns of saved rollouts
            "old_log_probs": old.old_log_probs,
            "log_probs": scores.log_probs.detach(),
            "rollout_model_log_probs": scores.rollout_model_log_probs.detach(),
            "kl_rollout_policy": scores.kl_rollout_policy,
            "policy_top_ids": scores.policy_top_ids,
            "policy_top_log_probs": scores.policy_top_log_probs,
        },
    )


def policy_report(
    objective: PolicyObjective, terms: PolicyTerms, correction: Correction, totals: Sums, max_length: int
) -> PolicyReport:
    """Measure the policy's loss and the correction on a micro-batch.

    Args:
        terms: terms of the loss, without a gradient (`PolicyTerms.detach`).
        correction: the result of applying the policy's correction to `terms.inputs` and `totals`.
        totals, max_length: as in `joint_loss`.
    """
    inputs, lam = terms.inputs, objective.correction.lam  # `lam` is used only where `inputs.lam` is None
    numerator, denominator = policy_loss(objective, terms, correction, max_length)
    budget_metrics = {} if inputs.lam is None else {"obrs/lam": Mean.of(inputs.lam, inputs.response_mask)}

    return PolicyReport(
        metrics=correction_metrics(correction, inputs, lam, terms.clipped, totals)
        | {"policy/loss": _quotient(numerator, denominator)}
        | budget_metrics,
        trace={
            "acceptance": inputs.acceptance(lam) * inputs.response_mask,
            "accept_mask": correction.accept_mask,
            "weights": correction.weights,
            "z": inputs.z.value,
        },
    )


def rollout_model_loss(
    objective: RolloutModelObjective | None, batch: TokenBatch, scores: TokenScores, old: OldLogProbs, max_length: int
) -> tuple[Tensor, Tensor, Sums]:
    """Compute the rollout model's PPO loss (eq. 6) and distillation loss (eq. 7), each times its weight, and metrics.

    Both run over all response tokens, also over those that the policy's correction rejects.

    Args:
        objective: None where no rollout model is trained: then both numerators are 0, and there are no metrics.
        max_length: as in `joint_loss`.

    Returns:
        The numerators, scalars with the rollout model's gradient; the count of `rollout_model/loss` is the denominator
        of both.
    """
    if objective is None:
        zero = scores.log_probs.new_zeros(())
        return zero, zero, {}

    mask, log_probs = batch.response_mask, scores.rollout_model_log_probs
    by_name = references(old.rollout_model_old_log_probs, log_probs, batch.rollout_log_probs)
    proximal = by_name[objective.proximal]

    # The correction is for p_proximal / p_inf of the rollout model itself, and is applied without sums over the step.
    inputs = CorrectionInputs(
        rollout_log_probs=batch.rollout_log_probs,
        target_log_probs=proximal,
        proximal_log_probs=proximal,
        response_mask=mask,
        uniforms=batch.uniforms,
        advantages=batch.advantages,
        z=old.z,  # the field must be given; no correction that a rollout model may have reads it
    )

    correction = objective.correction.apply(inputs, {})
    weights = correction.weights * correction.accept_mask
    surrogate = clipped_surrogate(log_probs, proximal, batch.advantages, mask, objective.clip_low, objective.clip_high)
    losses = -weights * surrogate.value

    generated = split_by_model(mask, batch.by_policy).get("_by_rollout_model", mask)  # what the rollout model sampled
    counted = mask.to(losses.dtype)
    ppo, count = objective.aggregate(objective.ppo_weight * losses, counted, max_length)
    distill, _ = objective.aggregate(objective.distill_weight * scores.distill_kl, counted, max_length)  # same count

    metrics: Sums = {
        "rollout_model/loss": _quotient(ppo + distill, count),
        "rollout_model/ppo_loss": _quotient(ppo, count),
        "rollout_model/distill_loss": _quotient(distill, count),
        "rollout_model/weight": Mean.of(weights, generated),
        "rollout_model/distill_kl": Mean.of(scores.distill_kl, mask),
        "rollout_model/clip_frac": Mean.of(surrogate.clipped, mask),
    }
    return ppo, distill, metrics


def _quotient(numerator: Tensor, denominator: Tensor) -> Mean:
    """Return a metric of value numerator / denominator; both add up where metrics of micro-batches are added."""
    return Mean(total=numerator.detach().double(), squares=numerator.new_zeros(()).double(), count=denominator.double())


def _model_metrics(batch: TokenBatch, scores: TokenScores, old: OldLogProbs) -> Sums:
    """Return metrics of both models and of how far engine, rollout model and policy differ, before any correction."""
    mask = batch.response_mask
    log_ratio = torch.where(mask, old.old_log_probs - batch.rollout_log_probs, 0.0)  # log p_old / p_inf
    moved = torch.where(mask, old.old_log_probs - scores.log_probs.detach(), 0.0)  # log p_old / p_new
    return mismatch(log_ratio, mask, batch.by_policy) | {
        "mismatch/kl_rollout_policy": Mean.of(scores.kl_rollout_policy, mask),
        "mismatch/kl_policy_rollout": Mean.of(scores.kl_policy_rollout, mask),
        "policy/entropy": Mean.of(scores.entropy, mask),
        "policy/reference_kl": Mean.of(scores.reference_kl, mask),
        "rollout_model/entropy": Mean.of(scores.rollout_model_entropy, mask),
        **update_kl(moved, log_ratio, mask),
        **health(scores.log_probs, batch.rollout_log_probs, mask),
    }
