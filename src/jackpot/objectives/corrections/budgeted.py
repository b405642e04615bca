"""OBRS, and what is left of it when one of its parts is taken out.

OBRS, eq. 5 and Algorithm 1, rejects with a coin and weighs what is kept by its distribution:

    a      = min(1, rho / lam)                                  rho = p_target / p_inf
    w      = min(kappa Z max(lam, rho), c1) * min(p_proximal / p_target, c2)
    kappa  = sum of a over the step / sum of Z over the step    section 4.4.2

Since lam Z <= 1, a min(w, c1) = min(Z rho, c1): in expectation OBRS is truncated importance sampling on Z rho, and lam
enters through Z alone. So three things can make it differ from `tis`, and each has an arm that isolates it, at the same
target, cap and second factor:

    arm             factor on the surrogate                        differs by
    target_only     min(rho, c1) r2                                the target and r2, from `tis`
    coin_only       coin * min(max(lam, rho), c1) r2               the coin, from target_only (equal mean if c1 >= lam)
    obrs, expected  a * min(kappa Z max(lam, rho), c1) r2          Z, from target_only
    obrs            coin * min(kappa Z max(lam, rho), c1) r2       Z and the coin, from target_only
    z_only          min(kappa Z, c1)                               Z, from `none`
    mask_only       coin                                           the rejection, from `none`
    reweight_only   min(kappa Z max(lam, rho), c1) r2              the rejection, from obrs

with r2 = min(p_proximal / p_target, c2), which moves the weight from the target to the point that PPO's ratio starts
from: p_old / p_target in the paper, exactly 1 where both are the same.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jackpot.core.metrics import Sums
from jackpot.objectives import obrs
from jackpot.objectives.corrections.base import Correction, CorrectionInputs, Measured, Totals, outcome

Mask = Literal["sampled", "expected"]
MASKS = {
    "sampled": lambda acceptance, uniforms: obrs.accept(acceptance, uniforms).to(acceptance.dtype),
    "expected": lambda acceptance, uniforms: acceptance,
}


class Budgeted(Measured, ABC):
    """A weight before the cap c1, who is kept, and the caps, which all these corrections share."""

    __slots__ = ()

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        kappa = self._kappa(totals, inputs)
        weight, to_proximal = self._weight(inputs, kappa), self._to_proximal(inputs)
        return outcome(
            inputs,
            weight.clamp(max=self.c1) * to_proximal.clamp(max=self.c2),
            accepted=self._accepted(inputs),
            capped=weight > self.c1,
            capped_c2=to_proximal > self.c2,
            kappa=kappa,
        )

    @abstractmethod
    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        """[B, T], before the cap c1."""

    def _to_proximal(self, inputs: CorrectionInputs) -> Tensor:
        return inputs.to_proximal

    def _accepted(self, inputs: CorrectionInputs) -> Tensor | None:
        """[B, T]; None where nothing is rejected."""
        return None

    def _kappa(self, totals: Sums, inputs: CorrectionInputs) -> Tensor:
        device = inputs.rollout_log_probs.device
        if self.totals == "none" or not totals:
            return torch.ones((), dtype=torch.float64, device=device)
        return obrs.kappa(totals["acceptance"].total, totals["z"].total).to(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Obrs(Budgeted):
    """`obrs`: the whole of it. Defaults lam 1, c1 3, c2 3, the paper's.

    `mask: sampled` is the paper; `mask: expected` replaces the coin by a(x), which has the same mean and less variance.
    kappa sits inside c1 and fixes only the mean of Z: `prepass` uses this step's sums, `previous` those of the step
    before (an approximation; 1 at the first), `auto` this step's where they cost no further forward pass and else
    those of the step before, `none` sets 1.

    Biased towards states on which the models agree: the expected gradient of a token is Z times that of `is`, with
    Z = 1 - TV at lam = 1. And towards the writer where Z rho > c1. Prefixes stay the writer's.
    """

    lam: float
    c1: float
    c2: float
    mask: Mask
    totals: Totals

    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        return obrs.weight(inputs.rollout_log_probs, inputs.target_log_probs, _z(inputs, kappa), self.lam)

    def _accepted(self, inputs: CorrectionInputs) -> Tensor:
        return _acceptance(inputs, self.lam, self.mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskOnly(Budgeted):
    """`mask_only`: rejection without the weight, w = 1 (submission, Tables 5 and 6). Default lam 1.

    What is kept is distributed as p~, closer to the target than p_inf, and is trained on as if it were the target.
    Biased towards the writer by the rest of the way, KL(p_target || p~), and towards states of high Z.
    """

    lam: float
    mask: Mask
    c1: float = torch.inf
    c2: float = torch.inf
    totals: Totals = "none"

    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        return torch.ones_like(inputs.rollout_log_probs)

    def _to_proximal(self, inputs: CorrectionInputs) -> Tensor:
        return torch.ones_like(inputs.rollout_log_probs)

    def _accepted(self, inputs: CorrectionInputs) -> Tensor:
        return _acceptance(inputs, self.lam, self.mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReweightOnly(Budgeted):
    """`reweight_only`: the weight without the rejection it belongs to (submission, appendix C.1). Defaults as `obrs`.

    Biased towards the writer: a token with rho < lam, which OBRS would mostly reject, keeps the weight Z lam.
    """

    lam: float
    c1: float
    c2: float
    totals: Totals

    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        return obrs.weight(inputs.rollout_log_probs, inputs.target_log_probs, _z(inputs, kappa), self.lam)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZOnly(Budgeted):
    """`z_only`: w = min(kappa Z, c1). The state's weight and nothing else. Defaults as `obrs`.

    Biased towards the writer as `none`, with states where the models disagree turned down.
    """

    lam: float
    c1: float
    c2: float = torch.inf
    totals: Totals

    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        return _z(inputs, kappa)

    def _to_proximal(self, inputs: CorrectionInputs) -> Tensor:
        return torch.ones_like(inputs.rollout_log_probs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOnly(Budgeted):
    """`target_only`: w = min(rho, c1) min(p_proximal / p_target, c2): TIS at OBRS's target and caps, no Z, no coin.

    Defaults as `obrs`. Biased as `tis`. With target and proximal point equal it is `tis` with cap c1.
    """

    c1: float
    c2: float
    totals: Totals = "none"
    lam: float = 1.0

    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        return inputs.log_ratio.exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class CoinOnly(Budgeted):
    """`coin_only`: rejects with OBRS's coin and weighs by min(max(lam, rho), c1): no Z. Defaults as `obrs`.

    In expectation `target_only` if c1 >= lam, so biased as that; what it adds is the coin's variance.
    """

    lam: float
    c1: float
    c2: float
    totals: Totals = "none"

    def _weight(self, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
        return inputs.log_ratio.exp().clamp(min=self.lam)

    def _accepted(self, inputs: CorrectionInputs) -> Tensor:
        return _acceptance(inputs, self.lam, "sampled")


def _acceptance(inputs: CorrectionInputs, lam: float, mask: Mask) -> Tensor:
    return MASKS[mask](obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, lam), inputs.uniforms)


def _z(inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
    """kappa Z in the log-probs' dtype: [B, T]."""
    return (kappa * inputs.z.value.double()).to(inputs.rollout_log_probs.dtype)
