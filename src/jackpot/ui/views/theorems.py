"""Both theorems and the identity as sections of a page."""

from collections.abc import Sequence

from jackpot.analysis.simulate.identity import CAPS, DRAWN_CAP, OUTSIDE_CAP, Identity
from jackpot.analysis.simulate.simulate import Theorems
from jackpot.analysis.simulate.theorems import RULES, BudgetCurve, Contraction
from jackpot.ui.charts import DASHED, GREY, SMALLEST_RATIO, Chart, Guide, Section, Series, Table, drawn, number

_AFTER = "KL(policy || what is kept), nats"


def theorem_section(theorems: Theorems) -> Section:
    derivative, best = theorems.derivative, theorems.optimality
    rows = (
        ("derivative: places between kinks of KL(lam)", f"{derivative.places:,}"),
        ("largest error of lam x derivative against difference quotients", number(derivative.error)),
        ("the same for the derivative as the submission prints it", number(derivative.printed_error)),
        ("places inside (min rho, max rho) where the KL does not fall", f"{derivative.rises}"),
        ("places outside where it changes", f"{derivative.moves}"),
        ("places where it is above the KL before", f"{derivative.above_before}"),
        (f"budgets {', '.join(f'{one:g}' for one in best.budgets)}: largest |Z - budget|", number(best.budget_error)),
        (f"other rules with the same budget, over {best.states} states", f"{best.alternatives:,}"),
        ("of these closer to the policy than OBRS", f"{best.better}"),
        ("smallest margin by which another rule is worse, nats", number(best.smallest_margin)),
        ("median margin, nats", number(best.median_margin)),
    )
    table = Table(title="Both theorems in numbers", columns=("what", "found"), rows=rows)
    charts = [_contraction_chart(one) for one in theorems.contractions]
    if theorems.contractions:
        charts.append(_derivative_chart(theorems.contractions[0]))
    return Section(
        title="Theorems 3.3 and 3.4",
        intro="Theorem 3.3: the KL from the policy to what is kept falls strictly in lam between the smallest and the "
        "largest rho, and stays as it is outside. The paper's condition, lam below the largest rho, is the wrong way "
        "round: a lam below the smallest one rejects nothing, and one above the largest is closest of all. Theorem "
        "3.4: one lam meets a budget, and no other rule with this budget comes closer.",
        items=(table, *charts, *(_budget_chart(one) for one in theorems.budgets)),
    )


def _contraction_chart(one: Contraction) -> Chart:
    guides = [Guide(text="KL before", y=one.kl_before)]
    guides += [
        Guide(text=text, x=value)
        for text, value in (("min rho", one.min_rho), ("max rho", one.max_rho))
        if one.lam[0] <= value <= one.lam[-1]
    ]
    return Chart(
        title=f"Theorem 3.3, one state of {one.name}",
        x_label="lam",
        y_label="nats; share",
        series=(
            Series(name=_AFTER, x=one.lam, y=drawn(one.kl)),
            Series(name="Z", x=one.lam, y=drawn(one.acceptance), number=1),
        ),
        note="Flat, then falling between the two dotted uprights, then 0.",
        log_x=True,
        guides=tuple(guides),
    )


def _derivative_chart(one: Contraction) -> Chart:
    def scaled(values: Sequence[float]) -> tuple[float | None, ...]:
        return drawn([value * lam for value, lam in zip(values, one.lam, strict=True)])

    return Chart(
        title=f"The derivative, one state of {one.name}",
        x_label="lam",
        y_label="lam x dKL / dlam",
        series=(
            Series(name="derivative", x=one.lam, y=scaled(one.derivative)),
            Series(name="as printed in the submission", x=one.lam, y=scaled(one.printed_derivative), number=1 + DASHED),
        ),
        note="The printed one lacks a term: it stays at -1 where the KL is 0 and cannot fall.",
        log_x=True,
    )


def _budget_chart(one: BudgetCurve) -> Chart:
    return Chart(
        title=f"Theorem 3.4, one state of {one.name}",
        x_label="accepted share",
        y_label=_AFTER,
        series=(
            Series(name="OBRS", x=one.budget, y=drawn(one.obrs)),
            Series(name="a ~ sqrt(rho)", x=one.budget, y=drawn(one.root), number=1),
            Series(name=f"best of {RULES:,} random rules", x=one.at, y=drawn(one.best_other), number=2, style="points"),
            Series(name="no rule comes below", x=one.budget, y=drawn(one.bound), number=GREY + DASHED),
        ),
        note="Every other rule lies on or above OBRS at the same accepted share.",
        guides=(Guide(text="KL before", y=one.kl_before),),
    )


def identity_section(identity: Identity) -> Section:
    rows = (
        ("pairs of a state and a token", f"{identity.tokens:,}"),
        (f"comparisons, c1 {', '.join(f'{cap:g}' for cap in CAPS)}", f"{identity.comparisons:,}"),
        ("largest |a min(w, c1) - min(Z rho, c1)|", number(identity.deviation)),
        ("largest lam Z", f"{identity.largest_lam_z:.15f}"),
        (f"the deviation with c1 = {OUTSIDE_CAP:g}, which is not promised", number(identity.outside_deviation)),
    )
    ends = [value for curve in identity.curves for value in _scaled(curve.rho, curve.z)]
    line = sorted({*drawn(ends, SMALLEST_RATIO), DRAWN_CAP} - {None})
    whole = tuple(
        Series(name=f"lam {curve.lam:g}", x=x, y=drawn(curve.product, SMALLEST_RATIO), number=order, style="points")
        for order, curve in enumerate(identity.curves)
        if (x := drawn(_scaled(curve.rho, curve.z), SMALLEST_RATIO))
    )
    parts = [
        Chart(
            title=title,
            x_label="rho = p_policy / p_rollout",
            y_label=label,
            series=tuple(
                Series(
                    name=f"lam {curve.lam:g}", x=drawn(curve.rho, SMALLEST_RATIO), y=drawn(read(curve)), number=order
                )
                for order, curve in enumerate(identity.curves)
            ),
            note=note,
            log_x=True,
            log_y=True,
        )
        for title, label, read, note in (
            ("The coin", "a(x)", lambda curve: curve.acceptance, "A larger lam rejects more ..."),
            ("The weight", f"min(w, {DRAWN_CAP:g})", lambda curve: curve.weight, "... and lifts the weight below lam."),
        )
    ]
    together = Chart(
        title="Coin times weight, one state",
        x_label="Z rho",
        y_label=f"a(x) min(w(x), {DRAWN_CAP:g})",
        series=(*whole, Series(name=f"min(Z rho, {DRAWN_CAP:g})", x=tuple(line), y=_capped(line), number=GREY)),
        note="All lams fall on one line: in expectation OBRS is truncated importance sampling on Z rho.",
        log_x=True,
        log_y=True,
    )
    return Section(
        title="The identity",
        intro="a(x) min(w(x), c1) = min(Z rho, c1) for every lam and every c1 of at least 1, because lam Z is at most "
        "1. So lam enters the expected update through Z alone, and the coin adds variance only.",
        items=(Table(title="The identity in float64", columns=("what", "found"), rows=rows), *parts, together),
    )


def _scaled(values: Sequence[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def _capped(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(value, DRAWN_CAP) for value in values)
