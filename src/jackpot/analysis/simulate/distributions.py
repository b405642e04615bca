"""Next-token distributions of two models at the same states: how far apart both are, and how much OBRS accepts.

All tensors are float64. Shapes: `N` states, `V` vocabulary, `D` tokens drawn at each state, `L` values of lam.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from jackpot.objectives import obrs

LAMS = (0.5, 1.0, 2.0)
RECIPE_LAM = LAMS.index(1.0)  # index of the lam of the paper and of our default settings
CAP = 3.0  # cap of TIS's weights, and c1 of OBRS
_CACHED_ELEMENTS = 2**16  # number of elements of a tensor that stays in a processor's cache


class _Columns(Protocol):
    """The type of a dataclass whose fields are all tensors [n, ...]."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Rows = TypeVar("Rows", bound=_Columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePairs:
    """The next-token distributions of rollout model and policy at N states, and tokens that the rollout model drew."""

    rollout: Tensor  # [N, V] log p_inf, float64
    target: Tensor  # [N, V] log p_target, float64
    token_ids: Tensor  # [N, D] int64, drawn from p_inf

    def __len__(self) -> int:
        return len(self.rollout)

    def pick(self, rows: Tensor) -> "StatePairs":
        """Return the states with the indices `rows`, or where the mask `rows`, [N], is True."""
        return StatePairs(rollout=self.rollout[rows], target=self.target[rows], token_ids=self.token_ids[rows])

    @property
    def rho(self) -> Tensor:
        """Return p_target / p_inf, [N, V]: inf where only p_inf is 0, NaN where both are."""
        return (self.target - self.rollout).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class StateNumbers:
    """Divergence, acceptance and weights at each of N states, as exact sums over the whole vocabulary."""

    kl: Tensor  # [N] KL(target || rollout), nats
    reverse_kl: Tensor  # [N] KL(rollout || target), nats
    acceptance: Tensor  # [N, L] Z, the expected acceptance, at each of the L lambdas in LAMS
    kl_after: Tensor  # [N, L] KL(target || distribution of accepted tokens); inf where none is ever accepted
    weights: Tensor  # [N, 6] the means that `weight_moments` returns


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of log-probs [..., V] as [...], nats; inf where only the second excludes a token."""
    return torch.where(first > -torch.inf, first.exp() * (first - second), 0.0).sum(-1)


def rejected_divergence(states: StatePairs, lam: float | Tensor) -> Tensor:
    """Return KL(target || p~) at each state, [N] nats, where p~ is the distribution of tokens that OBRS accepts.

    The KL is inf where nothing is ever accepted. Rounding, up to 1e-13 below 0, is cut to 0.

    Args:
        states: both models' distributions.
        lam: lambda of OBRS, one number for all states or [N, 1].
    """
    after = divergence(states.target, obrs.post_rejection(states.rollout, states.target, lam))
    return torch.where(after.isnan(), torch.inf, after.clamp(min=0.0))


def measure_states(states: StatePairs) -> StateNumbers:
    """Compute the `StateNumbers` of all states, a few at a time, so that tensors stay in the processor's cache."""
    size = max(1, _CACHED_ELEMENTS // states.rollout.shape[1])
    return concatenate([_measure_chunk(states.pick(rows)) for rows in torch.arange(len(states)).split(size)])


def _measure_chunk(states: StatePairs) -> StateNumbers:
    """Compute the `StateNumbers` of a few states, all at once."""
    rollout, target = states.rollout, states.target
    return StateNumbers(
        kl=divergence(target, rollout),
        reverse_kl=divergence(rollout, target),
        acceptance=torch.stack([obrs.exact_z(rollout, target, lam) for lam in LAMS], dim=-1),
        kl_after=torch.stack([rejected_divergence(states, lam) for lam in LAMS], dim=-1),
        weights=weight_moments(states),
    )


def weight_moments(states: StatePairs) -> Tensor:
    """Return six means of token weights at each state, [N, 6], by which TIS and OBRS with the cap CAP are compared.

    A token is drawn from p_inf. TIS weights it by t = min(rho, CAP). OBRS at lam = 1 accepts it with probability
    a = min(1, rho) and weights it by w = min(Z rho / a, CAP), so that it counts e = a w in expectation; without caps
    e = Z t. The means are those of t, t^2, e, a w^2, e^2 and t e, in this order.
    """
    rho, p_inf = states.rho.nan_to_num(0.0, posinf=0.0), states.rollout.exp()  # rho is NaN or inf where p_inf is 0
    t, a = rho.clamp(max=CAP), rho.clamp(max=1.0)
    z = (p_inf * a).sum(-1, keepdim=True)

    w = (z * rho.clamp(min=1.0)).clamp(max=CAP)  # rho / a = max(rho, 1)
    e = a * w
    moments = (t, t.square(), e, e * w, e.square(), t * e)
    return torch.stack([(p_inf * moment).sum(-1) for moment in moments], dim=-1)


def concatenate(chunks: Sequence[Rows]) -> Rows:
    """Concatenate one or more instances of a dataclass whose fields are all tensors [n, ...], in their order."""

    def column(name: str) -> Tensor:
        """Concatenate one field of all chunks."""
        return torch.cat([getattr(chunk, name) for chunk in chunks])

    return type(chunks[0])(**{name: column(name) for name in chunks[0].__dataclass_fields__})
