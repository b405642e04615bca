"""Find the model that a user names: a model folder, a name on the hub, or the folder of a run."""

import logging
from pathlib import Path

from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError
from jackpot.training.run_folder.checkpoint import Checkpoints, CorruptCheckpoint
from jackpot.training.run_folder.folder import run_config

_log = logging.getLogger(__name__)


def config_of_run(model: str) -> Config | None:
    """Return the settings of a run where `model` is a run folder; None where it is something else."""
    folder = Path(model).expanduser()
    is_run = (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()
    return run_config(folder) if is_run else None


def resolve_model_path(model: str) -> str:
    """Return the path of a model: `model` itself, or for a run folder the path of its best policy.

    The best policy has the highest accuracy on the run's own held-out problems (link `best`), which is not always the
    last one. Without it, or where it is corrupt, it is the policy of the newest checkpoint that is intact.

    Raises:
        CheckpointError: the run has no checkpoint, or corrupt ones only.
    """
    config = config_of_run(model)
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
