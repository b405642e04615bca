"""Corrections for text that another distribution wrote. Layer 2: pure.

A correction turns the log-probs of sampled tokens into (weights, accept_mask). Together with the proximal point that
PPO's ratio is taken from, it defines the policy's loss, for a surrogate S:

    loss = - sum over tokens of accept_mask * weights * S        both detached

`measure` gives sums that add up over micro-batches and ranks; `apply` takes their total over the whole optimizer step.
Every term is detached. Shapes: `B` sequences, `T` response tokens; log-probs in nats at the sampling temperature.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from jackpot.errors import ConfigError, unknown_name
from jackpot.ops import obrs
from jackpot.ops.reduce import Max, Mean, Sums

Totals = Literal["none", "prepass", "previous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionInputs:
    """What is known of every response token before its loss. All [B, T], detached; masked entries are ignored."""

    rollout_log_probs: Tensor  # log p_inf
    target_log_probs: Tensor  # log p_target, what the weights align to
    proximal_log_probs: Tensor  # log of the point that PPO's ratio is taken from
    response_mask: Tensor  # bool
    uniforms: Tensor  # float64 in [0, 1), the coins
    z: obrs.ZEstimate  # of p_inf and p_target, at the correction's lam


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The outcome. `accept_mask` is 1 where kept and 0 where rejected, or the expected acceptance a(x) if there is no
    coin."""

    weights: Tensor  # [B, T], 0 where masked
    accept_mask: Tensor  # [B, T] float, 0 where masked
    metrics: Sums


class CorrectionFn(Protocol):
    """A correction with its numbers fixed; frozen, without state."""

    totals: Totals  # what `apply` wants to know of the step first: nothing, this step's sums, the previous step's
    lam: float  # at which acceptance and Z are measured

    def measure(self, inputs: CorrectionInputs) -> Sums: ...

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction: ...


def measure_overlap(inputs: CorrectionInputs, lam: float) -> Sums:
    """How far the two distributions overlap, whatever the correction does about it.

    Names: `acceptance` a(x); `z` the estimate that enters weights; `acceptance_minus_z`, whose mean is 0 within its
    standard error where Z is exact (a martingale difference: uncorrelated between tokens); `z_bound_width`;
    `rollout_mass` and `target_mass` captured by the top-k sets.
    """
    mask, z = inputs.response_mask, inputs.z
    accepted = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, lam)
    return {
        "acceptance": Mean.of(accepted, mask),
        "z": Mean.of(z.value, mask),
        "acceptance_minus_z": Mean.of(accepted - z.value, mask),
        "z_bound_width": Mean.of(z.upper - z.lower, mask),
        "rollout_mass": Mean.of(z.rollout_mass, mask),
        "target_mass": Mean.of(z.target_mass, mask),
    }


