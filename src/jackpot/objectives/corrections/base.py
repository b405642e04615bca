"""The interface of a correction: its inputs, its result, and the sums that it measures.

A correction turns the log-probs of sampled tokens into (weights, accept_mask). Together with the proximal point that
PPO's ratio is taken from, it defines the policy's loss, for a surrogate S:

    loss = - sum over tokens of accept_mask * weights * S        both factors detached

`measure` returns sums that add up over micro-batches and ranks; `apply` takes their total over the whole optimizer
step. Every tensor is detached. Shapes: `B` sequences, `T` response tokens; log-probs in nats at the sampling
temperature. A sequence is never split between micro-batches.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jackpot.core.metrics import Mean, Means, Metric, Sums
from jackpot.objectives import obrs
from jackpot.objectives.constants import Kappa


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionInputs:
    """The inputs of a correction at every response token, detached: [B, T] each, except `by_policy`. Values at masked
    tokens are ignored."""

    rollout_log_probs: Tensor  # log p_inf of the sampled token, as the engine sampled it
    target_log_probs: Tensor  # log p_target, the distribution that the weights align to
    proximal_log_probs: Tensor  # log p_proximal, the point that PPO's ratio is taken from
    response_mask: Tensor  # bool, True where a model sampled the token, not a tool
    uniforms: Tensor  # float64 in [0, 1), the random numbers of the Bernoulli acceptance mask
    advantages: Tensor  # the policy's advantages; only corrections in `signed` read them, and only their signs
    z: obrs.ZEstimate  # Z, the mean acceptance of OBRS at each position, at the correction's lam
    lam: Tensor | None = None  # lam of each token, also in `z`, if a budget chooses it; None: the correction's lam
    by_policy: Tensor | None = None  # [B] bool, responses that the policy sampled; None: one model sampled all

    @property
    def masks(self) -> dict[str, Tensor]:
        """Return the response mask and, where two models sampled, the mask of each model's tokens, [B, T] bool, under
        the suffixes of metrics' names: "" for all tokens, `_by_policy` and `_by_rollout_model`."""
        return {"": self.response_mask} | split_by_model(self.response_mask, self.by_policy)

    def lam_per_token(self, default: float) -> float | Tensor:
        """Return the lam that a budget chose for each token, [B, T], 1 where masked; `default` without a budget."""
        return default if self.lam is None else torch.where(self.response_mask, self.lam, 1.0)

    def acceptance(self, lam: float) -> Tensor:
        """Return the probability a = min(1, rho / lam) that OBRS accepts each token, rho = p_target / p_inf: [B, T].
        The argument `lam` applies where no budget chose a lam for each token."""
        return obrs.acceptance(self.rollout_log_probs, self.target_log_probs, self.lam_per_token(lam))

    @property
    def log_ratio(self) -> Tensor:
        """Return log rho = log p_target - log p_inf: [B, T], 0 where masked."""
        return torch.where(self.response_mask, self.target_log_probs - self.rollout_log_probs, 0.0)

    @property
    def to_proximal(self) -> Tensor:
        """Return p_proximal / p_target: [B, T], 1 where masked. The product of this and a weight that turns means over
        p_inf into means over p_target turns them into means over p_proximal.

        It is 1 also where p_target is 0: no such token is accepted, so it has no weight to move.
        """
        moves = self.response_mask & ~self.target_log_probs.isneginf()
        return torch.where(moves, self.proximal_log_probs - self.target_log_probs, 0.0).exp()


