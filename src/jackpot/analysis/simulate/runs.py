"""`jackpot simulate` with models: candidates for the rollout model before training, or the checkpoints of a run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jackpot.analysis.simulate.pairs import Bench, Candidate
from jackpot.analysis.simulate.simulate import Views, views
from jackpot.analysis.simulate.survey import Survey, binned
from jackpot.analysis.simulate.topk import TopK
from jackpot.config.run import Config
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.launch.local import model_paths
from jackpot.training.run.checkpoint import Checkpoints
from jackpot.training.run.folder import run_config

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The two models of a run at one checkpoint."""

    iteration: int  # 0: where the run began
    measured: Candidate
    topk: tuple[TopK, ...]  # with the fill-in, then without


@dataclass(frozen=True, kw_only=True, slots=True)
class PairViews:
    """What is shown of real models."""

    candidates: tuple[Candidate, ...]
    training: tuple[Stage, ...]  # empty where no run was given
    left_out: tuple[str, ...]  # corrupt checkpoints
    views: Views


def simulate_candidates(config: Config, writers: Sequence[str], prompts: int, seed: int) -> PairViews:
    """The recipe's policy beside each of `writers`, or beside the recipe's rollout model where none is given.

    Raises:
        ConfigError: the policy writes for itself, or one path is given twice.
        ModelError, DataError: see Bench.
    """
    if not writers and config.rollout_model is None:
        raise ConfigError(
            "rollout_model is null, so the policy writes for itself and there is no gap to measure; name candidates "
            "with --rollout-model PATH, or take an arm with a rollout model"
        )
    writers = list(writers) or [config.rollout_model.path]
    if len(set(writers)) < len(writers):
        raise ConfigError(f"--rollout-model names a path twice: {', '.join(writers)}; give each candidate once")
    bench = Bench(config, config.policy.path, writers, prompts, seed)
    measured = [bench.measure(path, config.policy.path, path) for path in writers]
    found = [survey for _, survey in measured]
    return PairViews(
        candidates=tuple(candidate for candidate, _ in measured),
        training=(),
        left_out=(),
        views=_views(seed, found, f"policy {config.policy.path}"),
    )


def simulate_run(run: Path, prompts: int, seed: int) -> PairViews:
    """Every checkpoint that the run kept and is still what was written, after the models that it began with.

    Raises:
        CheckpointError: no run there, or no checkpoint of it that can be used.
        ConfigError: the policy of that run wrote for itself.
    """
    config = run_config(run)
    if config.rollout_model is None:
        raise ConfigError(f"the policy of {run} writes for itself, so there is no gap; give a run with a rollout model")
    folders, corrupt = Checkpoints(run / "checkpoints", config.checkpoint.keep).whole()
    for one in corrupt:
        _log.warning("%s; left out", one)
    if not folders:
        raise CheckpointError(
            f"{run} has no checkpoint that can be used ({len(corrupt)} are corrupt); train with checkpoint.every and "
            f"checkpoint.keep such that it keeps some"
        )
    places = {0: model_paths(config, None)} | {_iteration(folder): model_paths(config, folder) for folder in folders}
    stages, surveys = [], []
    for iteration, paths in places.items():
        bench = Bench(config, paths["policy"], [paths["rollout_model"]], prompts, seed)
        measured, survey = bench.measure(f"iteration {iteration}", paths["policy"], paths["rollout_model"])
        stages.append(Stage(iteration=iteration, measured=measured, topk=survey.topk))
        surveys.append(survey)
    shown = [surveys[0], surveys[-1]]
    return PairViews(
        candidates=tuple(stage.measured for stage in stages),
        training=tuple(stages),
        left_out=tuple(str(one) for one in corrupt),
        views=_views(seed, shown, f"the models of {run}"),
    )


def _views(seed: int, surveys: Sequence[Survey], text: str) -> Views:
    curves = [binned(one.name, one.numbers) for one in surveys]
    return views(seed, curves, surveys, [text] * len(surveys))


def _iteration(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
