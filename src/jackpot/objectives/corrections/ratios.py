"""Corrections that read the ratio rho = p_target / p_inf alone, of a token or of a whole response.

Their target is the proximal point by definition: the weight carries the expectation from p_inf to the point where PPO's
ratio starts. rho_t is the ratio of token t, and R = prod rho_t over the n sampled tokens of a response. Defaults stand
in `config/corrections.py`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from jackpot.config.corrections import (
    DropCorrection,
    GeometricMaskCorrection,
    IcePopCorrection,
    ISCorrection,
    MinPrefixCorrection,
    NoCorrection,
    PPOISCorrection,
    SequenceMaskCorrection,
    SequenceTISCorrection,
    TISAdjustedCorrection,
    TISCorrection,
)
from jackpot.core.metrics import Sums
from jackpot.objectives.corrections.base import BaseCorrection, Correction, CorrectionInputs, correction_result


@dataclass(frozen=True, slots=True)
class Uncorrected(BaseCorrection):
    """`none` and `ppo_is`: w = 1.

    `none` trains as if the policy itself had generated the rollouts. Biased towards tokens that the rollout model
    prefers and the policy does not: lowering their probability raises that of tokens which are never sampled, so
    entropy and policy can collapse.

    `ppo_is` sets `proximal: rollout`: PPO's own ratio is p_new / p_inf and its clip is the correction (Yao et al. 2025,
    there named PPO-IS; Colossal-AI). Unbiased inside the clip; a token outside it, on the side where the advantage
    would push further, loses its gradient whether updates or the mismatch moved its ratio, so a large mismatch uses up
    the trust region.
    """

    settings: NoCorrection | PPOISCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return correction_result(inputs, torch.ones_like(inputs.rollout_log_probs))


@dataclass(frozen=True, slots=True)
class ImportanceSampling(BaseCorrection):
    """`is`: w = rho, decoupled PPO (Hilton et al. 2022, arXiv 2110.00641; NeMo RL).

    Unbiased for each token given its prefix; its variance grows with the largest ratio. It corrects the token and not
    the prefix: states stay those of the rollout model.
    """

    settings: ISCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return correction_result(inputs, inputs.log_ratio.exp())


@dataclass(frozen=True, slots=True)
class TruncatedImportanceSampling(BaseCorrection):
    """`tis` and `tis_adjusted`: w = min(rho, cap).

    `tis`: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". The
    default cap is the paper's (verl has 2, TRL 3). Biased towards the rollout model where rho > cap.

    `tis_adjusted` sets `proximal: new` (Jackpot, submission B.1; "No-Clip" in arXiv Table 3), so PPO's ratio is 1 and
    its clip has no effect. Biased as `tis`, and without a trust region.

    Both correct the token and not the prefix: states stay those of the rollout model.
    """

    settings: TISCorrection | TISAdjustedCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio, cap = inputs.log_ratio.exp(), self.settings.cap
        return correction_result(inputs, ratio.clamp(max=cap), capped=ratio > cap)


@dataclass(frozen=True, slots=True)
class IcePop(BaseCorrection):
    """`icepop`: w = rho where low <= rho <= high; other tokens are rejected. Ring-1T, arXiv 2510.18855.

    The defaults are the paper's. Biased towards tokens on which both models agree: a token that the policy has given up
    (rho < low) is never pushed down further, one that it has discovered (rho > high) never up.
    """

    settings: IcePopCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return _ratio_within(inputs, self.settings.low, self.settings.high)


@dataclass(frozen=True, slots=True)
class Drop(BaseCorrection):
    """`drop`: w = rho where rho <= cap; other tokens are rejected. AReaL, arXiv 2505.24298.

    AReaL's code rejects the token, as here; in its paper F is the identity. Biased against tokens that the rollout
    model found improbable and the policy does not.
    """

    settings: DropCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return _ratio_within(inputs, 0.0, self.settings.cap)


@dataclass(frozen=True, slots=True)
class SequenceTIS(BaseCorrection):
    """`seq_tis`: w = min(R, cap) for every token of a response, verl's `rollout_is: sequence` with its default cap.

    R corrects prefixes and returns too, so without the cap the weight would be unbiased for the whole response. With
    it, biased towards the rollout model wherever R > cap; R spreads exponentially in the length, so on long responses
    most weights are either capped or almost 0.
    """

    settings: SequenceTISCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        log_ratio, log_cap = _response_log_ratio(inputs), math.log(self.settings.cap)
        return correction_result(inputs, log_ratio.clamp(max=log_cap).exp(), capped=log_ratio > log_cap)


@dataclass(frozen=True, slots=True)
class SequenceMask(BaseCorrection):
    """`seq_mask`: w = R where low <= R <= high; other responses are rejected whole. TRL's `sequence_mask`.

    The defaults are TRL's. Biased towards responses on which both models agree, and with a lower bound towards short
    ones, for R leaves any band as the response grows.
    """

    settings: SequenceMaskCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        log_ratio = _response_log_ratio(inputs)
        inside = (log_ratio >= _log(self.settings.low)) & (log_ratio <= _log(self.settings.high))
        weights = torch.where(inside, log_ratio, -torch.inf).exp()
        return correction_result(inputs, weights, accepted=inside, capped=~inside)


@dataclass(frozen=True, slots=True)
class MinPrefix(BaseCorrection):
    """`min_prefix`: w = min(rho_t min over s < t of rho_s, cap); the first token has w = min(rho_1, cap).

    After MinPRO, arXiv 2601.22718: the smallest ratio of the prefix stands for the product of all. The paper clips
    from below too; its bounds and its code are not known to us, so 0 and `cap` are ours.

    Between `tis`, which leaves prefixes to the rollout model, and `prefix`, which it is for the first two tokens, up to
    the cap. After these biased against late tokens, as the mean of the smallest of several ratios is below 1.
    """

    settings: MinPrefixCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        up_to = torch.where(inputs.response_mask, inputs.log_ratio, torch.inf).cummin(-1).values
        before = pad(up_to[:, :-1], (1, 0), value=torch.inf)
        log_weight = inputs.log_ratio + torch.where(before.isposinf(), 0.0, before)
        log_cap = math.log(self.settings.cap)
        return correction_result(inputs, log_weight.clamp(max=log_cap).exp(), capped=log_weight > log_cap)


@dataclass(frozen=True, slots=True)
class GeometricMask(BaseCorrection):
    """`geo_mask`: w = 1, and a response is rejected whole unless low <= R^(1/n) <= high, for n sampled tokens.

    Liu, Li et al. 2025, "When speed kills stability"; verl's `seq_mean_k1`, which bounds the reciprocal. The defaults
    are verl's for one model in two engines; another rollout model needs a far wider band. The length of a response no
    longer matters, but nothing is reweighted either: biased as `none`, on a biased choice of responses.
    """

    settings: GeometricMaskCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        counts = inputs.response_mask.sum(-1, keepdim=True).clamp(min=1)
        mean = _response_log_ratio(inputs) / counts
        inside = (mean >= _log(self.settings.low)) & (mean <= _log(self.settings.high))
        return correction_result(inputs, torch.ones_like(mean), accepted=inside, capped=~inside)


def _ratio_within(inputs: CorrectionInputs, low: float, high: float) -> Correction:
    """w = rho where low <= rho <= high; other tokens are rejected with weight 0."""
    ratio = inputs.log_ratio.exp()
    inside = (ratio >= low) & (ratio <= high)
    return correction_result(inputs, torch.where(inside, ratio, 0.0), accepted=inside, capped=~inside)


def _response_log_ratio(inputs: CorrectionInputs) -> Tensor:
    """log R of every response: [B, 1]."""
    return inputs.log_ratio.sum(-1, keepdim=True)


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf
