"""Theorems 3.3 and 3.4 in numbers.

Theorem 3.3 says that OBRS brings the rollout distribution closer to the target "whenever lam < max rho". G(lam) =
KL(target || p~) falls strictly exactly where min rho < lam < max rho (min over tokens that the target has). Below it
nothing but impossible tokens is rejected, above it p~ is the target and G is 0; both times G stays as it is. With
P = P_target(rho <= lam):

    G'(lam) = P / lam * (1 - 1 / (lam Z))          the derivative
    G'(lam) = - P / (lam^2 Z)                      as the submission's Proposition 1 prints it, without a term P / lam

Theorem 3.4: one lam gives a budget, and no other rule that accepts as much comes closer to the target.
"""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from jackpot.analysis.simulate.states import States, divergence, rejected_divergence
from jackpot.core.prng import stream_key
from jackpot.objectives import obrs

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """KL(target || p~) of one state over lam."""

    name: str
    kl_before: float
    min_rho: float
    max_rho: float  # inf where the target has what the rollout model has not
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


def contraction(name: str, state: States) -> Contraction:
    """Of the first of `states`."""
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


def check_derivative(states: States) -> DerivativeCheck:
    """In the middle between neighbouring rho of every state, and below and above all of them."""
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


def rho_range(states: States) -> tuple[Tensor, Tensor]:
    """The smallest and largest rho of tokens that the target has, [N] each."""
    rho, has = states.rho, states.target > -torch.inf
    return torch.where(has, rho, torch.inf).min(-1).values, torch.where(has, rho, 0.0).max(-1).values


def shortened(states: States, size: int = SMALL) -> States:
    """Pairs of distributions over `size` entries: what the search for a better rule runs on.

    Half of them are the tokens that the two models give most to. The others are the rest, sorted by rho and merged in
    groups of like rho, which OBRS treats alike. Over a small vocabulary the states stay as they are.
    """
    vocabulary, half = states.rollout.shape[1], size // 2
    if vocabulary <= size:
        return States(rollout=states.rollout, target=states.target, token_ids=states.token_ids[:, :0])
    heaviest = torch.logaddexp(states.rollout, states.target).topk(half, dim=-1).indices
    ratio = (states.target - states.rollout).scatter(-1, heaviest, -torch.inf)  # these come first
    order = ratio.argsort(-1)
    rest = torch.arange(vocabulary - half) * (size - half) // (vocabulary - half) + half
    group = torch.cat([torch.arange(half), rest]).expand_as(order)
    merged = [
        torch.zeros(len(states), size, dtype=torch.float64).scatter_add(-1, group, part.gather(-1, order).exp()).log()
        for part in (states.rollout, states.target)
    ]
    return States(rollout=merged[0], target=merged[1], token_ids=states.token_ids[:, :0])


def optimality(names: list[str], states: States, seed: int) -> tuple[Optimality, tuple[BudgetCurve, ...]]:
    """OBRS against other rules with the same budget on every state, and the curves of one state for each name."""
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


def _other_rules(states: States, obrs_lam: Tensor, budget: float, seed: int) -> list[Tensor]:
    """Log-weights [N, R, V] of rules that accept the more the larger they are: far from OBRS and near it."""
    generator = Generator().manual_seed(stream_key(seed, "simulate", "rules", f"{budget:g}"))
    shape = (len(states), ALTERNATIVES, states.rollout.shape[1])
    near = obrs.acceptance(states.rollout, states.target, obrs_lam).clamp(min=1e-300).log()[:, None]
    far = [
        power * torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-12).log() for power in _POWERS
    ]
    return far + [near + spread * torch.randn(shape, generator=generator, dtype=torch.float64) for spread in _SPREADS]


def _rule_kl(states: States, log_weights: Tensor, budget: float) -> Tensor:
    """KL(target || what is left) of a = min(1, weight / c) with c such that the budget is met: [N, R]."""
    rollout = states.rollout[:, None].expand_as(log_weights)
    pretended = torch.log_softmax(rollout + log_weights, dim=-1)  # the target for which that rule would be OBRS
    c = obrs.lam_for_budget(rollout, pretended, budget)[..., None]
    kept = rollout + obrs.acceptance(rollout, pretended, c).log()
    return divergence(states.target[:, None].expand_as(kept), torch.log_softmax(kept, -1))


def _budget_curve(name: str, state: States, best_other: Tensor) -> BudgetCurve:
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


def _obrs_kl(state: States, budget: float) -> Tensor:
    return rejected_divergence(state, obrs.lam_for_budget(state.rollout, state.target, budget)[:, None])


def _derivative(target_mass: Tensor, lam: Tensor, z: Tensor) -> Tensor:
    return target_mass / lam * (1.0 - 1.0 / (lam * z))


def _printed_derivative(target_mass: Tensor, lam: Tensor, z: Tensor) -> Tensor:
    return -target_mass / (lam.square() * z)


def _target_mass_up_to(states: States, lam: Tensor) -> Tensor:
    """P_target(rho <= lam), [N] for lam [N]."""
    return torch.where(states.rho <= lam[:, None], states.target.exp(), 0.0).sum(-1)


def _between_kinks(state: States, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Places for a difference quotient, at most 200, and whether each lies inside (min rho, max rho)."""
    rho = state.rho[(state.target > -torch.inf) & (state.rollout > -torch.inf)].unique()
    wide = rho[1:] > rho[:-1] * (1.0 + _LEAST_GAP)
    middle = (rho[1:] * rho[:-1]).sqrt()[wide]
    middle = middle[torch.linspace(0, len(middle) - 1, min(200, len(middle))).round().long()]
    outside = torch.tensor([low / 2, high * 2] if high < torch.inf else [low / 2], dtype=torch.float64)
    lams = torch.cat([middle, outside])
    return lams, (lams > low) & (lams < high)


def _repeated(state: States, times: int) -> States:
    return state.pick(torch.zeros(times, dtype=torch.int64))
