"""The factor F by which a correction multiplies a token's gradient, averaged over the random mask of accepted tokens.

p_new is the policy that is updated, p_inf the rollout model, A the advantage. The gradient of a token's loss is
F A grad log p_new(x), with the correction's weight w and the ratio r of the surrogate loss:

    F = accept * w * r * [PPO's clip lets the token through]      r = p_new / p_proximal, or what another surrogate uses

If nothing is capped or rejected, F is rho = p_new / p_inf.
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
    """A correction's factor F on the gradient of each token, and the parts of F, averaged over the random mask.

    E is this average, in which `accept` is 1 for an accepted token and 0 for a rejected one. Tensors have one shape.
    """

    mean: Tensor  # E F, F being the factor at the top of this file
    either: Tensor  # E F, averaged over both signs of the advantage, for sums over all tokens of a state
    square: Tensor  # E F^2
    weight: Tensor  # E (accept w), the mean weight w before PPO's ratio and clip
    accepted: Tensor  # E accept, the probability that the token is accepted
    capped: Tensor  # bool, whether a cap lowered the weight, or a band of ratios rejected the token
    clipped: Tensor  # share of the gradient that the clip of PPO removes or that of another surrogate changes
    scale: Tensor  # h, the sum of p_inf F over all tokens that a state allows, if no weight were capped (`_scale`)


def inputs_of(
    setting: CorrectionSetting, rollout: Tensor, old: Tensor, new: Tensor, mask: Tensor, z: obrs.ZEstimate
) -> CorrectionInputs:
    """Build a correction's inputs for tokens [B, T]; random numbers and advantages are 0, and `factors` replaces them.

    Args:
        setting: the correction with its settings.
        rollout, old, new: [B, T] log-probs of the engine, of the policy before the iteration, and of the policy now.
        mask: [B, T] bool, True at sampled tokens.
        z: Z, the probability that OBRS accepts a token, at all tokens; read by some corrections only.
    """
    log_probs = references(old, new, rollout)  # by the values that `target` and `proximal` may have: old, new, rollout
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=log_probs[setting.objective.target],
        proximal_log_probs=log_probs[setting.objective.proximal],
        response_mask=mask,
        uniforms=torch.zeros_like(rollout),
        advantages=torch.zeros_like(rollout),
        z=z,
    )


def factors(
    setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor, advantages: Tensor | None, totals: Sums
) -> GradientFactors:
    """Compute a correction's factors on tokens [B, T].

    Args:
        setting: the correction with its settings.
        inputs: inputs of the correction, from `inputs_of`.
        new: [B, T] log p_new.
        advantages: [B, T]; the sign decides which side PPO clips, and which tokens some corrections reject. At tokens
            with an advantage of 0, and at all tokens with None, factors are averaged over both signs.
        totals: sums over the optimizer step, from which OBRS takes kappa, the common factor of its weights.
    """
    positive, negative = (
        replace(inputs, advantages=torch.full_like(inputs.rollout_log_probs, sign)) for sign in (1.0, -1.0)
    )
    # The factors `up` for an advantage of 1 at every token, and `down` for an advantage of -1. A correction that does
    # not read advantages has the same weights for both, so they are computed once. PPO's clip depends on the sign.
    reads_sign = "advantages" in setting.objective.correction.reads
    up_weight = _averaged_over_mask(setting, positive, totals)
    down_weight = _averaged_over_mask(setting, negative, totals) if reads_sign else up_weight
    up = _factors_of_sign(setting, positive, new, up_weight)
    down = _factors_of_sign(setting, negative, new, down_weight)

    # The two are mixed by the share of positive advantages at a token: 0, 1/2 or 1.
    positive_share = torch.full_like(up.mean, 0.5) if advantages is None else (advantages.sign() + 1.0) / 2.0

    def mixed(name: str) -> Tensor:
        """Return a field of `up` and of `down`, averaged with the weight `positive_share` at each token."""
        return positive_share * getattr(up, name) + (1.0 - positive_share) * getattr(down, name)

    return GradientFactors(
        either=(up.mean + down.mean) / 2.0,
        # A token counts as capped if it is for the sign of its advantage, or for either sign where that sign is open.
        capped=(up.capped & (positive_share > 0.0)) | (down.capped & (positive_share < 1.0)),
        **{name: mixed(name) for name in ("mean", "square", "weight", "accepted", "clipped", "scale")},
    )


def _factors_of_sign(
    setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor, weight: "_MaskAveraged"
) -> GradientFactors:
    """Compute the factors on tokens [B, T] for inputs in which every advantage is 1, or every advantage is -1.

    `weight` is the correction's random weight for these inputs.
    """
    through, clipped = _through_surrogate(setting, inputs, new)
    factor = weight.value * through  # F, a token's factor on its gradient, if the random mask accepts the token
    mean = weight.chance * factor

    return GradientFactors(
        mean=mean,
        either=mean,  # of this sign alone; `factors` averages both signs
        square=weight.chance * factor.square(),
        weight=weight.chance * weight.value,
        accepted=weight.accepted,
        capped=weight.correction.capped | weight.correction.capped_c2,  # capped_c2: by c2 of OBRS
        clipped=clipped,
        scale=_scale(setting, inputs, weight.correction),
    )


def _through_surrogate(setting: CorrectionSetting, inputs: CorrectionInputs, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors [B, T]: the surrogate's factor on a token's gradient, and 1.0 where it clips, else 0.0.

    Without a clip PPO's factor is the ratio r = p_new / p_proximal.
    """
    objective, mask = setting.objective, inputs.response_mask
    proximal = torch.where(mask, inputs.proximal_log_probs, 0.0)

    with torch.enable_grad():
        log_probs = torch.where(mask, new, 0.0).detach().requires_grad_()
        surrogate = objective.surrogate(
            log_probs, proximal, inputs.advantages, mask, objective.clip_low, objective.clip_high
        )
        (gradient,) = torch.autograd.grad(surrogate.value.sum(), log_probs)

    # Every advantage is 1 or -1, so the quotient is the factor without the advantage.
    return torch.where(mask, gradient / inputs.advantages, 0.0), torch.where(mask, surrogate.clipped.double(), 0.0)


