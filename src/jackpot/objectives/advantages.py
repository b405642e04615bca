"""Advantages computed from rewards: GRPO and its variants, REINFORCE++, and GAE.

A group is the responses to one prompt. Responses of a group of equal rewards have the advantage 0, and still count in
every denominator. Rewards that differ by rounding alone are equal (`all_equal`). r is the reward of a response.
Shapes: `B` responses, `T` response tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_SPREAD = 1e-9  # rewards that differ by at most this share of max(1, largest |reward|) count as equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """The reward, the group and the length of every response of a rollout batch."""

    rewards: Tensor  # [B] float
    groups: Tensor  # [B] int64, the index of each response's group
    lengths: Tensor  # [B] int64, number of sampled tokens of each response
    beta: float = 1.0  # weight of the KL divergence to the sampler, in units of reward; only `oapl` reads it


def grpo(outcomes: Outcomes) -> Tensor:
    """Compute A = (r - mean of group) / (std of group), GRPO, arXiv 2402.03300 section 4.1.2: [B].

    The standard deviation divides by n - 1, as in the GRPO implementations of TRL and verl. A group of equal rewards,
    or of a single response, gets exactly 0; no epsilon is added to the denominator.
    """
    centred = dr_grpo(outcomes)  # r - mean of group
    std = (_group_sum(centred.square(), outcomes.groups) / (_group_sizes(outcomes) - 1).clamp(min=1)).sqrt()
    # `tiny` only avoids a division by 0, in groups of equal rewards, whose advantages are 0 anyway.
    return torch.where(centred == 0, 0.0, centred / std.clamp(min=torch.finfo(std.dtype).tiny))


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """Compute A = r - mean of group, Dr. GRPO, arXiv 2503.20783: [B]; equal rewards give exactly 0."""
    rewards, groups = outcomes.rewards, outcomes.groups
    mean = _group_sum(rewards, groups) / _group_sizes(outcomes)
    return torch.where(_is_equal(outcomes), 0.0, rewards - mean)


def rloo(outcomes: Outcomes) -> Tensor:
    """Compute A = r - mean of the group's other rewards = (r - mean of group) n / (n - 1), RLOO, arXiv 2402.14740: [B].

    A group of a single response gets 0.
    """
    sizes = _group_sizes(outcomes)
    return dr_grpo(outcomes) * sizes / (sizes - 1).clamp(min=1)


def opo(outcomes: Outcomes) -> Tensor:
    """Compute A = r - sum l r / sum l over the group, l the sampled tokens of a response, OPO, arXiv 2505.23585: [B].

    The baseline of least variance is sum |g|^2 r / sum |g|^2, with g the gradient of a response's log-prob; OPO takes
    |g|^2 to grow as the length. The off-policy baseline of VCPO (arXiv 2602.17616) also weights each response by the
    square of its ratio, and reads |g| from a backward pass for each response. Equal rewards, and a group of a single
    response, give exactly 0; verl's `opo` keeps the reward of a single response.
    """
    rewards, groups, lengths = outcomes.rewards, outcomes.groups, outcomes.lengths.to(outcomes.rewards.dtype)
    total = _group_sum(lengths, groups)
    # A group without a sampled token has a baseline of 0.
    baseline = _group_sum(lengths * rewards, groups) / torch.where(total > 0, total, 1.0)
    return torch.where(_is_equal(outcomes), 0.0, rewards - baseline)


def oapl(outcomes: Outcomes) -> Tensor:
    """Compute A = r - V, V = beta log mean of e^(r / beta) over the group, OAPL, arXiv 2602.19362: [B].

    V estimates the largest expectation of reward minus beta KL(policy || sampler) at this prompt; from a finite group
    the estimate is too low on average. A group's advantages do not sum to 0. Equal rewards, and a group of a single
    response, give exactly 0.
    """
    # Rewards are taken relative to the group's largest, so that no exponential overflows.
    below = outcomes.rewards - _group_extreme(outcomes.rewards, outcomes.groups, "amax")
    mean = _group_sum((below / outcomes.beta).exp(), outcomes.groups) / _group_sizes(outcomes)

    return torch.where(_is_equal(outcomes), 0.0, below - outcomes.beta * mean.log())


def reinforce_pp(outcomes: Outcomes) -> Tensor:
    """Compute A = (r - mean over all tokens) / (std over all tokens), REINFORCE++, arXiv 2501.03262: [B].

    Mean and variance are over the tokens of the batch, so each response counts with its length; the variance divides by
    n - 1, as in verl. The paper's KL penalty inside the reward is left out: `objective.reference` adds one to the loss.
    """
    return whiten(outcomes.rewards, outcomes.lengths)


def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """Compute A = whiten(r - mean of group), REINFORCE++ with a group baseline, arXiv 2501.03262: [B].

    Mean and standard deviation of `whiten` are over the tokens of the batch: each response counts with its length.
    """
    return whiten(dr_grpo(outcomes), outcomes.lengths)


ADVANTAGES: dict[str, Callable[[Outcomes], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "oapl": oapl,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def compute_advantages(
    name: str, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None, beta: float = 1.0
) -> Tensor:
    """Compute the advantage of each response, [B], by the function that `ADVANTAGES` has for `name`.

    Args:
        rewards: [B] float.
        groups: [B] int64, the index of each response's group.
        lengths: [B] int64, number of sampled tokens of each response; None counts all responses alike.
        beta: coefficient of `oapl`, above 0; no other advantage reads it.
    """
    lengths = torch.ones_like(groups) if lengths is None else lengths
    return ADVANTAGES[name](Outcomes(rewards=rewards, groups=groups, lengths=lengths, beta=beta))


def all_equal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group are equal: they differ by at most 1e-9 x max(1, largest |reward|).

    Equal rewards that are weighted sums may differ in their last digits: 0.1 + 0.2 is not 0.3. Divided by the standard
    deviation, such a difference would become an advantage of full size.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    return not rewards or bool(_no_spread(values.min(), values.max()))


def whiten(values: Tensor, counts: Tensor) -> Tensor:
    """Subtract the mean and divide by the standard deviation, with each entry counted `counts` times.

    The variance divides by n - 1, with n the sum of the counts. Values that are equal up to rounding, and a single
    entry, give exactly 0; no epsilon is added to the denominator. An entry of count 0 becomes 0. Shapes: all [B], or
    all [B, T].
    """
    counts = counts.to(values.dtype)
    values = torch.where(counts > 0, values, 0.0)
    total = counts.sum()
    present = values[counts > 0]
    if not len(present) or _no_spread(present.min(), present.max()):
        return torch.zeros_like(values)

    centred = values - (values * counts).sum() / total
    std = ((centred.square() * counts).sum() / (total - 1)).sqrt()
    return torch.where(counts > 0, centred / std, 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute GAE advantages, arXiv 1506.02438, and the returns that the critic learns: [B, T] each.

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)        return_t = A_t + V_t

    over the sampled tokens alone: the tokens of a tool between two sampled tokens belong to one step of the environment
    and are not discounted. The value after the last sampled token is 0.

    Args:
        rewards: [B, T] of each token, usually 0 except at the last sampled one; ignored where masked.
        values: [B, T] V of the state in which the token was sampled.
        mask: [B, T] bool, the tokens that the model sampled.
        gamma, lam: the discount and GAE's lambda, in [0, 1].
    """
    advantages = torch.zeros_like(values)
    following = values.new_zeros(values.shape[0])  # V of the next sampled token
    advantage = torch.zeros_like(following)
    for t in reversed(range(values.shape[1])):
        sampled = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = torch.where(sampled, delta + gamma * lam * advantage, advantage)
        following = torch.where(sampled, values[:, t], following)
        advantages[:, t] = torch.where(sampled, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def _no_spread(lowest: Tensor, highest: Tensor) -> Tensor:
    """Tell whether a lowest and a highest value are equal up to rounding, for each such pair: bool of their shape."""
    return highest - lowest <= EQUAL_SPREAD * torch.maximum(lowest.abs(), highest.abs()).clamp(min=1.0)


def _is_equal(outcomes: Outcomes) -> Tensor:
    """Return whether all rewards of each response's group are equal: bool [B]."""
    rewards, groups = outcomes.rewards, outcomes.groups
    return _no_spread(_group_extreme(rewards, groups, "amin"), _group_extreme(rewards, groups, "amax"))


def _group_sizes(outcomes: Outcomes) -> Tensor:
    """Return the number of responses in each response's group: [B]."""
    return _group_sum(torch.ones_like(outcomes.rewards), outcomes.groups)


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Return for each response the sum of the values in its group: [B]."""
    sums = values.new_zeros(int(groups.max()) + 1 if groups.numel() else 0)
    return sums.index_add(0, groups, values)[groups]


def _group_extreme(values: Tensor, groups: Tensor, reduce: str) -> Tensor:
    """Return the largest ("amax") or smallest ("amin") value of each response's group: [B]."""
    size = int(groups.max()) + 1 if groups.numel() else 0
    return values.new_zeros(size).scatter_reduce(0, groups, values, reduce, include_self=False)[groups]
