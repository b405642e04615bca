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
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.config.corrections import (
    CoinOnlyCorrection,
    Kappa,
    Mask,
    MaskOnlyCorrection,
    OBRSCorrection,
    ReweightOnlyCorrection,
    TargetOnlyCorrection,
    ZOnlyCorrection,
)
from jackpot.core.metrics import Sums
from jackpot.objectives import obrs
from jackpot.objectives.corrections.base import BaseCorrection, Correction, CorrectionInputs, Kappas, correction_result

MASKS = {
    "sampled": lambda acceptance, uniforms: obrs.accept(acceptance, uniforms).to(acceptance.dtype),
    "expected": lambda acceptance, uniforms: acceptance,
}
BEYOND_C1 = {  # the F of eq. 5, of a weight and c1
    "cap": lambda weight, c1: weight.clamp(max=c1),
    "drop": lambda weight, c1: torch.where(weight > c1, 0.0, weight),
}


@dataclass(frozen=True, slots=True)
class Budgeted(BaseCorrection):
    """Measures acceptance and Z at the lam of its settings."""

    settings: OBRSCorrection | ReweightOnlyCorrection | ZOnlyCorrection | MaskOnlyCorrection | CoinOnlyCorrection

    @property
    def lam(self) -> float:
        """The setting `lam`, above 0."""
        return self.settings.lam


@dataclass(frozen=True, slots=True)
class ZWeighted(Budgeted):
    """Weighs by kappa Z, and so asks for the sums that its setting `kappa` names."""

    settings: OBRSCorrection | ReweightOnlyCorrection | ZOnlyCorrection

    @property
    def kappa(self) -> Kappa:
        """Whether `apply` needs sums over the optimizer step: as the setting says; not with `auto` and an exact Z."""
        is_free_of_bias = self.settings.normalizer == "exact"
        return "none" if self.settings.kappa == "auto" and is_free_of_bias else self.settings.kappa

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"z"})

    def _kappas(self, inputs: CorrectionInputs, totals: Sums) -> Kappas:
        """kappa of the given sums; 1 with `kappa: none` or without sums."""
        device = inputs.rollout_log_probs.device

        def quotient(model: str) -> Tensor:
            return obrs.kappa(totals[f"acceptance{model}"].total, totals[f"z{model}"].total).to(device)

        if self.kappa == "none" or not totals:
            return Kappas(torch.ones((), dtype=torch.float64, device=device))
        if inputs.by_policy is None:
            return Kappas(quotient(""))
        of_policy, count = quotient("_by_policy"), totals["z_by_rollout_model"].count.to(device)
        return Kappas(torch.where(count > 0, quotient("_by_rollout_model"), of_policy), of_policy)

    def _obrs_weight(self, inputs: CorrectionInputs, kappas: Kappas) -> Tensor:
        """kappa Z max(lam, rho), before the cap c1: [B, T]."""
        lam = inputs.lam_or(self.lam)
        return obrs.weight(inputs.rollout_log_probs, inputs.target_log_probs, _kappa_z(inputs, kappas), lam)


@dataclass(frozen=True, slots=True)
class Obrs(ZWeighted):
    """`obrs`: accepts with probability a = min(1, rho / lam), and w = min(kappa Z max(lam, rho), c1) r2.

    The defaults of lam, c1 and c2 are the paper's. `mask: sampled` is the paper's Bernoulli mask; `mask: expected`
    replaces it by its mean a(x), which has less variance. kappa stands inside the cap c1 and fixes only the mean of Z:
    `prepass` and `auto` use this step's sums, known by another forward pass or after the backward passes; `none` sets
    it to 1. Where Z is exact its mean needs no factor, and `auto` is `none`. `budget` chooses the lam of each position,
    so that Z is the budget (Theorem 3.4). `beyond_c1: drop` puts w where w <= c1, else 0, in place of min(w, c1).

    Biased towards states on which the models agree: the expected gradient of a token is Z times that of `is`, with
    Z = 1 - TV at lam = 1. And towards the rollout model where Z rho > c1. Prefixes stay those of the rollout model.
    """

    settings: OBRSCorrection

    @property
    def kappa(self) -> Kappa:
        """As the setting says, but no gradient tells what a dropped token is worth: `auto` is then `prepass`."""
        wanted = ZWeighted.kappa.fget(self)
        return "prepass" if wanted == "auto" and self.settings.beyond_c1 == "drop" else wanted

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        kappas = self._kappas(inputs, totals)
        accepted = _accepted(inputs, self.lam, self.settings.mask)
        weight = self._obrs_weight(inputs, kappas)
        return _capped(inputs, weight, self.settings, accepted, kappas, BEYOND_C1[self.settings.beyond_c1])