class Kappas(NamedTuple):
    """The factors kappa by which one optimizer step multiplies Z: scalars, float64."""

    kappa: Tensor  # factor for tokens that the rollout model sampled; for all tokens where one model sampled all
    of_policy: Tensor | None = None  # factor for tokens that the policy sampled, where two models sampled; else None

    def by_response(self, by_policy: Tensor | None) -> Tensor:
        """Return kappa, the factor on estimates of Z, of each response, [B, 1]; a scalar where all have the same.

        Args:
            by_policy: [B] bool, True where the policy sampled the response; None where one model sampled all.
        """
        if self.of_policy is None or by_policy is None:
            return self.kappa
        return torch.where(by_policy[:, None], self.of_policy, self.kappa)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The result of a correction, detached. Weights and masks are [B, T], 0 or False where a token is masked."""

    weights: Tensor  # factor on the surrogate of an accepted token
    accept_mask: Tensor  # float: 1 where accepted, 0 where rejected; the acceptance a(x) with `mask: expected`
    capped: Tensor  # bool, where a cap lowered the weight or a band of ratios rejected the token
    capped_c2: Tensor  # bool, where the cap c2 lowered p_proximal / p_target
    kappa: Tensor  # scalar, float64: the factor on Z that the weights contain; 1 where they contain none
    kappa_of_policy: Tensor | None = None  # `kappa` for tokens that the policy sampled; None: one model sampled all

    @classmethod
    def of(
        cls,
        inputs: CorrectionInputs,
        weights: Tensor,
        *,
        accepted: Tensor | None = None,
        capped: Tensor | None = None,
        capped_c2: Tensor | None = None,
        kappas: Kappas | None = None,
    ) -> "Correction":
        """Build the result from tensors that broadcast to [B, T], masking each of them.

        Args:
            weights: the weight of every token, after the caps.
            accepted: acceptance mask, bool or float; None accepts every token.
            capped: bool, where a cap lowered the weight or a band rejected the token; None without cap and band.
            capped_c2: bool, where the cap c2 lowered p_proximal / p_target; None without such a cap.
            kappas: None where the weights do not contain kappa.
        """
        mask = inputs.response_mask
        # A product with `ones` broadcasts to [B, T]; `never` is False everywhere.
        ones, never = torch.ones_like(inputs.rollout_log_probs), torch.zeros_like(mask)
        accepted = ones if accepted is None else accepted.to(ones.dtype)
        kappas = kappas or no_kappa(ones.device)
        return cls(
            weights=torch.where(mask, weights * ones, 0.0),
            accept_mask=torch.where(mask, accepted * ones, 0.0),
            capped=never if capped is None else capped & mask,
            capped_c2=never if capped_c2 is None else capped_c2 & mask,
            kappa=kappas.kappa,
            kappa_of_policy=kappas.of_policy,
        )

    @property
    def kappas(self) -> Kappas:
        """Return the factors on Z that the weights contain, for the tokens of each model that sampled."""
        return Kappas(self.kappa, self.kappa_of_policy)


class CorrectionFn(Protocol):
    """The interface of a correction with fixed settings; frozen, without state. Its properties may be attributes.

    `kappa` says when `apply` needs sums over the optimizer step:

    "none"     never
    "prepass"  before the first backward pass
    "auto"     before it too, if that costs no forward pass; else afterwards: the correction first reads the sums of
               another step, and the gradient is repaired when the sums of this step are known
               (`training.kappa.KappaRepair`)

    "auto" gives the gradient of "prepass" for any correction whose accept_mask does not depend on the sums. The repair
    is cheap where the weights are piecewise linear in `Correction.kappa`: only sequences with a token whose weight does
    not change in proportion to kappa, such as one at a cap, take a second forward and backward pass.
    """

    @property
    def kappa(self) -> Kappa:
        """Return when `apply` needs its `totals` over the optimizer step: "none" (never), "prepass" or "auto"."""
        ...

    @property
    def lam(self) -> float:
        """Return the lam in the acceptance min(1, rho / lam) and in Z, for inputs whose own `lam` is None."""
        ...

    @property
    def reads(self) -> Collection[str]:
        """Return which of the inputs "z" and "advantages" the result depends on."""
        ...

    def measure(self, inputs: CorrectionInputs) -> Mapping[str, Metric]:
        """Return sums over a micro-batch's tokens whose totals over a step `apply` needs; the keys are metric names.

        Return {} where `apply` needs only the sums of `measure_overlap`, which `measured` adds for every correction.
        """
        ...

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        """Compute weights and acceptance mask of a micro-batch (`Correction.of`).

        Args:
            totals: sums over an optimizer step, of `measure` and `measure_overlap`; {} where there are none.
        """
        ...


def split_by_model(mask: Tensor, by_policy: Tensor | None) -> dict[str, Tensor]:
    """Split a mask [B, T] by the model that sampled each response; the keys are the suffixes of each model's metrics.

    Args:
        by_policy: [B] bool, True where the policy sampled the response; None where one model sampled all: returns {}.
    """
    if by_policy is None:
        return {}
    rows = by_policy[:, None]
    return {"_by_policy": mask & rows, "_by_rollout_model": mask & ~rows}


def measured(correction: CorrectionFn, inputs: CorrectionInputs) -> Sums:
    """Return the sums of `correction.measure` on a micro-batch, with those of `measure_overlap` added if missing.
    The name `obrs/acceptance` tells whether a correction has measured them itself."""
    sums = correction.measure(inputs)
    return dict(sums) if "obrs/acceptance" in sums else {**measure_overlap(inputs, correction.lam), **sums}


def measure_overlap(inputs: CorrectionInputs, lam: float) -> Means:
    """Return metrics of how far p_inf and p_target overlap, as sums over the sampled tokens, by name (docs/metrics.md).

    Where Z is exact, the mean of `acceptance_minus_z` is 0 within its standard error: at each token its expectation
    given the tokens before is 0, so tokens are uncorrelated (a martingale difference). Where two models sampled,
    acceptance and Z of each model's tokens are summed too.
    """
    mask, z, acceptance = inputs.response_mask, inputs.z, inputs.acceptance(lam)
    return {  # `model` is a suffix such as "_by_policy", "" for all tokens
        **{f"obrs/acceptance{model}": Mean.of(acceptance, sampled) for model, sampled in inputs.masks.items()},
        **{f"obrs/z{model}": Mean.of(z.value, sampled) for model, sampled in inputs.masks.items()},
        "obrs/acceptance_minus_z": Mean.of(acceptance - z.value, mask),
        "obrs/z_bound_width": Mean.of(z.upper - z.lower, mask),
        "obrs/rollout_mass": Mean.of(z.rollout_mass, mask),
        "obrs/target_mass": Mean.of(z.target_mass, mask),
        "obrs/union": Mean.of(z.union, mask),
    }


def no_kappa(device: torch.device) -> Kappas:
    """Return 1 for kappa, the factor on Z, so that Z stays as it is."""
    return Kappas(torch.ones((), dtype=torch.float64, device=device))


def step_kappas(inputs: CorrectionInputs, totals: Sums) -> Kappas:
    """Return kappa, the factor that corrects estimates of Z, for each model that sampled; 1 if `totals` is empty.

    It is the quotient of two sums over a step's tokens: their acceptances, min(1, rho / lam), by the estimates of Z.
    """
    device = inputs.rollout_log_probs.device

    def quotient(model: str) -> Tensor:
        """Return sum of acceptance / sum of Z over one model's tokens; `model` is a suffix of metrics, "" for all."""
        accepted, z = Mean.named(totals, f"obrs/acceptance{model}"), Mean.named(totals, f"obrs/z{model}")
        return obrs.kappa(accepted.total, z.total).to(device)

    if not totals:
        return no_kappa(device)
    if inputs.by_policy is None:
        return Kappas(kappa=quotient(""))

    policy_kappa, model_kappa = quotient("_by_policy"), quotient("_by_rollout_model")
    num_tokens = Mean.named(totals, "obrs/z_by_rollout_model").count.to(device)  # tokens of the rollout model
    # A rollout model that sampled no token of the step gets the policy's kappa.
    return Kappas(kappa=torch.where(num_tokens > 0, model_kappa, policy_kappa), of_policy=policy_kappa)
