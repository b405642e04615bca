"""Computes the factor by which a correction multiplies a token's gradient, averaged over its Bernoulli mask.

The gradient of a token's loss at the policy that is updated, p_new, is F A grad log p_new(x) with

    F = accept * w * r * [PPO's clip lets it through]       r = p_new / p_proximal

and F is rho = p_new / p_inf where nothing is capped or rejected. The corrections are those of `objectives`; this module
calls them and averages over their masks.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.replay.settings import CorrectionSetting
from jackpot.core.metrics import Sums
from jackpot.objectives import obrs
from jackpot.objectives.corrections import Correction, CorrectionInputs
from jackpot.objectives.corrections.budgeted import MaskOnly, Obrs, ReweightOnly, ZOnly
from jackpot.objectives.corrections.signed import DPPO
from jackpot.objectives.joint import references
from jackpot.objectives.losses import clip_share


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFactors:
    """A correction's factors of tokens, of one shape. Means are over the Bernoulli mask of OBRS, given the token."""

    mean: Tensor  # E F
    either: Tensor  # E F, averaged over both signs of the advantage, as over the tokens of a state
    square: Tensor  # E F^2
    weight: Tensor  # E (accept w), before PPO's ratio and clip
    accepted: Tensor  # E accept
    capped: Tensor  # whether a cap lowered the weight
    clipped: Tensor  # share of the gradient that PPO's clip removes
    scale: Tensor  # F_s of a state where nothing is capped: kappa Z with OBRS, else 1


def inputs_of(
    setting: CorrectionSetting, rollout: Tensor, old: Tensor, new: Tensor, mask: Tensor, z: obrs.ZEstimate
) -> CorrectionInputs:
    """Build the correction's inputs for tokens [B, T].

    `factors` sets uniforms and advantages, as it averages over the mask and over both signs.
    """
    named = references(old, new, rollout)
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=named[setting.objective.target],
        proximal_log_probs=named[setting.objective.proximal],
        response_mask=mask,
        uniforms=torch.zeros_like(rollout),
        advantages=torch.zeros_like(rollout),
        z=z,
    )


def factors(
    setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor, advantages: Tensor | None, totals: Sums
) -> GradientFactors:
    """Compute the correction's factors on tokens [B, T].

    Args:
        advantages: [B, T]; their sign decides which side PPO clips, and which tokens some corrections reject; None
            averages over both signs.
        totals: the step's sums, for kappa.
    """
    ones = torch.ones_like(inputs.rollout_log_probs)
    up, down = (_of_sign(setting, replace(inputs, advantages=sign * ones), new, totals) for sign in (1.0, -1.0))
    either = (up.mean + down.mean) / 2.0
    if advantages is not None:
        return replace(_of_sign(setting, replace(inputs, advantages=advantages), new, totals), either=either)
    return GradientFactors(
        mean=either,
        either=either,
        square=(up.square + down.square) / 2.0,
        weight=(up.weight + down.weight) / 2.0,
        accepted=(up.accepted + down.accepted) / 2.0,
        capped=up.capped | down.capped,
        clipped=(up.clipped + down.clipped) / 2.0,
        scale=up.scale,
    )


def _of_sign(setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor, totals: Sums) -> GradientFactors:
    """Compute the factors at the inputs' advantages; `either` is that of these alone."""
    objective, mask = setting.objective, inputs.response_mask
    found = _averaged_over_mask(setting, inputs, totals)
    ratio = torch.where(mask, new - inputs.proximal_log_probs, 0.0).exp()
    clips = (objective.clip_low, objective.clip_high)
    clipped = torch.where(mask, clip_share(new, inputs.proximal_log_probs, inputs.advantages, *clips).double(), 0.0)
    kept = found.value * ratio * (1.0 - clipped)
    return GradientFactors(
        mean=found.chance * kept,
        either=found.chance * kept,
        square=found.chance * kept * found.value * ratio,
        weight=found.chance * found.value,
        accepted=found.accepted,
        capped=found.correction.capped | found.correction.capped_c2,
        clipped=clipped,
        scale=_scale(setting, inputs, found.correction.kappa),
    )


def needs_z(setting: CorrectionSetting) -> bool:
    """Tell whether the correction reads Z."""
    correction = setting.objective.correction
    return isinstance(correction, _BY_Z) or (isinstance(correction, DPPO) and correction.settings.divergence == "topk")


def _scale(setting: CorrectionSetting, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
    if isinstance(setting.objective.correction, (*_BY_Z, MaskOnly)):  # the mask accepts Z of a state
        return kappa * inputs.z.value
    return torch.ones_like(inputs.z.value)


class _MaskAveraged(NamedTuple):
    """A correction averaged over its mask, [B, T] each: the factor is `value` with probability `chance`, else 0."""

    value: Tensor
    chance: Tensor
    accepted: Tensor  # E accept
    correction: Correction


def _averaged_over_mask(setting: CorrectionSetting, inputs: CorrectionInputs, totals: Sums) -> _MaskAveraged:
    """Average the correction over its Bernoulli mask.

    Where the smallest and the largest uniform give the same mask, the mask is deterministic; elsewhere it accepts with
    probability a(x). An expected mask is deterministic: its factor is a w, where a sampled one is w with probability a.
    """
    correction = setting.objective.correction
    lowest = correction.apply(replace(inputs, uniforms=torch.zeros_like(inputs.uniforms)), totals)
    highest = correction.apply(replace(inputs, uniforms=torch.full_like(inputs.uniforms, _LARGEST_UNIFORM)), totals)
    is_random = lowest.accept_mask != highest.accept_mask
    if not is_random.any():
        value = lowest.weights * lowest.accept_mask
        return _MaskAveraged(value, torch.ones_like(value), lowest.accept_mask, lowest)
    acceptance = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, correction.lam)
    chance = torch.where(is_random, acceptance, lowest.accept_mask)
    return _MaskAveraged(lowest.weights, chance, chance, lowest)


_BY_Z = (Obrs, ReweightOnly, ZOnly)  # weigh by Z
_LARGEST_UNIFORM = 1.0 - 2.0**-53
