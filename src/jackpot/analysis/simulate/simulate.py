"""`jackpot simulate` without models: the families, all that OBRS does to them, both theorems."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from jackpot.analysis.simulate.families import FAMILIES, VOCABULARY, Family, states_of
from jackpot.analysis.simulate.identity import Identity, identity
from jackpot.analysis.simulate.states import LAMS, States, joined, measure
from jackpot.analysis.simulate.survey import Curve, Ratios, Survey, curve, point, ratios, survey
from jackpot.analysis.simulate.theorems import (
    BudgetCurve,
    Contraction,
    DerivativeCheck,
    Optimality,
    check_derivative,
    contraction,
    optimality,
    shortened,
)
from jackpot.analysis.simulate.topk import TopK

SWEEP_STATES = 32  # at each gap
EXAMPLE_STATES = 128  # at the gap that top-k, ratios and theorems are shown at
EXAMPLE_KL = 0.5  # nats
_CHUNK = 32
_SEARCHED_EVERY = 4  # of the kept states one in so many is searched for a better rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One pair of models: what is shown of it beside its curve."""

    name: str
    text: str
    states: int
    vocabulary: int
    ratios: Ratios
    topk: tuple[TopK, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Theorems:
    contractions: tuple[Contraction, ...]
    derivative: DerivativeCheck
    budgets: tuple[BudgetCurve, ...]
    optimality: Optimality


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """What every kind of simulation shows."""

    seed: int
    lams: tuple[float, ...]
    curves: tuple[Curve, ...]
    sources: tuple[Source, ...]
    theorems: Theorems
    identity: Identity


def simulate_families(seed: int, vocabulary: int = VOCABULARY) -> Views:
    """All of it; the same seed gives the same numbers."""
    curves, surveys, texts = [], [], []
    for family in FAMILIES:
        points = [
            point(measure(states_of(family, gap, SWEEP_STATES, seed, vocabulary=vocabulary))) for gap in family.gaps
        ]
        curves.append(curve(family.name, points))
        gap = min(zip(points, family.gaps, strict=True), key=lambda pair: abs(pair[0].kl - EXAMPLE_KL))[1]
        surveys.append(survey(family.name, _chunks(family, gap, seed, vocabulary), EXAMPLE_STATES))
        texts.append(f"{family.text}; here the gap is {gap:.3g}")
    return views(seed, curves, surveys, texts)


def views(seed: int, curves: Sequence[Curve], surveys: Sequence[Survey], texts: Sequence[str]) -> Views:
    """Everything that follows from what was measured of some sources.

    All sources have one vocabulary, and there is one at least.
    """
    middles = [_middle(one) for one in surveys]
    small = [shortened(one.kept) for one in surveys]
    searched = [part.pick(torch.arange(0, len(part), _SEARCHED_EVERY)) for part in small]
    best, budgets = optimality([one.name for one in surveys], joined([*map(shortened, middles), *searched]), seed)
    return Views(
        seed=seed,
        lams=LAMS,
        curves=tuple(curves),
        sources=tuple(
            Source(
                name=one.name,
                text=text,
                states=len(one.numbers.kl),
                vocabulary=one.vocabulary,
                ratios=ratios(one),
                topk=one.topk,
            )
            for one, text in zip(surveys, texts, strict=True)
        ),
        theorems=Theorems(
            contractions=tuple(contraction(one.name, middle) for one, middle in zip(surveys, middles, strict=True)),
            derivative=check_derivative(joined(small)),
            budgets=budgets,
            optimality=best,
        ),
        identity=identity(joined([*middles, *(one.kept for one in surveys)]), drawn=0),
    )


def _middle(one: Survey) -> States:
    """The kept state whose KL is nearest to the mean of all: the one that is drawn."""
    distance = (measure(one.kept).kl - one.numbers.kl.mean()).abs()
    return one.kept.pick(distance.argmin().reshape(1))


def _chunks(family: Family, gap: float, seed: int, vocabulary: int) -> Iterator[States]:
    for part in range(EXAMPLE_STATES // _CHUNK):
        yield states_of(family, gap, _CHUNK, seed, part=part, vocabulary=vocabulary)
