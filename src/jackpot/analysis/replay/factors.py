"""What a correction multiplies a token's gradient by, coins averaged.

The gradient of a token's loss at the policy that is updated, p_new, is F A grad log p_new(x) with

    F = accept * w * r * [PPO's clip lets it through]       r = p_new / p_proximal

and F would be rho = p_new / p_inf where nothing is lost. The corrections themselves are those of `objectives`: this
calls them and adds nothing but the mean over their coins.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.replay.settings import Setting
from jackpot.core.metrics import Sums
from jackpot.objectives import obrs
from jackpot.objectives.corrections import Correction, CorrectionInputs
from jackpot.objectives.corrections.budgeted import MaskOnly, Obrs, ReweightOnly, ZOnly
from jackpot.objectives.joint import references
from jackpot.objectives.losses import clip_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Of tokens, any one shape. Means are over the coins of OBRS, given the token."""

    mean: Tensor  # E F
    either: Tensor  # the same with both signs of the advantage counting half, as the tokens of a state do
    square: Tensor  # E F^2
    weight: Tensor  # E (accept w), before PPO's ratio and clip
    accepted: Tensor  # E accept
    capped: Tensor  # a cap took something from the weight
    clipped: Tensor  # share that PPO's clip takes
    scale: Tensor  # of p_new, what a state trains on where nothing is capped: kappa Z with OBRS, else 1


def inputs_of(
    setting: Setting, rollout: Tensor, old: Tensor, new: Tensor, mask: Tensor, z: obrs.ZEstimate
) -> CorrectionInputs:
    """What the correction sees of tokens [B, T]. Coins are set by `factors`, which averages over them."""
    named = references(old, new, rollout)
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=named[setting.objective.target],
        proximal_log_probs=named[setting.objective.proximal],
        response_mask=mask,
        uniforms=torch.zeros_like(rollout),
        z=z,
    )


def factors(
    setting: Setting, inputs: CorrectionInputs, new: Tensor, advantages: Tensor | None, totals: Sums
) -> Factors:
    """The correction's factors on tokens [B, T].

    Args:
        advantages: their sign decides which side PPO clips; None where it is not known, and both sides count half.
        totals: the sums that kappa is made of.
    """
    objective = setting.objective
    found = _without_coin(setting, inputs, totals)
    ratio = torch.where(inputs.response_mask, new - inputs.proximal_log_probs, 0.0).exp()
    clips = (objective.clip_low, objective.clip_high)
    ones = torch.ones_like(ratio)
    sides = [clip_share(new, inputs.proximal_log_probs, sign * ones, *clips) for sign in (1.0, -1.0)]
    either = torch.where(inputs.response_mask, (sides[0].double() + sides[1].double()) / 2.0, 0.0)
    clipped = either
    if advantages is not None:
        of_sign = clip_share(new, inputs.proximal_log_probs, advantages, *clips).double()
        clipped = torch.where(inputs.response_mask, of_sign, 0.0)
    kept = found.value * ratio * (1.0 - clipped)
    return Factors(
        mean=found.chance * kept,
        either=found.chance * found.value * ratio * (1.0 - either),
        square=found.chance * kept * found.value * ratio,
        weight=found.chance * found.value,
        accepted=found.accepted,
        capped=found.correction.capped | found.correction.capped_c2,
        clipped=clipped,
        scale=_scale(setting, inputs, found.correction.kappa),
    )


def needs_z(setting: Setting) -> bool:
    """Whether the correction weighs by Z."""
    return isinstance(setting.objective.correction, Obrs | ReweightOnly | ZOnly)


def _scale(setting: Setting, inputs: CorrectionInputs, kappa: Tensor) -> Tensor:
    if needs_z(setting) or isinstance(setting.objective.correction, MaskOnly):  # which keeps Z of a state
        return kappa * inputs.z.value
    return torch.ones_like(inputs.z.value)


class _Coinless(NamedTuple):
    """[B, T] each: with probability `chance` the factor is `value`, else 0."""

    value: Tensor
    chance: Tensor
    accepted: Tensor  # E accept
    correction: Correction


def _without_coin(setting: Setting, inputs: CorrectionInputs, totals: Sums) -> _Coinless:
    """The correction with its coin taken out.

    Where the luckiest and the unluckiest coin agree there is none; elsewhere a(x) decides. An expected mask has no
    coin: its factor is a w for sure, where the coin's is w with probability a.
    """
    correction = setting.objective.correction
    lucky = correction.apply(replace(inputs, uniforms=torch.zeros_like(inputs.uniforms)), totals)
    unlucky = correction.apply(replace(inputs, uniforms=torch.full_like(inputs.uniforms, _ALMOST_ONE)), totals)
    has_coin = lucky.accept_mask != unlucky.accept_mask
    if not has_coin.any():
        value = lucky.weights * lucky.accept_mask
        return _Coinless(value, torch.ones_like(value), lucky.accept_mask, lucky)
    acceptance = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, correction.lam)
    chance = torch.where(has_coin, acceptance, lucky.accept_mask)
    return _Coinless(lucky.weights, chance, chance, lucky)


_ALMOST_ONE = 1.0 - 2.0**-53
