"""Writing and reading of checkpoints, so that a checkpoint on the disk is complete or is known to be damaged.

Status: supported.
"""

import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.config.arms import build_config
from jackpot.config.changes import fixed_changes, settings_of
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError, ConfigError, RankError
from jackpot.core.files import PARTIAL, cause_of, checkpoint_error_in, checksum, flush_file, flush_folder
from jackpot.core.foreign import ForeignFileError, check_foreign, parse_json, read_foreign
from jackpot.core.roles import Role
from jackpot.training.components import RunComponents
from jackpot.training.learner import Learner
from jackpot.training.run_folder.folder import RunFolder, run_config

_CHECKSUMS = "checksums.json"
_CORRUPT = ".corrupt"
_log = logging.getLogger(__name__)


class CorruptCheckpoint(CheckpointError):
    """The error of a checkpoint with a file that differs from what was written; it names the file and says how."""

    def __init__(self, folder: Path, file: str, why: str) -> None:
        super().__init__(f"{folder / file} {why}")
        self.folder = folder
        self.file = file
        self.why = why


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is intact: every file in it matches the checksum that was written for the file."""

    folder: Path
    state: dict[str, Any]  # content of state.pt

    def check_settings(self, config: Config) -> None:
        """Refuse to continue from the checkpoint of a run with other settings.

        Raises:
            CheckpointError: settings that decide the run's numbers differ, which are listed; or the saved settings do
                not fit this version.
        """
        try:
            saved_settings = settings_of(build_config(json.loads(self.state["settings"])))
        except ConfigError as error:
            raise CheckpointError(
                f"the settings in {self.folder / 'state.pt'} do not fit this version:\n{error}\nContinue the run with "
                f"the version that began it, or give --run another folder"
            ) from error
        if changes := fixed_changes(Config, saved_settings, settings_of(config)):
            lines = "\n  ".join(map(str, changes))
            raise CheckpointError(
                f"{self.folder} is of another run:\n  {lines}\nPut this run's own checkpoints back, or give --run "
                f"another folder"
            )


class Checkpoints:
    """The checkpoints of one run: they are written, found and pruned. The `keep` newest ones stay, and the best.

        checkpoints/step-N/{policy,rollout_model,critic}/   plain save_pretrained folders
        checkpoints/step-N/moments/ROLE.safetensors         moments of the optimizers
        checkpoints/step-N/state.pt                         versions, prompt stream, best; loaded with `weights_only`
        checkpoints/step-N/checksums.json                   size and sha256 of every other file
        checkpoints/last, checkpoints/best                  links to one of them
        checkpoints/step-N.corrupt                          put there by `set_aside`; nothing reads or removes it

    N counts iterations. A checkpoint is written under another name and renamed when every byte is on the disk, so a
    killed run leaves either a whole checkpoint or a `.partial` folder, which the next start removes. Checksums show
    later damage.

    With several ranks each writes a part of weights and moments, ROLE-0000R-of-0000N.safetensors, and computes
    checksums of its part (`models.parts`). Rank 0 writes the rest, checksums.json last, and renames the folder when all
    ranks are done.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def save(
        self,
        iteration: int,
        learner: Learner,
        roles: Sequence[Role],
        tokenizer: PreTrainedTokenizerBase,
        state: dict[str, Any],
        is_best: bool,
    ) -> None:
        """Write the checkpoint of an iteration and point the links `last` and, where `is_best`, `best` at it.

        Args:
            roles: the models to save.
            state: what the run needs to continue, in addition to models and the learner's state.

        Raises:
            CheckpointError: the checkpoint cannot be written. Earlier checkpoints are untouched.
            RankError: a rank that holds a part of the models is lost, so that the run cannot go on.
        """
        folder = self._step(iteration)
        partial = folder.with_name(folder.name + PARTIAL)

        try:
            # A folder that exists is complete: an earlier attempt failed after the rename.
            if not folder.exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                written = learner.save(partial, roles)  # checksums of the large files, which are flushed already
                for role in roles:
                    tokenizer.save_pretrained(partial / role)
                with (partial / "state.pt").open("wb") as file:
                    torch.save(state | {"learner": learner.state_dict()}, file)
                _write_checksums(partial, written)
                _flush(partial, written)
                partial.rename(folder)

            flush_folder(self._folder)
            self._link("last", folder)
            if is_best:
                self._link("best", folder)
        except Exception as error:  # torch, safetensors and tokenizers have different errors for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, RankError):
                raise
            raise CheckpointError(f"cannot write the checkpoint {folder}: {cause_of(error)}") from error

    def find(self) -> tuple[Checkpoint | None, list[CorruptCheckpoint]]:
        """Return the newest intact checkpoint, None before the first, and errors of newer, corrupt ones.

        Nothing on the disk changes.

        Raises:
            CheckpointError: the run has checkpoints, and all are corrupt; or a file is a link out of its checkpoint.
        """
        corrupt: list[CorruptCheckpoint] = []
        for folder in reversed(self._steps()):
            try:
                _verify(folder)
                return Checkpoint(folder, load_state(folder)), corrupt
            except CorruptCheckpoint as error:
                corrupt.append(error)

        # A run whose checkpoints are all corrupt must not begin anew in silence.
        damage = [*map(str, corrupt), *(f"{path}, set aside" for path in self._folder.glob(f"step-*{_CORRUPT}*"))]
        if damage:
            listed = "\n  ".join(damage)
            raise CheckpointError(
                f"every checkpoint of this run is corrupt:\n  {listed}\nBring one back from a copy, or give --run "
                f"another folder; to begin this run again from nothing, remove {self._folder}"
            )

        return None, []

    def best(self) -> Path | None:
        """Return the folder of the best checkpoint. Nothing on the disk changes.

        Return None before there is one, or where the link `best` leads anywhere but to a folder beside it.

        Raises:
            CheckpointError: a file is a link out of the folder, or a pipe or device.
            CorruptCheckpoint: a file of the checkpoint differs from what was written.
        """
        link = self._folder / "best"  # leads to the name of a checkpoint beside it, unless somebody else has set it
        if link.is_symlink() and len(link.readlink().parts) != 1:
            _log.warning("%s leads to %s, which is not beside it, and is left alone", link, link.readlink())
            return None
        folder = link.resolve()
        if not folder.is_dir():
            return None
        _verify(folder)
        return folder

    def set_aside(self, folder: Path) -> None:
        """Rename a corrupt checkpoint to step-N.corrupt, so that nothing finds or counts it any more."""
        names = (f"{folder.name}{_CORRUPT}{count or ''}" for count in itertools.count())
        folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))

    def restore_links(self, best: dict[str, float] | None) -> dict[str, float] | None:
        """Set the links `last` and `best` to the right checkpoints, in case a kill came before they were written.

        Args:
            best: iteration and accuracy of the best checkpoint, as saved in the state; None before there is one.

        Returns:
            `best` if its checkpoint still exists, else None.

        Raises:
            CheckpointError: a link cannot be written.
        """
        with checkpoint_error_in(self._folder):
            self._link("last", self._steps()[-1])  # the newest
            if best and self._step(best["iteration"]).is_dir():
                self._link("best", self._step(best["iteration"]))
                return best
            (self._folder / "best").unlink(missing_ok=True)
        return None

    def prune(self) -> None:
        """Remove all checkpoints but the `keep` newest and the best; remove also those that a kill left unfinished."""
        best = self._folder / "best"
        names = {path.name for path in self._steps()[-self._keep :]}
        if best.is_symlink():
            names.add(best.readlink().name)
        for path in self._steps():
            if path.name not in names:  # rename it before removal, so that no checkpoint is ever seen half removed
                path.rename(path.with_name(f"{path.name}.old{PARTIAL}"))
        self.remove_unfinished()  # removes the renamed ones too

    def remove_unfinished(self) -> None:
        """Remove checkpoints that a kill left half written or half removed."""
        for path in self._folder.glob(f"step-*{PARTIAL}"):
            if re.fullmatch(rf"step-\d+(\.old)?{re.escape(PARTIAL)}", path.name):
                shutil.rmtree(path)

    def _step(self, iteration: float) -> Path:
        """Return the folder of an iteration's checkpoint."""
        return self._folder / f"step-{int(iteration)}"

    def _steps(self) -> list[Path]:
        """List the folders of finished checkpoints, oldest first."""
        steps = (path for path in self._folder.glob("step-*") if path.name.removeprefix("step-").isdigit())
        return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")))

    def _link(self, name: str, target: Path) -> None:
        """Let the link `name` lead to the checkpoint `target`; a kill leaves the old link or the new one."""
        link, new_link = self._folder / name, self._folder / f".{name}"
        if link.is_symlink() and link.readlink().name == target.name:
            return  # the link is right, and writing it again could fail on a full disk
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(target.name)
        new_link.replace(link)


