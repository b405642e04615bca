"""a(x) min(w(x), c1) = min(Z rho, c1): rejection with its weight is truncated importance sampling on Z rho.

It holds for every lam and every c1 of at least 1, because lam Z <= 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.simulate.states import States
from jackpot.objectives import obrs

IDENTITY_LAMS = (0.1, 0.5, 1.0, 2.0, 10.0)
CAPS = (1.0, 3.0, 10.0)
DRAWN_CAP = 3.0
OUTSIDE_CAP = 0.5  # below 1, where the identity is not promised
_DRAWN_TOKENS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityCurve:
    """Some tokens of one state at one lam, evenly over log rho."""

    lam: float
    z: float
    rho: tuple[float, ...]
    acceptance: tuple[float, ...]
    weight: tuple[float, ...]  # min(w, c1)
    product: tuple[float, ...]  # a min(w, c1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    tokens: int  # pairs of a state and a token that both models can write
    comparisons: int  # tokens times lams times caps
    deviation: float  # the largest of |a min(w, c1) - min(Z rho, c1)|
    largest_lam_z: float
    outside_deviation: float  # the same with c1 = OUTSIDE_CAP
    curves: tuple[IdentityCurve, ...]


def identity(states: States, drawn: int) -> Identity:
    """Over all states, tokens, lams and caps.

    Args:
        drawn: the state whose curves are given.
    """
    zs = {lam: obrs.exact_z(states.rollout, states.target, lam) for lam in IDENTITY_LAMS}
    inside = [_deviation(states, z, lam, cap) for lam, z in zs.items() for cap in CAPS]
    outside = [_deviation(states, z, lam, OUTSIDE_CAP) for lam, z in zs.items()]
    tokens = int(_possible(states).sum())
    return Identity(
        tokens=tokens,
        comparisons=tokens * len(IDENTITY_LAMS) * len(CAPS),
        deviation=float(torch.stack(inside).max()),
        largest_lam_z=float(torch.stack([lam * z.max() for lam, z in zs.items()]).max()),
        outside_deviation=float(torch.stack(outside).max()),
        curves=tuple(_curve(states.pick(torch.tensor([drawn])), lam) for lam in IDENTITY_LAMS),
    )


def _possible(states: States) -> Tensor:
    return (states.rollout > -torch.inf) & (states.target > -torch.inf)


def _deviation(states: States, z: Tensor, lam: float, cap: float) -> Tensor:
    left = obrs.acceptance(states.rollout, states.target, lam)
    left = left * obrs.weight(states.rollout, states.target, z[:, None], lam).clamp(max=cap)
    right = (z[:, None] * states.rho).clamp(max=cap)
    return torch.where(_possible(states), (left - right).abs(), 0.0).max()


def _curve(state: States, lam: float) -> IdentityCurve:
    possible = _possible(state)
    rollout, target = state.rollout[possible], state.target[possible]
    log_rho, order = (target - rollout).sort()
    share = torch.linspace(0.0, 1.0, _DRAWN_TOKENS, dtype=torch.float64)
    places = torch.searchsorted(log_rho, log_rho[0] + share * (log_rho[-1] - log_rho[0])).clamp(max=len(order) - 1)
    rows = order[places.unique()]
    rollout, target = rollout[rows], target[rows]
    z = obrs.exact_z(state.rollout, state.target, lam)
    accept = obrs.acceptance(rollout, target, lam)
    weight = obrs.weight(rollout, target, z, lam).clamp(max=DRAWN_CAP)
    return IdentityCurve(
        lam=lam,
        z=float(z),
        rho=tuple((target - rollout).exp().tolist()),
        acceptance=tuple(accept.tolist()),
        weight=tuple(weight.tolist()),
        product=tuple((accept * weight).tolist()),
    )
