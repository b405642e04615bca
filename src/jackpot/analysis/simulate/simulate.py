"""`jackpot simulate`: what OBRS does to the gap between two models, without training.

The pairs are synthetic families, or a recipe's policy with candidates for its rollout model.

Status: supported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jackpot.analysis.simulate.candidates import Candidate, PairBench
from jackpot.analysis.simulate.distributions import LAMS, StatePairs, measure_states
from jackpot.analysis.simulate.measurements import (
    GapCurve,
    PairMeasurement,
    TokenRatios,
    curve_by_kl,
    gap_curve,
    mean_point,
    measure_pair,
    token_ratios,
)
from jackpot.analysis.simulate.synthetic import FAMILIES, VOCABULARY, GapFamily, sample_states
from jackpot.analysis.simulate.topk import TopKSummary
from jackpot.config.config import Config
from jackpot.core.errors import ConfigError

SWEEP_STATES = 32  # states at each gap of a family
EXAMPLE_STATES = 128  # states at the one gap at which ratios and top-k estimates are shown
EXAMPLE_KL = 0.5  # KL at that gap, nats
_CHUNK = 32  # states in memory at once


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPair:
    """One pair of models at one gap: the ratios of its tokens and the top-k estimates of Z."""

    name: str
    text: str  # what the two models are
    states: int
    vocabulary: int
    ratios: TokenRatios
    topk: tuple[TopKSummary, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationViews:
    """The numbers behind the views that every simulation shows."""

    seed: int
    lams: tuple[float, ...]
    curves: tuple[GapCurve, ...]
    sources: tuple[SimulatedPair, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSimulation:
    """The simulation of real models."""

    candidates: tuple[Candidate, ...]
    views: SimulationViews


def simulate_families(seed: int, vocabulary: int = VOCABULARY) -> SimulationViews:
    """Simulate every synthetic family; the same seed gives the same numbers."""
    curves, pairs = synthetic_measurements(seed, vocabulary)
    return _views(seed, curves, pairs)


def synthetic_measurements(
    seed: int, vocabulary: int = VOCABULARY
) -> tuple[list[GapCurve], list[tuple[PairMeasurement, str]]]:
    """Measure each family over all its gaps, and many states at the gap nearest to EXAMPLE_KL.

    Returns:
        The curves, and for each family its measurement at that gap with a sentence on what the gap is.
    """
    curves, pairs = [], []
    for family in FAMILIES:
        points = [
            mean_point(measure_states(sample_states(family, gap, SWEEP_STATES, seed, vocabulary=vocabulary)))
            for gap in family.gaps
        ]
        curves.append(gap_curve(family.name, points))
        gap = min(zip(points, family.gaps, strict=True), key=lambda pair: abs(pair[0].kl - EXAMPLE_KL))[1]
        measured = measure_pair(family.name, _chunks(family, gap, seed, vocabulary), EXAMPLE_STATES)
        pairs.append((measured, f"{family.text}; here the gap is {gap:.3g}"))
    return curves, pairs


def _chunks(family: GapFamily, gap: float, seed: int, vocabulary: int) -> Iterator[StatePairs]:
    for part in range(EXAMPLE_STATES // _CHUNK):
        yield sample_states(family, gap, _CHUNK, seed, part=part, vocabulary=vocabulary)


def simulate_candidates(config: Config, candidates: Sequence[str], prompts: int, seed: int) -> PairSimulation:
    """Compare the recipe's policy with each candidate rollout model, or with the recipe's own where none is given.

    Args:
        candidates: paths of rollout models.
        prompts: held-out prompts that each rollout model answers.

    Raises:
        ConfigError: the recipe has no rollout model and no candidate is given, or one path is given twice.
        ModelError, DataError: as `PairBench`.
    """
    candidates = list(candidates) or ([config.rollout_model.path] if config.rollout_model else [])
    if not candidates:
        raise ConfigError(
            "rollout_model is null, so the policy generates its own rollouts and there is no gap to measure; name "
            "candidates with --rollout-model PATH, or take an arm with a rollout model"
        )
    if len(set(candidates)) < len(candidates):
        raise ConfigError(f"--rollout-model names a path twice: {', '.join(candidates)}; give each candidate once")
    bench = PairBench(config, config.policy.path, candidates, prompts, seed)
    measured = [bench.measure(path, config.policy.path, path) for path in candidates]
    return PairSimulation(
        candidates=tuple(candidate for candidate, _ in measured),
        views=_views(
            seed,
            [curve_by_kl(pair.name, pair.numbers) for _, pair in measured],
            [(pair, f"policy {config.policy.path}") for _, pair in measured],
        ),
    )


def _views(seed: int, curves: Sequence[GapCurve], pairs: Sequence[tuple[PairMeasurement, str]]) -> SimulationViews:
    return SimulationViews(
        seed=seed,
        lams=LAMS,
        curves=tuple(curves),
        sources=tuple(
            SimulatedPair(
                name=one.name,
                text=text,
                states=len(one.numbers.kl),
                vocabulary=one.vocabulary,
                ratios=token_ratios(one),
                topk=one.topk,
            )
            for one, text in pairs
        ),
    )
