"""Corrections that read rho = p_target / p_inf and the sign of the advantage A: which way an update moves a token.

Their target is the proximal point by definition, as in `ratios`, and the current policy by default, as in their papers;
then PPO's ratio is 1 and its clip has no effect. rho_t is the ratio of sampled token t of a response, R_t the product
rho_1 ... rho_t over its prefix, and A the advantage. A token with A = 0 has no gradient and counts as accepted.
"""

import torch
from torch import Tensor

from jackpot.objectives.corrections.formula import Weighed
from jackpot.objectives.corrections.ratios import difference
from jackpot.objectives.obrs import ZEstimate


def prefix(log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, low: float, high: float) -> Weighed:
    """Weigh token t by R_t, the product of the ratios up to t, and reject it if R_t is outside of a band: `prefix`.

    It is rejected if R_t > e^(high sqrt t), or if its advantage A is below 0 and R_t < e^(-low sqrt t). CTPO, arXiv
    2605.07331: PPO's clip of R_t, with a band that grows as the spread of log R_t does. Formula and defaults are those
    of its code (horizon-llm/CTPO acc4021, verl/trainer/ppo/core_algos.py, `cum-token-cumprod-la`), whose dual clip also
    rejects R_t above the band where A < 0. That code clamps the log ratio of a token to +-20 and log R_t to 10, we do
    not. The defaults are for update steps of one model; another rollout model needs a far wider band.

    R_t corrects the token and the states before it, so inside the band the weight is unbiased for both; the tokens
    after it stay the rollout model's. It is biased against tokens that only one of the models is likely to reach.
    """
    log_prefix_ratio = log_ratio.cumsum(-1)  # log R_t
    spread = response_mask.cumsum(-1).to(log_prefix_ratio.dtype).sqrt()  # sqrt t
    rejected = (log_prefix_ratio > high * spread) | ((log_prefix_ratio < -low * spread) & (advantages < 0))
    return Weighed(torch.where(rejected, -torch.inf, log_prefix_ratio).exp(), accepted=~rejected, capped=rejected)


def f_tis(log_ratio: Tensor, advantages: Tensor, cap: float, max_kl: float) -> Weighed:
    """Weigh a token by min(rho, cap), and reject tokens with A < 0 in responses whose KL is above max_kl: `f_tis`.

    F-TIS, arXiv 2605.22537, with its defaults. Its code is not known to us. Here the KL of a response is the sum of
    log(p_inf / p_target) over its sampled tokens, an estimate of KL(p_inf || p_target) that grows with the length.

    Biased as `tis`, and towards responses that are far from the policy: the bad ones among them are not unlearned.
    """
    is_far = -log_ratio.sum(-1, keepdim=True) > max_kl
    return _tis_but(rejected=is_far & (advantages < 0), log_ratio=log_ratio, cap=cap)


def dppo(
    log_ratio: Tensor,
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    advantages: Tensor,
    max_tv: float,
    cap: float,
) -> Weighed:
    """Weigh a token by min(rho, cap), and reject it if TV > max_tv and the update would raise TV: `dppo`, binary.

    DPPO, arXiv 2602.04879. The update would raise TV if A log rho > 0. TV is the total variation between p_inf and
    p_target, as the setting `divergence` defines it; this function is `binary`, and `dppo_topk` is `topk`:

        binary   |p_target - p_inf| of the sampled token         verl 1dda039, verl/trainer/ppo/core_algos.py, `dppo_tv`
        topk     the engine's top-k tokens, and all other tokens counted as one       sail-sg/Stable-RL c6af1d1,
                 1/2 sum |p_target - p_inf|                                           verl/workers/actor/utils.py

    The default cap is verl's, the default of max_tv that of verl's example. Both formulas give lower bounds on the
    total variation over all tokens. Stable-RL adds the sampled token to the top k, which we do not; we add the policy's
    top k where the rollout model's probability of them is known.

    This is a trust region, which does not correct what it rejects. Biased towards tokens on which the policy and the
    rollout model already agree: a token far from the rollout model is only moved back to it.
    """
    variation = difference(rollout_log_probs, target_log_probs)
    return _tis_but(rejected=(variation > max_tv) & (advantages * log_ratio > 0), log_ratio=log_ratio, cap=cap)


def dppo_topk(log_ratio: Tensor, z: ZEstimate, advantages: Tensor, max_tv: float, cap: float) -> Weighed:
    """Do as `dppo` with `divergence: topk`: all tokens that Z does not sum over count as one token of the variation.

    With q = p_target, p = p_inf, and q_K, p_K their sums over the tokens that Z sums over, the total variation is
    1/2 (sum |q - p| + |q_K - p_K|) = max(q_K, p_K) - sum min(q, p). The last sum is Z at lam = 1. Where Z is over the
    whole vocabulary, the total variation is 1 - Z.
    """
    variation = torch.maximum(z.rollout_mass, z.target_mass) - z.value  # Z at lam = 1, as `dppo` has no setting lam
    moves_away = advantages * log_ratio > 0  # whether the update would raise the variation, as in `dppo`
    return _tis_but(rejected=(variation > max_tv) & moves_away, log_ratio=log_ratio, cap=cap)


def _tis_but(rejected: Tensor, log_ratio: Tensor, cap: float) -> Weighed:
    """Weigh tokens by min(rho, cap), and reject the tokens where `rejected` is True."""
    ratio = log_ratio.exp()
    return Weighed(ratio.clamp(max=cap), accepted=~rejected, capped=rejected | (ratio > cap))
