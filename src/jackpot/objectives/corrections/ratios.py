"""Corrections that read the ratio rho = p_target / p_inf, of a token or of a whole response; `ipo` also the difference.

Their target is the proximal point by definition: the weight carries the expectation from p_inf to the point where PPO's
ratio starts. rho_t is the ratio of token t, and R = prod rho_t over the n sampled tokens of a response; log_ratio is
log rho. Arguments are tensors [B, T], detached; settings and their defaults stand in `config/corrections.py`.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from jackpot.objectives.corrections.formula import Weighed


def none(rollout_log_probs: Tensor) -> Weighed:
    """Weigh every token by 1, as if the policy itself had generated the rollouts: `none`.

    Biased towards tokens that the rollout model prefers and the policy does not: lowering their probability raises that
    of tokens which are never sampled, so entropy and policy can collapse.

    With `proximal: rollout` PPO's own ratio is p_new / p_inf and its clip is the correction (Yao et al. 2025, there
    named PPO-IS; Colossal-AI). It is unbiased inside the clip. A token outside of it, on the side where the advantage
    would push it further, loses its gradient, whether updates moved its ratio there or the mismatch did. So a large
    mismatch uses up the trust region.
    """
    return Weighed(torch.ones_like(rollout_log_probs))


def importance_sampling(log_ratio: Tensor) -> Weighed:
    """Weigh a token by rho: `is`, decoupled PPO (Hilton et al. 2022, arXiv 2110.00641; NeMo RL).

    Unbiased for each token given its prefix; its variance grows with the largest ratio. It corrects the token and not
    the prefix: states stay those of the rollout model.
    """
    return Weighed(log_ratio.exp())


def tis(log_ratio: Tensor, cap: float) -> Weighed:
    """Weigh a token by min(rho, cap): `tis`, truncated importance sampling.

    Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". The default
    cap is that of Yao et al. (verl's is 2, TRL's 3). Biased towards the rollout model where rho > cap. It corrects the
    token and not the prefix: states stay those of the rollout model. With `proximal: new` (Jackpot's "TIS +
    adjustment", submission B.1; "No-Clip" in arXiv Table 3) PPO's ratio is 1 and its clip has no effect.
    """
    ratio = log_ratio.exp()
    return Weighed(ratio.clamp(max=cap), capped=ratio > cap)


def icepop(log_ratio: Tensor, low: float, high: float) -> Weighed:
    """Weigh a token by rho where low <= rho <= high, and reject the others: `icepop`, Ring-1T, arXiv 2510.18855.

    The defaults are the paper's. Biased towards tokens on which both models agree: a token that the policy has given up
    (rho < low) is never pushed down further, one that it has discovered (rho > high) never up.
    """
    ratio = log_ratio.exp()
    inside = (ratio >= low) & (ratio <= high)
    return Weighed(torch.where(inside, ratio, 0.0), accepted=inside, capped=~inside)


def drop(log_ratio: Tensor, cap: float) -> Weighed:
    """Weigh a token by rho where rho <= cap, and reject the others: `drop`, AReaL, arXiv 2505.24298.

    AReaL's code rejects tokens, as here; its paper does not. Biased against tokens that the rollout model found
    improbable and the policy does not.
    """
    return icepop(log_ratio, 0.0, cap)


def ipo(log_ratio: Tensor, rollout_log_probs: Tensor, target_log_probs: Tensor, max_tv: float) -> Weighed:
    """Weigh a token by rho where |p_target - p_inf| <= max_tv, and reject the others: `ipo`, prime-rl's default loss.

    Mask and ratio are those of prime-rl's `ipo_loss_fn` (559b447, src/prime_rl/trainer/rl/loss.py), which caps no
    weight and counts rejected tokens in its denominator. The default of max_tv is prime-rl's `eps` since pull request
    3586; its KL to the sampler, off since then, is left out. The default target is the current policy, as in prime-rl.

    Unlike `dppo`, it ignores the sign of the advantage: a token whose probability the policy has moved far is not moved
    back either. Biased towards tokens on which both models agree. A token that both models find less likely than max_tv
    is never rejected, whatever its ratio, so rare tokens keep the unbounded variance of `is`.
    """
    inside = difference(rollout_log_probs, target_log_probs) <= max_tv
    # No weight is capped: `capped` also marks tokens that a band, here max_tv, rejects. Their weight is e^-inf = 0.
    return Weighed(torch.where(inside, log_ratio, -torch.inf).exp(), accepted=inside, capped=~inside)


def difference(rollout_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """Return |p_target - p_inf| of the sampled token, [B, T]: the total variation if all other tokens count as one."""
    return (target_log_probs.exp() - rollout_log_probs.exp()).abs()


def seq_tis(log_ratio: Tensor, cap: float) -> Weighed:
    """Weigh every token of a response by min(R, cap), with R the product of its tokens' ratios: `seq_tis`.

    This is verl's `rollout_is: sequence` with verl's default cap. R also corrects the tokens before and after a token,
    so without the cap the weight would be unbiased for the whole response. With the cap it is biased towards the
    rollout model wherever R > cap. The spread of R grows exponentially with the length, so on long responses most
    weights are either capped or almost 0.
    """
    log_product, log_cap = log_ratio.sum(-1, keepdim=True), math.log(cap)  # log of R, a response's product, [B, 1]
    return Weighed(log_product.clamp(max=log_cap).exp(), capped=log_product > log_cap)


def seq_mask(log_ratio: Tensor, low: float, high: float) -> Weighed:
    """Weigh tokens by R, the product of a response's ratios, if low <= R <= high, else reject them: `seq_mask`.

    This is TRL's `sequence_mask`, with TRL's defaults. Biased towards responses on which both models agree, and
    with a lower bound towards short ones, for R leaves any band as the response grows.
    """
    log_product = log_ratio.sum(-1, keepdim=True)  # log of R, the product of a response's ratios, [B, 1]
    inside = (log_product >= _log_bound(low)) & (log_product <= _log_bound(high))
    return Weighed(torch.where(inside, log_product, -torch.inf).exp(), accepted=inside, capped=~inside)


def geo_mask(log_ratio: Tensor, response_mask: Tensor, low: float, high: float) -> Weighed:
    """Weigh tokens by 1, and reject a response whole unless low <= R^(1/n) <= high: `geo_mask`.

    R^(1/n) is the geometric mean of the ratios of its n sampled tokens. Liu, Li et al. 2025, "When speed kills
    stability"; verl's `seq_mean_k1`, which bounds 1 / R^(1/n). The defaults are verl's for one model in two engines;
    another rollout model needs a far wider band. Unlike `seq_mask` it does not reject long responses more often, but
    accepted tokens are not reweighted: biased as `none`, and by the choice of responses.
    """
    log_mean = log_ratio.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp(min=1)
    inside = (log_mean >= _log_bound(low)) & (log_mean <= _log_bound(high))
    return Weighed(torch.ones_like(log_mean), accepted=inside, capped=~inside)


def min_prefix(log_ratio: Tensor, response_mask: Tensor, cap: float) -> Weighed:
    """Weigh token t by min(rho_t times the smallest rho before it, cap), the first by min(rho_1, cap): `min_prefix`.

    After MinPRO, arXiv 2601.22718: the smallest ratio of the prefix replaces the product of all. The paper clips from
    below too; its bounds and its code are not known to us, so the bounds 0 and `cap` are ours.

    `min_prefix` lies between `tis`, which does not correct the prefix at all, and `prefix`, to which it is equal on
    the first two tokens, up to the cap. From the third token on it is biased against late tokens, as the mean of the
    smallest of several ratios is below 1.
    """
    # Logs of the smallest ratio so far: `smallest` counts the token itself, `smallest_before` only those before it; inf
    # where there is none yet.
    smallest = torch.where(response_mask, log_ratio, torch.inf).cummin(-1).values
    smallest_before, log_cap = pad(smallest[:, :-1], (1, 0), value=torch.inf), math.log(cap)
    log_weight = log_ratio + torch.where(smallest_before.isposinf(), 0.0, smallest_before)
    return Weighed(log_weight.clamp(max=log_cap).exp(), capped=log_weight > log_cap)


def _log_bound(bound: float) -> float:
    """Return the log of a bound, -inf for the bound 0."""
    return math.log(bound) if bound else -math.inf