class Checkpointer:
    """The schedule of a run's checkpoints: it writes those that are due, and prunes old ones.

    A checkpoint is due every `checkpoint.every` iterations, at the last iteration, when the policy is better than ever
    before, and one iteration after a checkpoint that could not be written. That of a best policy is tried twice.

    Args:
        folder: the open run folder, which counts the checkpoints that could not be written.
        state: content of the checkpoint that the run continues from; None for a new run.
    """

    def __init__(self, components: RunComponents, folder: RunFolder, state: Mapping[str, Any] | None) -> None:
        """Set links and counts of failures as `state` says and remove half-written checkpoints, if `state` is given."""
        self._components, self._folder = components, folder
        self._checkpoints = Checkpoints(folder.checkpoints, components.config.checkpoint.keep)
        self._saved = -1  # newest iteration with a checkpoint
        self._overdue = False  # True after a checkpoint that could not be written
        self._value: float | None = None  # accuracy or mean reward of the policy in this iteration, if it was evaluated
        # "iteration" and "accuracy" (or mean reward, under the same name) of the best checkpoint.
        self._best: dict[str, float] | None = None
        if state is not None:
            self._saved = state["iteration"]
            self._best = self._checkpoints.restore_links(state["best"])
            for name, count in state["failed"].items():
                folder.failed[name] += count  # added, since this start may already have counted a failure
            with folder.dispensable(self._saved, "removal of old checkpoints"):
                self._checkpoints.remove_unfinished()

    def save_if_due(self, iteration: int, state: Callable[[], dict[str, Any]], value: float | None) -> None:
        """Write the checkpoint of an iteration if one is due. A failure is counted and shown, and the run goes on.

        Args:
            state: returns the rest of the state that a resumed run needs; called only where a checkpoint is due.
            value: accuracy of the policy after this iteration, or its mean reward if the task has no verdict; None if
                the policy was not evaluated.
        """
        self._value = value  # `_is_best` compares it with that of the best checkpoint
        config = self._components.config.checkpoint
        is_last = iteration == self._components.config.iterations
        due = is_last or self._is_best or self._overdue or iteration % config.every == 0
        if due and iteration:  # iteration 0, before training, gets no checkpoint
            self._save(iteration, state())

    def save_last(self, iteration: int, state: Callable[[], dict[str, Any]]) -> None:
        """Write the checkpoint that a run ends with, unless this iteration already has one.

        Raises:
            CheckpointError: it cannot be written; names the iteration that the run would continue from.
        """
        # Iteration 0, before training, gets no checkpoint.
        if iteration > max(self._saved, 0) and (error := self._save(iteration, state())):
            next_start = (
                f"continues from iteration {self._saved}, the newest checkpoint"
                if self._saved >= 0
                else "begins again from iteration 0, as there is no checkpoint, and keeps what it finds in superseded/"
            )
            raise CheckpointError(f"{error}. Free space there and run the same command: it {next_start}") from error

    @property
    def _is_best(self) -> bool:
        """Tell whether the policy was evaluated in this iteration and is better than that of every checkpoint."""
        return self._value is not None and (self._best is None or self._value > self._best["accuracy"])

    def _save(self, iteration: int, state: dict[str, Any]) -> CheckpointError | None:
        """Write a checkpoint and prune older ones; return the error where it cannot be written, else None.

        A failure is counted and shown. The checkpoint of a best policy is then tried once more, at once.
        """
        config, is_best = self._components.config, self._is_best
        roles: list[Role] = [role for role in get_args(Role) if getattr(config, role) is not None]

        best = {"iteration": iteration, "accuracy": self._value} if is_best else self._best
        # Complete the state, of which the trainer has given its own part.
        state |= {
            "iteration": iteration,
            "best": best,
            "failed": self._folder.failed,
            "version": list(self._components.learner.version),
            "settings": config.model_dump_json(),
        }

        self._folder.flush(iteration)
        if error := self._try(iteration, roles, state, is_best):
            self._folder.failure(iteration, "checkpoint/failed", {"event": "checkpoint_failed", "why": str(error)})
            if is_best:  # try at once, since one iteration later the best policy no longer exists
                error = self._try(iteration, roles, state, is_best)
        self._overdue = error is not None
        if error:
            return error

        self._saved, self._best = iteration, best
        with self._folder.dispensable(iteration, "removal of old checkpoints"):
            self._checkpoints.prune()
        return None

    def _try(
        self, iteration: int, roles: Sequence[Role], state: dict[str, Any], is_best: bool
    ) -> CheckpointError | None:
        """Write a checkpoint; return the error where it cannot be written, else None."""
        learner, tokenizer = self._components.learner, self._components.tokenizer
        try:
            self._checkpoints.save(iteration, learner, roles, tokenizer, state, is_best)
        except CheckpointError as error:
            return error
        return None


