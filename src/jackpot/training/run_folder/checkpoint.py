"""Write and read checkpoints: each one on the disk is complete, or is known not to be.

    checkpoints/step-N/{policy,rollout_model,critic}/   plain save_pretrained folders
    checkpoints/step-N/moments/ROLE.safetensors         moments of the optimizers
    checkpoints/step-N/state.pt                         versions, prompt stream, best; loaded with weights_only
    checkpoints/step-N/checksums.json                   size and sha256 of every other file
    checkpoints/last, checkpoints/best           links to one of them
    checkpoints/step-N.corrupt                   put there by `set_aside`; nothing reads or removes it

N counts iterations. A checkpoint is written under another name and renamed when every byte is on the disk, so a killed
run leaves either all of it or a `.partial` folder that the next start removes. Checksums detect later damage.

Of several ranks each writes a part of weights and moments, ROLE-0000R-of-0000N.safetensors, and finds its checksums
(`models.parts`). Rank 0 writes the rest, last of it checksums.json, and renames the folder when all ranks have written.

Status: supported.
"""

import itertools
import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.config.arms import build_config
from jackpot.config.changes import fixed_changes, settings_of
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError, ConfigError, RankError
from jackpot.core.files import PARTIAL, cause_of, checkpoint_error_in, checksum, flush_file, flush_folder
from jackpot.core.roles import Role
from jackpot.training.learner import Learner

_CHECKSUMS = "checksums.json"
_CORRUPT = ".corrupt"


