"""Bias, variance and drift of the corrected gradient against the exact one, summed over all tokens x of each state s.

Gradients are with respect to the logits of a state (docs/replay.md). With the advantage A_s of the response that was
sampled, n_x = |e_x - p_new|^2, f(x) = p_inf(x) E F(x), and the factor c by which the gradients fit best:

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
from jackpot.core.metrics import Mean, Sum, Sums

_MEANS = ("state", "state square", "state variation")  # names of the means of `state_sums`
_PRODUCTS = ("estimator", "product", "exact", "noise", "ideal noise", "drift")  # names of the sums of `state_sums`


class StateValues(NamedTuple):
    """The effect of one correction in each of N states, on M tokens."""

    trained: Tensor  # [N, M] f, the weight of each token in the corrected gradient
    second: Tensor  # [N, M] p_inf E F^2
    of_state: Tensor  # [N] F_s, the sum of f over the tokens
    variation: Tensor  # [N] F_s times the total variation between f / F_s and p_new


def state_values(factors: GradientFactors, states: StateDistributions) -> StateValues:
    """Compute the effect of a correction in each state from its factors [N, M] on every token."""
    rollout = states.rollout.exp()
    can_be_sampled = rollout > 0.0  # False where top-p or top-k forbids the token, and the ratio is infinite
    trained = torch.where(can_be_sampled, rollout * factors.mean, 0.0)
    of_state = trained.sum(-1)

    return StateValues(
        trained=trained,
        second=torch.where(can_be_sampled, rollout * factors.square, 0.0),
        of_state=of_state,
        variation=(trained - of_state.unsqueeze(-1) * states.new.exp()).abs().sum(-1) / 2.0,
    )


def state_sums(values: StateValues, states: StateDistributions) -> Sums:
    """Sum the effect of one correction over states, under the names of `_MEANS` and `_PRODUCTS`.

    The sums are S_ff, S_ft and S_tt, the variance times c^2, the variance of sampling from p_new, and the numerator of
    the drift. The means are of F_s, of the sum of p_inf E F^2 over a state, and of F_s times the total variation.
    """
    target = states.new.exp()
    trained, second, of_state, variation = values
    norms = 1.0 - 2.0 * target + target.square().sum(-1, keepdim=True)  # n_x of each token

    products = (
        trained.square() * norms,
        trained * target * norms,
        target.square() * norms,
        (second - trained.square()) * norms,
        (target - target.square()) * norms,  # the variance of sampling from p_new itself
        (trained - of_state.unsqueeze(-1) * target).square(),
    )

    squares = states.advantages.square()
    totals = [Sum((squares * product.sum(-1)).sum()) for product in products]

    everywhere = torch.ones_like(of_state, dtype=torch.bool)
    means = [Mean.of(column, everywhere) for column in (of_state, second.sum(-1), variation)]
    return dict(zip((*_MEANS, *_PRODUCTS), (*means, *totals), strict=True))


def exact_numbers(sums: Sums) -> dict[str, float]:
    """Compute the fields of `CorrectionResult` that are exact sums over states; empty without a state.

    - `exact_effective` is the effective sample size as a share.
    - `tv_after_correction` is the total variation that the correction leaves.
    - `bias` is 0 for the exact direction and 1 for an orthogonal one. A common factor, which a learning rate offsets,
      is no bias.
    - `variance` is a multiple of the variance of responses that the updated policy samples itself.
    - `drift` is a multiple of the exact gradient's size.
    - `state_spread` is the standard deviation of F_s over the mean of F_s.
    """
    if _MEANS[0] not in sums:
        return {}

    weight, square, variation = (Mean.named(sums, name) for name in _MEANS)
    estimator, product, exact, noise, ideal_noise, drift = (sums[name].value for name in _PRODUCTS)

    return {
        "exact_effective": float(weight.value.square() / square.value),
        "tv_after_correction": float(variation.total / weight.total),
        "bias": float((1.0 - product.square() / (estimator * exact)).clamp(min=0.0).sqrt()),
        "variance": float(noise / (product / exact).square() / ideal_noise),
        "drift": float((drift * exact).sqrt() / product),
        "state_spread": float(weight.variance.sqrt() / weight.value),
    }


def known_states(sums: Sums) -> int:
    """Return the number of tokens over whose whole distributions the sums were taken."""
    return int(Mean.named(sums, _MEANS[0]).count) if _MEANS[0] in sums else 0