def load_state(folder: Path) -> dict[str, Any]:
    """Read the state.pt of a checkpoint.

    Raises:
        CorruptCheckpoint: the file is missing or damaged, or is a pipe or device.
    """
    try:
        return torch.load(check_foreign(folder / "state.pt"), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no common error class; any error means that the file cannot be used
        raise CorruptCheckpoint(folder, "state.pt", f"cannot be read: {cause_of(error)}") from error


def config_of_run(model: str) -> Config | None:
    """Return the settings of the run if `model` is a run folder; None for a model's own folder or name."""
    folder = Path(model).expanduser()
    is_run = (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()
    return run_config(folder) if is_run else None


def resolve_model_path(model: str) -> str:
    """Return the path of a model: `model` itself, or for a run folder the path of its best policy.

    The best policy has the highest accuracy on the run's held-out problems (link `best`), and need not be the last one.
    Where no checkpoint is the best, or the best is corrupt, the policy of the newest intact checkpoint is returned.

    Raises:
        CheckpointError: the run has no checkpoint, or corrupt ones only.
    """
    config = config_of_run(model)
    if config is None:
        return model  # a model's folder or name, no run folder
    folder = Path(model).expanduser()
    try:
        if best := Checkpoints(folder / "checkpoints", config.checkpoint.keep).best():
            return str(best / "policy")
    except CorruptCheckpoint as error:
        _log.warning("%s; taking the newest checkpoint", error)
    return str(newest_checkpoint(folder, config).folder / "policy")


def _write_checksums(folder: Path, written: Mapping[str, Any]) -> None:
    """Write checksums.json, with size and SHA-256 of every file of a checkpoint.

    Args:
        written: the checksums that are known already, by the file's path in `folder`.
    """
    # The files in the folder and those in `written`: `_verify` then reports a written file that is missing.
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    checksums = {name: written.get(name) or checksum(folder / name) for name in sorted(names | written.keys())}
    (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")


def _verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its checksum.

    Raises:
        CheckpointError: a file is a link out of the folder, or a pipe or device.
        CorruptCheckpoint: the first file that differs, is missing or cannot be read.
    """
    name = _CHECKSUMS  # the file that is being read
    try:
        for name, written in parse_json(read_foreign(folder / _CHECKSUMS, inside=folder), dict).items():
            current, size = checksum(check_foreign(folder / name, inside=folder)), written.get("size")
            if current["size"] != size:
                raise CorruptCheckpoint(folder, name, f"has {current['size']} bytes, {size} were written")
            if current != written:
                raise CorruptCheckpoint(folder, name, "has changed since it was written")

    except ForeignFileError as error:  # the file is not damaged, so the checkpoint is not set aside
        raise CheckpointError(
            f"{error}. A checkpoint is read from files inside of its folder; copy them there"
        ) from error
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a checksum is no dict
        raise CorruptCheckpoint(folder, name, f"cannot be read: {cause_of(error)}") from error


def _flush(folder: Path, flushed: Collection[str]) -> None:
    """Flush a checkpoint to the disk before its folder gets the final name, all but the files that `flushed` names."""
    for path in folder.rglob("*"):
        if not path.is_file():
            flush_folder(path)
        elif path.relative_to(folder).as_posix() not in flushed:
            flush_file(path)
    flush_folder(folder)


def newest_checkpoint(run: Path, config: Config) -> Checkpoint:
    """Return the newest intact checkpoint of a run folder, with a warning for each corrupt one that is newer.

    Raises:
        CheckpointError: the run has no checkpoint, or corrupt ones only.
    """
    newest, corrupt = Checkpoints(run / "checkpoints", config.checkpoint.keep).find()
    for damage in corrupt:
        _log.warning("%s; taking the checkpoint before it", damage)

    if newest is None:
        raise CheckpointError(
            f"{run} has no checkpoint yet; the first is written at the first evaluation after training began, at the "
            f"latest at iteration {config.checkpoint.every}"
        )
    return newest
