"""Settings of the policy's loss, `objective` in a recipe."""

from typing import Literal

from jackpot.config.base import Conflicts, Count, Finite, NonNegative, Strict
from jackpot.config.corrections import OBRSCorrection, PolicyCorrection


class ReferenceConfig(Strict):
    """Settings of a frozen model that the policy stays near, by the term kl_loss_coef * KL(policy || reference)."""

    path: str | None = None
    """Folder or hub name of the reference; null: the policy as it is at the start of the run."""
    kl_loss_coef: Finite = 0.001
    """Coefficient of the KL divergence in the loss."""
    kl_loss_type: Literal["exact", "k2", "k3"] = "exact"
    """Estimator of the KL divergence: summed over the vocabulary (exact), or from the sampled tokens: k2 (verl's mse)
    or k3 (verl's low_var_kl, GRPO's)."""


class OverlongBufferConfig(Strict):
    """Settings of DAPO's soft penalty of long responses, which grows over the last tokens (arXiv 2503.14476 eq. 13)."""

    len: Count
    """Response tokens before `sampling.max_new_tokens` over which the penalty falls from 0 to -`penalty_factor`."""
    penalty_factor: Finite = 1.0
    """Penalty of a response that reaches the limit, in units of reward."""


class ObjectiveConfig(Strict):
    """Settings of the policy's loss: correction, advantages, clip, denominator and additional terms."""

    correction: PolicyCorrection = OBRSCorrection()
    """Correction of the mismatch between the engine that sampled the rollouts and the policy."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "opo", "oapl", "reinforce_pp", "reinforce_pp_baseline", "gae"] = (
        "grpo"
    )
    """Advantage estimator; `gae` needs a critic, and `oapl` is made for the surrogate of that name."""
    surrogate: Literal["ppo", "gspo", "gmpo", "cispo", "oapl"] = "ppo"
    """What is maximized of a token: PPO's clipped ratio times advantage; the same with the response's geometric mean of
    ratios, clipped as a whole (gspo) or token by token before the mean (gmpo); or the log-prob times the advantage and
    the clipped ratio, which carries no gradient (cispo). The correction's weights multiply each of them. oapl has no
    ratio and no clip: minus the squared distance of `oapl_beta` times the log-ratio of the response to the advantage,
    with correction {name: none, proximal: rollout} and advantage: oapl."""
    oapl_beta: Finite = 1.0
    """beta of OAPL, the weight of the KL divergence to whoever sampled, in units of reward: only of `advantage` and
    `surrogate` oapl. The smaller, the further the policy may go from the sampler before the next weights are sent."""
    baseline: Literal["group", "model"] = "group"
    """Responses whose rewards the advantage of one is compared with: all to its prompt, or those that the same model
    generated (model, only with `rollout_model.split: group`), of which one alone has the advantage 0.
    `batch.filter_groups` goes by the same ones. With `advantage: rloo` each is compared with the others alone, which
    adds no bias of its own whichever model generated them, as long as the correction's weights have none."""
    clip_low: NonNegative | None = 0.2
    """The surrogate's clip of the ratio from below, at 1 - clip_low; null: no clip. gspo needs a far closer one."""
    clip_high: NonNegative | None = 0.2
    """The surrogate's clip of the ratio from above, at 1 + clip_high; null: no clip."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """Denominator of the loss over an optimizer step: tokens (DAPO), each response's tokens and then responses (GRPO),
    or responses times `sampling.max_new_tokens` (Dr. GRPO)."""
    count: Literal["proposed", "accepted"] = "proposed"
    """Tokens that the denominator counts: all that the model sampled, or those that the correction accepts."""
    entropy_coeff: NonNegative = 0.0
    """Coefficient of the entropy bonus: the exact entropy at every response token, nats."""
    reference: ReferenceConfig | None = None
    """Penalty that keeps the policy near a frozen model; null: none."""
    overlong_buffer: OverlongBufferConfig | None = None
    """Penalty of responses near the length limit; null: none."""

    def conflicts(self) -> Conflicts:
        """Refuse what does not go with the surrogate oapl, or with counting the accepted tokens only."""
        counts_accepted = self.count == "accepted"
        correction, proximal = self.correction.name, self.correction.proximal
        is_oapl = self.surrogate == "oapl"
        oapl = "surrogate is 'oapl', a regression of each response's log-ratio to its sampler on the advantage 'oapl'"

        return [
            (
                is_oapl and (correction, proximal) != ("none", "rollout"),
                f"{oapl}, but correction is {correction!r} with proximal {proximal!r}; set correction to "
                "{name: none, proximal: rollout}",
            ),
            (
                is_oapl and self.advantage != "oapl",
                f"{oapl}, but advantage is {self.advantage!r}; set advantage to oapl",
            ),
            (
                is_oapl and self.loss_agg_mode == "seq-mean-token-mean",
                f"{oapl}, but loss_agg_mode 'seq-mean-token-mean' divides each response by its length; use token-mean "
                "or seq-mean-token-sum-norm",
            ),
            (
                counts_accepted and self.loss_agg_mode == "seq-mean-token-sum-norm",
                "loss_agg_mode 'seq-mean-token-sum-norm' divides by sequences x max_new_tokens, accepted or not; "
                "use count: proposed, or loss_agg_mode: token-mean or seq-mean-token-mean",
            ),
            (
                counts_accepted and (self.entropy_coeff or self.reference),
                "count 'accepted' divides by the accepted tokens, but entropy_coeff and reference act on all "
                "response tokens; use count: proposed with them",
            ),
        ]
