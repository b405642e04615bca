"""Z from the two top-k sets against the exact Z (appendix C.3), with the fill-in and without.

At lam = 1. Shapes: `N` states, `K` values of k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.simulate.distributions import RECIPE_LAM, StateNumbers, StatePairs
from jackpot.objectives import obrs

KS = (5, 10, 20, 40, 80, 160)
RECIPE_K = 20  # k of the paper and of the recipes
_LOW_QUANTILE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKNumbers:
    """The top-k estimate of Z at each state and each k, [N, K] each."""

    value: Tensor  # Z_k, which enters the weight
    lower: Tensor
    upper: Tensor
    captured: Tensor  # p_inf of the tokens whose two probabilities are known


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKSummary:
    """The top-k estimate of Z at one k, over all states of a pair of models."""

    k: int
    fill_in: bool  # whether p_inf is known at the policy's top-k
    z_share: float  # mean of Z_k / Z
    z_share_low: float  # the quantile of 1 % of Z_k / Z
    width: float  # mean of upper - lower
    captured: float  # mean
    outside: int  # states whose exact Z lies outside the bounds
    kappa: float  # sum a / sum Z_k over the sampled tokens
    kappa_error: float  # standard error of kappa over the draw of tokens at these states
    kappa_exact: float  # sum Z / sum Z_k, which kappa estimates
    corrected: float  # mean of kappa * Z_k over the mean of Z


def topk_sizes(vocabulary: int) -> tuple[int, ...]:
    """Return the KS below the vocabulary's size; where that leaves some out, the vocabulary comes last (Z_k is Z)."""
    below = tuple(k for k in KS if k < vocabulary)
    return below if len(below) == len(KS) else (*below, vocabulary)


def topk_numbers(states: StatePairs, fill_in: bool) -> TopKNumbers:
    """Estimate Z of every state at every k, as training does from the top-k lists of engine and policy."""
    ks = topk_sizes(states.rollout.shape[1])
    rollout = states.rollout.topk(ks[-1], dim=-1)
    target = states.target.topk(ks[-1], dim=-1)
    target_at_rollout = states.target.gather(-1, rollout.indices)
    rollout_at_target = states.rollout.gather(-1, target.indices)
    valid = torch.full((len(states),), fill_in)
    estimates = [
        obrs.topk_z(
            rollout_top_log_probs=rollout.values[:, :k],
            target_at_rollout_top=target_at_rollout[:, :k],
            rollout_top_ids=rollout.indices[:, :k],
            target_top_ids=target.indices[:, :k],
            target_top_log_probs=target.values[:, :k],
            fill_ins=rollout_at_target[:, :k],
            fill_valid=valid,
            lam=1.0,
        )
        for k in ks
    ]
    value, lower, upper, captured, _ = (torch.stack(columns, dim=-1) for columns in zip(*estimates, strict=True))
    return TopKNumbers(value=value, lower=lower, upper=upper, captured=captured)


def topk_summary(
    numbers: TopKNumbers, exact: StateNumbers, sampled: Tensor, vocabulary: int, fill_in: bool
) -> tuple[TopKSummary, ...]:
    """Summarize the estimates over all states, one row for each k.

    Args:
        sampled: [N, D] acceptance a(x) of the tokens drawn at each state.
    """
    z = exact.acceptance[:, RECIPE_LAM]
    draws = sampled.shape[1]
    error = (exact.acceptance_variance.sum() * draws).sqrt()  # standard deviation of sum a, given the states
    rows = []
    for index, k in enumerate(topk_sizes(vocabulary)):
        value, lower, upper = numbers.value[:, index], numbers.lower[:, index], numbers.upper[:, index]
        share = torch.where(z > 0, value / z, 1.0)
        z_sum = value.sum() * draws
        kappa = obrs.kappa(sampled.sum(), z_sum)
        rows.append(
            TopKSummary(
                k=k,
                fill_in=fill_in,
                z_share=float(share.mean()),
                z_share_low=float(share.quantile(_LOW_QUANTILE)),
                width=float((upper - lower).mean()),
                captured=float(numbers.captured[:, index].mean()),
                outside=int(((z < lower - 1e-12) | (z > upper + 1e-12)).sum()),
                kappa=float(kappa),
                kappa_error=float(error / z_sum),
                kappa_exact=float(obrs.kappa(z.sum(), value.sum())),
                corrected=float(kappa * value.mean() / z.mean()),
            )
        )
    return tuple(rows)
