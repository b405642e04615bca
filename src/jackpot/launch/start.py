"""Starts a new run in a folder, or continues the run in it from its newest checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from jackpot.config.config import Config
from jackpot.core.cores import pick_threads
from jackpot.launch.build import BuildLearner, computed_differently, make_components
from jackpot.launch.head_kernel import head_options
from jackpot.launch.ray import check_started_by_ray
from jackpot.models.device import pick_device
from jackpot.models.quantization.product import product_name
from jackpot.models.quantization.quantizer import SCHEMES
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.trainer import OnMetrics, Trainer


def train_run(
    config: Config,
    path: Path,
    on_metrics: OnMetrics,
    on_start: Callable[[int], None] = lambda iteration: None,
    build: BuildLearner | None = None,
) -> bool:
    """Train a new run in the folder `path`, or continue the run in it.

    Args:
        path: the run folder.
        on_metrics: called with every line of metrics.jsonl once it is written.
        on_start: called once with the iteration that the run continues after, -1 for a new run.
        build: makes the learner; None: `build_learner`.

    Returns:
        True if the run has reached its last iteration; False if a signal ended it early.

    Raises:
        JackpotError: as `launch` and `Trainer.train`.
    """
    with closing(launch(config, path, on_metrics, build)) as trainer:
        on_start(trainer.iteration)
        return trainer.train()


def launch(config: Config, path: Path, on_metrics: OnMetrics, build: BuildLearner | None = None) -> Trainer:
    """Build the trainer of a new run in the folder `path`, or of the run there from the newest intact checkpoint.

    Args:
        path, on_metrics, build: as in `train_run`.

    Raises:
        CheckpointError: the folder is in use or damaged, or holds a run with other settings, or one without an intact
            checkpoint.
        ModelError, DataError, ConfigError: models, tokenizers or settings do not fit each other.
    """
    check_started_by_ray(config)
    folder = RunFolder(path)
    with ExitStack() as undo:
        undo.callback(folder.close)
        folder.lock()
        undo.callback(folder.give_up)  # removes what `lock` made, if no run began
        folder.check(config)

        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        newest, corrupt = checkpoints.find()
        if newest:
            newest.check_settings(config)

        components = make_components(config, newest, build)
        undo.callback(components.close)

        # A start that is refused above changes nothing of the run; from here on its folder is written to.
        iteration = newest.state["iteration"] if newest else -1  # the iteration that the run continues after
        threads = folder.start(config, pick_threads(config.threads), iteration)  # the count that a continued run had
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        for event in _events_of_computing(config):
            folder.event(max(iteration, 0), event)  # for a new run, whose `iteration` is -1, at iteration 0

        for damage in corrupt:
            facts = {"checkpoint": damage.folder.name, "file": damage.file, "why": damage.why}
            folder.warn(iteration, {"event": "corrupt_checkpoint"} | facts)
            checkpoints.set_aside(damage.folder)

        trainer = Trainer(components, folder, newest.state if newest else None, on_metrics)
        undo.pop_all()  # from here on, closing the trainer closes folder and components
    return trainer


def _events_of_computing(config: Config) -> Iterator[dict[str, Any]]:
    """Yield an event for each of these that the run has: a kernel of output layers other than `eager`, a function that
    multiplies quantized matrices in training, and layers that engines compute in other number formats than training."""
    if (kernel := head_options(config).reader.name) != "eager":
        yield {"event": "head_kernel", "kernel": kernel}
    if config.trained_quantization:
        product = product_name(pick_device(config.device), SCHEMES[config.trained_quantization].weights.codes)
        yield {"event": f"{config.precision}_training", "product": product, "backward": config.fp8_backward}
    if layers := computed_differently(config):
        yield {"event": "computed_differently", "layers": layers}
