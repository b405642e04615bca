"""Both distributions at a token, from the saved top-k lists: the tokens in both, and the rest in one.

Where both lists hold nearly all of the mass, what a correction does can be computed and need not be sampled: sums go
over the M = K tokens that are in both lists and one more that stands for all others together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.replay.responses import Batch, Response
from jackpot.objectives.obrs import ZEstimate, exact_z, known_z

CAPTURED = 0.999  # of either distribution, to sum over its tokens
SAME = 1e-3  # in log-probs of sampled tokens: two names for one distribution
_TINY = 1e-12  # mass of what is left where nothing is
_NOTHING = -200.0  # log-prob of a column that no token stands in, the same in both: it weighs nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Of N sampled tokens. float64, nats."""

    at: Tensor  # [B, T] bool, which tokens these are
    rollout: Tensor  # [N, M] log p_inf, the last column of all tokens that are not in both lists
    new: Tensor  # [N, M] log p_new
    old: Tensor | None  # [N, M] log p_old; None where it is neither p_new nor p_inf
    advantages: Tensor  # [N]

    def z(self, lam: float, target: str) -> Tensor | None:
        """Z of p_inf and the target, exact but for what is left over: [N]; None where the target is not known."""
        log_probs = self.new if target == "new" else self.old
        return None if log_probs is None else exact_z(self.rollout, log_probs, lam)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """The same of every sampled token, however little its lists hold; and of those that hold enough."""

    everywhere: States
    known: States | None


def lists_of(batch: Batch) -> Lists | None:
    """None where a response has no lists for both models."""
    if not all(one.has_lists for one in batch.responses):
        return None
    rollout_ids, rollout_top = _pad(batch, "rollout_top_ids", "rollout_top_log_probs")
    policy_ids, policy_top = _pad(batch, "policy_top_ids", "policy_top_log_probs")
    rollout_ids, rollout_top = rollout_ids[batch.mask], rollout_top[batch.mask]
    policy_ids, policy_top = policy_ids[batch.mask], policy_top[batch.mask]
    same = rollout_ids.unsqueeze(-1) == policy_ids.unsqueeze(-2)  # [N, K, K']
    in_both = same.any(-1)
    place = same.int().argmax(-1)
    nothing = torch.tensor(_NOTHING, dtype=torch.float64)
    rollout = torch.where(in_both, rollout_top, nothing)
    new = torch.where(in_both, policy_top.gather(-1, place), nothing)
    held = torch.minimum(rollout.exp().sum(-1), new.exp().sum(-1))
    rollout, new = _with_rest(rollout), _with_rest(new)
    old = _old(batch, rollout, new)
    return Lists(
        everywhere=_some(batch, torch.ones_like(held, dtype=torch.bool), rollout, new, old),
        known=_some(batch, held >= CAPTURED, rollout, new, old) if (held >= CAPTURED).any() else None,
    )


def _some(batch: Batch, chosen: Tensor, rollout: Tensor, new: Tensor, old: Tensor | None) -> States:
    at = batch.mask.clone()
    at[batch.mask] = chosen
    return States(
        at=at,
        rollout=rollout[chosen],
        new=new[chosen],
        old=None if old is None else old[chosen],
        advantages=batch.advantages[at],
    )


def z_of(lists: Lists | None, batch: Batch, lam: float, target: str) -> ZEstimate | None:
    """Z for a correction's inputs, [B, T]; None where there are no lists of the target."""
    found = lists.everywhere.z(lam, target) if lists else None
    if found is None:
        return None
    return known_z(torch.ones_like(batch.rollout).masked_scatter(lists.everywhere.at, found))


def _with_rest(log_probs: Tensor) -> Tensor:
    """[N, K] -> [N, K + 1], summing to 1. Rounding of what was saved may take the known mass beyond 1."""
    log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True).clamp(min=0.0)
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_TINY)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _old(batch: Batch, rollout: Tensor, new: Tensor) -> Tensor | None:
    """No list is of p_old; at the first step on a batch it is p_new, and where the policy wrote itself it is p_inf."""
    if (batch.old - batch.new).abs().max() < SAME:
        return new
    return rollout if (batch.old - batch.rollout).abs().max() < SAME else None


def _pad(batch: Batch, ids: str, log_probs: str) -> tuple[Tensor, Tensor]:
    """[B, T, K] of every response's lists, as wide as the widest."""
    width = max(getattr(one, ids).shape[1] for one in batch.responses)
    shape = (*batch.mask.shape, width)
    all_ids = torch.full(shape, -1 if ids.startswith("rollout") else -2)
    all_log_probs = torch.full(shape, -torch.inf, dtype=torch.float64)
    for row, response in enumerate(batch.responses):
        _fill(all_ids[row], all_log_probs[row], response, ids, log_probs)
    return all_ids, all_log_probs


def _fill(ids: Tensor, log_probs: Tensor, response: Response, ids_name: str, log_probs_name: str) -> None:
    rows: Sequence[Tensor] = (getattr(response, ids_name), getattr(response, log_probs_name))
    length, width = rows[0].shape
    ids[:length, :width], log_probs[:length, :width] = rows
