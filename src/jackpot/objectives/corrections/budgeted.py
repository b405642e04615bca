"""OBRS, and the corrections that are left when one of its parts is taken out.

OBRS, eq. 5 and Algorithm 1, rejects a token by a Bernoulli mask of mean a and weighs an accepted token:

    a      = min(1, rho / lam)                                  rho = p_target / p_inf
    w      = min(kappa Z max(lam, rho), c1) * r2                r2 = min(p_proximal / p_target, c2)
    kappa  = sum of a over the step / sum of Z over the step    section 4.4.2

r2 moves the weight from the target to the point that PPO's ratio starts from: p_old / p_target in the paper, exactly 1
where both are the same. Since lam Z <= 1, a min(w, c1) = min(Z rho, c1): in expectation OBRS is truncated importance
sampling on Z rho, and lam enters through Z alone. So three things can make it differ from `tis`, and each has an arm
that isolates it, at the same target, cap and second factor, with m the Bernoulli mask:

    arm             factor on the surrogate                        differs by
    target_only     min(rho, c1) r2                                the target and r2, from `tis`
    coin_only       m min(max(lam, rho), c1) r2                    the mask, from target_only (equal mean if c1 >= lam)
    obrs, expected  a min(kappa Z max(lam, rho), c1) r2            Z, from target_only
    obrs            m min(kappa Z max(lam, rho), c1) r2            Z and the mask, from target_only
    z_only          min(kappa Z, c1)                               Z, from `none`
    mask_only       m                                              the rejection, from `none`
    reweight_only   min(kappa Z max(lam, rho), c1) r2              the rejection, from obrs
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jackpot.objectives.corrections.formula import Weighed
from jackpot.objectives.obrs import accept, weight

MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of the acceptance and uniforms
    "sampled": lambda acceptance, uniforms: accept(acceptance, uniforms).to(acceptance.dtype),
    "expected": lambda acceptance, uniforms: acceptance,
}
BEYOND_C1: dict[str, Callable[[Tensor, float], Tensor]] = {  # the F of eq. 5, of a weight and c1
    "cap": lambda weight, c1: weight.clamp(max=c1),
    "drop": lambda weight, c1: torch.where(weight > c1, 0.0, weight),
}


def obrs(
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    uniforms: Tensor,
    to_proximal: Tensor,
    acceptance: Tensor,
    kappa_z: Tensor,
    lam: float | Tensor,
    c1: float,
    c2: float,
    mask: str,
    beyond_c1: str,
) -> Weighed:
    """`obrs`: accepts with probability a = min(1, rho / lam), and w = min(kappa Z max(lam, rho), c1) r2.

    The defaults of lam, c1 and c2 are the paper's. `mask: sampled` is the paper's Bernoulli mask; `mask: expected`
    replaces it by its mean a(x), which has less variance. kappa stands inside the cap c1 and fixes only the mean of Z:
    `prepass` and `auto` use this step's sums, known by another forward pass or after the backward passes; `none` sets
    it to 1. Where Z is exact its mean needs no factor, and `auto` is `none`. `budget` chooses the lam of each position,
    so that Z is the budget (Theorem 3.4). `beyond_c1: drop` puts w where w <= c1, else 0, in place of min(w, c1).

    Biased towards states on which the models agree: the expected gradient of a token is Z times that of `is`, with
    Z = 1 - TV at lam = 1. And towards the rollout model where Z rho > c1. Prefixes stay those of the rollout model.
    """
    uncapped = weight(rollout_log_probs, target_log_probs, kappa_z, lam)
    return _capped(uncapped, to_proximal, c1, c2, MASKS[mask](acceptance, uniforms), BEYOND_C1[beyond_c1])


def reweight_only(
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    to_proximal: Tensor,
    kappa_z: Tensor,
    lam: float | Tensor,
    c1: float,
    c2: float,
) -> Weighed:
    """`reweight_only`: w = min(kappa Z max(lam, rho), c1) r2, and no token is rejected (submission, appendix C.1).

    Biased towards the rollout model: a token with rho < lam, which OBRS would mostly reject, keeps the weight Z lam.
    """
    return _capped(weight(rollout_log_probs, target_log_probs, kappa_z, lam), to_proximal, c1, c2)


def z_only(kappa_z: Tensor, c1: float) -> Weighed:
    """`z_only`: w = min(kappa Z, c1), the weight of the state alone.

    Biased towards the rollout model as `none`, with a lower weight on states where the models disagree.
    """
    return Weighed(kappa_z.clamp(max=c1), capped=kappa_z > c1)


def mask_only(rollout_log_probs: Tensor, uniforms: Tensor, acceptance: Tensor, mask: str) -> Weighed:
    """`mask_only`: OBRS's rejection without its weight, w = 1 (submission, Tables 5 and 6).

    Accepted tokens are distributed as p~, closer to the target than p_inf, and are trained on as if p~ were the target.
    Biased towards the rollout model by what is left, KL(p_target || p~), and towards states of high Z.
    """
    return Weighed(torch.ones_like(rollout_log_probs), accepted=MASKS[mask](acceptance, uniforms))


def target_only(log_ratio: Tensor, to_proximal: Tensor, c1: float, c2: float) -> Weighed:
    """`target_only`: w = min(rho, c1) min(p_proximal / p_target, c2): TIS at OBRS's target and caps, no Z, no mask.

    Biased as `tis`. With target and proximal point equal it is `tis` with cap c1.
    """
    return _capped(log_ratio.exp(), to_proximal, c1, c2)


def coin_only(
    log_ratio: Tensor, uniforms: Tensor, to_proximal: Tensor, acceptance: Tensor, lam: float, c1: float, c2: float
) -> Weighed:
    """`coin_only`: OBRS's Bernoulli mask and w = min(max(lam, rho), c1) r2, no Z.

    In expectation it is `target_only` if c1 >= lam, so biased as that; it adds the variance of the mask.
    """
    return _capped(log_ratio.exp().clamp(min=lam), to_proximal, c1, c2, MASKS["sampled"](acceptance, uniforms))


def _capped(
    uncapped: Tensor,
    to_proximal: Tensor,
    c1: float,
    c2: float,
    accepted: Tensor | None = None,
    bound: Callable[[Tensor, float], Tensor] = BEYOND_C1["cap"],
) -> Weighed:
    """min(uncapped, c1) * min(p_proximal / p_target, c2), or another F of eq. 5 in place of the first (`bound`)."""
    return Weighed(
        bound(uncapped, c1) * to_proximal.clamp(max=c2),
        accepted=accepted,
        capped=uncapped > c1,
        capped_c2=to_proximal > c2,
    )
