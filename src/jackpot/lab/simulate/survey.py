"""Everything that is measured of one pair of models, in one pass over its states. Layer 6, pure.

A source is a pair with a name: a made-up family at one gap, two real models, or the models of a checkpoint.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.lab.simulate.states import (
    LAMS,
    RECIPE_LAM,
    StateNumbers,
    States,
    joined,
    joined_states,
    measure,
)
from jackpot.lab.simulate.topk import TopK, TopKNumbers, summary, topk_numbers
from jackpot.lab.simulate.topk import joined as joined_topk
from jackpot.ops import obrs

KEPT = 16  # states that are kept whole, for ratios, theorems and the identity
_TOKENS = 12  # of a kept state in the picture of ratios, from either model
_LOW_ACCEPTANCE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """All states of a source."""

    name: str
    vocabulary: int
    numbers: StateNumbers
    topk: tuple[TopK, ...]  # with the fill-in, then without
    kept: States  # evenly from all states


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Means over some states: those of one gap of a family, or those of like KL of a real pair."""

    states: int
    kl: float  # KL(target || rollout), nats
    reverse_kl: float
    acceptance: tuple[float, ...]  # at LAMS
    acceptance_low: float  # quantiles of 10 and 90 % over the states, at lam = 1
    acceptance_high: float
    kl_after: tuple[float, ...]  # at LAMS


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    name: str
    points: tuple[Point, ...]  # by KL


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """p_target / p_inf and p_target / p~ = Z max(lam, rho) of single tokens, at lam = 1."""

    name: str
    kl: float  # mean KL(target || rollout) of the source
    before: tuple[float, ...]  # of tokens drawn from p_inf
    after: tuple[float, ...]
    policy_before: tuple[float, ...]  # of tokens drawn from p_target, which p_inf may hardly ever write
    policy_after: tuple[float, ...]


def survey(name: str, chunks: Iterable[States], total: int) -> Survey:
    """Measure every state of `chunks`, which are `total` states together."""
    stride = max(1, total // KEPT)
    seen, parts, kept, sampled = 0, [], [], []
    topk: dict[bool, list[TopKNumbers]] = {True: [], False: []}
    vocabulary = 0
    for states in chunks:
        parts.append(measure(states))
        for fill_in, numbers in topk.items():
            numbers.append(topk_numbers(states, fill_in))
        sampled.append(sampled_acceptance(states))
        rows = torch.arange(seen, seen + len(states))
        kept.append(states.pick(rows % stride == 0))
        seen += len(states)
        vocabulary = states.rollout.shape[1]
    numbers, drawn = joined(parts), torch.cat(sampled)
    return Survey(
        name=name,
        vocabulary=vocabulary,
        numbers=numbers,
        topk=tuple(
            row for fill, each in topk.items() for row in summary(joined_topk(each), numbers, drawn, vocabulary, fill)
        ),
        kept=joined_states(kept),
    )


def sampled_acceptance(states: States) -> Tensor:
    """a(x) of the tokens that were written, at lam = 1: [N, D]."""
    ids = states.token_ids
    return obrs.acceptance(states.rollout.gather(-1, ids), states.target.gather(-1, ids), LAMS[RECIPE_LAM])


def point(numbers: StateNumbers) -> Point:
    """Means over all of the states."""
    at_one = numbers.acceptance[:, RECIPE_LAM]
    return Point(
        states=len(numbers.kl),
        kl=float(numbers.kl.mean()),
        reverse_kl=float(numbers.reverse_kl.mean()),
        acceptance=tuple(numbers.acceptance.mean(0).tolist()),
        acceptance_low=float(at_one.quantile(0.1)),
        acceptance_high=float(at_one.quantile(0.9)),
        kl_after=tuple(numbers.kl_after.mean(0).tolist()),
    )


def binned(name: str, numbers: StateNumbers, bins: int = 14, least: int = 8, smallest: float = 1e-5) -> Curve:
    """The states of one source by their own KL, in bins of equal width on a logarithmic axis.

    Bins of fewer than `least` states are left out, and so are states below `smallest` nats: rounding, nothing else.
    """
    logs = numbers.kl.clamp(min=smallest).log()
    usable = (numbers.kl > smallest) & numbers.kl.isfinite()
    if not usable.any():
        return Curve(name=name, points=())
    low, high = logs[usable].min(), logs[usable].max()
    place = ((logs - low) / (high - low).clamp(min=1e-9) * bins).floor().clamp(max=bins - 1)
    groups = [usable & (place == number) for number in range(bins)]
    return Curve(name=name, points=tuple(point(_some(numbers, rows)) for rows in groups if rows.sum() >= least))


def share_below(numbers: StateNumbers) -> float:
    """The share of states where less than half is accepted at lam = 1."""
    return float((numbers.acceptance[:, RECIPE_LAM] < _LOW_ACCEPTANCE).double().mean())


def ratios(one: Survey) -> Ratios:
    """Of tokens drawn at the kept states, evenly over each distribution: no chance is in it."""
    states = one.kept
    z = obrs.exact_z(states.rollout, states.target, 1.0)[:, None]
    clouds = []
    for log_probs in (states.rollout, states.target):
        places = (torch.arange(_TOKENS, dtype=torch.float64) + 0.5) / _TOKENS
        total = log_probs.exp().cumsum(-1)
        ids = torch.searchsorted(total, (places * total[:, -1:]).contiguous()).clamp(max=log_probs.shape[1] - 1)
        rollout, target = states.rollout.gather(-1, ids), states.target.gather(-1, ids)
        clouds += [(target - rollout).exp(), obrs.weight(rollout, target, z, 1.0)]
    before, after, policy_before, policy_after = (tuple(cloud.flatten().tolist()) for cloud in clouds)
    return Ratios(
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
