"""Computes the factor by which a correction multiplies a token's gradient, averaged over its Bernoulli mask.

The gradient of a token's loss at the policy that is updated, p_new, is F A grad log p_new(x) with

    F = accept * w * r * [PPO's clip lets it through]       r = p_new / p_proximal, or as another surrogate has it

and F is rho = p_new / p_inf where nothing is capped or rejected. The corrections are those of `objectives`; this module
calls them and averages over their masks.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from jackpot.analysis.replay.settings import CorrectionSetting
from jackpot.core.metrics import Sums
from jackpot.objectives import obrs
from jackpot.objectives.corrections import Correction, CorrectionInputs
from jackpot.objectives.joint import references


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFactors:
    """A correction's factors of tokens, of one shape. Means are over the Bernoulli mask of OBRS, given the token."""

    mean: Tensor  # E F
    either: Tensor  # E F, averaged over both signs of the advantage, as over the tokens of a state
    square: Tensor  # E F^2
    weight: Tensor  # E (accept w), before PPO's ratio and clip
    accepted: Tensor  # E accept
    capped: Tensor  # whether a cap lowered the weight
    clipped: Tensor  # share of the gradient that PPO's clip removes, or another surrogate's changes
    scale: Tensor  # h, F_s of a state where nothing is capped: kappa Z with OBRS, R_t with prefixes, else 1


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
        advantages: [B, T]; their sign decides which side PPO clips, and which tokens some corrections reject. Both
            signs count half where one is 0, and everywhere with None.
        totals: the step's sums, for kappa.
    """
    ones = torch.ones_like(inputs.rollout_log_probs)
    signed = [replace(inputs, advantages=sign * ones) for sign in (1.0, -1.0)]
    reads_sign = "advantages" in setting.objective.correction.reads
    averages = [_averaged_over_mask(setting, one_sign, totals) for one_sign in signed[: 2 if reads_sign else 1]]
    up = _of_sign(setting, signed[0], new, averages[0])
    down = _of_sign(setting, signed[1], new, averages[-1])
    share = 0.5 * ones if advantages is None else (advantages.sign() + 1.0) / 2.0

    def of(name: str) -> Tensor:
        return share * getattr(up, name) + (1.0 - share) * getattr(down, name)

    return GradientFactors(
        either=(up.mean + down.mean) / 2.0,
        capped=(up.capped & (share > 0.0)) | (down.capped & (share < 1.0)),
        scale=of("scale"),
        **{name: of(name) for name in ("mean", "square", "weight", "accepted", "clipped")},
    )


def _of_sign(
    setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor, average: "_MaskAveraged"
) -> GradientFactors:
    """Compute the factors at the inputs' advantages of 1 or -1; `either` is that of these alone."""
    through, clipped = _through_surrogate(setting, inputs, new)
    kept = average.value * through
    return GradientFactors(
        mean=average.chance * kept,
        either=average.chance * kept,
        square=average.chance * kept.square(),
        weight=average.chance * average.value,
        accepted=average.accepted,
        capped=average.correction.capped | average.correction.capped_c2,
        clipped=clipped,
        scale=_scale(setting, inputs, average.correction),
    )


def _through_surrogate(setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factor of the surrogate on a token's gradient, r where nothing is clipped, and where it clips."""
    objective, mask = setting.objective, inputs.response_mask
    proximal = torch.where(mask, inputs.proximal_log_probs, 0.0)
    with torch.enable_grad():
        log_probs = torch.where(mask, new, 0.0).detach().requires_grad_()
        clips = (objective.clip_low, objective.clip_high)
        surrogate = objective.surrogate(log_probs, proximal, inputs.advantages, mask, *clips)
        (gradient,) = torch.autograd.grad(surrogate.value.sum(), log_probs)
    return torch.where(mask, gradient / inputs.advantages, 0.0), torch.where(mask, surrogate.clipped.double(), 0.0)


def _scale(setting: CorrectionSetting, inputs: CorrectionInputs, correction: Correction) -> Tensor:
    """Return F_s of a state, [B, T], were nothing capped in it."""
    log_ratio = inputs.log_ratio
    if setting.name in ("obrs", "reweight_only", "z_only", "mask_only"):  # weigh by Z; the mask accepts Z of a state
        return correction.kappa * inputs.z.value
    if setting.name == "prefix":
        return _before(correction.weights)  # 0 behind a rejected prefix
    if setting.name == "min_prefix":
        lowest = torch.where(inputs.response_mask, log_ratio, torch.inf).cummin(-1).values
        return _before(torch.where(lowest.isposinf(), 0.0, lowest).exp())
    if setting.name in ("seq_tis", "seq_mask"):
        return prefix_ratio(log_ratio)
    return torch.ones_like(inputs.z.value)


def prefix_ratio(log_ratio: Tensor) -> Tensor:
    """Return R_t, the product of rho over the tokens before each: [B, T], at most e^MOST."""
    return (log_ratio.cumsum(-1) - log_ratio).clamp(max=MOST).exp()


def _before(values: Tensor) -> Tensor:
    """Return the value at the token before each, 1 before the first: [B, T]."""
    return pad(values[:, :-1], (1, 0), value=1.0)


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
    chance = torch.where(is_random, inputs.acceptance(correction.lam), lowest.accept_mask)
    return _MaskAveraged(lowest.weights, chance, chance, lowest)


MOST = 40.0  # of log R_t, so that its sums are finite
_LARGEST_UNIFORM = 1.0 - 2.0**-53
