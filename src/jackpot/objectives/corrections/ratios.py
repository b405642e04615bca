"""Corrections that read the ratio rho = p_target / p_inf, of a token or of a whole response; `ipo` also the difference.

Their target is the proximal point by definition: the weight carries the expectation from p_inf to the point where PPO's
ratio starts. rho_t is the ratio of token t, and R = prod rho_t over the n sampled tokens of a response. Arguments are
tensors [B, T], detached; settings and their defaults stand in `config/corrections.py`.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from jackpot.objectives.corrections.formula import Weighed


def none(rollout_log_probs: Tensor) -> Weighed:
    """`none`: w = 1, as if the policy itself had generated the rollouts.

    Biased towards tokens that the rollout model prefers and the policy does not: lowering their probability raises that
    of tokens which are never sampled, so entropy and policy can collapse.

    With `proximal: rollout` PPO's own ratio is p_new / p_inf and its clip is the correction (Yao et al. 2025, there
    named PPO-IS; Colossal-AI). Unbiased inside the clip; a token outside it, on the side where the advantage would push
    further, loses its gradient whether updates or the mismatch moved its ratio, so a large mismatch uses up the trust
    region.
    """
    return Weighed(torch.ones_like(rollout_log_probs))


def importance_sampling(log_ratio: Tensor) -> Weighed:
    """`is`: w = rho, decoupled PPO (Hilton et al. 2022, arXiv 2110.00641; NeMo RL).

    Unbiased for each token given its prefix; its variance grows with the largest ratio. It corrects the token and not
    the prefix: states stay those of the rollout model.
    """
    return Weighed(log_ratio.exp())


def tis(log_ratio: Tensor, cap: float) -> Weighed:
    """`tis`: w = min(rho, cap). Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training".

    The default cap is the paper's (verl has 2, TRL 3). Biased towards the rollout model where rho > cap. It corrects
    the token and not the prefix: states stay those of the rollout model. With `proximal: new` (Jackpot's "TIS +
    adjustment", submission B.1; "No-Clip" in arXiv Table 3) PPO's ratio is 1 and its clip has no effect.
    """
    ratio = log_ratio.exp()
    return Weighed(ratio.clamp(max=cap), capped=ratio > cap)


def icepop(log_ratio: Tensor, low: float, high: float) -> Weighed:
    """`icepop`: w = rho where low <= rho <= high; other tokens are rejected. Ring-1T, arXiv 2510.18855.

    The defaults are the paper's. Biased towards tokens on which both models agree: a token that the policy has given up
    (rho < low) is never pushed down further, one that it has discovered (rho > high) never up.
    """
    ratio = log_ratio.exp()
    inside = (ratio >= low) & (ratio <= high)
    return Weighed(torch.where(inside, ratio, 0.0), accepted=inside, capped=~inside)


def drop(log_ratio: Tensor, cap: float) -> Weighed:
    """`drop`: w = rho where rho <= cap; other tokens are rejected. AReaL, arXiv 2505.24298.

    AReaL's code rejects the token, as here; in its paper F is the identity. Biased against tokens that the rollout
    model found improbable and the policy does not.
    """
    return icepop(log_ratio, 0.0, cap)


def ipo(log_ratio: Tensor, rollout_log_probs: Tensor, target_log_probs: Tensor, max_tv: float) -> Weighed:
    """`ipo`: w = rho where |p_target - p_inf| <= max_tv; other tokens are rejected. prime-rl's default loss.

    Mask and ratio are those of its `ipo_loss_fn` (559b447, src/prime_rl/trainer/rl/loss.py), which caps no weight and
    counts rejected tokens in its denominator. The default is its `eps` since pull request 3586; its KL to the sampler,
    off since then, is left out. The target is the current policy by default, as there.

    As `dppo` without the sign of the advantage: a token that the policy has moved far in probability is not moved back
    either. Biased towards tokens on which both models agree. No token is rejected that both find less likely than
    max_tv, whatever its ratio, so rare tokens keep the unbounded variance of `is`.
    """
    inside = difference(rollout_log_probs, target_log_probs) <= max_tv
    return Weighed(torch.where(inside, log_ratio, -torch.inf).exp(), accepted=inside, capped=~inside)


def difference(rollout_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """Return |p_target - p_inf| of the sampled token: [B, T], the total variation of {this token, any other}."""
    return (target_log_probs.exp() - rollout_log_probs.exp()).abs()


def seq_tis(log_ratio: Tensor, cap: float) -> Weighed:
    """`seq_tis`: w = min(R, cap) for every token of a response, verl's `rollout_is: sequence` with its default cap.

    R corrects prefixes and returns too, so without the cap the weight would be unbiased for the whole response. With
    it, biased towards the rollout model wherever R > cap; R spreads exponentially in the length, so on long responses
    most weights are either capped or almost 0.
    """
    whole, log_cap = _of_response(log_ratio), math.log(cap)
    return Weighed(whole.clamp(max=log_cap).exp(), capped=whole > log_cap)


def seq_mask(log_ratio: Tensor, low: float, high: float) -> Weighed:
    """`seq_mask`: w = R where low <= R <= high; other responses are rejected whole. TRL's `sequence_mask`.

    The defaults are TRL's. Biased towards responses on which both models agree, and with a lower bound towards short
    ones, for R leaves any band as the response grows.
    """
    whole = _of_response(log_ratio)
    inside = (whole >= _log(low)) & (whole <= _log(high))
    return Weighed(torch.where(inside, whole, -torch.inf).exp(), accepted=inside, capped=~inside)


def geo_mask(log_ratio: Tensor, response_mask: Tensor, low: float, high: float) -> Weighed:
    """`geo_mask`: w = 1, and a response is rejected whole unless low <= R^(1/n) <= high, for n sampled tokens.

    Liu, Li et al. 2025, "When speed kills stability"; verl's `seq_mean_k1`, which bounds the reciprocal. The defaults
    are verl's for one model in two engines; another rollout model needs a far wider band. The length of a response no
    longer matters, but nothing is reweighted either: biased as `none`, on a biased choice of responses.
    """
    mean = _of_response(log_ratio) / response_mask.sum(-1, keepdim=True).clamp(min=1)
    inside = (mean >= _log(low)) & (mean <= _log(high))
    return Weighed(torch.ones_like(mean), accepted=inside, capped=~inside)


def min_prefix(log_ratio: Tensor, response_mask: Tensor, cap: float) -> Weighed:
    """`min_prefix`: w = min(rho_t min over s < t of rho_s, cap); the first token has w = min(rho_1, cap).

    After MinPRO, arXiv 2601.22718: the smallest ratio of the prefix stands for the product of all. The paper clips
    from below too; its bounds and its code are not known to us, so 0 and `cap` are ours.

    Between `tis`, which leaves prefixes to the rollout model, and `prefix`, which it is for the first two tokens, up to
    the cap. After these biased against late tokens, as the mean of the smallest of several ratios is below 1.
    """
    up_to = torch.where(response_mask, log_ratio, torch.inf).cummin(-1).values
    before = pad(up_to[:, :-1], (1, 0), value=torch.inf)
    log_weight, log_cap = log_ratio + torch.where(before.isposinf(), 0.0, before), math.log(cap)
    return Weighed(log_weight.clamp(max=log_cap).exp(), capped=log_weight > log_cap)


def _of_response(log_ratio: Tensor) -> Tensor:
    """log R of every response: [B, 1]."""
    return log_ratio.sum(-1, keepdim=True)


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf
