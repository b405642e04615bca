"""Both models' distributions at a token, recovered from the saved top-k lists.

If both lists hold nearly all of the mass, the effect of a correction is summed over the vocabulary instead of estimated
from the sampled token: over the tokens in both lists, and one column for all other tokens together.

Shapes: `B` responses of up to `T` tokens, `N` sampled tokens, `K` entries of a list, `M` = K + 1 columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from jackpot.analysis.replay.responses import ResponseBatch
from jackpot.objectives.obrs import ZEstimate, exact_z, known_z

CAPTURED = 0.999  # least mass of each distribution in its list at which the vocabulary is summed over
EQUAL = 1e-3  # largest difference between log-probs of a sampled token under two equal distributions
_TINY = 1e-12  # smallest mass of the column of all other tokens
_NEGLIGIBLE = -200.0  # log-prob of an empty column; equal in both models, so that the column weighs nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDistributions:
    """The distributions of both models at N sampled tokens; float64, nats."""

    at: Tensor  # [B, T] bool, True at the N tokens
    held: Tensor  # [N] bool, True where both lists hold at least CAPTURED of the mass
    rollout: Tensor  # [N, M] log p_inf; the last column stands for all tokens that are not in both lists
    new: Tensor  # [N, M] log p_new
    old: Tensor | None  # [N, M] log p_old; None: not known, since p_old is neither p_new nor p_inf
    advantages: Tensor  # [N]

    def z(self, lam: float, target: str) -> Tensor | None:
        """Return Z of p_inf and the target, [N], exact but for the last column; None for a target that is not known.

        Args:
            lam: lambda of OBRS.
            target: old or new, the policy that rollouts are aligned to.
        """
        log_probs = self.new if target == "new" else self.old
        return None if log_probs is None else exact_z(self.rollout, log_probs, lam)

    @property
    def known(self) -> "StateDistributions | None":
        """Return the distributions at tokens whose lists hold enough mass to sum over; None without such tokens."""
        if not self.held.any():
            return None

        return StateDistributions(
            at=self.at.masked_scatter(self.at, self.held),
            held=self.held[self.held],
            rollout=self.rollout[self.held],
            new=self.new[self.held],
            old=None if self.old is None else self.old[self.held],
            advantages=self.advantages[self.held],
        )


def saved_distributions(batch: ResponseBatch) -> StateDistributions | None:
    """Match the top-k lists of both models at every sampled token of a batch; None if a response lacks a list."""
    if not all(response.has_lists for response in batch.responses):
        return None

    rollout_ids, rollout_top = _sampled_lists(batch, "rollout", -1)
    policy_ids, policy_top = _sampled_lists(batch, "policy", -2)
    matches = rollout_ids.unsqueeze(-1) == policy_ids.unsqueeze(-2)  # [N, K, K']
    in_both = matches.any(-1)

    # Columns in the order of the rollout model's list; a token that the policy's list lacks leaves an empty column.
    nothing = torch.tensor(_NEGLIGIBLE, dtype=torch.float64)
    rollout = torch.where(in_both, rollout_top, nothing)
    new = torch.where(in_both, policy_top.gather(-1, matches.int().argmax(-1)), nothing)
    held = torch.minimum(rollout.exp().sum(-1), new.exp().sum(-1)) >= CAPTURED
    rollout, new = _with_rest(rollout), _with_rest(new)

    return StateDistributions(
        at=batch.mask,
        held=held,
        rollout=rollout,
        new=new,
        old=_old(batch, rollout, new),
        advantages=batch.advantages[batch.mask],
    )


def z_of(lists: StateDistributions | None, batch: ResponseBatch, lam: float, target: str) -> ZEstimate | None:
    """Return Z for a correction's inputs, [B, T]; None without the target's distributions."""
    if lists is None or (z := lists.z(lam, target)) is None:
        return None
    return known_z(torch.ones_like(batch.rollout).masked_scatter(lists.at, z))


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append the column of all other tokens to log-probs: [N, K] -> [N, K + 1]."""
    # Rounding of saved values may take the mass above 1.
    log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True).clamp(min=0.0)

    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_TINY)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _old(batch: ResponseBatch, rollout: Tensor, new: Tensor) -> Tensor | None:
    """Return log p_old, which has no list of its own, if it equals p_new or p_inf; else None.

    It equals p_new before the first step on a batch, and p_inf where the policy itself sampled the batch.
    """
    if (batch.old - batch.new).abs().max() < EQUAL:
        return new
    return rollout if (batch.old - batch.rollout).abs().max() < EQUAL else None


def _sampled_lists(batch: ResponseBatch, model: str, padding: int) -> tuple[Tensor, Tensor]:
    """Return the ids and log-probs of a model's lists at the sampled tokens, [N, K] each.

    Args:
        batch: responses with lists of both models.
        model: rollout or policy.
        padding: id at the end of shorter lists; its log-prob is -inf.
    """

    def padded(column: str, value: float) -> Tensor:
        rows = [getattr(response, f"{model}_{column}")[response.sampled_mask] for response in batch.responses]
        width = max(lists.shape[1] for lists in rows)
        return torch.cat([pad(lists, (0, width - lists.shape[1]), value=value) for lists in rows])

    return padded("top_ids", padding), padded("top_log_probs", -torch.inf)
