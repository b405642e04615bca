"""Checks Theorems 3.3 and 3.4 and the identity of docs/replay.md by enumeration, and draws them.

    python -m research.theorems [--seed 0] [--out runs/theorems]

The states are those that research/families.py keeps of its pairs of models. Tables are printed; the folder gets
theorems.html and theorems.json. Half a minute on one core.

Theorem 3.3 says that OBRS brings the rollout distribution closer to the target "whenever lam < max rho". G(lam) =
KL(target || p~) falls strictly exactly where min rho < lam < max rho (min over tokens that the target has). Below it
nothing but impossible tokens is rejected, above it p~ is the target and G is 0; both times G stays as it is. With
P = P_target(rho <= lam):

    G'(lam) = P / lam * (1 - 1 / (lam Z))          the derivative
    G'(lam) = - P / (lam^2 Z)                      as the submission's Proposition 1 prints it, without a term P / lam

Theorem 3.4: one lam gives a budget, and no other rule that accepts as much comes closer to the target.

The identity: a(x) min(w(x), c1) = min(Z rho, c1) for every lam and every c1 of at least 1, because lam Z <= 1. So
rejection with its weight is, in expectation, truncated importance sampling on Z rho.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Generator, Tensor

from jackpot.analysis.simulate.distributions import (
    StatePairs,
    concatenate,
    divergence,
    measure_states,
    rejected_divergence,
)
from jackpot.core.prng import fold_in
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
from jackpot.ui.results import write_results
from jackpot.ui.terminal.output import show_files, show_tables
from research.families import synthetic_measurements
from research.figure2 import SMALLEST_RATIO, PairMeasurement

BUDGETS = (0.2, 0.4, 0.6, 0.8, 0.95)
ALTERNATIVES = 400  # rules of each kind, for each state and budget
SMALL = 64  # entries of a state in the search for a better rule
_SPREADS = (0.01, 0.1, 1.0)  # of the logarithm, for rules near OBRS
_POWERS = (0.25, 1.0, 4.0)  # of a uniform number, for rules that have nothing to do with OBRS
RULES = ALTERNATIVES * (len(_SPREADS) + len(_POWERS))  # for each state and budget
_GRID = 80
_LEAST_LAM = 1e-9  # that is drawn
_LEAST_GAP = 1e-3  # relative, between two rho, to put a difference quotient between them
_STEP = 1e-5  # of log lam
_ROUNDING = 1e-12
SEARCHED_EVERY = 4  # of the kept states one in so many is searched for a better rule
IDENTITY_LAMS = (0.1, 0.5, 1.0, 2.0, 10.0)
CAPS = (1.0, 3.0, 10.0)
DRAWN_CAP = 3.0
OUTSIDE_CAP = 0.5  # below 1, where the identity is not promised
DRAWN_TOKENS = 60
_AFTER = "KL(policy || what is kept), nats"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/theorems"))
    given = parser.parse_args()
    theorems, found = check_theorems(synthetic_measurements(given.seed)[1], given.seed)
    sections = {"theorems": theorem_section(theorems), "identity": identity_section(found)}
    numbers = {"seed": given.seed, "theorems": asdict(theorems), "identity": asdict(found)}
    files = write_results(given.out, "theorems", "Theorems 3.3 and 3.4, and the identity", sections, numbers)

    show_tables(Console(), sections.values())
    show_files(Console(), files)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """KL(target || p~) of one state over lam."""

    name: str
    kl_before: float
    min_rho: float
    max_rho: float  # inf where the target has a token that the rollout model gives probability 0
    lam: tuple[float, ...]
    acceptance: tuple[float, ...]
    kl: tuple[float, ...]
    derivative: tuple[float, ...]
    printed_derivative: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivativeCheck:
    """lam G'(lam) = dG / dlog lam against difference quotients, between the kinks of G."""

    places: int
    error: float  # the largest |lam G' - quotient|, nats
    printed_error: float  # the same with the derivative as printed
    rises: int  # places strictly inside (min rho, max rho) where G does not fall
    moves: int  # places outside where G moves by more than 1e-12
    above_before: int  # places where G is above the KL before by more than 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetCurve:
    """KL(target || p~) of one state against what is accepted."""

    name: str
    kl_before: float
    budget: tuple[float, ...]
    obrs: tuple[float, ...]
    root: tuple[float, ...]  # a = min(1, sqrt(rho) / c)
    bound: tuple[float, ...]  # max(0, KL before + log budget): no rule at all comes below it
    at: tuple[float, ...]  # BUDGETS
    best_other: tuple[float, ...]  # the smallest KL of the other rules there


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimality:
    states: int
    budgets: tuple[float, ...]
    budget_error: float  # the largest |Z(lam_for_budget) - budget|
    alternatives: int
    better: int  # alternatives whose KL is below that of OBRS by more than 1e-12
    smallest_margin: float  # the smallest KL of another rule minus that of OBRS
    median_margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Theorems:
    """Both theorems on the states of all sources."""

    contractions: tuple[Contraction, ...]
    derivative: DerivativeCheck
    budgets: tuple[BudgetCurve, ...]
    optimality: Optimality


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
    tokens: int  # pairs of a state and a token that both models give a probability above 0
    comparisons: int  # tokens times lams times caps
    deviation: float  # the largest of |a min(w, c1) - min(Z rho, c1)|
    largest_lam_z: float
    outside_deviation: float  # the same with c1 = OUTSIDE_CAP
    curves: tuple[IdentityCurve, ...]


