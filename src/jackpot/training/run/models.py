"""The model that a person means: a folder, a name, or what a run saved."""

import logging
from pathlib import Path

from jackpot.config.run import Config
from jackpot.core.errors import CheckpointError
from jackpot.training.run.checkpoint import Checkpoints, CorruptCheckpoint
from jackpot.training.run.folder import run_config

_log = logging.getLogger(__name__)


def run_of(model: str) -> Config | None:
    """The settings of the run whose folder `model` is; None where it is something else."""
    folder = Path(model).expanduser()
    is_run = (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()
    return run_config(folder) if is_run else None


def find_model(model: str) -> str:
    """Where the model is read from: `model` itself, or of a run its best policy.

    The best is the checkpoint with the highest accuracy on the run's own held-out problems (its link `best`), which is
    not always the last one; without one, or where it is corrupt, the newest checkpoint that is whole.

    Raises:
        CheckpointError: a run without a checkpoint, or with corrupt ones only.
    """
    config = run_of(model)
    if config is None:
        return model
    folder = Path(model).expanduser()
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    try:
        chosen = checkpoints.best()
    except CorruptCheckpoint as error:
        _log.warning("%s; taking the newest checkpoint", error)
        chosen = None
    if chosen is None:
        found, corrupt = checkpoints.find()
        for one in corrupt:
            _log.warning("%s; taking the checkpoint before it", one)
        if found is None:
            raise CheckpointError(
                f"{folder} has no checkpoint yet; the first is written at the first evaluation after training began, "
                f"at the latest at iteration {config.checkpoint.every}"
            )
        chosen = found.folder
    return str(chosen / "policy")