class CorruptCheckpoint(CheckpointError):
    """Names the file of a checkpoint that differs from what was written, and says how."""

    def __init__(self, folder: Path, file: str, why: str) -> None:
        super().__init__(f"{folder / file} {why}")
        self.folder, self.file, self.why = folder, file, why


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Names an intact checkpoint, every file of which matches its checksum."""

    folder: Path
    state: dict[str, Any]  # content of state.pt

    def check_settings(self, config: Config) -> None:
        """Refuse to continue from the checkpoint of a run with other settings.

        Raises:
            CheckpointError: settings that decide its numbers differ; lists them.
        """
        try:
            old = settings_of(build_config(json.loads(self.state["settings"])))
        except ConfigError as error:
            raise CheckpointError(
                f"the settings in {self.folder / 'state.pt'} do not fit this version:\n{error}\nContinue the run with "
                f"the version that began it, or give --run another folder"
            ) from error
        if differing := fixed_changes(Config, old, settings_of(config)):
            listed = "\n  ".join(map(str, differing))
            raise CheckpointError(
                f"{self.folder} is of another run:\n  {listed}\nPut this run's own checkpoints back, or give --run "
                f"another folder"
            )


class Checkpoints:
    """Writes, finds and prunes the checkpoints of one run; the `keep` newest ones stay, and the best."""

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
            CheckpointError: it cannot be written. Earlier checkpoints are untouched.
            RankError: a rank that holds a part of the models is lost, and the run with it.
        """
        place = self._place(iteration)
        partial = place.with_name(place.name + PARTIAL)
        try:
            if not place.exists():  # else what comes after the rename failed
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                written = learner.save(partial, roles)
                for role in roles:
                    tokenizer.save_pretrained(partial / role)
                with (partial / "state.pt").open("wb") as file:
                    torch.save(state | {"learner": learner.state_dict()}, file)
                _write_checksums(partial, written)
                _flush(partial, written)
                partial.rename(place)
            flush_folder(self._folder)
            self._link("last", place)
            if is_best:
                self._link("best", place)
        except Exception as error:  # torch, safetensors and tokenizers each have another error for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, RankError):
                raise
            raise CheckpointError(f"cannot write the checkpoint {place}: {cause_of(error)}") from error

    def find(self) -> tuple[Checkpoint | None, list[CorruptCheckpoint]]:
        """Return the newest intact checkpoint, and the corrupt ones that are newer. Changes nothing on the disk.

        Raises:
            CheckpointError: the run has checkpoints, and all are corrupt.
        """
        corrupt: list[CorruptCheckpoint] = []
        for folder in reversed(self._steps()):
            try:
                _verify(folder)
                return Checkpoint(folder, load_state(folder)), corrupt
            except CorruptCheckpoint as error:
                corrupt.append(error)
        damage = [*map(str, corrupt), *(f"{path}, set aside" for path in self._folder.glob(f"step-*{_CORRUPT}*"))]
        if damage:
            listed = "\n  ".join(damage)
            raise CheckpointError(
                f"every checkpoint of this run is corrupt:\n  {listed}\nBring one back from a copy, or give --run "
                f"another folder; to begin this run again from nothing, remove {self._folder}"
            )
        return None, []

    def newest_until(self, iteration: int) -> int | None:
        """Return the iteration of the newest intact checkpoint up to `iteration`; None without one."""
        numbers = (number for folder in self.intact()[0] if (number := _iteration_of(folder)) <= iteration)
        return max(numbers, default=None)

    def after(self, iteration: int) -> list[Path]:
        """List the folders of finished checkpoints after `iteration`, newest first."""
        return [folder for folder in reversed(self._steps()) if _iteration_of(folder) > iteration]

    def best(self) -> Path | None:
        """Return the folder of the best checkpoint; None before there is one. Changes nothing on the disk.

        Raises:
            CorruptCheckpoint: it differs from what was written.
        """
        folder = (self._folder / "best").resolve()
        if not folder.is_dir():
            return None
        _verify(folder)
        return folder

    def intact(self) -> tuple[list[Path], list[CorruptCheckpoint]]:
        """Return every intact checkpoint, oldest first, and the corrupt ones. Changes nothing on the disk."""
        found: list[Path] = []
        corrupt: list[CorruptCheckpoint] = []
        for folder in self._steps():
            try:
                _verify(folder)
                found.append(folder)
            except CorruptCheckpoint as error:
                corrupt.append(error)
        return found, corrupt

    def set_aside(self, folder: Path) -> None:
        """Rename a corrupt checkpoint to step-N.corrupt, so that it is no longer found or counted."""
        names = (f"{folder.name}{_CORRUPT}{number or ''}" for number in itertools.count())
        folder.rename(next(place for name in names if not (place := folder.with_name(name)).exists()))

    def restore_links(self, best: dict[str, float] | None) -> dict[str, float] | None:
        """Point the links `last` and `best` where they belong, in case a kill came before they were written.

        Returns:
            `best` if its checkpoint still exists, else None.

        Raises:
            CheckpointError: a link cannot be written.
        """
        kept = best if best and self._place(best["iteration"]).is_dir() else None
        with checkpoint_error_in(self._folder):
            self._link("last", self._steps()[-1])
            if kept:
                self._link("best", self._place(kept["iteration"]))
            else:
                (self._folder / "best").unlink(missing_ok=True)
        return kept

    def prune(self) -> None:
        """Remove checkpoints that are neither new nor best, then what `remove_unfinished` does."""
        best = self._folder / "best"
        kept = {path.name for path in self._steps()[-self._keep :]}
        if best.is_symlink():
            kept.add(best.readlink().name)
        for path in self._steps():
            if path.name not in kept:  # rename first, so that no checkpoint is ever seen half removed
                path.rename(path.with_name(f"{path.name}.old{PARTIAL}"))
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Remove checkpoints that a kill left half written or half removed."""
        for path in self._folder.glob(f"step-*{PARTIAL}"):
            if re.fullmatch(rf"step-\d+(\.old)?{re.escape(PARTIAL)}", path.name):
                shutil.rmtree(path)

    def _place(self, iteration: float) -> Path:
        return self._folder / f"step-{int(iteration)}"

    def _steps(self) -> list[Path]:
        """List the folders of finished checkpoints, oldest first."""
        names = (path for path in self._folder.glob("step-*") if path.name.removeprefix("step-").isdigit())
        return sorted(names, key=_iteration_of)

    def _link(self, name: str, target: Path) -> None:
        link, new = self._folder / name, self._folder / f".{name}"
        if link.is_symlink() and link.readlink().name == target.name:
            return  # nothing to write, and the disk may be full
        new.unlink(missing_ok=True)
        new.symlink_to(target.name)
        new.replace(link)


def _iteration_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def load_state(folder: Path) -> dict[str, Any]:
    """Read the state.pt of a checkpoint.

    Raises:
        CorruptCheckpoint: the file is missing or damaged.
    """
    try:
        return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no common error class; any error means that the file cannot be used
        raise CorruptCheckpoint(folder, "state.pt", f"cannot be read: {cause_of(error)}") from error


def _write_checksums(folder: Path, known: Mapping[str, Any]) -> None:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    checksums = {name: known.get(name) or checksum(folder / name) for name in sorted(names | known.keys())}
    (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")


def _verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its checksum.

    Raises:
        CorruptCheckpoint: the first file that differs.
    """
    name = _CHECKSUMS
    try:
        for name, written in json.loads((folder / _CHECKSUMS).read_text()).items():
            found, size = checksum(folder / name), written.get("size")
            if found["size"] != size:
                raise CorruptCheckpoint(folder, name, f"has {found['size']} bytes, {size} were written")
            if found != written:
                raise CorruptCheckpoint(folder, name, "has changed since it was written")
    except (OSError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(folder, name, f"cannot be read: {cause_of(error)}") from error


def _flush(folder: Path, done: Collection[str]) -> None:
    """Flush everything in `folder` but the files `done` to the disk, before the folder gets its final name."""
    for path in folder.rglob("*"):
        if not path.is_file():
            flush_folder(path)
        elif path.relative_to(folder).as_posix() not in done:
            flush_file(path)
    flush_folder(folder)
