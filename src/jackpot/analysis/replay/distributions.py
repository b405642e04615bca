"""Next-token distributions of the rollout model and of the policy, recovered from the saved top-k lists of a token.

If both lists hold nearly all probability, the effect of a correction is summed over the vocabulary instead of estimated
from the sampled token. The sum is over the tokens in both lists, and one column for all other tokens together.

Shapes: `B` responses of up to `T` tokens, `N` sampled tokens, `K` entries of a list, `M` = K + 1 columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from jackpot.analysis.replay.responses import ResponseBatch
from jackpot.objectives.obrs import ZEstimate, exact_z, known_z

CAPTURED = 0.999  # least probability, under each model, of the tokens in both lists, for sums over the vocabulary
EQUAL = 1e-3  # nats; largest difference between the log-probs of a sampled token at which two policies count as equal
_TINY = 1e-12  # smallest probability of the column of all other tokens
_NEGLIGIBLE = -200.0  # log-prob of an empty column under both models, so that the column adds nothing to a sum


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDistributions:
    """The distributions of both models at N sampled tokens; float64, nats.

    p_inf is the rollout model, p_new the policy that is updated, and p_old the policy before its first update on the
    batch.
    """

    at: Tensor  # [B, T] bool, True at the N tokens
    held: Tensor  # [N] bool, True where the tokens in both lists have a probability of at least CAPTURED in each model
    rollout: Tensor  # [N, M] log p_inf; the last column stands for all tokens that are not in both lists
    new: Tensor  # [N, M] log p_new
    old: Tensor | None  # [N, M] log p_old; None: not known, since p_old is neither p_new nor p_inf
    advantages: Tensor  # [N] advantage of each token

    def z(self, lam: float, target: str) -> Tensor | None:
        """Return Z, the probability that OBRS accepts a token of p_inf for a target policy, [N]; None if not known.

        Z is exact but for the tokens that are not in both top-k lists, which count as one token.

        Args:
            lam: lambda of OBRS, by which the target is divided: Z is the sum of min(p_inf, p_target / lam).
            target: old or new, the policy that rollouts are aligned to.
        """
        log_probs = self.new if target == "new" else self.old
        return None if log_probs is None else exact_z(self.rollout, log_probs, lam)

    @property
    def known(self) -> "StateDistributions | None":
        """Return the states in which the lists hold enough probability (`held`); None if there is no such state."""
        if not self.held.any():
            return None

        return StateDistributions(
            at=self.at.masked_scatter(self.at, self.held),  # True at those of the N tokens that are held
            held=self.held[self.held],  # True everywhere
            rollout=self.rollout[self.held],
            new=self.new[self.held],
            old=None if self.old is None else self.old[self.held],
            advantages=self.advantages[self.held],
        )


def saved_distributions(batch: ResponseBatch) -> StateDistributions | None:
    """Recover both models' distributions at every sampled token of a batch; None if a response lacks a top-k list."""
    if not all(response.has_lists for response in batch.responses):
        return None

    # Lists are padded with two different ids, so that padding never matches padding.
    rollout_ids, rollout_top = _sampled_lists(batch, "rollout", padding=-1)
    policy_ids, policy_top = _sampled_lists(batch, "policy", padding=-2)
    matches = rollout_ids.unsqueeze(-1) == policy_ids.unsqueeze(-2)  # [N, K, K'], the two lists' lengths
    in_both = matches.any(-1)

    # Columns follow the order of the rollout model's list; a token that the policy's list lacks gets an empty column,
    # in which both models have the log-prob `nothing`.
    # For a token in both lists, argmax finds the token's place in the policy's list.
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
    """Return Z, the mean acceptance of OBRS, at the tokens of a batch, [B, T]; None if the lists do not give it.

    Tokens that the model did not sample, such as a tool's, get 1.
    """
    if lists is None or (z := lists.z(lam, target)) is None:
        return None
    return known_z(torch.ones_like(batch.rollout).masked_scatter(lists.at, z))


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append a column for all unlisted tokens together to the log-probs of listed tokens: [N, K] -> [N, K + 1]."""
    # Saved values are rounded, so their probabilities may sum to more than 1, and are divided by the sum then.
    log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True).clamp(min=0.0)

    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_TINY)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _old(batch: ResponseBatch, rollout: Tensor, new: Tensor) -> Tensor | None:
    """Return log p_old, [N, M], if p_old equals p_new or p_inf, else None, since no list holds p_old itself.

    It equals p_new before the first step on a batch, and p_inf where the policy itself sampled the batch. Two count
    as equal if their log-probs differ by less than EQUAL at every sampled token.
    """
    if (batch.old - batch.new).abs().max() < EQUAL:
        return new
    return rollout if (batch.old - batch.rollout).abs().max() < EQUAL else None


def _sampled_lists(batch: ResponseBatch, model: str, padding: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the log-probs of a model's top-k lists at the sampled tokens, [N, K] each.

    Args:
        batch: responses with lists of both models.
        model: rollout or policy.
        padding: id at the end of shorter lists; its log-prob is -inf.
    """

    def padded(column: str, value: float) -> Tensor:
        """Stack the ids or the log-probs in the lists of all responses, [N, K], with `value` behind shorter lists."""
        rows = [getattr(response, f"{model}_{column}")[response.sampled_mask] for response in batch.responses]
        width = max(lists.shape[1] for lists in rows)
        return torch.cat([pad(lists, (0, width - lists.shape[1]), value=value) for lists in rows])

    return padded("top_ids", padding), padded("top_log_probs", -torch.inf)
