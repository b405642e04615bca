"""Bias, variance and drift of a corrected gradient against the exact gradient, from sums over all tokens of a state.

A state is the context of one sampled token. Gradients are with respect to the logits in a state. docs/replay.md has the
formulas and their symbols: p_inf is the rollout model, p_new the updated policy, F a correction's factor on a token's
gradient, and E the mean over the correction's random mask.

Shapes: `N` states, `M` tokens of each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.replay.distributions import StateDistributions
from jackpot.analysis.replay.factors import GradientFactors
from jackpot.core.metrics import Mean, Sum, Sums


class StateValues(NamedTuple):
    """The effect of one correction on the gradient in each of N states, whose M tokens all have known probabilities."""

    trained: Tensor  # [N, M] f = p_inf E F, the weight of each token in the corrected gradient
    second: Tensor  # [N, M] p_inf E F^2, the second moment that belongs to the mean f
    of_state: Tensor  # [N] F_s, the sum of f over the tokens of the state
    variation: Tensor  # [N] F_s times the total variation between the normalized weights f / F_s and p_new


def state_values(factors: GradientFactors, states: StateDistributions) -> StateValues:
    """Compute what a correction does to the gradient in each state: the weights of its tokens, and their sums.

    `factors` holds the moments E F and E F^2 of the correction's factor at the M tokens of the N states, [N, M] each.
    """
    rollout = states.rollout.exp()  # p_inf
    can_be_sampled = rollout > 0.0  # False where top-p or top-k forbids the token, and p_new / p_inf is infinite
    trained = torch.where(can_be_sampled, rollout * factors.mean, 0.0)  # f
    of_state = trained.sum(-1)  # F_s

    return StateValues(
        trained=trained,
        second=torch.where(can_be_sampled, rollout * factors.square, 0.0),
        of_state=of_state,
        variation=(trained - of_state.unsqueeze(-1) * states.new.exp()).abs().sum(-1) / 2.0,
    )


def state_sums(values: StateValues, states: StateDistributions) -> Sums:
    """Sum the effect of one correction over N states; `exact_numbers` computes bias and variance from the sums."""
    target = states.new.exp()
    trained, second, of_state, variation = values  # f, its second moment, F_s, and F_s times the total variation
    norms = 1.0 - 2.0 * target + target.square().sum(-1, keepdim=True)  # n_x, the squared norm of grad log p_new(x)

    everywhere = torch.ones_like(of_state, dtype=torch.bool)
    squared_advantages = states.advantages.square()

    def total(products: Tensor) -> Sum:
        """Sum products [N, M] over tokens and states, each state weighted by its squared advantage."""
        return Sum((squared_advantages * products.sum(-1)).sum())

    # The names S_ff, S_ft, S_tt and c = S_ft / S_tt are those of docs/replay.md. f and p_new are the tokens' weights in
    # the corrected and in the exact gradient; "drift" sums how far f is from p_new scaled to the same sum F_s.
    return {
        "state": Mean.of(of_state, everywhere),
        "state square": Mean.of(second.sum(-1), everywhere),
        "state variation": Mean.of(variation, everywhere),
        "estimator": total(trained.square() * norms),  # S_ff
        "product": total(trained * target * norms),  # S_ft
        "exact": total(target.square() * norms),  # S_tt
        "noise": total((second - trained.square()) * norms),  # the variance of the corrected gradient
        "ideal noise": total((target - target.square()) * norms),  # the variance of sampling from p_new itself
        "drift": total((trained - of_state.unsqueeze(-1) * target).square()),  # f - F_s p_new, squared
    }


def exact_numbers(sums: Sums) -> dict[str, float]:
    """Compute the fields of `CorrectionResult` that are exact sums over states; empty without a state.

    - `exact_effective` is the effective sample size of the weighted tokens, as a share of their number.
    - `tv_after_correction` is the total variation between p_new and the distribution that the correction trains on.
    - `bias` is 0 for the exact direction and 1 for an orthogonal one. A common factor, which a learning rate offsets,
      is no bias.
    - `variance` is the gradient's variance, divided by that with responses which the updated policy samples.
    - `drift` is the distance of the weights f from F_s p_new (`state_sums`), divided by the corrected gradient's size
      along the exact one.
    - `state_spread` is the standard deviation over the mean of F_s, the weight that the correction gives to a state.
    """
    if "state" not in sums:
        return {}

    # docs/replay.md has the formulas below. `estimator` (S_ff) stands for the squared size of the corrected gradient,
    # `exact` (S_tt) for that of the exact one, `product` (S_ft) for their inner product. `noise` is the variance of
    # the corrected, `ideal_noise` of the exact one; `drift` is the squared distance of f from F_s p_new (`state_sums`).
    # Means over states: `weight` of F_s, `square` of the sum of p_inf E F^2, `variation` of F_s times total variation.
    weight, square, variation = (Mean.named(sums, name) for name in ("state", "state square", "state variation"))
    estimator, product, exact = (sums[name].value for name in ("estimator", "product", "exact"))
    noise, ideal_noise, drift = (sums[name].value for name in ("noise", "ideal noise", "drift"))
    scale = product / exact  # c, the corrected gradient's size along the exact one: what a learning rate can offset

    return {
        "exact_effective": float(weight.value.square() / square.value),
        "tv_after_correction": float(variation.total / weight.total),
        "bias": float((1.0 - product.square() / (estimator * exact)).clamp(min=0.0).sqrt()),
        "variance": float(noise / scale.square() / ideal_noise),  # of the gradient divided by c
        "drift": float((drift * exact).sqrt() / product),  # sqrt(drift) / (c sqrt(exact))
        "state_spread": float(weight.variance.sqrt() / weight.value),
    }


def known_states(sums: Sums) -> int:
    """Return the number of tokens whose whole distributions entered the sums."""
    return int(Mean.named(sums, "state").count) if "state" in sums else 0
