"""Keeps what a start replaces, in superseded/N of the run folder under its old name. Nothing reads or removes it."""

import itertools
from functools import cached_property
from pathlib import Path

from jackpot.core.files import write_whole


class Superseded:
    """Takes over files of a run folder that one start replaces; N is the first free number, from 1."""

    def __init__(self, run: Path) -> None:
        self._run = run

    @cached_property
    def folder(self) -> Path:
        """Return the folder of this start, which is made when it is first needed."""
        for number in itertools.count(1):
            folder = self._run / "superseded" / str(number)
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder

    def move(self, path: Path) -> None:
        """Move a file or folder of the run folder."""
        target = self.folder / path.relative_to(self._run)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)

    def keep(self, name: str, content: bytes) -> None:
        """Write what is about to be removed from the file of this name."""
        write_whole(self.folder / name, content)
