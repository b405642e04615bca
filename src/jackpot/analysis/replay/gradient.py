"""Bias and variance of a token's gradient against the exact one, summed over all tokens of its state.

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

from jackpot.analysis.replay.factors import Factors
from jackpot.analysis.replay.states import States
from jackpot.core.metrics import Mean


class GradientSums(NamedTuple):
    """Sums over states; every entry adds up. Scalars, float64."""

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
        """c: what the estimator's mean is of the exact gradient, at best; a learning rate makes up for it."""
        return float(self.both / self.exact)

    @property
    def bias(self) -> float:
        """Of the direction, relative: 0 for the exact direction, 1 for one that has nothing to do with it."""
        return float((1.0 - self.both.square() / (self.estimator * self.exact)).clamp(min=0.0).sqrt())

    @property
    def variance(self) -> float:
        """Times that of text that the policy itself had just written."""
        return float(self.noise / (self.both / self.exact).square() / self.ideal_noise)

    @property
    def drift_size(self) -> float:
        """The push that has nothing to do with which token was right, over the exact gradient's size."""
        return float((self.drift * self.exact).sqrt() / self.both)


class StateSums(NamedTuple):
    """What is known of a correction from whole distributions; every entry adds up."""

    gradient: GradientSums
    mean: Mean  # F_s over states
    square: Mean  # sum_x p_inf E F^2 over states
    misplaced: Mean  # F_s times the total variation between f / F_s and p_new, over states

    def __add__(self, other: "StateSums") -> "StateSums":
        return StateSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def misplaced_share(self) -> float:
        """Of what is trained on, the probability that lies on other tokens than the policy's."""
        return float(self.misplaced.total / self.mean.total)

    @property
    def effective(self) -> float:
        """Of tokens, (E F)^2 / E F^2."""
        return float(self.mean.value.square() / self.square.value)

    @property
    def state_spread(self) -> float:
        """Standard deviation over mean of F_s: how unevenly states count."""
        return float(self.mean.variance.sqrt() / self.mean.value)


def state_sums(found: Factors, states: States) -> StateSums:
    """Of one correction whose factors [N, M] are those of every token of every state."""
    rollout, target = states.rollout.exp(), states.new.exp()
    can_be_sampled = rollout > 0.0  # else the ratio is infinite, of a token that top-p or top-k forbids
    trained = torch.where(can_be_sampled, rollout * found.mean, 0.0)  # f
    second = torch.where(can_be_sampled, rollout * found.square, 0.0)
    of_state = trained.sum(-1)  # F_s
    norms = 1.0 - 2.0 * target + target.square().sum(-1, keepdim=True)  # n_x
    squares = states.advantages.square()

    def total(values: Tensor) -> Tensor:
        return (squares * values.sum(-1)).sum()

    apart = (trained - of_state.unsqueeze(-1) * target).abs().sum(-1) / 2.0
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
        misplaced=Mean.of(apart, everywhere),
    )
