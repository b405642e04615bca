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
    GapPoint,
    PairMeasurement,
    TokenRatios,
    curve_by_kl,
    gap_curve,
    mean_point,
    measure_pair,
    token_ratios,
)
from jackpot.analysis.simulate.synthetic import FAMILIES, VOCABULARY, GapFamily, sample_states
from jackpot.config.config import Config
from jackpot.core.errors import ConfigError

SWEEP_STATES = 32  # states at each gap of a family
EXAMPLE_STATES = 128  # states at the one gap at which ratios and top-k estimates are shown
EXAMPLE_KL = 0.5  # KL at that gap, nats
_CHUNK = 32  # states in memory at once


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationViews:
    """The numbers behind the views that every simulation shows."""

    seed: int
    lams: tuple[float, ...]
    curves: tuple[GapCurve, ...]
    ratios: tuple[TokenRatios, ...]  # of each family's example, or of each candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSimulation:
    """The simulation of real models."""

    candidates: tuple[Candidate, ...]
    views: SimulationViews


def simulate_families(seed: int, vocabulary: int = VOCABULARY) -> SimulationViews:
    """Simulate every synthetic family; the same seed gives the same numbers."""
    curves, pairs = synthetic_measurements(seed, vocabulary)
    return _views(seed, curves, pairs)


def synthetic_measurements(seed: int, vocabulary: int = VOCABULARY) -> tuple[list[GapCurve], list[PairMeasurement]]:
    """Measure each family over all its gaps, and many states at the gap of its example."""
    curves, pairs = [], []
    for family in FAMILIES:
        points = family_points(family, seed, vocabulary)
        curves.append(gap_curve(family.name, points))
        states = example_states(family, example_gap(family, points), seed, vocabulary)
        pairs.append(measure_pair(family.name, states, EXAMPLE_STATES))
    return curves, pairs


def family_points(family: GapFamily, seed: int, vocabulary: int) -> list[GapPoint]:
    """Measure a few states of a family at each of its gaps."""
    return [
        mean_point(measure_states(sample_states(family, gap, SWEEP_STATES, seed, vocabulary=vocabulary)))
        for gap in family.gaps
    ]


def example_gap(family: GapFamily, points: Sequence[GapPoint]) -> float:
    """Return the gap of a family whose KL is nearest to EXAMPLE_KL."""
    return min(zip(points, family.gaps, strict=True), key=lambda pair: abs(pair[0].kl - EXAMPLE_KL))[1]


def example_states(family: GapFamily, gap: float, seed: int, vocabulary: int) -> Iterator[StatePairs]:
    """Yield EXAMPLE_STATES states of a family at one gap, a few at a time."""
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
            [pair for _, pair in measured],
        ),
    )


def _views(seed: int, curves: Sequence[GapCurve], pairs: Sequence[PairMeasurement]) -> SimulationViews:
    return SimulationViews(seed=seed, lams=LAMS, curves=tuple(curves), ratios=tuple(map(token_ratios, pairs)))
