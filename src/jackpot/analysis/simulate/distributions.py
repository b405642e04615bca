"""Next-token distributions of two models at the same states, with the KL and the acceptance of OBRS at each state.

All in float64. Shapes: `N` states, `V` vocabulary, `D` tokens drawn at each state, `L` values of lam.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from jackpot.objectives import obrs

LAMS = (0.5, 1.0, 2.0)
RECIPE_LAM = LAMS.index(1.0)  # the paper's lam and ours
CAP = 3.0  # of TIS's weights, and c1 of OBRS
_CACHED_ELEMENTS = 2**16


class _Columns(Protocol):
    """A dataclass whose fields are all tensors [n, ...]."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Rows = TypeVar("Rows", bound=_Columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePairs:
    """The distributions of both models at N states, and tokens drawn there from the rollout model."""

    rollout: Tensor  # [N, V] log p_inf, float64
    target: Tensor  # [N, V] log p_target, float64
    token_ids: Tensor  # [N, D] int64, drawn from p_inf

    def __len__(self) -> int:
        return len(self.rollout)

    def pick(self, rows: Tensor) -> "StatePairs":
        """Return some of the states; `rows` are their numbers or a mask [N]."""
        return StatePairs(rollout=self.rollout[rows], target=self.target[rows], token_ids=self.token_ids[rows])

    @property
    def rho(self) -> Tensor:
        """Return p_target / p_inf, [N, V]: inf where only the rollout model gives 0, NaN where both do."""
        return (self.target - self.rollout).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class StateNumbers:
    """Numbers of each state, exact sums over the whole vocabulary."""

    kl: Tensor  # [N] KL(target || rollout), nats
    reverse_kl: Tensor  # [N] KL(rollout || target)
    acceptance: Tensor  # [N, L] Z
    kl_after: Tensor  # [N, L] KL(target || p~); inf where nothing is ever accepted
    weights: Tensor  # [N, 6] `weight_moments`


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of log-probs [..., V] as [...], nats; inf where only the second gives 0 to a token."""
    return torch.where(first > -torch.inf, first.exp() * (first - second), 0.0).sum(-1)


def rejected_divergence(states: StatePairs, lam: float | Tensor) -> Tensor:
    """Return KL(target || p~) at each state, [N] nats; inf where nothing is ever accepted. A tensor `lam` is [N, 1].

    Where p~ is the target, rounding leaves up to 1e-13 on either side of 0; the result is never below 0.
    """
    after = divergence(states.target, obrs.post_rejection(states.rollout, states.target, lam))
    return torch.where(after.isnan(), torch.inf, after.clamp(min=0.0))


def measure_states(states: StatePairs) -> StateNumbers:
    """Compute every number of every state, a few states at a time so that they stay in the processor's cache."""
    size = max(1, _CACHED_ELEMENTS // states.rollout.shape[1])
    return joined(
        [
            _measure_chunk(states.pick(torch.arange(len(states))[start : start + size]))
            for start in range(0, len(states), size)
        ]
    )


def _measure_chunk(states: StatePairs) -> StateNumbers:
    rollout, target = states.rollout, states.target
    return StateNumbers(
        kl=divergence(target, rollout),
        reverse_kl=divergence(rollout, target),
        acceptance=torch.stack([obrs.exact_z(rollout, target, lam) for lam in LAMS], dim=-1),
        kl_after=torch.stack([rejected_divergence(states, lam) for lam in LAMS], dim=-1),
        weights=weight_moments(states),
    )


def weight_moments(states: StatePairs) -> Tensor:
    """Return means over p_inf of what decides between TIS and OBRS at each state, [N, 6], both with the cap CAP.

    With t = min(rho, CAP) of TIS, a = min(1, rho) the acceptance of OBRS at lam = 1, w = min(Z rho / a, CAP) its weight
    and e = a w what a token counts in expectation: t, t^2, e, a w^2, e^2 and t e. Without the caps e = Z t.
    """
    rho, p_inf = states.rho.nan_to_num(0.0, posinf=0.0), states.rollout.exp()
    tis, accepted = rho.clamp(max=CAP), rho.clamp(max=1.0)
    z = (p_inf * accepted).sum(-1, keepdim=True)

    obrs_weight = (z * rho.clamp(min=1.0)).clamp(max=CAP)  # rho / a is 1 where rho is smaller
    expected = accepted * obrs_weight
    moments = (tis, tis.square(), expected, expected * obrs_weight, expected.square(), tis * expected)
    return torch.stack([(p_inf * moment).sum(-1) for moment in moments], dim=-1)


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate chunks in their order: one or more equal dataclasses whose fields are all tensors [n, ...]."""
    names = parts[0].__dataclass_fields__
    return type(parts[0])(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
