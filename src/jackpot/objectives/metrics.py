"""The metrics of a micro-batch: the mismatch before the correction, the correction itself, and PPO's clip.

Every correction has the same metrics, over all response tokens, before any masking: a metric over the accepted tokens
alone would hide the rejected ones. All entries are sums that add up (`core.metrics`). docs/metrics.md says what each
means and which values are healthy.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from jackpot.core.bands import POSITIONS, band_masks
from jackpot.core.metrics import ClusteredMean, EffectiveSampleSize, Histogram, Max, Mean, Sum, Sums
from jackpot.objectives import obrs
from jackpot.objectives.corrections import Correction, CorrectionInputs

ROUNDING = 1e-6  # of Z in float32


def mismatch(log_ratio: Tensor, mask: Tensor) -> Sums:
    """Measure how far p_old is from p_inf on the sampled tokens, before any correction.

    Args:
        log_ratio: [B, T] log p_old / p_inf of sampled tokens, 0 where masked.
        mask: [B, T] response mask.
    """
    ratio = log_ratio.double().exp()
    present = mask.any(-1)
    whole = log_ratio.double().sum(-1)  # [B] log ratio of the response
    prefix = log_ratio.double().cumsum(-1) - log_ratio  # [B, T] log ratio of the tokens before each token
    bands = _position_masks(mask)
    return {
        "mismatch/ratio": Mean.of(ratio, mask),
        "mismatch/ratio_max": Max.of(ratio, mask),
        "mismatch/ratio_above_10": Mean.of(ratio > 10.0, mask),
        "mismatch/ratio_below_0.1": Mean.of(ratio < 0.1, mask),
        "mismatch/log_ratio": Histogram.of(log_ratio, mask),
        "mismatch/kl_k1": Mean.of(-log_ratio, mask),
        "mismatch/kl_k3": Mean.of(ratio - 1.0 - log_ratio, mask),
        "mismatch/sequence_log_ratio": Mean.of(whole, present),
        "mismatch/sequence_ess": EffectiveSampleSize.of(whole, present),
    } | {f"mismatch/prefix_ess_{name}": EffectiveSampleSize.of(prefix, band) for name, band in bands.items()}


def update_kl(moved: Tensor, log_ratio: Tensor, mask: Tensor) -> Sums:
    """Estimate KL(p_old || p_new), how far the policy has moved on this batch, from tokens that p_inf sampled.

    `k1` is logged by other frameworks as the KL of an update. It is unbiased only where p_inf is p_old, and then at
    least 0 in expectation; below 0 it shows the mismatch. `weighted` weights each token by p_old / p_inf, which is
    unbiased in every state that the rollout model visited. (The case study on KL estimation in "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training".)

    Args:
        moved: [B, T] log p_old / p_new of sampled tokens, 0 where masked.
        log_ratio: [B, T] log p_old / p_inf of them, 0 where masked.
        mask: [B, T] response mask.
    """
    moved = moved.double()
    return {
        "policy/approx_kl_k1": Mean.of(moved, mask),
        "policy/approx_kl_k3": Mean.of((-moved).exp() - 1.0 + moved, mask),
        "policy/approx_kl_weighted": Mean.of(log_ratio.double().exp() * moved, mask),
    }


def correction_metrics(
    correction: Correction, inputs: CorrectionInputs, lam: float, advantages: Tensor, clipped: Tensor, totals: Sums
) -> Sums:
    """Measure what the correction and PPO's clip did, over all response tokens, by sign of advantage and by position.

    Args:
        lam: at which acceptance is measured.
        advantages: [B, T].
        clipped: [B, T] bool, True where PPO's clip removes the gradient.
        totals: the sums over the optimizer step that kappa is computed from; {} where there are none.
    """
    mask, z = inputs.response_mask, inputs.z.value.double()
    factor = correction.weights * correction.accept_mask
    acceptance = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, lam)
    columns = {
        "obrs/acceptance": acceptance,
        "correction/accepted": correction.accept_mask,
        "correction/weight": factor,
        "correction/clip_frac": correction.capped,
        "correction/clip_frac_c2": correction.capped_c2,
        "policy/clip_frac": clipped,
    }
    groups = {"": mask, "_positive": mask & (advantages > 0), "_negative": mask & (advantages < 0)}
    groups |= {f"_{name}": band for name, band in _position_masks(mask).items()}
    sums = _by_group(columns, groups)
    del sums["obrs/acceptance"]  # the correction's own measure gives the whole of it
    return sums | {
        "correction/weight_max": Max.of(factor, mask),
        "obrs/kappa": Mean.of(correction.kappa.expand_as(factor), mask),
        "obrs/kappa_z_above_1": Mean.of(
            (correction.kappa - 2.0 * _kappa_error(totals)) * z > min(1.0, 1.0 / lam) + ROUNDING, mask
        ),
        "obrs/acceptance_by_response": ClusteredMean.of(acceptance - z, mask),
        "obrs/acceptance_variance": Mean.of((z * (1.0 - z)).clamp(min=0.0), mask),
        "policy/largest_advantage": Max.of(advantages.abs(), mask),
        "policy/largest_kept_advantage": Max.of(advantages.abs() * correction.accept_mask, mask),
    }


def _kappa_error(totals: Sums) -> Tensor | float:
    """Return the standard error of kappa = sum a / sum Z, from the spread of a - Z; 0 without totals."""
    if not totals:
        return 0.0
    return totals["acceptance_minus_z"].squares.sqrt() / totals["z"].total.clamp(min=1e-9)


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


def _position_masks(mask: Tensor) -> dict[str, Tensor]:
    """Split the mask [B, T] by bands of positions; a position counts all response tokens, a tool's too."""
    position = torch.arange(mask.shape[1], device=mask.device)
    return {f"at_{name}": mask & here for name, here in band_masks(position, POSITIONS).items()}


def _by_group(columns: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> Sums:
    """Average every column over every group of tokens, all [B, T], in two matrix products; named column + group."""
    any_group = torch.stack(list(groups.values())).any(0)
    members = torch.stack([group[any_group] for group in groups.values()]).double()  # [G, N]
    values = torch.stack([column.detach()[any_group].double() for column in columns.values()])  # [C, N]
    totals, squares, counts = values @ members.T, values.square() @ members.T, members.sum(-1)
    return {
        column + group: Mean(totals[c, g], squares[c, g], counts[g])
        for c, column in enumerate(columns)
        for g, group in enumerate(groups)
    }