def check_theorems(pairs: Sequence[PairMeasurement], seed: int) -> tuple[Theorems, Identity]:
    """Check everything on the kept states of some pairs of models over one vocabulary."""
    middles = [_middle(one) for one in pairs]
    small = [shortened(one.kept) for one in pairs]
    searched = [part.pick(torch.arange(0, len(part), SEARCHED_EVERY)) for part in small]
    best, budgets = optimality([one.name for one in pairs], concatenate([*map(shortened, middles), *searched]), seed)
    theorems = Theorems(
        contractions=tuple(contraction(one.name, middle) for one, middle in zip(pairs, middles, strict=True)),
        derivative=check_derivative(concatenate(small)),
        budgets=budgets,
        optimality=best,
    )
    return theorems, identity(concatenate([*middles, *(one.kept for one in pairs)]), drawn_state=0)


def _middle(one: PairMeasurement) -> StatePairs:
    """Return the kept state whose KL is nearest to the mean of all states, which is the one to draw."""
    distance = (measure_states(one.kept).kl - one.numbers.kl.mean()).abs()
    return one.kept.pick(distance.argmin().reshape(1))


def contraction(name: str, state: StatePairs) -> Contraction:
    """Compute the curve of KL(target || p~) over lam at the first of the states."""
    rollout, target = state.rollout[:1], state.target[:1]
    low, high = rho_range(state)
    first, last = max(float(low[0]) / 5, _LEAST_LAM), min(float(high[0]) * 5, 1.0 / _LEAST_LAM)
    lams = torch.logspace(math.log10(first), math.log10(last), _GRID, dtype=torch.float64)
    many = _repeated(state, _GRID)
    z = obrs.exact_z(many.rollout, many.target, lams[:, None])
    mass = _target_mass_up_to(many, lams)
    return Contraction(
        name=name,
        kl_before=float(divergence(target, rollout)[0]),
        min_rho=float(low[0]),
        max_rho=float(high[0]),
        lam=tuple(lams.tolist()),
        acceptance=tuple(z.tolist()),
        kl=tuple(rejected_divergence(many, lams[:, None]).tolist()),
        derivative=tuple(_derivative(mass, lams, z).tolist()),
        printed_derivative=tuple(_printed_derivative(mass, lams, z).tolist()),
    )


def check_derivative(states: StatePairs) -> DerivativeCheck:
    """Compare derivatives midway between neighbouring rho of every state, and below and above all of them."""
    errors, printed, rises, moves, above, places = [0.0], [0.0], 0, 0, 0, 0
    low, high = rho_range(states)
    for row in range(len(states)):
        state = states.pick(torch.tensor([row]))
        lams, inside = _between_kinks(state, float(low[row]), float(high[row]))
        many = _repeated(state, len(lams))
        ahead = rejected_divergence(many, lams[:, None] * math.exp(_STEP))
        behind = rejected_divergence(many, lams[:, None] * math.exp(-_STEP))
        here = rejected_divergence(many, lams[:, None])
        quotient = (ahead - behind) / (2.0 * _STEP)
        z, mass = obrs.exact_z(many.rollout, many.target, lams[:, None]), _target_mass_up_to(many, lams)
        errors.append(float((lams * _derivative(mass, lams, z) - quotient).abs().max()))
        printed.append(float((lams * _printed_derivative(mass, lams, z) - quotient).abs().max()))
        rises += int((inside & (ahead >= behind)).sum())
        moves += int((~inside & ((ahead - behind).abs() > _ROUNDING)).sum())
        above += int((here > divergence(state.target, state.rollout) + _ROUNDING).sum())
        places += len(lams)
    return DerivativeCheck(
        places=places, error=max(errors), printed_error=max(printed), rises=rises, moves=moves, above_before=above
    )


