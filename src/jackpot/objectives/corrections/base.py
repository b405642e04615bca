"""What a correction is given, what it answers, and what is measured for all of them.

A correction turns the log-probs of sampled tokens into (weights, accept_mask). Together with the proximal point that
PPO's ratio is taken from, it defines the policy's loss, for a surrogate S:

    loss = - sum over tokens of accept_mask * weights * S        both detached

`measure` gives sums that add up over micro-batches and ranks; `apply` takes their total over the whole optimizer step.
Every term is detached. Shapes: `B` sequences, `T` response tokens; log-probs in nats at the sampling temperature. Whole
sequences stay within a micro-batch.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from jackpot.core.metrics import Mean, Sums
from jackpot.objectives import obrs

Totals = Literal["none", "auto", "prepass", "previous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionInputs:
    """What is known of every response token before its loss. All [B, T], detached; masked entries are ignored."""

    rollout_log_probs: Tensor  # log p_inf
    target_log_probs: Tensor  # log p_target, what the weights align to
    proximal_log_probs: Tensor  # log of the point that PPO's ratio is taken from
    response_mask: Tensor  # bool
    uniforms: Tensor  # float64 in [0, 1), the coins
    z: obrs.ZEstimate  # of p_inf and p_target, at the correction's lam

    @property
    def log_ratio(self) -> Tensor:
        """log rho = log p_target / p_inf: [B, T], 0 where masked."""
        return torch.where(self.response_mask, self.target_log_probs - self.rollout_log_probs, 0.0)

    @property
    def to_proximal(self) -> Tensor:
        """p_proximal / p_target: [B, T], 1 where masked. Moves a weight from the target to PPO's own point."""
        return torch.where(self.response_mask, self.proximal_log_probs - self.target_log_probs, 0.0).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The outcome. All [B, T], 0 or False where masked."""

    weights: Tensor
    accept_mask: Tensor  # float: 1 where kept, 0 where rejected, or the expected acceptance a(x) if there is no coin
    capped: Tensor  # bool, where a cap took something from the weight
    capped_c2: Tensor  # bool, where the cap on p_proximal / p_target did
    kappa: Tensor  # scalar, the factor on Z that was used; 1 where none was


class CorrectionFn(Protocol):
    """A correction with its numbers fixed; frozen, without state."""

    # What `apply` wants to know of the step first: nothing, this step's sums, the previous step's; auto: this step's
    # where they cost no further forward pass.
    totals: Totals
    lam: float  # at which acceptance and Z are measured

    def measure(self, inputs: CorrectionInputs) -> Sums: ...

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction: ...


class Measured:
    """The measure that all corrections share."""

    __slots__ = ()

    def measure(self, inputs: CorrectionInputs) -> Sums:
        return measure_overlap(inputs, self.lam)


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


def outcome(
    inputs: CorrectionInputs,
    weights: Tensor,
    *,
    accepted: Tensor | None = None,
    capped: Tensor | None = None,
    capped_c2: Tensor | None = None,
    kappa: Tensor | None = None,
) -> Correction:
    """A correction from tensors that broadcast to [B, T]; None: everything kept, nothing capped, no kappa."""
    mask = inputs.response_mask
    ones, never = torch.ones_like(inputs.rollout_log_probs), torch.zeros_like(mask)
    accepted = ones if accepted is None else accepted.to(ones.dtype)
    return Correction(
        weights=torch.where(mask, weights * ones, 0.0),
        accept_mask=torch.where(mask, accepted * ones, 0.0),
        capped=never if capped is None else capped & mask,
        capped_c2=never if capped_c2 is None else capped_c2 & mask,
        kappa=torch.ones((), dtype=torch.float64, device=ones.device) if kappa is None else kappa,
    )
