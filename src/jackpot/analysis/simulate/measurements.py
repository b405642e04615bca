"""Measures one pair of models in one pass over its states, and summarizes the states as points, curves and ratios.

A pair is a synthetic family at one gap, or two real models.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.simulate.distributions import RECIPE_LAM, StateNumbers, StatePairs, joined, measure_states
from jackpot.objectives import obrs

KEPT = 16  # states whose whole distributions are kept, for the ratios of tokens
_TOKENS = 12  # tokens of a kept state in the picture of ratios, from either model
_LOW_ACCEPTANCE = 0.5
MARKS = (0.01, 0.1, 1.0)  # KL at which curves are read off, nats
HIGH_ACCEPTANCE = 0.95  # the paper's claim at large gaps


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMeasurement:
    """The numbers of all states of one pair of models."""

    name: str
    numbers: StateNumbers
    kept: StatePairs  # KEPT states, evenly from all


@dataclass(frozen=True, kw_only=True, slots=True)
class GapPoint:
    """Means over states of about one gap: one gap of a family, or states of like KL of a real pair."""

    states: int
    kl: float  # KL(target || rollout), nats
    reverse_kl: float
    acceptance: tuple[float, ...]  # at LAMS
    acceptance_low: float  # quantiles of 10 and 90 % over the states, at lam = 1
    acceptance_high: float
    kl_after: tuple[float, ...]  # at LAMS
    log_acceptance: float  # mean of -log Z at lam = 1: no rule lowers the KL by more

    @property
    def factor(self) -> float:
        """Return KL before over KL after at lam = 1, inf where no KL is left."""
        after = self.kl_after[RECIPE_LAM]
        return self.kl / after if after > 0.0 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveReading:
    """Values of a curve at one KL, interpolated; None where the curve does not reach it."""

    kl: float
    acceptance: float | None  # at lam = 1
    factor: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GapCurve:
    """Acceptance and KL after rejection against the KL before it."""

    name: str
    points: tuple[GapPoint, ...]  # in the order of their KL
    marks: tuple[CurveReading, ...]  # values at MARKS
    kl_at_high_acceptance: float | None  # where the acceptance passes HIGH_ACCEPTANCE on its way down


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRatios:
    """p_target / p_inf and p_target / p~ = Z max(lam, rho) of single tokens, at lam = 1."""

    name: str
    kl: float  # mean KL(target || rollout) of the source
    before: tuple[float, ...]  # of tokens drawn from p_inf
    after: tuple[float, ...]
    policy_before: tuple[float, ...]  # of tokens drawn from p_target, which p_inf may sample very rarely
    policy_after: tuple[float, ...]


def measure_pair(name: str, chunks: Iterable[StatePairs], total: int) -> PairMeasurement:
    """Measure every state of `chunks`, which hold `total` states together."""
    stride = max(1, total // KEPT)
    seen, parts, kept = 0, [], []
    for states in chunks:
        parts.append(measure_states(states))
        rows = torch.arange(seen, seen + len(states))
        kept.append(states.pick(rows % stride == 0))
        seen += len(states)
    return PairMeasurement(name=name, numbers=joined(parts), kept=joined(kept))


def mean_point(numbers: StateNumbers) -> GapPoint:
    """Average the numbers over all of the states."""
    at_one = numbers.acceptance[:, RECIPE_LAM]
    return GapPoint(
        states=len(numbers.kl),
        kl=float(numbers.kl.mean()),
        reverse_kl=float(numbers.reverse_kl.mean()),
        acceptance=tuple(numbers.acceptance.mean(0).tolist()),
        acceptance_low=float(at_one.quantile(0.1)),
        acceptance_high=float(at_one.quantile(0.9)),
        kl_after=tuple(numbers.kl_after.mean(0).tolist()),
        log_acceptance=float(-at_one.log().mean()),
    )


def gap_curve(name: str, points: Sequence[GapPoint]) -> GapCurve:
    """Order the points by their KL and read the curve off at MARKS and at HIGH_ACCEPTANCE."""
    points = sorted(points, key=lambda one: one.kl)
    logs = [math.log(one.kl) for one in points]
    acceptance = [one.acceptance[RECIPE_LAM] for one in points]
    factors = [math.log(one.factor) if one.factor < math.inf else math.nan for one in points]
    marks = []
    for kl in MARKS:
        at, factor = (_read_off(logs, values, math.log(kl)) for values in (acceptance, factors))
        marks.append(CurveReading(kl=kl, acceptance=at, factor=None if factor is None else math.exp(factor)))
    high = _read_off([-value for value in acceptance], logs, -HIGH_ACCEPTANCE)
    return GapCurve(
        name=name,
        points=tuple(points),
        marks=tuple(marks),
        kl_at_high_acceptance=None if high is None else math.exp(high),
    )


def _read_off(x: Sequence[float], y: Sequence[float], at: float) -> float | None:
    """Interpolate y where x first, which rises on the whole, passes `at`; None where it never does."""
    for left in range(len(x) - 1):
        if x[left] <= at <= x[left + 1]:
            share = (at - x[left]) / (x[left + 1] - x[left]) if x[left + 1] > x[left] else 0.0
            value = y[left] + share * (y[left + 1] - y[left])
            return value if math.isfinite(value) else None
    return None


def curve_by_kl(name: str, numbers: StateNumbers, bins: int = 14, least: int = 8, smallest: float = 1e-5) -> GapCurve:
    """Sort the states of one pair by their own KL into bins of equal width on a logarithmic axis, a point for each.

    Bins of fewer than `least` states are left out, and so are states below `smallest` nats, whose KL is rounding.
    """
    logs = numbers.kl.clamp(min=smallest).log()
    usable = (numbers.kl > smallest) & numbers.kl.isfinite()
    if not usable.any():
        return gap_curve(name, [])
    low, high = logs[usable].min(), logs[usable].max()
    bin_of = ((logs - low) / (high - low).clamp(min=1e-9) * bins).floor().clamp(max=bins - 1)
    groups = [usable & (bin_of == index) for index in range(bins)]
    return gap_curve(name, [mean_point(_some(numbers, rows)) for rows in groups if rows.sum() >= least])


def share_below(numbers: StateNumbers) -> float:
    """Return the share of states where less than half is accepted at lam = 1."""
    return float((numbers.acceptance[:, RECIPE_LAM] < _LOW_ACCEPTANCE).double().mean())


def token_ratios(one: PairMeasurement) -> TokenRatios:
    """Compute the ratios of tokens at evenly spaced quantiles of either model's distribution at the kept states."""
    states = one.kept
    z = obrs.exact_z(states.rollout, states.target, 1.0)[:, None]
    clouds = []
    for log_probs in (states.rollout, states.target):
        quantiles = (torch.arange(_TOKENS, dtype=torch.float64) + 0.5) / _TOKENS
        total = log_probs.exp().cumsum(-1)
        ids = torch.searchsorted(total, (quantiles * total[:, -1:]).contiguous()).clamp(max=log_probs.shape[1] - 1)
        rollout, target = states.rollout.gather(-1, ids), states.target.gather(-1, ids)
        clouds += [(target - rollout).exp(), obrs.weight(rollout, target, z, 1.0)]
    before, after, policy_before, policy_after = (tuple(cloud.flatten().tolist()) for cloud in clouds)
    return TokenRatios(
        name=one.name,
        kl=float(one.numbers.kl.mean()),
        before=before,
        after=after,
        policy_before=policy_before,
        policy_after=policy_after,
    )


def _some(numbers: StateNumbers, rows: Tensor) -> StateNumbers:
    names: Sequence[str] = tuple(StateNumbers.__dataclass_fields__)
    return StateNumbers(**{name: getattr(numbers, name)[rows] for name in names})
