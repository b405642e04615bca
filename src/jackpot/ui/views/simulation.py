"""Turns the results of `jackpot simulate`, among them the paper's three views, into tables and charts.

Computes no number that is not in the results of `analysis.simulate`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jackpot.analysis.simulate.distributions import LAMS, RECIPE_LAM
from jackpot.analysis.simulate.measurements import HIGH_ACCEPTANCE, GapCurve, GapPoint, TokenRatios
from jackpot.analysis.simulate.simulate import SimulationViews
from jackpot.ui.charts import (
    DASHED,
    GRAY,
    SMALLEST_KL,
    SMALLEST_RATIO,
    Chart,
    Guide,
    Section,
    Series,
    Table,
    as_details,
    finite,
)
from jackpot.ui.numbers import format_number

_BEFORE = "KL(policy || rollout model), nats"
_AFTER = "KL(policy || accepted tokens), nats"


def view_sections(views: SimulationViews) -> dict[str, Section]:
    """Return the sections of the page by their names."""
    return {
        "ratios": _ratio_section(views.ratios),
        "acceptance": _acceptance_section(views.curves),
        **as_details({"kl": _kl_section(views.curves)}),
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
                Series(name=name, x=finite(before, SMALLEST_RATIO), y=finite(after), number=number, style="points")
                for number, (name, before, after) in enumerate(clouds)
            ),
            Series(name="unchanged", x=ends, y=ends, number=GRAY + DASHED),
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
        line = Series(name=curve.name, x=kl, y=accepted, number=order, style="both")
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
                Series(name="unchanged", x=ends, y=ends, number=GRAY),
                Series(name="a tenth", x=ends, y=tuple(0.1 * end for end in ends), number=GRAY + DASHED),
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
                Series(name="the limit of every rule", x=limit, y=limit, number=GRAY + DASHED),
            ),
            note="Every point lies on or below the diagonal: the KL falls by no more than -log Z.",
            log_x=True,
            log_y=True,
        ),
    )


def _lines(curves: Sequence[GapCurve], x: Sequence[tuple], y: Sequence[tuple]) -> tuple[Series, ...]:
    return tuple(
        Series(name=curve.name, x=x[order], y=y[order], number=order, style="both")
        for order, curve in enumerate(curves)
    )


def _column(
    curve: GapCurve, read: Callable[[GapPoint], float], smallest: float = -math.inf
) -> tuple[float | None, ...]:
    return finite([read(point) for point in curve.points], smallest)
