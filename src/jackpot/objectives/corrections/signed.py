"""Corrections that read the sign of the advantage too: they reject a token by where the update would move it.

Their target is the proximal point by definition, as in `ratios`, and the current policy by default, as in their papers;
then PPO's ratio is 1 and its clip has no effect. rho_t is the ratio of sampled token t of a response, R_t the product
rho_1 ... rho_t over its prefix, and A the advantage. A token with A = 0 has no gradient and counts as accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.config.corrections import DPPOCorrection, FTISCorrection, PrefixCorrection
from jackpot.core.metrics import Sums
from jackpot.objectives.corrections.base import BaseCorrection, Correction, CorrectionInputs, correction_result


@dataclass(frozen=True, slots=True)
class Signed(BaseCorrection):
    """Reads the sign of the advantage."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"advantages"})


@dataclass(frozen=True, slots=True)
class Prefix(Signed):
    """`prefix`: w = R_t; rejects a token with R_t > e^(high sqrt t), or with A < 0 and R_t < e^(-low sqrt t).

    CTPO, arXiv 2605.07331: PPO's clip of R_t, with a band that grows as the spread of log R_t does. Formula and
    defaults are those of its code (horizon-llm/CTPO acc4021, verl/trainer/ppo/core_algos.py, `cum-token-cumprod-la`),
    whose dual clip also rejects R_t above the band where A < 0; it clamps log rho_t to +-20 and log R_t to 10, we do
    not. The defaults are for update steps of one model; another rollout model needs a far wider band.

    R_t corrects the token and the states before it, so inside the band the weight is unbiased for both; what comes
    after the token stays the rollout model's. Biased against tokens that only one of the models is likely to reach.
    """

    settings: PrefixCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        log_ratio = inputs.log_ratio.cumsum(-1)
        spread = inputs.response_mask.cumsum(-1).to(log_ratio.dtype).sqrt()
        is_low = (log_ratio < -self.settings.low * spread) & (inputs.advantages < 0)
        rejected = (log_ratio > self.settings.high * spread) | is_low
        weights = torch.where(rejected, -torch.inf, log_ratio).exp()
        return correction_result(inputs, weights, accepted=~rejected, capped=rejected)


@dataclass(frozen=True, slots=True)
class FTIS(Signed):
    """`f_tis`: w = min(rho, cap); where the KL of a response is above max_kl its tokens with A < 0 are rejected.

    F-TIS, arXiv 2605.22537, with its defaults. Its code is not known to us; the KL of a response is taken as the
    estimate from its sampled tokens, sum log(p_inf / p_target), which is of KL(p_inf || p_target) and grows with the
    length.

    Biased as `tis`; and upwards in the responses that are far from the policy: what is bad in them is not unlearned.
    """

    settings: FTISCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio, cap = inputs.log_ratio.exp(), self.settings.cap
        is_far = -inputs.log_ratio.sum(-1, keepdim=True) > self.settings.max_kl
        rejected = is_far & (inputs.advantages < 0)
        return correction_result(inputs, ratio.clamp(max=cap), accepted=~rejected, capped=rejected | (ratio > cap))


@dataclass(frozen=True, slots=True)
class DPPO(Signed):
    """`dppo`: w = min(rho, cap); rejects a token if TV > max_tv and A log rho > 0, so that the update would widen it.

    DPPO, arXiv 2602.04879, with the total variation between p_inf and p_target, by `divergence`:

        binary   |p_target - p_inf| of the sampled token         verl 1dda039, verl/trainer/ppo/core_algos.py, `dppo_tv`
        topk     the tokens of the engine's top-k each, and all others as one         sail-sg/Stable-RL c6af1d1,
                 1/2 sum |p_target - p_inf|                                           verl/workers/actor/utils.py

    The default cap is verl's, max_tv that of its example; prime-rl has 0.2 and no cap. Both are lower bounds on the
    total variation. Stable-RL puts the sampled token into the top k, which we do not; we add the policy's top k where
    the rollout model's probability of them is known.

    A trust region and no correction of what is outside: biased towards where the policy and the rollout model already
    agree, for a token far from the rollout model is only moved back to it.
    """

    settings: DPPOCorrection

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"advantages"} if self.settings.divergence == "binary" else {"advantages", "z"})

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio, cap = inputs.log_ratio.exp(), self.settings.cap
        is_outside = TOTAL_VARIATIONS[self.settings.divergence](inputs) > self.settings.max_tv
        rejected = is_outside & (inputs.advantages * inputs.log_ratio > 0)
        return correction_result(inputs, ratio.clamp(max=cap), accepted=~rejected, capped=rejected | (ratio > cap))


def binary_variation(inputs: CorrectionInputs) -> Tensor:
    """|p_target - p_inf| of the sampled token, the total variation of {it, any other}: [B, T]."""
    return (inputs.target_log_probs.exp() - inputs.rollout_log_probs.exp()).abs()


def topk_variation(inputs: CorrectionInputs) -> Tensor:
    """Total variation of {each token that Z sums over, any other}: [B, T].

    With q = p_target, p = p_inf, and masses q_K, p_K of these tokens, it is 1/2 (sum |q - p| + |q_K - p_K|)
    = max(q_K, p_K) - sum min(q, p), and the last sum is Z at lam = 1; 1 - Z where Z is of the whole vocabulary.
    """
    z = inputs.z
    return torch.maximum(z.rollout_mass, z.target_mass) - z.value


TOTAL_VARIATIONS: dict[str, Callable[[CorrectionInputs], Tensor]] = {
    "binary": binary_variation,
    "topk": topk_variation,
}
