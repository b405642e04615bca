"""The metrics of a micro-batch: the mismatch before the correction, the correction itself, and PPO's clip.

Every correction has the same metrics, over all response tokens, before any masking: a metric over the accepted tokens
alone would hide the rejected ones. All are kept as sums that add up over micro-batches (`core.metrics`).
docs/metrics.md says what each means and which values are healthy.
"""

import torch
from torch import Tensor

from jackpot.core.bands import POSITIONS, band_masks
from jackpot.core.metrics import ClusteredMean, EffectiveSampleSize, Histogram, Max, Mean, Means, Sum, Sums, means
from jackpot.core.types import TokenBatch, Version
from jackpot.objectives.corrections import Correction, CorrectionInputs
from jackpot.objectives.corrections.base import split_by_model

ROUNDING = 1e-6  # room for the rounding error of Z in float32


def mismatch(log_ratio: Tensor, mask: Tensor, by_policy: Tensor | None = None) -> Sums:
    """Measure how far p_old, the policy before its first update on the batch, is from p_inf on the sampled tokens.

    Args:
        log_ratio: [B, T] log p_old / p_inf of sampled tokens, 0 where masked.
        mask: [B, T] response mask.
        by_policy: [B] bool, responses that the policy sampled; None: one model sampled all.
    """
    ratio = log_ratio.double().exp()
    present = mask.any(-1)  # [B] True for a response with sampled tokens
    whole = log_ratio.double().sum(-1)  # [B] log of the ratio of each whole response
    prefix = log_ratio.double().cumsum(-1) - log_ratio  # [B, T] log of the ratio of the tokens before each token

    per_token = {
        "mismatch/ratio": ratio,
        "mismatch/ratio_above_10": ratio > 10.0,
        "mismatch/ratio_below_0.1": ratio < 0.1,
        "mismatch/kl_k1": -log_ratio,
        "mismatch/kl_k3": ratio - 1.0 - log_ratio,
    }

    return {
        **means(per_token, {"": mask} | split_by_model(mask, by_policy)),
        "mismatch/ratio_max": Max.of(ratio, mask),
        "mismatch/log_ratio": Histogram.of(log_ratio, mask),
        "mismatch/sequence_log_ratio": Mean.of(whole, present),
        "mismatch/sequence_ess": EffectiveSampleSize.of(whole, present),
        **EffectiveSampleSize.of_each(prefix, _position_masks(mask, "mismatch/prefix_ess")),
    }


def update_kl(moved: Tensor, log_ratio: Tensor, mask: Tensor) -> Means:
    """Estimate KL(p_old || p_new), how far the policy has moved on this batch, from tokens that p_inf sampled.

    `k1` is the mean of log p_old / p_new, which other frameworks log as the KL of an update. It is unbiased only where
    p_inf is p_old, and then at least 0 in expectation; a `k1` below 0 is a sign of mismatch. `weighted` weights each
    token by p_old / p_inf, which is unbiased in every state that the rollout model visited. (Source: the case study on
    KL estimation in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".)

    Args:
        moved: [B, T] log p_old / p_new of sampled tokens, 0 where masked.
        log_ratio: [B, T] log p_old / p_inf of the same tokens, 0 where masked.
        mask: [B, T] response mask.
    """
    moved = moved.double()
    per_token = {
        "policy/approx_kl_k1": moved,
        "policy/approx_kl_k3": (-moved).exp() - 1.0 + moved,
        "policy/approx_kl_weighted": log_ratio.double().exp() * moved,
    }
    return means(per_token, {"": mask})


