"""The forward pass of policy and rollout model over a micro-batch, through the output head that reads both."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.roles import Role
from jackpot.core.types import TokenBatch, Version
from jackpot.models.forward import logit_softcap, output_layer, response_hidden
from jackpot.models.gathered import Gathered
from jackpot.objectives.joint import (
    OldLogProbs,
    PolicyObjective,
    TokenScores,
    check_exact,
    on_support,
    scores_on_support,
    token_scores,
)
from jackpot.objectives.kernels.linear_head import HeadOutput, JointOutput, LinearHead
from jackpot.objectives.losses import Distillation
from jackpot.objectives.obrs import known_z
from jackpot.training.batching import batch_to, sampled_with
from jackpot.training.learner_options import LearnerOptions
from jackpot.training.old_policy import column_on_host, holds_target
from jackpot.training.reference import Reference

_Result = TypeVar("_Result")


class ModelOutputs(NamedTuple):
    """The outputs of the models at the N sampled tokens of a micro-batch."""

    hidden: dict[Role, Tensor]  # hidden states of each model that predict the tokens, [N, H]
    head: HeadOutput | JointOutput
    reference_kl: Tensor | None  # [N] KL to the reference; None where there is no reference
    # Z (expected acceptance) and lam (divisor of acceptance probabilities) of each token, [N] float64, where the
    # correction's budget chooses them; else None
    budgeted: tuple[Tensor, Tensor] | None


class JointForward:
    """The forward pass of both models: backbones, joint head, and the estimate of Z at each sampled token.

    Z is the probability that OBRS accepts a token that is drawn from the engine's distribution in that state.

    Args:
        models: both models; where they are one model, the policy generates its own rollouts.
        distill: divergence of the rollout model's distillation; None where the rollout model is not trained.
        version: returns the version of the models' current weights.
        reference, gathered: as in `JointLearner`.
    """

    def __init__(
        self,
        models: Mapping[Role, PreTrainedModel],
        objective: PolicyObjective,
        distill: Distillation | None,
        options: LearnerOptions,
        version: Callable[[], Version],
        *,
        reference: Reference | None,
        gathered: Gathered | None,
    ) -> None:
        """Make the head that reads both models or, where one model has both roles, the policy alone.

        `distill` is None where the rollout model is not trained; `version` returns that of the current weights.
        `reference` is the model of the KL term, `gathered` the holder of sharded models; None: there is none.
        """
        self._models = models
        self._objective = objective
        self.distill = distill
        self._options = options
        self._version = version
        self.reference = reference
        self._gathered = gathered

        policy, rollout_model = models["policy"], models["rollout_model"]
        self.is_separate = rollout_model is not policy  # whether each role has a model of its own
        self.runs_both = self.is_separate  # whether both models read the rollout batch that is trained on now
        self.device = gathered.device if gathered else policy.device
        self._head = LinearHead(
            output_layer(policy),
            output_layer(rollout_model) if self.is_separate else None,
            policy_soft_cap=logit_softcap(policy),
            rollout_model_soft_cap=logit_softcap(rollout_model) if self.is_separate else None,
            options=options.head,
        )

    def __call__(self, batch: TokenBatch, old: OldLogProbs | None = None) -> TokenScores:
        """Run both models and the joint head over a micro-batch, and return what `scores` makes of their outputs."""
        return self.scores(batch, self.outputs(batch, old), old)

    def send(self, batch: TokenBatch, old: OldLogProbs | None) -> TokenBatch:
        """Copy a micro-batch to the device; where the objective needs an exact Z, check first that Z can be exact.

        Z is the expected acceptance of a token. The check is made on the CPU, so that nothing waits for the device.

        Raises:
            ConfigError: as `check_exact`.
        """
        if not self._options.is_mixed:  # one model sampled all rollouts, so nothing is to be told apart
            batch = replace(batch, by_policy=None)
        if self._normalizer(old) == "exact":
            check_exact(self.weights_are_current(batch), batch.response_mask)
        return batch_to(batch, self.device)

    def outputs(self, batch: TokenBatch, old: OldLogProbs | None, is_trained: bool = False) -> ModelOutputs:
        """Run the backbones and the joint head over a micro-batch; return hidden states and the head's output.

        No exact Z (expected acceptance) is computed where `old` holds the Z that the correction uses, because the
        weights that generated the rollouts may no longer exist.

        Args:
            is_trained: True to compute also what only a backward pass and its metrics need.
        """
        return self.run(lambda: self._outputs(batch, old, is_trained))

    def scores(self, batch: TokenBatch, outputs: ModelOutputs, old: OldLogProbs | None) -> TokenScores:
        """Return the outputs of the models, such as log-probs and Z, as columns of the micro-batch, [B, T].

        Z is the expected acceptance; lam divides acceptance probabilities. Where there is a budget, it chose both.
        """
        objective = self._objective
        scores = token_scores(
            outputs.head,
            batch,
            self.weights_are_current(batch),
            lam=objective.correction.lam,
            normalizer="topk" if outputs.budgeted else self._normalizer(old),  # a budgeted Z is put in below
            distill=self.distill if self.runs_both else None,
            reference_kl=outputs.reference_kl,
        )

        if outputs.budgeted is None or objective.budget is None:
            return scores

        # Replace Z, the expected acceptance of each token, and lam by those that the budget has chosen.
        z, lam = (batch.spread(column.to(scores.log_probs.dtype)) for column in outputs.budgeted)
        # Z is the sum of min(p_inf, p_target / lam) over the vocabulary, p_inf being the engine's distribution. Where
        # the policy sampled, p_inf is p_target, so Z is min(1, 1 / lam), which is the budget at lam = 1 / budget.
        if batch.by_policy is not None:
            is_own = batch.by_policy[:, None] & batch.response_mask
            z, lam = torch.where(is_own, objective.budget, z), torch.where(is_own, 1.0 / objective.budget, lam)
        return replace(scores, z=known_z(z), lam=lam)

    def policy_log_probs(self, batch: TokenBatch) -> Tensor:
        """Run the policy alone over a batch; return log-probs of the tokens, [B, T] with gradient, 0 where masked."""

        def log_probs() -> Tensor:
            """Compute the log-probs of the N sampled tokens, [N]."""
            hidden, temperature = response_hidden(self._models["policy"], batch), self._options.temperature
            # Where the engine truncates its distribution, normalize the log-probs on the tokens that it kept.
            if self._options.on_support:
                (policy_head,) = self._head.heads(hidden, None)  # None: the rollout model is not read
                sampled_log_probs, _ = scores_on_support(policy_head, batch, temperature)
                return sampled_log_probs
            ids = batch.at_sampled(batch.response_ids)
            return self._head(hidden, None, ids, temperature=temperature, only_log_probs=True).log_probs

        return batch.spread(self.run(log_probs))

    def weights_are_current(self, batch: TokenBatch) -> Tensor:
        """Mark the tokens whose model still has the weights that sampled them: [B, T] bool.

        False for all tokens of an engine that quantizes, truncates, or computes in another dtype than training.
        """
        generator = "rollout_model" if self.is_separate else "policy"
        # Whether the engine that sampled a token gives the distribution that training computes from equal weights.
        is_exact: bool | Tensor = generator in self._options.exact_engines
        if batch.by_policy is not None:
            is_exact = torch.where(batch.by_policy[:, None], "policy" in self._options.exact_engines, is_exact)
        return sampled_with(batch, self._version()) & is_exact

    @torch.no_grad()
    def column(self, batches: Sequence[TokenBatch], compute: Callable[[TokenBatch], Tensor]) -> dict[str, Tensor]:
        """Compute a tensor [B, T, ...] for each batch without gradient; return its rows by rollout uid, on the CPU."""
        return column_on_host([(batch, self.run(partial(compute, batch_to(batch, self.device)))) for batch in batches])

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Call `work`, part of a forward pass, with autocast as the options say, and with sharded weights gathered.

        Autocast keeps no cast copies of sharded weights, because these copies would stay in memory when the gathered
        weights are freed.
        """
        keeps_copies = torch.is_autocast_cache_enabled() and self._gathered is None
        autocast = (
            torch.autocast(self.device.type, self._options.autocast, cache_enabled=keeps_copies)
            if self._options.autocast
            else None
        )
        with autocast or nullcontext():
            return self._gathered(work) if self._gathered else work()

    def _normalizer(self, old: OldLogProbs | None) -> str:
        """Return the key of `NORMALIZERS` by which Z, the expected acceptance of a token, is estimated.

        It is the objective's, such as "exact". But where the correction reads the Z of `old` (`holds_target`), the Z
        that is estimated here is not used, so it is "topk", the cheaper way, from both models' top-k lists.
        """
        return "topk" if holds_target(old, self._objective) else self._objective.normalizer

    def _outputs(self, batch: TokenBatch, old: OldLogProbs | None, is_trained: bool) -> ModelOutputs:
        """Run the backbones and the joint head, as `outputs` does, but without autocast and gathering of weights."""
        roles: tuple[Role, ...] = ("policy", "rollout_model") if self.runs_both else ("policy",)
        hidden: dict[Role, Tensor] = {role: response_hidden(self._models[role], batch) for role in roles}
        states = (hidden["policy"], hidden.get("rollout_model"))  # what the head reads; None: the policy alone

        # The head sums an exact Z, the expected acceptance, at the correction's lam. But where the correction has a
        # budget, the Z that all tokens shall have, `z_for_budget` below finds the lam that gives this Z.
        is_exact = self._normalizer(old) == "exact"
        budget = self._objective.budget if is_exact else None
        head = self._head(
            *states,
            batch.at_sampled(batch.response_ids),
            temperature=self._options.temperature,
            lam=self._objective.correction.lam if is_exact and budget is None else None,
            num_top=self._options.num_top_log_probs,
            gather_ids=batch.at_sampled(batch.top_ids),
            only_log_probs=not is_trained,
        )

        reference_kl = None
        if self.reference and is_trained:
            # The head returns an output of each model or, where it reads the policy alone, the policy's output itself.
            log_probs = head.policy.log_probs if self.runs_both else head.log_probs
            reference_kl = self.reference.kl(batch, hidden["policy"], log_probs)

        # Where the engine truncates its distribution, normalize the log-probs on the tokens that it kept.
        if self._options.on_support:
            head = on_support(head, self._head.heads(*states), batch, self._options.temperature)

        budgeted = None
        if budget:
            budgeted = self._head.z_for_budget(*states, temperature=self._options.temperature, budget=budget)
        return ModelOutputs(hidden=hidden, head=head, reference_kl=reference_kl, budgeted=budgeted)
