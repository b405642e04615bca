"""Corrections that read the sign of the advantage too: they reject a token by where the update would move it.

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
    """`prefix`: w = R_t; rejects a token with R_t > e^(high sqrt t), or with A < 0 and R_t < e^(-low sqrt t).

    CTPO, arXiv 2605.07331: PPO's clip of R_t, with a band that grows as the spread of log R_t does. Formula and
    defaults are those of its code (horizon-llm/CTPO acc4021, verl/trainer/ppo/core_algos.py, `cum-token-cumprod-la`),
    whose dual clip also rejects R_t above the band where A < 0; it clamps log rho_t to +-20 and log R_t to 10, we do
    not. The defaults are for update steps of one model; another rollout model needs a far wider band.

    R_t corrects the token and the states before it, so inside the band the weight is unbiased for both; what comes
    after the token stays the rollout model's. Biased against tokens that only one of the models is likely to reach.
    """
    up_to = log_ratio.cumsum(-1)
    spread = response_mask.cumsum(-1).to(up_to.dtype).sqrt()
    rejected = (up_to > high * spread) | ((up_to < -low * spread) & (advantages < 0))
    return Weighed(torch.where(rejected, -torch.inf, up_to).exp(), accepted=~rejected, capped=rejected)


def f_tis(log_ratio: Tensor, advantages: Tensor, cap: float, max_kl: float) -> Weighed:
    """`f_tis`: w = min(rho, cap); where the KL of a response is above max_kl its tokens with A < 0 are rejected.

    F-TIS, arXiv 2605.22537, with its defaults. Its code is not known to us; the KL of a response is taken as the
    estimate from its sampled tokens, sum log(p_inf / p_target), which is of KL(p_inf || p_target) and grows with the
    length.

    Biased as `tis`; and upwards in the responses that are far from the policy: what is bad in them is not unlearned.
    """
    is_far = -log_ratio.sum(-1, keepdim=True) > max_kl
    return _tis_but(is_far & (advantages < 0), log_ratio, cap)


def dppo(
    log_ratio: Tensor,
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    advantages: Tensor,
    max_tv: float,
    cap: float,
) -> Weighed:
    """`dppo`: w = min(rho, cap); rejects a token if TV > max_tv and A log rho > 0, so that the update would widen it.

    DPPO, arXiv 2602.04879, with the total variation between p_inf and p_target, by `divergence`:

        binary   |p_target - p_inf| of the sampled token         verl 1dda039, verl/trainer/ppo/core_algos.py, `dppo_tv`
        topk     the tokens of the engine's top-k each, and all others as one         sail-sg/Stable-RL c6af1d1,
                 1/2 sum |p_target - p_inf|                                           verl/workers/actor/utils.py

    The default cap is verl's, max_tv that of its example. Both are lower bounds on the total variation. Stable-RL puts
    the sampled token into the top k, which we do not; we add the policy's top k where the rollout model's probability
    of them is known.

    A trust region and no correction of what is outside: biased towards where the policy and the rollout model already
    agree, for a token far from the rollout model is only moved back to it.
    """
    variation = difference(rollout_log_probs, target_log_probs)
    return _tis_but((variation > max_tv) & (advantages * log_ratio > 0), log_ratio, cap)


def dppo_topk(log_ratio: Tensor, z: ZEstimate, advantages: Tensor, max_tv: float, cap: float) -> Weighed:
    """`dppo` with `divergence: topk`, the total variation of {each token that Z sums over, any other}.

    With q = p_target, p = p_inf, and masses q_K, p_K of these tokens, it is 1/2 (sum |q - p| + |q_K - p_K|)
    = max(q_K, p_K) - sum min(q, p), and the last sum is Z at lam = 1; 1 - Z where Z is of the whole vocabulary.
    """
    variation = torch.maximum(z.rollout_mass, z.target_mass) - z.value
    return _tis_but((variation > max_tv) & (advantages * log_ratio > 0), log_ratio, cap)


def _tis_but(rejected: Tensor, log_ratio: Tensor, cap: float) -> Weighed:
    """w = min(rho, cap) of the tokens that are not rejected."""
    ratio = log_ratio.exp()
    return Weighed(ratio.clamp(max=cap), accepted=~rejected, capped=rejected | (ratio > cap))