def correction_metrics(
    correction: Correction, inputs: CorrectionInputs, lam: float, clipped: Tensor, totals: Sums
) -> Sums:
    """Measure what the correction and PPO's clip did, over all response tokens, by sign of advantage and by position.

    The acceptance is measured by sign and by position only: `measure_overlap` measures it over all tokens, and over the
    tokens that each model sampled.

    Args:
        correction: its `capped_c2` is True where the cap c2 lowered p_proximal / p_target.
        lam: lam of the correction.
        clipped: [B, T] bool, True where PPO's clip removes the gradient.
        totals: sums over the optimizer step that kappa, the factor that corrects Z, is computed from; {}: none.
    """
    mask, z, advantages = inputs.response_mask, inputs.z.value.double(), inputs.advantages
    acceptance, factor = inputs.acceptance(lam), correction.weights * correction.accept_mask
    kappa = correction.kappas.by_response(inputs.by_policy)
    per_token = {
        "obrs/acceptance": acceptance,
        "correction/accepted": correction.accept_mask,
        "correction/weight": factor,
        "correction/clip_frac": correction.capped,
        "correction/clip_frac_c2": correction.capped_c2,
        "policy/clip_frac": clipped,
    }
    # Masks [B, T] of the tokens that a metric is averaged over, by the end of the metric's name.
    groups = {"": mask, "_positive": mask & (advantages > 0), "_negative": mask & (advantages < 0)}
    models = split_by_model(mask, inputs.by_policy)
    measured_elsewhere = {f"obrs/acceptance{model}" for model in ("", *models)}  # by `measure_overlap`
    sums = means(per_token, groups | models | _position_masks(mask))

    # Z is at most min(1, 1 / lam). Where kappa Z exceeds that, beyond two standard errors of kappa, kappa is too large.
    ceiling = (1.0 / torch.as_tensor(inputs.lam_per_token(lam), dtype=torch.float64)).clamp(max=1.0)
    # These metrics are averaged over all response tokens, not by sign or position; kappa also over each model's tokens.
    whole = {
        "obrs/kappa": kappa.expand_as(factor),
        "obrs/kappa_z_above_1": (kappa - 2.0 * _kappa_error(totals)) * z > ceiling + ROUNDING,
        "obrs/acceptance_variance": (z * (1.0 - z)).clamp(min=0.0),
    }
    return {
        **{name: metric for name, metric in sums.items() if name not in measured_elsewhere},
        **means(whole, {"": mask}),
        **{f"obrs/kappa{model}": Mean.of(whole["obrs/kappa"], sampled) for model, sampled in models.items()},
        "obrs/acceptance_by_response": ClusteredMean.of(acceptance - z, mask),
        "correction/weight_max": Max.of(factor, mask),
        "policy/largest_advantage": Max.of(advantages.abs(), mask),
        "policy/largest_kept_advantage": Max.of(advantages.abs() * correction.accept_mask, mask),
    }


def correction_summary(correction: Correction, inputs: CorrectionInputs, overlap: Sums, has_z: bool) -> Sums:
    """Measure a correction, and the mismatch that it corrects, in few metrics, for the log of another framework.

    Args:
        overlap: metrics of the same tokens that `corrections.base.measured` returns.
        has_z: whether Z, the expected acceptance, is known; without it metrics of Z are left out.
    """
    mask, log_ratio = inputs.response_mask, inputs.log_ratio.double()
    ratio, factor = log_ratio.exp(), correction.weights * correction.accept_mask  # factor: multiplies each token's loss
    per_token = {
        "mismatch/ratio": ratio,
        "mismatch/kl_k1": -log_ratio,
        "mismatch/kl_k3": ratio - 1.0 - log_ratio,
        "correction/accepted": correction.accept_mask,
        "correction/weight": factor,
        "correction/clip_frac": correction.capped,
    }

    z_names = ("obrs/z", "obrs/acceptance_minus_z", "obrs/z_bound_width") if has_z else ()
    sums: Sums = {
        **means(per_token, {"": mask}),
        **{name: overlap[name] for name in ("obrs/acceptance", *z_names)},
        "mismatch/ratio_max": Max.of(ratio, mask),
        "correction/weight_max": Max.of(factor, mask),
    }
    return dict(sorted(sums.items()))


def _kappa_error(totals: Sums) -> Tensor | float:
    """Return the standard error of kappa = sum a / sum Z over a step's tokens: acceptance a, expected acceptance Z.

    It is sqrt(sum (a - Z)^2) / sum Z. Without totals there is no kappa to estimate: it is 0.
    """
    if not totals:
        return 0.0
    gaps, z = Mean.named(totals, "obrs/acceptance_minus_z"), Mean.named(totals, "obrs/z")
    return gaps.squares.sqrt() / z.total.clamp(min=1e-9)


def health(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Sums:
    """Count response tokens with a log-prob that is not finite, and responses without a sampled token.

    Args:
        log_probs, rollout_log_probs, mask: [B, T] each.
    """
    finite = log_probs.detach().isfinite() & rollout_log_probs.isfinite()
    return {
        "health/non_finite_tokens": Sum.of(mask & ~finite),
        "health/empty_responses": Sum.of(~mask.any(-1)),
    }


def lag(batch: TokenBatch, version: Version) -> Sums:
    """Measure, for each model, how many optimizer steps lie between the version of a token's weights and `version`."""
    sums: Sums = {}
    for role, now, then in zip(Version._fields, version, batch.versions.unbind(-1), strict=True):
        steps = (now - then).double()
        sums[f"lag/{role}"] = Mean.of(steps, batch.response_mask)
        sums[f"lag/{role}_max"] = Max.of(steps, batch.response_mask)
    return sums


def _position_masks(mask: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Return the part of `mask` [B, T] in each band of positions, by the end of a metric's name, such as `_at_4-15`.

    Positions count all tokens of a response from its start, those that tools wrote too.
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    return {f"{prefix}_at_{name}": mask & here for name, here in band_masks(position, POSITIONS).items()}
