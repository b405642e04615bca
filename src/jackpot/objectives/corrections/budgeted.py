"""OBRS, and the corrections that are left when one of its parts is taken out: which part of OBRS helps?

OBRS, eq. 5 and Algorithm 1, rejects a token by a Bernoulli mask m of mean a and weighs an accepted token by w:

    a      = min(1, rho / lam)                                  rho = p_target / p_inf
    w      = min(kappa Z max(lam, rho), c1) * r2                r2 = min(p_proximal / p_target, c2)
    kappa  = sum of a over the step / sum of Z over the step    section 4.4.2

In words: the larger lam is, the more tokens are rejected; Z is the mean of a over the tokens that may be sampled after
a prefix, and kappa makes the mean of estimates of Z right; c1 and c2 are caps. r2 moves the weight from the target to
the point that PPO's ratio starts from: p_old / p_target in the paper, exactly 1 where both are the same.
docs/corrections.md says in which part each correction differs from `tis`, `none` and `obrs`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jackpot.objectives.corrections.formula import Weighed
from jackpot.objectives.obrs import accept, weight

MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # by the setting `mask`: (acceptance, uniforms) -> mask
    "sampled": lambda acceptance, uniforms: accept(acceptance, uniforms).to(acceptance.dtype),
    "expected": lambda acceptance, uniforms: acceptance,
}
BEYOND_C1: dict[str, Callable[[Tensor, float], Tensor]] = {  # by `beyond_c1`: (weight, c1) -> bounded weight
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
    """Accept a token with probability a = min(1, rho / lam), with the weight min(kappa Z max(lam, rho), c1) r2: `obrs`.

    rho = p_target / p_inf, Z is the mean of a at the token's prefix, and kappa = sum of a / sum of estimates of Z.
    The tensor `acceptance` is a, `kappa_z` is kappa Z, and `to_proximal` is p_proximal / p_target.
    r2 = min(p_proximal / p_target, c2) moves the weight to the point that PPO's ratio starts from.
    The defaults of lam, c1 and c2 are the paper's. `mask: sampled` is the paper's Bernoulli mask; `mask: expected`
    multiplies by the mask's mean a(x) instead, which has less variance. `kappa: none` sets kappa to 1. Else kappa is
    computed from sums over this optimizer step, known after one more forward pass (`prepass`) or at the latest after
    the backward passes (`auto`). Kappa only makes the mean of estimates of Z right; for an exact Z `auto` is `none`.
    `budget` chooses the lam of each position, so that Z is the budget (the paper's Theorem 3.4). `beyond_c1: drop` sets
    weights above c1 to 0 instead of c1.

    Biased towards states on which the models agree: the expected gradient of a token is Z times that of `is`, with
    Z = 1 - TV at lam = 1. Biased also towards the rollout model where Z rho > c1. Prefixes stay those of the rollout
    model.
    """
    uncapped = weight(rollout_log_probs, target_log_probs, kappa_z, lam)
    accepted = MASKS[mask](acceptance, uniforms)
    return _capped(uncapped, to_proximal, c1, c2, accepted=accepted, bound=BEYOND_C1[beyond_c1])


def reweight_only(
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    to_proximal: Tensor,
    kappa_z: Tensor,
    lam: float | Tensor,
    c1: float,
    c2: float,
) -> Weighed:
    """Weigh every token by OBRS's weight, min(kappa Z max(lam, rho), c1) r2, and reject none: `reweight_only`.

    Here rho = p_target / p_inf, Z is the mean of min(1, rho / lam) at the token's prefix, kappa corrects the estimates
    of Z, and r2 = min(p_proximal / p_target, c2). Source: submission, appendix C.1.

    Biased towards the rollout model: a token with rho < lam, which OBRS would mostly reject, keeps the weight Z lam.
    """
    return _capped(weight(rollout_log_probs, target_log_probs, kappa_z, lam), to_proximal, c1, c2)


def z_only(kappa_z: Tensor, c1: float) -> Weighed:
    """Weigh every token by min(kappa Z, c1), with Z the mean acceptance at the token's prefix: `z_only`.

    kappa is the factor of a step that corrects estimates of Z.

    Biased towards the rollout model as `none`, with a lower weight on states where the models disagree.
    """
    return Weighed(kappa_z.clamp(max=c1), capped=kappa_z > c1)


def mask_only(rollout_log_probs: Tensor, uniforms: Tensor, acceptance: Tensor, mask: str) -> Weighed:
    """Reject tokens as OBRS does, and weigh the accepted ones by 1: `mask_only` (submission, Tables 5 and 6).

    Accepted tokens have the distribution p~ = min(p_inf, p_target / lam) / Z, with Z the sum of that minimum over all
    tokens. It is closer to the target than p_inf, and accepted tokens are trained on as if p~ were the target.
    Biased towards the rollout model, by the remaining divergence KL(p_target || p~), and towards states of high Z.
    """
    return Weighed(torch.ones_like(rollout_log_probs), accepted=MASKS[mask](acceptance, uniforms))


def target_only(log_ratio: Tensor, to_proximal: Tensor, c1: float, c2: float) -> Weighed:
    """Weigh a token by min(rho, c1) * min(p_proximal / p_target, c2), without Z or mask: `target_only`.

    Here rho = p_target / p_inf. This is TIS at OBRS's target and caps, biased as `tis`. With target and proximal point
    equal it is `tis` at cap c1.
    """
    return _capped(log_ratio.exp(), to_proximal, c1, c2)


def coin_only(
    log_ratio: Tensor, uniforms: Tensor, to_proximal: Tensor, acceptance: Tensor, lam: float, c1: float, c2: float
) -> Weighed:
    """Reject tokens as OBRS does, and weigh the accepted ones without Z, by min(max(lam, rho), c1) r2: `coin_only`.

    Here rho = p_target / p_inf, r2 = min(p_proximal / p_target, c2), and `acceptance` is the chance of acceptance,
    min(1, rho / lam). If c1 >= lam, mask times weight has the expectation of the weight of `target_only`, and so the
    same bias; the mask adds variance.
    """
    return _capped(log_ratio.exp().clamp(min=lam), to_proximal, c1, c2, accepted=MASKS["sampled"](acceptance, uniforms))


def _capped(
    uncapped: Tensor,
    to_proximal: Tensor,
    c1: float,
    c2: float,
    accepted: Tensor | None = None,
    bound: Callable[[Tensor, float], Tensor] = BEYOND_C1["cap"],
) -> Weighed:
    """Weigh tokens by bound(uncapped, c1) * min(to_proximal, c2), where `bound` is the minimum by default.

    `uncapped` is the weight that aligns p_inf to p_target, and `to_proximal` is p_proximal / p_target.
    """
    return Weighed(
        bound(uncapped, c1) * to_proximal.clamp(max=c2),
        accepted=accepted,
        capped=uncapped > c1,
        capped_c2=to_proximal > c2,
    )
