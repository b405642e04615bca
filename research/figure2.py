"""Measures and draws the three views of the paper's Figure 2: what OBRS does to the gap between two models.

A pair of models is measured in one pass over its states, which are then summarized as points, curves and ratios.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jackpot.analysis.simulate.distributions import (
    LAMS,
    RECIPE_LAM,
    StateNumbers,
    StatePairs,
    concatenate,
    measure_states,
)
from jackpot.objectives import obrs
from jackpot.ui.charts import (
    DASHED,
    GRAY,
    Chart,
    Guide,
    Section,
    Series,
    Table,
    finite,
)
from jackpot.ui.numbers import format_number

KEPT = 16  # states whose whole distributions are kept, for the ratios of tokens
_TOKENS = 12  # tokens of a kept state in the picture of ratios, from either model
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
    return PairMeasurement(name=name, numbers=concatenate(parts), kept=concatenate(kept))


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


SMALLEST_RATIO = 1e-5  # smallest ratio on a logarithmic axis
SMALLEST_KL = 1e-7  # smallest KL on a logarithmic axis, nats
_BEFORE = "KL(policy || rollout model), nats"
_AFTER = "KL(policy || accepted tokens), nats"


def view_sections(curves: Sequence[GapCurve], ratios: Sequence[TokenRatios]) -> dict[str, Section]:
    """Return the sections of the page by their names."""
    return {
        "ratios": _ratio_section(ratios),
        "acceptance": _acceptance_section(curves),
        "kl": _kl_section(curves),
    }


def _ratio_section(ratios: Sequence[TokenRatios]) -> Section:
    return Section(
        title="Ratios of single tokens",
        intro="View (a) of the paper's Figure 2: p_policy / p_rollout of a token before, p_policy / p~ after, where p~ "
        "is the distribution of accepted tokens at lam = 1. Above lam the ratio is only multiplied by Z; below lam it "
        "is lifted to Z. OBRS removes the small ratios, not the large ones: rejection cannot "
        "add tokens that the rollout model never generates.",
        items=tuple(map(_ratio_chart, ratios)),
    )


def _ratio_chart(ratios: TokenRatios) -> Chart:
    clouds = (
        ("sampled by the rollout model", ratios.before, ratios.after),
        ("sampled by the policy", ratios.policy_before, ratios.policy_after),
    )
    shown = [value for _, before, _ in clouds for value in finite(before, SMALLEST_RATIO) if value]
    ends = (min(shown), max(shown))
    return Chart(
        title=f"{ratios.name}, mean KL {ratios.kl:.3g}",
        x_label="p_policy / p_rollout before",
        y_label="p_policy / p~ after",
        series=(
            *(
                Series(name=name, x=finite(before, SMALLEST_RATIO), y=finite(after), color_index=number, style="points")
                for number, (name, before, after) in enumerate(clouds)
            ),
            Series(name="unchanged", x=ends, y=ends, color_index=GRAY + DASHED),
        ),
        note="Left of 1 the points lie flat at the Z of their state; right of 1 they run just below the diagonal.",
        log_x=True,
        log_y=True,
    )


def _acceptance_section(curves: Sequence[GapCurve]) -> Section:
    charts = [_acceptance_chart(curves, index) for index in range(len(LAMS))]
    kls = [mark.kl for curve in curves[:1] for mark in curve.marks]
    rows = [
        (
            curve.name,
            format_number(curve.kl_at_high_acceptance),
            *(format_number(mark.acceptance, ".3f") for mark in curve.marks),
        )
        for curve in curves
    ]
    table = Table(
        title="Acceptance at lam = 1",
        columns=("source", f"KL where {HIGH_ACCEPTANCE:.0%} is accepted", *(f"Z at KL {kl:g}" for kl in kls)),
        rows=tuple(rows),
        note="-: the source has no such KL.",
    )
    return Section(
        title="Acceptance against the gap",
        intro='View (b): the expected acceptance Z against the KL before rejection. The paper says "about 95 % even '
        'at large KL": the table says at which KL each source has 95 %.',
        items=(table, *charts),
    )


def _acceptance_chart(curves: Sequence[GapCurve], index: int) -> Chart:
    series = []
    for order, curve in enumerate(curves):
        kl = _column(curve, lambda point: point.kl, SMALLEST_KL)
        accepted = _column(curve, lambda point: point.acceptance[index])
        line = Series(name=curve.name, x=kl, y=accepted, color_index=order, style="both")
        if index == RECIPE_LAM:
            low = _column(curve, lambda point: point.acceptance_low)
            line = replace(line, low=low, high=_column(curve, lambda point: point.acceptance_high))
        series.append(line)
    limits = LAMS[index] > 1.0
    guide = Guide(text="1 / lam", y=1.0 / LAMS[index]) if limits else Guide(text="0.95", y=HIGH_ACCEPTANCE)
    return Chart(
        title=f"lam = {LAMS[index]:g}",
        x_label=_BEFORE,
        y_label="Z, the expected acceptance",
        series=tuple(series),
        note="The band holds 80 % of the states."
        if index == RECIPE_LAM
        else "A smaller lam accepts more, a larger one rejects even where the models agree: Z is at most 1 / lam.",
        log_x=True,
        y_range=(0.0, 1.05),
        guides=(guide,),
    )


def _kl_section(curves: Sequence[GapCurve]) -> Section:
    kls = [mark.kl for curve in curves[:1] for mark in curve.marks]
    table = Table(
        title="KL before / KL after at lam = 1",
        columns=("source", *(f"at KL {kl:g}" for kl in kls)),
        rows=tuple((curve.name, *(format_number(mark.factor) for mark in curve.marks)) for curve in curves),
        note='The paper says "about an order of magnitude". The factor depends on the kind of gap.',
    )
    return Section(
        title="KL before and after",
        intro="View (c): the KL from the policy to the rollout model, and to the accepted tokens. Since "
        "p~ is at most p_rollout / Z, the KL of a state falls by at most -log Z, for OBRS and for every other rule: a "
        "state that accepts 95 % can fall tenfold only from below 0.057 nats.",
        items=(table, *_kl_charts(curves)),
    )


def _kl_charts(curves: Sequence[GapCurve]) -> tuple[Chart, ...]:
    before = [_column(curve, lambda point: point.kl, SMALLEST_KL) for curve in curves]
    after = [_column(curve, lambda point: point.kl_after[RECIPE_LAM], SMALLEST_KL) for curve in curves]
    every = [value for column in before for value in column if value] or [1.0]
    ends = (min(every), max(every))
    spent = [_column(curve, lambda point: point.log_acceptance, SMALLEST_KL) for curve in curves]
    fall = [_column(curve, lambda point: point.kl - point.kl_after[RECIPE_LAM], SMALLEST_KL) for curve in curves]
    limits = [value for column in spent for value in column if value] or [1.0]
    limit = (min(limits), max(limits))
    return (
        Chart(
            title="Before and after, lam = 1",
            x_label=_BEFORE,
            y_label=_AFTER,
            series=(
                *_lines(curves, before, after),
                Series(name="unchanged", x=ends, y=ends, color_index=GRAY),
                Series(name="a tenth", x=ends, y=tuple(0.1 * end for end in ends), color_index=GRAY + DASHED),
            ),
            note="Points below the dashed gray line fall by more than an order of magnitude.",
            log_x=True,
            log_y=True,
        ),
        Chart(
            title="KL before over KL after, lam = 1",
            x_label=_BEFORE,
            y_label="KL before / KL after",
            series=_lines(curves, before, [_column(curve, lambda point: point.factor) for curve in curves]),
            note="Rejection removes tokens that are generated too often and cannot add tokens that are missing.",
            log_x=True,
            log_y=True,
            guides=(Guide(text="ten", y=10.0),),
        ),
        Chart(
            title="Acceptance that a smaller KL costs",
            x_label="mean of -log Z",
            y_label="KL before - KL after, nats",
            series=(
                *_lines(curves, spent, fall),
                Series(name="the limit of every rule", x=limit, y=limit, color_index=GRAY + DASHED),
            ),
            note="Every point lies on or below the diagonal: the KL falls by no more than -log Z.",
            log_x=True,
            log_y=True,
        ),
    )


def _lines(curves: Sequence[GapCurve], x: Sequence[tuple], y: Sequence[tuple]) -> tuple[Series, ...]:
    return tuple(
        Series(name=curve.name, x=x[order], y=y[order], color_index=order, style="both")
        for order, curve in enumerate(curves)
    )


def _column(
    curve: GapCurve, read: Callable[[GapPoint], float], smallest: float = -math.inf
) -> tuple[float | None, ...]:
    return finite([read(point) for point in curve.points], smallest)
