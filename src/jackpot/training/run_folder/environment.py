"""The file environment.json, which records program, packages and machine of each start, and the run's CPU threads.

A start reports what differs from the start before, as the file has it, and a continued run keeps its number of threads.
"""

import json
import os
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

from jackpot.core.errors import CheckpointError
from jackpot.core.files import write_whole
from jackpot.core.foreign import parse_json, read_foreign
from jackpot.core.package import version
from jackpot.core.process_rank import process_rank

FORMAT = 2  # version of the run folder's format; a format that older programs cannot continue gets a higher version


class Environment:
    """The content of environment.json: {"format", "threads", "starts": one entry for each start, oldest first}.

    Args:
        run: the run folder; a new run folder has no environment.json.

    Raises:
        CheckpointError: the file is damaged, or of a later format.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / "environment.json"
        self._content = _read(self._path)

    @property
    def threads(self) -> int | None:
        """Return the number of CPU threads that the run began with; None for a new run."""
        return self._content["threads"]

    @property
    def newest(self) -> dict[str, Any]:
        """Return what the file records of the newest start: versions and machine; an empty dict for a new run."""
        starts = self._content["starts"]
        return dict(starts[-1]) if starts else {}

    def add_start(self, iteration: int, threads: int) -> dict[str, tuple[Any, Any]]:
        """Append the start of this process, which continues after `iteration` (-1: a new run), and write the file.

        Returns:
            Differences from the previous start, (previous, current) by name; empty for the first start.
        """
        previous, current = self.newest, _environment()
        start = {"time": time.time(), "after_iteration": iteration} | current
        self._content = {"format": FORMAT, "threads": threads, "starts": [*self._content["starts"], start]}
        write_whole(self._path, json.dumps(self._content, indent=2).encode() + b"\n")
        if not previous:
            return {}
        return {name: (previous.get(name), value) for name, value in current.items() if previous.get(name) != value}


def _read(path: Path) -> dict[str, Any]:
    """Read environment.json, or return the content of a new run's file where there is none.

    Raises:
        CheckpointError: the file cannot be read, is of a later version, or lacks threads or starts.
    """
    try:
        content = parse_json(read_foreign(path, inside=path.parent))
    except FileNotFoundError:
        return {"format": FORMAT, "threads": None, "starts": []}
    except (OSError, ValueError) as error:  # a JSON error names line and column
        raise CheckpointError(
            f"{path} cannot be read: {error}. Bring it back from a copy; without the file the run continues too, but "
            f"with another number of threads perhaps, and then not bit-equal"
        ) from error

    written = content.get("format", FORMAT) if isinstance(content, dict) else None
    if isinstance(written, int) and written > FORMAT:
        # The version of the newest start, "a later version" where the file does not say it.
        by = (content.get("starts") or [{}])[-1].get("jackpot", "a later version")
        raise CheckpointError(
            f"{path.parent} has the format {written} of jackpot {by}, and this version ({version()}) knows formats up "
            f"to {FORMAT}; use that version, or give another folder"
        )

    # What `add_start` writes: a number of threads, and a list with a dict for each start.
    if isinstance(content, dict) and isinstance(content.get("threads"), int):
        starts = content.get("starts")
        if isinstance(starts, list) and all(isinstance(start, dict) for start in starts):
            return content

    raise CheckpointError(
        f"{path} is not the file that jackpot writes there: threads or starts are missing; give another folder"
    )


def _environment() -> dict[str, Any]:
    """Return the versions of program and packages, and the machine, of this process."""
    import torch
    import transformers

    return {
        "jackpot": version(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "ranks": process_rank().size,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@cache
def commit(file: str = __file__) -> str | None:
    """Return the git commit that a file of the package belongs to, with `-dirty` where files have changed since.

    Return None where git does not know the file, as in an installed package, or where there is no git.
    """
    git = ["git", "-C", str(Path(file).parent)]
    # With these arguments, git names the commit by all its 40 digits, and by no tag.
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file], capture_output=True, timeout=10.0, check=True)
        described = subprocess.run(
            [*git, "--no-optional-locks", *describe], capture_output=True, text=True, timeout=10.0, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
