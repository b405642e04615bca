"""Checkpoints: whole or not there. Layer 5.

    checkpoints/step-N/{policy,rollout_model}/   plain save_pretrained folders
    checkpoints/step-N/state.pt                  optimizers, versions, prompt stream, best; loaded with weights_only
    checkpoints/last, checkpoints/best           links to one of them

N counts iterations. A checkpoint is written beside its place and renamed when every byte is on the disk, so a killed
run leaves either the whole of it or a `.partial` folder that the next save removes.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.errors import CheckpointError
from jackpot.learner import Learner
from jackpot.types import Role

_PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run; `keep` newest ones stay, and the best."""

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
    ) -> Path:
        """Write step-`iteration`, move the links, remove what is neither new nor best."""
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / f"step-{iteration}"
        partial = place.with_name(place.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        for role in roles:
            learner.save_model(role, partial / role)
            tokenizer.save_pretrained(partial / role)
        torch.save(state | {"learner": learner.state_dict()}, partial / "state.pt")
        _flush(partial)
        if place.exists():
            self._remove(place)
        partial.rename(place)
        _flush_folder(self._folder)
        self._link("last", place)
        if is_best:
            self._link("best", place)
        self._prune()
        return place

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        steps = self._steps()
        return steps[-1] if steps else None

    def restore_links(self, best: int | None) -> None:
        """Point `last` and `best` where they belong, should a kill have come between a checkpoint and its links."""
        if newest := self.latest():
            self._link("last", newest)
        if best is not None and (place := self._folder / f"step-{best}").is_dir():
            self._link("best", place)

    def _steps(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        names = (path for path in self._folder.glob("step-*") if path.name.removeprefix("step-").isdigit())
        return sorted(names, key=lambda path: int(path.name.removeprefix("step-")))

    def _link(self, name: str, target: Path) -> None:
        new = self._folder / f".{name}"
        new.unlink(missing_ok=True)
        new.symlink_to(target.name)
        new.replace(self._folder / name)

    def _prune(self) -> None:
        best = self._folder / "best"
        kept = {path.name for path in self._steps()[-self._keep :]}
        if best.is_symlink():
            kept.add(best.readlink().name)
        for path in self._steps():
            if path.name not in kept:
                self._remove(path)
        for path in self._folder.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(path)

    def _remove(self, place: Path) -> None:
        """Take the name away first: a checkpoint is whole or not there, while it goes as well."""
        doomed = place.with_name(f"{place.name}.old{_PARTIAL}")
        place.rename(doomed)
        shutil.rmtree(doomed)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state.pt` of a checkpoint.

    Raises:
        CheckpointError: missing or damaged.
    """
    path = folder / "state.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no common error class; whatever it says, this file cannot be used
        raise CheckpointError(
            f"cannot read {path}: {type(error).__name__}: {error}. Remove the folder {folder} to continue from the "
            f"checkpoint before it"
        ) from error


def _flush(folder: Path) -> None:
    """Have every file below `folder` on the disk before anybody can see it under its name."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