class _Measured:
    """The measure that all corrections share."""

    __slots__ = ()

    def measure(self, inputs: CorrectionInputs) -> Sums:
        return measure_overlap(inputs, self.lam)


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncorrected(_Measured):
    """Weight 1, nothing rejected: trains as if the policy itself had written the text.

    With `proximal: rollout` this is PPO-IS, where the ratio p_new / p_inf is PPO's own and its clip is the correction.
    """

    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        return _keep_all(torch.ones_like(inputs.rollout_log_probs), inputs, share_capped=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceSampling(_Measured):
    """w = min(p_target / p_inf, cap); F(x) = x for an infinite cap (AReaL, arXiv 2505.24298), truncated otherwise.

    Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training". The target is the proximal point by definition; at `proximal: new` it is the paper's "TIS + adjustment".
    """

    cap: float
    totals: Totals = "none"
    lam: float = 1.0

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio = (inputs.target_log_probs - inputs.rollout_log_probs).exp()
        return _keep_all(ratio.clamp(max=self.cap), inputs, share_capped=ratio > self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class Obrs(_Measured):
    """OBRS, eq. 5 and Algorithm 1: reject with a coin, weigh what is kept by its distribution.

        w      = min(kappa Z max(lam, rho), c1) * min(p_proximal / p_target, c2)        rho = p_target / p_inf
        kappa  = sum of a over the step / sum of Z over the step                        section 4.4.2

    The second factor moves the weight from the target to the point that PPO's ratio starts from; it is p_old / p_target
    in the paper and exactly 1 where both are the same. `mask: sampled` is the paper; `mask: expected` replaces the coin
    by a(x), which has the same mean and less variance. kappa sits inside c1 and fixes only the mean of Z.

    `kappa: prepass` uses this step's sums, `previous` those of the step before (an approximation; 1 at the first),
    `none` sets 1.
    """

    lam: float
    c1: float
    c2: float
    mask: Literal["sampled", "expected"]
    totals: Totals

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        mask, rollout, target = inputs.response_mask, inputs.rollout_log_probs, inputs.target_log_probs
        accepted = obrs.acceptance(rollout, target, self.lam)
        kept = MASKS[self.mask](accepted, inputs.uniforms)
        kappa = self._kappa(totals, accepted)
        z = (kappa * inputs.z.value.double()).to(rollout.dtype)
        weight = obrs.weight(rollout, target, z, self.lam)
        to_proximal = (inputs.proximal_log_probs - target).exp()
        weights = weight.clamp(max=self.c1) * to_proximal.clamp(max=self.c2)
        metrics = {
            "obrs/accepted": Mean.of(kept, mask),
            "obrs/kappa": Mean.of(kappa.expand_as(z), mask),
            "obrs/kappa_z_above_1": Mean.of(z > 1.0, mask),
            "correction/capped": Mean.of(weight > self.c1, mask),
            "correction/capped_c2": Mean.of(to_proximal > self.c2, mask),
        }
        weights, kept = torch.where(mask, weights, 0.0), torch.where(mask, kept, 0.0)
        return Correction(weights=weights, accept_mask=kept, metrics=metrics | _weight_metrics(weights, kept, mask))

    def _kappa(self, totals: Sums, like: Tensor) -> Tensor:
        if self.totals == "none" or not totals:
            return torch.ones((), dtype=torch.float64, device=like.device)
        return obrs.kappa(totals["acceptance"].total, totals["z"].total).to(like.device)


MASKS = {
    "sampled": lambda acceptance, uniforms: obrs.accept(acceptance, uniforms).to(acceptance.dtype),
    "expected": lambda acceptance, uniforms: acceptance,
}

CORRECTIONS = {
    "none": Uncorrected,
    "is": lambda: ImportanceSampling(cap=math.inf),
    "tis": ImportanceSampling,
    "obrs": Obrs,
}


def make_correction(name: str, **numbers) -> CorrectionFn:
    """`CORRECTIONS[name]` with its numbers, e.g. make_correction("tis", cap=2.0).

    Raises:
        ConfigError: an unknown name (all are listed), or numbers that it does not take or that are out of range.
    """
    if name not in CORRECTIONS:
        raise ConfigError(unknown_name("correction", name, CORRECTIONS))
    for key in ("cap", "c1", "c2", "lam"):
        if key in numbers and not numbers[key] > 0:
            raise ConfigError(f"correction {name}: {key} is {numbers[key]}; it must be above 0")
    for key, valid in (("mask", MASKS), ("totals", get_args(Totals))):
        if key in numbers and numbers[key] not in valid:
            raise ConfigError(unknown_name(key, numbers[key], valid))
    try:
        return CORRECTIONS[name](**numbers)
    except TypeError as error:
        raise ConfigError(f"correction {name} does not take {sorted(numbers)}: {error}") from None


def _keep_all(weights: Tensor, inputs: CorrectionInputs, share_capped: Tensor | None) -> Correction:
    mask = inputs.response_mask
    weights, kept = torch.where(mask, weights, 0.0), mask.to(weights.dtype)
    capped = torch.zeros_like(mask) if share_capped is None else share_capped
    metrics = {"correction/capped": Mean.of(capped, mask)} | _weight_metrics(weights, kept, mask)
    return Correction(weights=weights, accept_mask=kept, metrics=metrics)


def _weight_metrics(weights: Tensor, kept: Tensor, mask: Tensor) -> Sums:
    """Of the final factor accept_mask * weights that multiplies the surrogate."""
    final = weights * kept
    return {"correction/weight": Mean.of(final, mask), "correction/weight_max": Max.of(final, mask)}