def _scale(setting: CorrectionSetting, inputs: CorrectionInputs, correction: Correction) -> Tensor:
    """Return h, the sum of p_inf F over all tokens that a state allows, if no weight were capped: [B, T].

    A state is the context of a token. If h is not the same in all states, the correction weighs states unequally.
    """
    log_ratio = inputs.log_ratio

    # OBRS and its parts with Z, which is in the weight or, for `mask_only`, the share of accepted tokens.
    if setting.name in ("obrs", "reweight_only", "z_only", "mask_only"):
        return correction.kappa * inputs.z.value
    # Corrections whose weight is rho of the token times a factor of the tokens before: their product of rho (`prefix`)
    # or their smallest rho (`min_prefix`). The mean of the token's rho is 1, so h is the factor of the tokens before.
    if setting.name == "prefix":
        return _of_token_before(correction.weights)  # a weight is 0 behind a rejected prefix
    if setting.name == "min_prefix":
        # The smallest log rho from the first token up to each token.
        lowest = torch.where(inputs.response_mask, log_ratio, torch.inf).cummin(-1).values
        return _of_token_before(torch.where(lowest.isposinf(), 0.0, lowest).exp())
    # Corrections that weigh the whole response by the product of its rho: those of the token and of the tokens after it
    # average to 1, so h is the product over the tokens before.
    if setting.name in ("seq_tis", "seq_mask"):
        return prefix_ratio(log_ratio)

    # All other corrections: F averages to 1 in every state if nothing is capped.
    return torch.ones_like(inputs.z.value)


def prefix_ratio(log_ratio: Tensor) -> Tensor:
    """Return R_t, the product of rho = p_policy / p_inf over the tokens before token t: [B, T].

    It is at most e^LARGEST_LOG_RATIO.
    """
    return (log_ratio.cumsum(-1) - log_ratio).clamp(max=LARGEST_LOG_RATIO).exp()


def _of_token_before(values: Tensor) -> Tensor:
    """Shift values [B, T] by one token: each token gets the value of the token before, and the first token 1."""
    return pad(values[:, :-1], (1, 0), value=1.0)


class _MaskAveraged(NamedTuple):
    """A correction's random weight on tokens: `value` with probability `chance`, else 0. Tensors are [B, T].

    Also at a token whose mask is not random, the mean weight is `chance` times `value`.
    """

    value: Tensor
    chance: Tensor
    accepted: Tensor  # E accept, the probability that the token is accepted
    correction: Correction  # the result for the smallest uniform random number, which accepts the most tokens


def _averaged_over_mask(setting: CorrectionSetting, inputs: CorrectionInputs, totals: Sums) -> _MaskAveraged:
    """Average a correction over its random mask of accepted tokens.

    If the smallest and the largest random number give a token the same mask, the mask is deterministic. Else it is that
    of `mask: sampled`: the token keeps its weight w with its acceptance probability a, and gets 0 otherwise. With
    `mask: expected` the mask is a itself, so the weight is always a w.
    """
    correction = setting.objective.correction
    lowest = correction.apply(replace(inputs, uniforms=torch.zeros_like(inputs.uniforms)), totals)
    highest = correction.apply(replace(inputs, uniforms=torch.full_like(inputs.uniforms, _LARGEST_UNIFORM)), totals)

    is_random = lowest.accept_mask != highest.accept_mask
    if not is_random.any():
        value = lowest.weights * lowest.accept_mask
        return _MaskAveraged(value=value, chance=torch.ones_like(value), accepted=lowest.accept_mask, correction=lowest)

    # The chance of a token whose mask is not random is 1 or 0.
    chance = torch.where(is_random, inputs.acceptance(correction.lam), lowest.accept_mask)
    return _MaskAveraged(value=lowest.weights, chance=chance, accepted=chance, correction=lowest)


LARGEST_LOG_RATIO = 40.0  # largest log R_t, so that sums of R_t stay finite
_LARGEST_UNIFORM = 1.0 - 2.0**-53