def rho_range(states: StatePairs) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest rho of tokens that the target has, [N] each."""
    rho, has = states.rho, states.target > -torch.inf
    return torch.where(has, rho, torch.inf).min(-1).values, torch.where(has, rho, 0.0).max(-1).values


def shortened(states: StatePairs, size: int = SMALL) -> StatePairs:
    """Merge each pair of distributions into one over `size` entries, on which the search for a better rule runs.

    Half of them are the tokens that the two models give most to. The others are the rest, sorted by rho and merged in
    groups of like rho, which OBRS treats alike. Over a small vocabulary the states stay as they are.
    """
    vocabulary, half = states.rollout.shape[1], size // 2
    if vocabulary <= size:
        return StatePairs(rollout=states.rollout, target=states.target, token_ids=states.token_ids[:, :0])
    heaviest = torch.logaddexp(states.rollout, states.target).topk(half, dim=-1).indices
    ratio = (states.target - states.rollout).scatter(-1, heaviest, -torch.inf)  # these come first
    order = ratio.argsort(-1)
    rest = torch.arange(vocabulary - half) * (size - half) // (vocabulary - half) + half
    group = torch.cat([torch.arange(half), rest]).expand_as(order)
    merged = [
        torch.zeros(len(states), size, dtype=torch.float64).scatter_add(-1, group, part.gather(-1, order).exp()).log()
        for part in (states.rollout, states.target)
    ]
    return StatePairs(rollout=merged[0], target=merged[1], token_ids=states.token_ids[:, :0])


def optimality(names: list[str], states: StatePairs, seed: int) -> tuple[Optimality, tuple[BudgetCurve, ...]]:
    """Compare OBRS with other rules of the same budget on every state; draw curves of one state for each name."""
    errors, margins, best = [], [], []
    for budget in BUDGETS:
        lam = obrs.lam_for_budget(states.rollout, states.target, budget)[:, None]
        errors.append((obrs.exact_z(states.rollout, states.target, lam) - budget).abs().max())
        others = torch.cat([_rule_kl(states, rule, budget) for rule in _other_rules(states, lam, budget, seed)], dim=1)
        margins.append((others - rejected_divergence(states, lam)[:, None]).flatten())
        best.append(others.min(1).values)
    every = torch.cat(margins)
    result = Optimality(
        states=len(states),
        budgets=BUDGETS,
        budget_error=float(torch.stack(errors).max()),
        alternatives=every.numel(),
        better=int((every < -_ROUNDING).sum()),
        smallest_margin=float(every.min()),
        median_margin=float(every.median()),
    )
    best_of = torch.stack(best, dim=1)  # [N, budgets]
    curves = tuple(
        _budget_curve(name, states.pick(torch.tensor([row])), best_of[row]) for row, name in enumerate(names)
    )
    return result, curves


def _other_rules(states: StatePairs, obrs_lam: Tensor, budget: float, seed: int) -> list[Tensor]:
    """Draw log-weights [N, R, V] of rules far from OBRS and near it; a larger weight is accepted more often."""
    generator = Generator().manual_seed(fold_in(seed, "simulate", "rules", f"{budget:g}"))
    shape = (len(states), ALTERNATIVES, states.rollout.shape[1])
    near = obrs.acceptance(states.rollout, states.target, obrs_lam).clamp(min=1e-300).log()[:, None]
    far = [
        power * torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-12).log() for power in _POWERS
    ]
    return far + [near + spread * torch.randn(shape, generator=generator, dtype=torch.float64) for spread in _SPREADS]


def _rule_kl(states: StatePairs, log_weights: Tensor, budget: float) -> Tensor:
    """Return KL(target || kept) of a = min(1, weight / c) with c such that the budget is met: [N, R]."""
    rollout = states.rollout[:, None].expand_as(log_weights)
    pretended = torch.log_softmax(rollout + log_weights, dim=-1)  # the target for which that rule would be OBRS
    c = obrs.lam_for_budget(rollout, pretended, budget)[..., None]
    kept = rollout + obrs.acceptance(rollout, pretended, c).log()
    return divergence(states.target[:, None].expand_as(kept), torch.log_softmax(kept, -1))


def _budget_curve(name: str, state: StatePairs, best_other: Tensor) -> BudgetCurve:
    budgets = [0.025 * step for step in range(1, 40)] + [0.99]
    before = divergence(state.target, state.rollout)
    root = 0.5 * (state.target - state.rollout)[:, None]
    return BudgetCurve(
        name=name,
        kl_before=float(before),
        budget=tuple(budgets),
        obrs=tuple(float(_obrs_kl(state, budget)) for budget in budgets),
        root=tuple(float(_rule_kl(state, root, budget)) for budget in budgets),
        bound=tuple(max(0.0, float(before + torch.tensor(budget).log())) for budget in budgets),
        at=BUDGETS,
        best_other=tuple(best_other.tolist()),
    )


def _obrs_kl(state: StatePairs, budget: float) -> Tensor:
    return rejected_divergence(state, obrs.lam_for_budget(state.rollout, state.target, budget)[:, None])


def _derivative(target_mass: Tensor, lam: Tensor, z: Tensor) -> Tensor:
    return target_mass / lam * (1.0 - 1.0 / (lam * z))


def _printed_derivative(target_mass: Tensor, lam: Tensor, z: Tensor) -> Tensor:
    return -target_mass / (lam.square() * z)


def _target_mass_up_to(states: StatePairs, lam: Tensor) -> Tensor:
    """Return P_target(rho <= lam), [N] for lam [N]."""
    return torch.where(states.rho <= lam[:, None], states.target.exp(), 0.0).sum(-1)


def _between_kinks(state: StatePairs, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return at most 200 lams for a difference quotient, and whether each lies inside (min rho, max rho)."""
    rho = state.rho[(state.target > -torch.inf) & (state.rollout > -torch.inf)].unique()
    wide = rho[1:] > rho[:-1] * (1.0 + _LEAST_GAP)
    middle = (rho[1:] * rho[:-1]).sqrt()[wide]
    middle = middle[torch.linspace(0, len(middle) - 1, min(200, len(middle))).round().long()]
    outside = torch.tensor([low / 2, high * 2] if high < torch.inf else [low / 2], dtype=torch.float64)
    lams = torch.cat([middle, outside])
    return lams, (lams > low) & (lams < high)


