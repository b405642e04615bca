"""Trains a run from Python, and reads the folder of a run: `jackpot.train` and `jackpot.load_run`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.core.errors import DataError
from jackpot.core.process_rank import process_rank
from jackpot.launch.engine_processes import make_hosted
from jackpot.launch.ranks import follow_leader, leading, run_rank
from jackpot.launch.ray import train_on_ray
from jackpot.launch.start import train_run
from jackpot.rollout.tasks.registry import check_sets
from jackpot.training.run_folder.checkpoint import resolve_model_path
from jackpot.training.run_folder.folder import RunFolder, run_config
from jackpot.training.run_folder.saved_rollouts import list_rollout_files, read_columns
from jackpot.training.trainer import OnMetrics


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The folder of a run, finished or not, and the settings in it."""

    folder: Path
    config: Config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, one for each iteration and one for before training (docs/metrics.md)."""
        return RunFolder(self.folder).read("metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl: starts, warnings, and why the run stopped."""
        return RunFolder(self.folder).read("events.jsonl")

    @property
    def policy(self) -> str:
        """Return the `save_pretrained` folder of the best policy, or without one, that of the newest checkpoint.

        Raises:
            CheckpointError: no checkpoint has been written yet, or all are corrupt.
        """
        return resolve_model_path(str(self.folder))

    def rollouts(self, iteration: int | None = None) -> pa.Table:
        """Return the saved rollouts of an iteration, one row for each response (docs/metrics.md).

        Args:
            iteration: number of the iteration; None: the newest one with saved rollouts.

        Raises:
            DataError: the iteration has no saved rollouts, or they cannot be read.
        """
        files, unreadable = list_rollout_files(self.folder)
        chosen = [file for file in files if iteration in (None, file.iteration)]
        if not chosen:
            known = ", ".join(str(file.iteration) for file in files) or "none"
            raise DataError("\n".join([f"{self.folder} has no rollouts of {iteration=}; it has {known}", *unreadable]))
        return read_columns(chosen[-1])  # the newest: the files are in the order of iterations


def train_config(
    config: Config, folder: Path, on_metrics: OnMetrics, on_start: Callable[[int], None] = lambda iteration: None
) -> bool:
    """Train a run in this process, alone or as rank 0 of torchrun's ranks; with `launcher: ray` in actors of Ray.

    Args:
        folder: the run folder.
        on_metrics, on_start: as in `train_run`; where Ray places the run, `on_start` is called at its end.

    Returns:
        As `train_run`.

    Raises:
        JackpotError: as `leading`, `train_run` and `train_on_ray`.
    """
    if config.placement.launcher == "ray":
        start, is_finished = train_on_ray(config, folder, on_metrics, run_rank, make_hosted)
        on_start(start)
        return is_finished

    with leading(config, folder) as build:
        return train_run(config, folder, on_metrics, on_start, build)


def train(
    recipe: str | Path | Config,
    *overrides: str,
    folder: Path | str,
    arm: str | None = None,
    on_metrics: OnMetrics = lambda line: None,
) -> SavedRun:
    """Train a new run in a folder, or continue the run in it, as `jackpot train` does.

    A process that torchrun started with a rank above 0 follows rank 0, and returns the same as rank 0.

    Examples:
        >>> run = train("quickstart", "iterations=20", folder="runs/first")  # doctest: +SKIP
        >>> run.metrics[-1]["eval/policy_accuracy"]  # doctest: +SKIP

    Args:
        recipe: name of a recipe, path of a YAML file, or all settings.
        overrides: settings as `key=value`, if `recipe` is a name or a path.
        folder: the run folder.
        arm: name of an arm of the recipe.
        on_metrics: called with every line of metrics.jsonl once it is written.

    Raises:
        JackpotError: settings, models or data cannot be used, the folder holds another run, or training had to stop.
    """
    if isinstance(recipe, Config) and (overrides or arm):
        raise TypeError("overrides and arm belong to the name of a recipe; change the Config itself")
    config = recipe if isinstance(recipe, Config) else resolve(str(recipe), arm, overrides)
    check_sets(config.evaluation.benchmark_names)

    run = Path(folder)
    if (process := process_rank()).rank > 0:
        follow_leader(process)
    else:
        train_config(config, run, on_metrics)
    return SavedRun(run, config)


def load_run(folder: Path | str) -> SavedRun:
    """Open the folder of a run, to read its settings, metrics, rollouts and best policy.

    Raises:
        CheckpointError: the folder holds no run, or its config.yaml is damaged.
        ConfigError: its config.yaml does not fit the settings of this version.
    """
    return SavedRun(Path(folder), run_config(Path(folder)))