@dataclass(frozen=True, slots=True)
class ReweightOnly(ZWeighted):
    """`reweight_only`: w = min(kappa Z max(lam, rho), c1) r2, and no token is rejected (submission, appendix C.1).

    Biased towards the rollout model: a token with rho < lam, which OBRS would mostly reject, keeps the weight Z lam.
    """

    settings: ReweightOnlyCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        kappas = self._kappas(inputs, totals)
        return _capped(inputs, self._obrs_weight(inputs, kappas), self.settings, None, kappas)


@dataclass(frozen=True, slots=True)
class ZOnly(ZWeighted):
    """`z_only`: w = min(kappa Z, c1), the weight of the state alone.

    Biased towards the rollout model as `none`, with a lower weight on states where the models disagree.
    """

    settings: ZOnlyCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        kappas, c1 = self._kappas(inputs, totals), self.settings.c1
        weight = _kappa_z(inputs, kappas)
        return correction_result(inputs, weight.clamp(max=c1), capped=weight > c1, **kappas.named)


@dataclass(frozen=True, slots=True)
class MaskOnly(Budgeted):
    """`mask_only`: OBRS's rejection without its weight, w = 1 (submission, Tables 5 and 6).

    Accepted tokens are distributed as p~, closer to the target than p_inf, and are trained on as if p~ were the target.
    Biased towards the rollout model by what is left, KL(p_target || p~), and towards states of high Z.
    """

    settings: MaskOnlyCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        accepted = _accepted(inputs, self.lam, self.settings.mask)
        return correction_result(inputs, torch.ones_like(inputs.rollout_log_probs), accepted=accepted)


@dataclass(frozen=True, slots=True)
class TargetOnly(BaseCorrection):
    """`target_only`: w = min(rho, c1) min(p_proximal / p_target, c2): TIS at OBRS's target and caps, no Z, no mask.

    Biased as `tis`. With target and proximal point equal it is `tis` with cap c1.
    """

    settings: TargetOnlyCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return _capped(inputs, inputs.log_ratio.exp(), self.settings)


@dataclass(frozen=True, slots=True)
class CoinOnly(Budgeted):
    """`coin_only`: OBRS's Bernoulli mask and w = min(max(lam, rho), c1) r2, no Z.

    In expectation it is `target_only` if c1 >= lam, so biased as that; it adds the variance of the mask.
    """

    settings: CoinOnlyCorrection

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        weight = inputs.log_ratio.exp().clamp(min=self.lam)
        return _capped(inputs, weight, self.settings, _accepted(inputs, self.lam, "sampled"))


def _capped(
    inputs: CorrectionInputs,
    weight: Tensor,
    settings: OBRSCorrection | ReweightOnlyCorrection | TargetOnlyCorrection | CoinOnlyCorrection,
    accepted: Tensor | None = None,
    kappas: Kappas | None = None,
    bound: Callable[[Tensor, float], Tensor] = BEYOND_C1["cap"],
) -> Correction:
    """min(weight, c1) * min(p_proximal / p_target, c2), both caps from the settings; `bound` is one of BEYOND_C1."""
    to_proximal = inputs.to_proximal
    return correction_result(
        inputs,
        bound(weight, settings.c1) * to_proximal.clamp(max=settings.c2),
        accepted=accepted,
        capped=weight > settings.c1,
        capped_c2=to_proximal > settings.c2,
        **(kappas.named if kappas else {}),
    )


def _accepted(inputs: CorrectionInputs, lam: float, mask: Mask) -> Tensor:
    """The Bernoulli mask of mean a(x), or a(x) itself with `mask: expected`: [B, T]."""
    acceptance = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, inputs.lam_or(lam))
    return MASKS[mask](acceptance, inputs.uniforms)


def _kappa_z(inputs: CorrectionInputs, kappas: Kappas) -> Tensor:
    """kappa Z in the log-probs' dtype: [B, T]."""
    return (kappas.by_response(inputs.by_policy) * inputs.z.value.double()).to(inputs.rollout_log_probs.dtype)
