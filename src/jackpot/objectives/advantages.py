"""Advantages of whole responses from their rewards. Layer 2: pure.

A group is the responses to one prompt. Groups of equal reward have advantage 0 and stay in every count.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jackpot.errors import unknown_name


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = (r - mean of group) / (std of group), GRPO, arXiv 2402.03300 section 4.1.2.

    The standard deviation is the sample one (n - 1), as in the GRPO implementations of TRL and verl. A group of equal
    rewards, a group of one among them, gets exactly 0; no epsilon enters otherwise.

    Args:
        rewards: [B].
        groups: [B] int64, the number of the group of each response.
    """
    centred = dr_grpo(rewards, groups)
    counts = _group_sum(torch.ones_like(rewards), groups)
    std = (_group_sum(centred.square(), groups) / (counts - 1).clamp(min=1)).sqrt()
    return torch.where(centred == 0, 0.0, centred / std.clamp(min=torch.finfo(std.dtype).tiny))


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r - mean of group, Dr. GRPO, arXiv 2503.20783. Arguments as in `grpo`; equal rewards give exactly 0."""
    mean = _group_sum(rewards, groups) / _group_sum(torch.ones_like(rewards), groups)
    equal = _group_extreme(rewards, groups, "amax") == _group_extreme(rewards, groups, "amin")
    return torch.where(equal, 0.0, rewards - mean)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo}


def compute_advantages(name: str, rewards: Tensor, groups: Tensor) -> Tensor:
    """`ADVANTAGES[name]` on checked input: [B], [B] -> [B]. ValueError for an unknown name or unequal lengths."""
    if name not in ADVANTAGES:
        raise ValueError(unknown_name("advantage", name, ADVANTAGES))
    if rewards.shape != groups.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [B]")
    return ADVANTAGES[name](rewards, groups)


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """The sum over each response's group, given back to every response: [B]."""
    sums = values.new_zeros(int(groups.max()) + 1 if groups.numel() else 0)
    return sums.index_add(0, groups, values)[groups]


def _group_extreme(values: Tensor, groups: Tensor, reduce: str) -> Tensor:
    size = int(groups.max()) + 1 if groups.numel() else 0
    return values.new_zeros(size).scatter_reduce(0, groups, values, reduce, include_self=False)[groups]
