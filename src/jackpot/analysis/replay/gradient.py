"""Computes bias and variance of a token's gradient against the exact one, summed over all tokens of its state.

With respect to the logits of a state s (docs/replay.md), with the advantage's square A_s^2 of the response that was
sampled, n_x = |e_x - p_new|^2, f(x) = p_inf(x) E F(x), and c the factor that fits best:

    S_ff = sum_s A_s^2 sum_x f(x)^2 n_x       S_ft = ... f(x) p_new(x) n_x        S_tt = ... p_new(x)^2 n_x
    bias      = sqrt(1 - S_ft^2 / (S_ff S_tt))
    variance  = sum_s A_s^2 sum_x (p_inf(x) E F(x)^2 - f(x)^2) n_x / c^2           c = S_ft / S_tt
    drift     = sqrt( sum_s A_s^2 |f - F_s p_new|^2 / (c^2 S_tt) )                F_s = sum_x f(x)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.replay.distributions import StateDistributions
from jackpot.analysis.replay.factors import GradientFactors
from jackpot.core.metrics import Mean


class GradientSums(NamedTuple):
    """Sums over states that add up over batches. Scalars, float64."""

    estimator: Tensor  # S_ff
    both: Tensor  # S_ft
    exact: Tensor  # S_tt
    noise: Tensor  # the variance times c^2
    ideal_noise: Tensor  # the variance of sampling from p_new itself
    drift: Tensor  # the drift squared, times c^2 S_tt

    def __add__(self, other: "GradientSums") -> "GradientSums":
        return GradientSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def scale(self) -> float:
        """Return c, the multiple of the exact gradient that fits the mean best; a learning rate offsets it."""
        return float(self.both / self.exact)

    @property
    def bias(self) -> float:
        """Return the relative bias of the direction: 0 for the exact direction, 1 for an orthogonal one."""
        return float((1.0 - self.both.square() / (self.estimator * self.exact)).clamp(min=0.0).sqrt())

    @property
    def variance(self) -> float:
        """Return the variance, as a multiple of that of responses which the updated policy itself has sampled."""
        return float(self.noise / (self.both / self.exact).square() / self.ideal_noise)

    @property
    def drift_size(self) -> float:
        """Return the size of the part that does not depend on the tokens' rewards, over the exact gradient's size."""
        return float((self.drift * self.exact).sqrt() / self.both)


class StateSums(NamedTuple):
    """Sums over states of one correction, from whole distributions, that add up over batches."""

    gradient: GradientSums
    mean: Mean  # F_s over states
    square: Mean  # sum_x p_inf E F^2 over states
    variation: Mean  # F_s times the total variation between f / F_s and p_new, over states

    def __add__(self, other: "StateSums") -> "StateSums":
        return StateSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def tv_after_correction(self) -> float:
        """Return the total variation between the corrected distribution and the policy, states weighted by F_s."""
        return float(self.variation.total / self.mean.total)

    @property
    def effective(self) -> float:
        """Return the effective share of tokens, (E F)^2 / E F^2."""
        return float(self.mean.value.square() / self.square.value)

    @property
    def state_spread(self) -> float:
        """Return the standard deviation of F_s over its mean: how unevenly states count."""
        return float(self.mean.variance.sqrt() / self.mean.value)


class StateValues(NamedTuple):
    """What one correction does in each of N states."""

    trained: Tensor  # [N, M] f
    second: Tensor  # [N, M] p_inf E F^2
    of_state: Tensor  # [N] F_s
    variation: Tensor  # [N] F_s times the total variation between f / F_s and p_new


def state_values(found: GradientFactors, states: StateDistributions) -> StateValues:
    """Compute f and the like from a correction's factors [N, M] on every token of every state."""
    rollout = states.rollout.exp()
    can_be_sampled = rollout > 0.0  # False where top-p or top-k forbids the token, and the ratio is infinite
    trained = torch.where(can_be_sampled, rollout * found.mean, 0.0)
    of_state = trained.sum(-1)
    return StateValues(
        trained=trained,
        second=torch.where(can_be_sampled, rollout * found.square, 0.0),
        of_state=of_state,
        variation=(trained - of_state.unsqueeze(-1) * states.new.exp()).abs().sum(-1) / 2.0,
    )


def state_sums(values: StateValues, states: StateDistributions) -> StateSums:
    """Sum one correction over states."""
    target = states.new.exp()
    trained, second, of_state, variation = values
    norms = 1.0 - 2.0 * target + target.square().sum(-1, keepdim=True)  # n_x
    squares = states.advantages.square()

    def total(values: Tensor) -> Tensor:
        return (squares * values.sum(-1)).sum()

    gradient = GradientSums(
        estimator=total(trained.square() * norms),
        both=total(trained * target * norms),
        exact=total(target.square() * norms),
        noise=total((second - trained.square()) * norms),
        ideal_noise=total((target - target.square()) * norms),
        drift=total((trained - of_state.unsqueeze(-1) * target).square()),
    )
    everywhere = torch.ones_like(of_state, dtype=torch.bool)
    return StateSums(
        gradient=gradient,
        mean=Mean.of(of_state, everywhere),
        square=Mean.of(second.sum(-1), everywhere),
        variation=Mean.of(variation, everywhere),
    )
