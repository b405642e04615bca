"""Speculative sampling (arXiv 2211.17192, 2302.01318): one model drafts tokens, another accepts or replaces them.

Torch only, pure.

Status: experimental.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from jackpot.models.sampling import sample_tokens

Chance = TypeVar("Chance", float, Tensor)
MOST_DRAFTS = 8  # most drafts of one verifying pass that `analysis.advice` considers when it advises on settings


class Verdict(NamedTuple):
    """The result of verifying the draft in each of `N` positions."""

    accepted: Tensor  # [N] bool
    replacements: Tensor  # [N] int64, the token to take where the draft was not accepted, or none was made
    log_probs: Tensor  # [N, V] log m, nats; m is the distribution that the token is drawn from in the end (`verify`)


def verify(log_probs: Tensor, draft_probs: Tensor, drafts: Tensor, uniforms: Tensor, lam: float) -> Verdict:
    """Accept or replace the draft in each of `N` positions that do not depend on each other.

    A draft x ~ q is accepted with probability a(x) = min(1, p(x) / (lam q(x))), and else replaced by a token of the
    residual distribution r = (p - q a)+ / sum (p - q a)+. So the token of a position is drawn from

        m = q a + (1 - sum q a) r,   with q a = min(q, p / lam).

    At lam = 1, m is p. With lam < 1 more drafts are accepted and m differs from p; (p - q a)+ is (p - q)+ for every lam
    up to 1.

    Where nothing was drafted, `draft_probs` is 0 and the token is drawn from p; likewise where `draft_probs` is NaN.

    Args:
        log_probs: log p, [N, V].
        draft_probs: q, [N, V].
        drafts: [N] int64, drawn from q.
        uniforms: [N, 2] float64 in [0, 1): the first decides the acceptance, the second draws the other token.
        lam: in (0, 1]; 1 is exact.
    """
    probs, index = log_probs.exp(), drafts[:, None]
    drafted_probs = draft_probs.gather(1, index)  # [N, 1]
    is_draft = drafted_probs > 0.0  # False where nothing was drafted, and where q is NaN
    accepted = is_draft & (uniforms[:, :1] * lam * drafted_probs < probs.gather(1, index))  # u < p / (lam q)

    # The residual distribution r, not normalized; p itself where p - q is nowhere above 0.
    residual = (probs - draft_probs).clamp_(min=0.0)
    is_empty = ~(residual > 0.0).any(dim=-1, keepdim=True)  # True also where `draft_probs` is NaN
    residual = torch.where(is_empty, probs, residual)
    replacements = sample_tokens(residual, uniforms[:, 1])

    if lam < 1.0:
        accepted_mass = torch.minimum(draft_probs, probs / lam)  # q a
        rejected = (draft_probs - accepted_mass).sum(-1, keepdim=True)  # 1 - sum q a, without the rounding of 1 - ...
        mixed = accepted_mass + rejected * residual / residual.sum(-1, keepdim=True)
        log_probs = torch.where(is_draft, mixed.log(), log_probs)
    return Verdict(accepted=accepted[:, 0], replacements=replacements, log_probs=log_probs)


def tokens_per_verification(acceptance: Chance, drafted: int) -> Chance:
    """Return the expected number of tokens from one pass that verifies drafts, (1 - alpha^(k+1)) / (1 - alpha).

    Args:
        acceptance: alpha, the probability that a draft is accepted if all drafts before it were, in [0, 1].
        drafted: k, the number of drafts that the pass verifies.
    """
    # The sum of alpha^i for i from 0 to k; `acceptance**0` is 1 in the type of `acceptance`.
    return sum((acceptance**count for count in range(1, drafted + 1)), start=acceptance**0)
