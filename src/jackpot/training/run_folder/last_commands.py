"""Keeps what each rank was last commanded to do in ranks/R.json of the run folder, for the error when one is lost."""

import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any


class LastCommand:
    """Writes the newest command of one rank; does without the file where it cannot be written.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self._path = run / "ranks" / f"{rank}.json"
        self._facts: dict[str, Any] = {"rank": rank, "host": platform.node(), "pid": os.getpid()}
        self.number, self.name = 0, "none"
        self._write("waits")

    def begin(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self._write("runs")

    def end(self) -> None:
        self._write("done")

    def fail(self, error: BaseException) -> None:
        why = str(error).strip().partition("\n")[0]
        self._write("failed", error=f"{type(error).__name__}: {why}")

    def __str__(self) -> str:
        return f"command {self.number} ({self.name})"

    def _write(self, state: str, **more: Any) -> None:
        facts = self._facts | {"number": self.number, "command": self.name, "state": state, "time": time.time()} | more
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(facts) + "\n")
            partial.replace(self._path)


def describe(run: Path, size: int) -> str:
    """Say what each rank of a run was last commanded to do, from ranks/R.json."""
    return "; ".join(_sentence(run / "ranks" / f"{rank}.json", rank) for rank in range(size))


def _sentence(path: Path, rank: int) -> str:
    try:
        facts = json.loads(path.read_text())
        ago = f"{max(0.0, time.time() - facts['time']):.0f} s ago"
        of = f"rank {rank} (process {facts['pid']} on {facts['host']})"
        if facts["state"] == "waits":
            return f"{of} has had no command"
        what = f"command {facts['number']} ({facts['command']})"
        if facts["state"] == "failed":
            return f"{of} failed in {what} {ago}: {facts['error']}"
        return f"{of} {'began' if facts['state'] == 'runs' else 'finished'} {what} {ago}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"rank {rank} has left no ranks/{rank}.json"
