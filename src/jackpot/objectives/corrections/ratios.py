"""Corrections that look at the ratio rho = p_target / p_inf alone, of a token or of a whole response.

Their target is the proximal point by definition: the weight carries the expectation from p_inf to the point where PPO's
ratio starts. With `rho_t` of token t and the product over the sampled tokens of a response R = prod rho_t.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.core.metrics import Sums
from jackpot.objectives.corrections.base import Correction, CorrectionInputs, Measured, Totals, outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncorrected(Measured):
    """`none`: w = 1, trains as if the policy itself had written the text. No default to choose.

    Biased towards what the writer likes and the policy does not: pushing such text down lifts what is never written, so
    entropy and policy can collapse.

    `ppo_is` is this with `proximal: rollout`: the ratio p_new / p_inf is PPO's own and its clip is the correction (Yao
    et al. 2025, there named PPO-IS; Colossal-AI). Unbiased inside the clip; tokens outside it, on the side where the
    advantage would push further, lose their gradient whatever the cause of the ratio, so a large mismatch eats the
    trust region.
    """

    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return outcome(inputs, torch.ones_like(inputs.rollout_log_probs))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceSampling(Measured):
    """w = min(rho, cap).

    `is`: cap = inf, decoupled PPO (Hilton et al. 2022, arXiv 2110.00641; NeMo RL). Unbiased for each token given its
    prefix; its variance grows with the largest ratio.
    `tis`: truncated importance sampling, Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training". Default cap 3, the paper's (verl 2, TRL 3). Biased towards the writer where rho > cap.
    `tis_adjusted`: the same with `proximal: new` (Jackpot, submission B.1; "No-Clip" in arXiv Table 3), so PPO's ratio
    is 1 and its clip does nothing. Biased as `tis`, and without a trust region.

    All of them correct the token and not the prefix: states stay the writer's.
    """

    cap: float
    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio = inputs.log_ratio.exp()
        return outcome(inputs, ratio.clamp(max=self.cap), capped=ratio > self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class Band(Measured):
    """w = rho where low <= rho <= high; other tokens are dropped.

    `icepop`: two-sided masking, Ring-1T, arXiv 2510.18855. Default 0.5 to 5, the paper's. Biased towards tokens on
    which both models agree: those that the policy has given up (rho < low) are never pushed down further, those that it
    has discovered (rho > high) never up.
    `drop`: low = 0, AReaL's, arXiv 2505.24298 (its code drops the token, the paper's F is the identity). Default 5.
    Biased against tokens that the writer found improbable and the policy does not.
    """

    low: float
    high: float
    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio = inputs.log_ratio.exp()
        inside = (ratio >= self.low) & (ratio <= self.high)
        return outcome(inputs, torch.where(inside, ratio, 0.0), accepted=inside, capped=~inside)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceImportanceSampling(Measured):
    """`seq_tis`: w = min(R, cap) for every token of a response, verl's `rollout_is: sequence`. Default cap 2, verl's.

    Corrects prefixes and returns too, so without the cap it would be unbiased for the whole response. With it, biased
    towards the writer wherever R > cap; R spreads exponentially in the length, so on long responses most weights are
    either capped or almost 0.
    """

    cap: float
    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        log_ratio = _of_response(inputs)
        return outcome(inputs, log_ratio.clamp(max=math.log(self.cap)).exp(), capped=log_ratio > math.log(self.cap))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBand(Measured):
    """`seq_mask`: w = R where low <= R <= high; other responses are dropped whole. TRL's `sequence_mask`.

    Default 0 to 3, TRL's. Biased towards responses on which both models agree, and with a lower bound towards short
    ones, for R leaves any band as the response grows.
    """

    low: float
    high: float
    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        log_ratio = _of_response(inputs)
        inside = (log_ratio >= _log(self.low)) & (log_ratio <= _log(self.high))
        return outcome(inputs, torch.where(inside, log_ratio, -torch.inf).exp(), accepted=inside, capped=~inside)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeometricBand(Measured):
    """`geo_mask`: w = 1, and responses are dropped whole unless low <= R^(1/n) <= high, n sampled tokens.

    Liu, Li et al. 2025, "When speed kills stability"; verl's `seq_mean_k1`, which bounds the reciprocal. Default 0.999
    to 1.001, verl's for one model in two engines; another rollout model needs a far wider band. Length no longer
    matters, but nothing is reweighted either: biased as `none`, on a biased choice of responses.
    """

    low: float
    high: float
    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        counts = inputs.response_mask.sum(-1, keepdim=True).clamp(min=1)
        mean = _of_response(inputs) / counts
        inside = (mean >= _log(self.low)) & (mean <= _log(self.high))
        return outcome(inputs, torch.ones_like(mean), accepted=inside, capped=~inside)


def _of_response(inputs: CorrectionInputs) -> Tensor:
    """log R of every response: [B, 1]."""
    return inputs.log_ratio.sum(-1, keepdim=True)


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf
