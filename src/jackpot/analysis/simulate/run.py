"""`jackpot simulate`: what OBRS does to the gap between two models, without training.

The pairs are synthetic families, a recipe's policy with candidates for its rollout model, or a run's checkpoints.

Status: supported.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jackpot.analysis.advice.rule import why_different
from jackpot.analysis.replay.run import replay
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
from jackpot.config.run import Config
from jackpot.core.errors import CheckpointError, ConfigError, DataError
from jackpot.launch.local import model_paths
from jackpot.training.run.checkpoint import Checkpoints
from jackpot.training.run.folder import run_config

SWEEP_STATES = 32  # states at each gap of a family
EXAMPLE_STATES = 128  # states at the one gap at which ratios and top-k estimates are shown
EXAMPLE_KL = 0.5  # KL at that gap, nats
_CHUNK = 32  # states in memory at once
_log = logging.getLogger(__name__)


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
class CheckpointPair:
    """The two models of a run at one checkpoint."""

    iteration: int  # 0: where the run began
    measured: Candidate
    topk: tuple[TopKSummary, ...]  # with the fill-in, then without


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSimulation:
    """The simulation of real models."""

    candidates: tuple[Candidate, ...]
    training: tuple[CheckpointPair, ...]  # empty where no run was given
    left_out: tuple[str, ...]  # errors of corrupt checkpoints
    different: str | None  # why `replay` of the run's saved rollouts advises otherwise than its last checkpoint
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
    if not candidates and config.rollout_model is None:
        raise ConfigError(
            "rollout_model is null, so the policy generates its own rollouts and there is no gap to measure; name "
            "candidates with --rollout-model PATH, or take an arm with a rollout model"
        )
    candidates = list(candidates) or [config.rollout_model.path]
    if len(set(candidates)) < len(candidates):
        raise ConfigError(f"--rollout-model names a path twice: {', '.join(candidates)}; give each candidate once")
    bench = PairBench(config, config.policy.path, candidates, prompts, seed)
    measured = [bench.measure(path, config.policy.path, path) for path in candidates]
    return PairSimulation(
        candidates=tuple(candidate for candidate, _ in measured),
        training=(),
        left_out=(),
        different=None,
        views=_views_of_models(seed, [pair for _, pair in measured], f"policy {config.policy.path}"),
    )


def simulate_run(run: Path, prompts: int, seed: int) -> PairSimulation:
    """Measure the models that a run began with, and those of every checkpoint that it kept and that is not corrupt.

    Args:
        prompts: held-out prompts that the rollout model of each checkpoint answers.

    Raises:
        CheckpointError: no run there, or no checkpoint of it that can be used.
        ConfigError: the run has no rollout model.
    """
    config = run_config(run)
    if config.rollout_model is None:
        raise ConfigError(
            f"the policy of {run} generates its own rollouts, so there is no gap; give a run with a rollout model"
        )
    folders, corrupt = Checkpoints(run / "checkpoints", config.checkpoint.keep).intact()
    for one in corrupt:
        _log.warning("%s; left out", one)
    if not folders:
        raise CheckpointError(
            f"{run} has no checkpoint that can be used ({len(corrupt)} are corrupt); train with checkpoint.every and "
            f"checkpoint.keep such that it keeps some"
        )
    places = {0: model_paths(config, None)} | {_iteration(folder): model_paths(config, folder) for folder in folders}
    stages, pairs = [], []
    for iteration, paths in places.items():
        bench = PairBench(config, paths["policy"], [paths["rollout_model"]], prompts, seed)
        measured, pair = bench.measure(f"iteration {iteration}", paths["policy"], paths["rollout_model"])
        stages.append(CheckpointPair(iteration=iteration, measured=measured, topk=pair.topk))
        pairs.append(pair)
    return PairSimulation(
        candidates=tuple(stage.measured for stage in stages),
        training=tuple(stages),
        left_out=tuple(str(one) for one in corrupt),
        different=_different(run, stages[-1].measured),
        views=_views_of_models(seed, [pairs[0], pairs[-1]], f"the models of {run}"),
    )


def _different(run: Path, last: Candidate) -> str | None:
    """Say why the saved rollouts give other advice than the last checkpoint; None where none differs."""
    try:
        replayed = replay(run)
    except DataError:
        return None
    return why_different(last.answer, replayed.answer.numbers())


def _iteration(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _views_of_models(seed: int, pairs: Sequence[PairMeasurement], text: str) -> SimulationViews:
    curves = [curve_by_kl(one.name, one.numbers) for one in pairs]
    return _views(seed, curves, [(one, text) for one in pairs])


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