def _repeated(state: StatePairs, times: int) -> StatePairs:
    return state.pick(torch.zeros(times, dtype=torch.int64))


def identity(states: StatePairs, drawn_state: int) -> Identity:
    """Measure the identity's deviation over all states, tokens, lams and caps.

    Args:
        drawn_state: number of the state whose curves are returned.
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
        curves=tuple(_curve(states.pick(torch.tensor([drawn_state])), lam) for lam in IDENTITY_LAMS),
    )


def _possible(states: StatePairs) -> Tensor:
    return (states.rollout > -torch.inf) & (states.target > -torch.inf)


def _deviation(states: StatePairs, z: Tensor, lam: float, cap: float) -> Tensor:
    left = obrs.acceptance(states.rollout, states.target, lam)
    left = left * obrs.weight(states.rollout, states.target, z[:, None], lam).clamp(max=cap)
    right = (z[:, None] * states.rho).clamp(max=cap)
    return torch.where(_possible(states), (left - right).abs(), 0.0).max()


def _curve(state: StatePairs, lam: float) -> IdentityCurve:
    possible = _possible(state)
    rollout, target = state.rollout[possible], state.target[possible]
    log_rho, order = (target - rollout).sort()
    share = torch.linspace(0.0, 1.0, DRAWN_TOKENS, dtype=torch.float64)
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


def theorem_section(theorems: Theorems) -> Section:
    derivative, best = theorems.derivative, theorems.optimality
    rows = (
        ("derivative: places between kinks of KL(lam)", f"{derivative.places:,}"),
        ("largest error of lam x derivative against difference quotients", format_number(derivative.error)),
        ("the same for the derivative as the submission prints it", format_number(derivative.printed_error)),
        ("places inside (min rho, max rho) where the KL does not fall", f"{derivative.rises}"),
        ("places outside where it changes", f"{derivative.moves}"),
        ("places where it is above the KL before", f"{derivative.above_before}"),
        (
            f"budgets {', '.join(f'{one:g}' for one in best.budgets)}: largest |Z - budget|",
            format_number(best.budget_error),
        ),
        (f"other rules with the same budget, over {best.states} states", f"{best.alternatives:,}"),
        ("of these closer to the policy than OBRS", f"{best.better}"),
        ("smallest margin by which another rule is worse, nats", format_number(best.smallest_margin)),
        ("median margin, nats", format_number(best.median_margin)),
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
            Series(name=_AFTER, x=one.lam, y=finite(one.kl)),
            Series(name="Z", x=one.lam, y=finite(one.acceptance), color_index=1),
        ),
        note="Flat, then falling between the two dotted uprights, then 0.",
        log_x=True,
        guides=tuple(guides),
    )


def _derivative_chart(one: Contraction) -> Chart:
    def scaled(values: Sequence[float]) -> tuple[float | None, ...]:
        return finite([value * lam for value, lam in zip(values, one.lam, strict=True)])

    return Chart(
        title=f"The derivative, one state of {one.name}",
        x_label="lam",
        y_label="lam x dKL / dlam",
        series=(
            Series(name="derivative", x=one.lam, y=scaled(one.derivative)),
            Series(
                name="as printed in the submission", x=one.lam, y=scaled(one.printed_derivative), color_index=1 + DASHED
            ),
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
            Series(name="OBRS", x=one.budget, y=finite(one.obrs)),
            Series(name="a ~ sqrt(rho)", x=one.budget, y=finite(one.root), color_index=1),
            Series(
                name=f"best of {RULES:,} random rules",
                x=one.at,
                y=finite(one.best_other),
                color_index=2,
                style="points",
            ),
            Series(name="no rule comes below", x=one.budget, y=finite(one.bound), color_index=GRAY + DASHED),
        ),
        note="Every other rule lies on or above OBRS at the same accepted share.",
        guides=(Guide(text="KL before", y=one.kl_before),),
    )


def identity_section(identity: Identity) -> Section:
    rows = (
        ("pairs of a state and a token", f"{identity.tokens:,}"),
        (f"comparisons, c1 {', '.join(f'{cap:g}' for cap in CAPS)}", f"{identity.comparisons:,}"),
        ("largest |a min(w, c1) - min(Z rho, c1)|", format_number(identity.deviation)),
        ("largest lam Z", f"{identity.largest_lam_z:.15f}"),
        (f"the deviation with c1 = {OUTSIDE_CAP:g}, which is not promised", format_number(identity.outside_deviation)),
    )
    ends = [value for curve in identity.curves for value in _scaled(curve.rho, curve.z)]
    line = sorted({*finite(ends, SMALLEST_RATIO), DRAWN_CAP} - {None})
    whole = tuple(
        Series(
            name=f"lam {curve.lam:g}", x=x, y=finite(curve.product, SMALLEST_RATIO), color_index=order, style="points"
        )
        for order, curve in enumerate(identity.curves)
        if (x := finite(_scaled(curve.rho, curve.z), SMALLEST_RATIO))
    )
    parts = [
        Chart(
            title=title,
            x_label="rho = p_policy / p_rollout",
            y_label=label,
            series=tuple(
                Series(
                    name=f"lam {curve.lam:g}",
                    x=finite(curve.rho, SMALLEST_RATIO),
                    y=finite(read(curve)),
                    color_index=order,
                )
                for order, curve in enumerate(identity.curves)
            ),
            note=note,
            log_x=True,
            log_y=True,
        )
        for title, label, read, note in (
            ("The acceptance", "a(x)", lambda curve: curve.acceptance, "A larger lam rejects more ..."),
            ("The weight", f"min(w, {DRAWN_CAP:g})", lambda curve: curve.weight, "... and lifts the weight below lam."),
        )
    ]
    together = Chart(
        title="Acceptance times weight, one state",
        x_label="Z rho",
        y_label=f"a(x) min(w(x), {DRAWN_CAP:g})",
        series=(*whole, Series(name=f"min(Z rho, {DRAWN_CAP:g})", x=tuple(line), y=_capped(line), color_index=GRAY)),
        note="All lams fall on one line: in expectation OBRS is truncated importance sampling on Z rho.",
        log_x=True,
        log_y=True,
    )
    return Section(
        title="The identity",
        intro="a(x) min(w(x), c1) = min(Z rho, c1) for every lam and every c1 of at least 1, because lam Z is at most "
        "1. So lam enters the expected update through Z alone, and the Bernoulli mask adds variance only.",
        items=(Table(title="The identity in float64", columns=("what", "found"), rows=rows), *parts, together),
    )


def _scaled(values: Sequence[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def _capped(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(value, DRAWN_CAP) for value in values)


if __name__ == "__main__":
    main()
