"""The interface of a correction: its inputs, its result, and the sums that every correction measures.

A correction turns the log-probs of sampled tokens into (weights, accept_mask). Together with the proximal point that
PPO's ratio is taken from, it defines the policy's loss, for a surrogate S:

    loss = - sum over tokens of accept_mask * weights * S        both factors detached

`measure` returns sums that add up over micro-batches and ranks; `apply` takes their total over the whole optimizer
step. Every tensor is detached. Shapes: `B` sequences, `T` response tokens; log-probs in nats at the sampling
temperature. A sequence is never split between micro-batches.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jackpot.config.base import Strict
from jackpot.config.corrections import Kappa
from jackpot.core.metrics import Mean, Sums
from jackpot.objectives import obrs


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionInputs:
    """Holds what a correction reads of every response token. All [B, T], detached; masked entries are ignored."""

    rollout_log_probs: Tensor  # log p_inf of the sampled token, as the engine sampled it
    target_log_probs: Tensor  # log p_target, the distribution that the weights align to
    proximal_log_probs: Tensor  # log-probs of the point that PPO's ratio is taken from
    response_mask: Tensor  # bool, True where the rollout model sampled the token
    uniforms: Tensor  # float64 in [0, 1), the random numbers of the Bernoulli acceptance mask
    advantages: Tensor  # of the policy; only corrections in `signed` read them, and those read their sign alone
    z: obrs.ZEstimate  # Z of p_inf and p_target at the correction's lam
    lam: Tensor | None = None  # the lam of each token, at which Z is, where a budget chooses it; None: the correction's
    by_policy: Tensor | None = None  # [B] bool, responses that the policy sampled; None: one model sampled all

    @property
    def masks(self) -> dict[str, Tensor]:
        """Return the response mask, and where two models sampled, the tokens of each: [B, T] bool, by the suffix of a
        metric's name."""
        return {"": self.response_mask} | split_by_model(self.response_mask, self.by_policy)

    def lam_or(self, lam: float) -> float | Tensor:
        """Return the lam of each token, [B, T], 1 where masked; `lam` where the correction has one for all."""
        return lam if self.lam is None else torch.where(self.response_mask, self.lam, 1.0)

    @property
    def log_ratio(self) -> Tensor:
        """log rho = log p_target - log p_inf: [B, T], 0 where masked."""
        return torch.where(self.response_mask, self.target_log_probs - self.rollout_log_probs, 0.0)

    @property
    def to_proximal(self) -> Tensor:
        """p_proximal / p_target: [B, T], 1 where masked. It moves a weight from the target to PPO's own point.

        1 also where p_target is 0: no such token is accepted, and none has a weight to move.
        """
        moves = self.response_mask & ~self.target_log_probs.isneginf()
        return torch.where(moves, self.proximal_log_probs - self.target_log_probs, 0.0).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Holds the result of one correction. All [B, T], detached, 0 or False where masked."""

    weights: Tensor  # factor on the surrogate of an accepted token
    accept_mask: Tensor  # float: 1 where accepted, 0 where rejected; the acceptance a(x) with `mask: expected`
    capped: Tensor  # bool, where the cap lowered the weight or the band rejected the token
    capped_c2: Tensor  # bool, where the cap c2 lowered p_proximal / p_target
    kappa: Tensor  # scalar, float64: the factor on Z that the weights contain; 1 where they contain none
    kappa_of_policy: Tensor | None = None  # the same of what the policy sampled, where two models did; else None

    @property
    def kappas(self) -> "Kappas":
        """Both factors."""
        return Kappas(self.kappa, self.kappa_of_policy)


class Kappas(NamedTuple):
    """Holds the factors on Z of one optimizer step: scalars, float64."""

    kappa: Tensor  # of tokens that the rollout model sampled; of all where there is no other
    of_policy: Tensor | None = None  # of tokens that the policy sampled, where two models did

    @property
    def named(self) -> dict[str, Tensor | None]:
        """Return both as arguments of `correction_result`."""
        return {"kappa": self.kappa, "kappa_of_policy": self.of_policy}

    def by_response(self, by_policy: Tensor | None) -> Tensor:
        """Return the factor of each response, [B, 1], or where there is one of all, [].

        Args:
            by_policy: [B] bool, None where one model sampled all.
        """
        if self.of_policy is None or by_policy is None:
            return self.kappa
        return torch.where(by_policy[:, None], self.of_policy, self.kappa)


class CorrectionFn(Protocol):
    """Describes a correction with fixed settings; frozen, without state."""

    # Whether `apply` needs sums over the optimizer step: "none"; "prepass", before the first backward pass; or "auto",
    # before it where they cost no forward pass. Else "auto" applies the correction to the sums of another step first,
    # and to this step's when they are known (`training.kappa_repair`). That gives the same gradient for any correction
    # whose accept_mask does not depend on the sums, and is cheap where the weights are piecewise linear in
    # `Correction.kappa`: only sequences with a token whose weight is not multiplied by the same factor are read again.
    kappa: Kappa
    lam: float  # at which acceptance and Z are measured, unless the inputs hold one for each token

    def measure(self, inputs: CorrectionInputs) -> Sums:
        """Sum acceptance, Z and the like over the response tokens of a micro-batch.

        The learner reads the names of `measure_overlap`, so one's own sums come in addition to those.
        """
        ...

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        """Compute weights and acceptance mask of a micro-batch.

        Args:
            totals: sums over an optimizer step; {} where there are none, and then kappa is 1.
        """
        ...


def split_by_model(mask: Tensor, by_policy: Tensor | None) -> dict[str, Tensor]:
    """Split a mask [B, T] by the model that sampled a response, by the suffix of a metric's name; {} where one did all.

    Args:
        by_policy: [B] bool, None where one model sampled all.
    """
    if by_policy is None:
        return {}
    own = by_policy[:, None]
    return {"_by_policy": mask & own, "_by_rollout_model": mask & ~own}


@dataclass(frozen=True, slots=True)
class BaseCorrection(ABC):
    """Holds the settings of a correction and measures the overlap of the two distributions.

    A correction whose settings have `lam` or `kappa` overrides the property of that name.
    """

    settings: Strict

    @property
    def kappa(self) -> Kappa:
        """Whether `apply` needs sums over the optimizer step: none, where the weights do not contain kappa."""
        return "none"

    @property
    def lam(self) -> float:
        """The lam at which acceptance and Z are measured: 1, where the settings have none."""
        return 1.0

    @property
    def reads(self) -> frozenset[str]:
        """Which of the inputs "z" and "advantages" decide the result."""
        return frozenset()

    def measure(self, inputs: CorrectionInputs) -> Sums:
        """Sum the overlap of p_inf and p_target on a micro-batch (`measure_overlap`)."""
        return measure_overlap(inputs, self.lam)

    @abstractmethod
    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        """Compute weights and acceptance mask of a micro-batch by the formula in the docstring of the class."""


def measure_overlap(inputs: CorrectionInputs, lam: float) -> Sums:
    """Sum how far p_inf and p_target overlap on the sampled tokens; the same for every correction.

    Names: `acceptance` a(x); `z` the estimate that enters weights; `acceptance_minus_z`, whose mean is 0 within its
    standard error where Z is exact (a martingale difference: uncorrelated between tokens); `z_bound_width`;
    `rollout_mass` and `target_mass` captured by the top-k sets. Where two models sampled, acceptance and Z of
    each too, with `_by_policy` and `_by_rollout_model` behind the name.
    """
    mask, z = inputs.response_mask, inputs.z
    accepted = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, inputs.lam_or(lam))
    return {
        **{f"acceptance{model}": Mean.of(accepted, own) for model, own in inputs.masks.items()},
        **{f"z{model}": Mean.of(z.value, own) for model, own in inputs.masks.items()},
        "acceptance_minus_z": Mean.of(accepted - z.value, mask),
        "z_bound_width": Mean.of(z.upper - z.lower, mask),
        "rollout_mass": Mean.of(z.rollout_mass, mask),
        "target_mass": Mean.of(z.target_mass, mask),
    }


def correction_result(
    inputs: CorrectionInputs,
    weights: Tensor,
    *,
    accepted: Tensor | None = None,
    capped: Tensor | None = None,
    capped_c2: Tensor | None = None,
    kappa: Tensor | None = None,
    kappa_of_policy: Tensor | None = None,
) -> Correction:
    """Build a `Correction` from tensors that broadcast to [B, T], masking each of them.

    Args:
        weights: the weight of every token, after the caps.
        accepted: acceptance mask, bool or float; None accepts every token.
        capped, capped_c2: bool; None where there is no such cap.
        kappa: scalar, float64; None where the weights do not contain kappa.
        kappa_of_policy: the same of tokens that the policy sampled, where two models sampled.
    """
    mask = inputs.response_mask
    ones, never = torch.ones_like(inputs.rollout_log_probs), torch.zeros_like(mask)
    accepted = ones if accepted is None else accepted.to(ones.dtype)
    return Correction(
        weights=torch.where(mask, weights * ones, 0.0),
        accept_mask=torch.where(mask, accepted * ones, 0.0),
        capped=never if capped is None else capped & mask,
        capped_c2=never if capped_c2 is None else capped_c2 & mask,
        kappa=torch.ones((), dtype=torch.float64, device=ones.device) if kappa is None else kappa,
        kappa_of_policy=kappa_of_policy,
    )
