"""A process that has the virtual GPU, and works for a test whose own process has none."""

import importlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 600  # that a function may take


class VirtualGpu:
    """A process with the device of a built library; `folder` is for what it notes."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._hazards = folder / "hazards"
        root = HERE.parents[1]
        folders = list(map(str, (library.parent, HERE / "site", HERE.parent, root / "src", root / "benchmarks")))
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=(folders,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VIRTUAL_GPU_HAZARDS", str(self._hazards))
            patch.setenv("PYTHONPATH", os.pathsep.join(folders))
            self._pool.submit(int).result()

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Return what a function gives in the process, such as "mixes.not_refused"; it raises what that raises, and
        TimeoutError where it does not end."""
        return self._pool.submit(_call, function, *arguments).result(SECONDS)

    def hazards(self) -> list[str]:
        """Return what has been written early since the last call, in this process and those that it started."""
        lines = self._hazards.read_text().splitlines() if self._hazards.exists() else []
        self._hazards.unlink(missing_ok=True)
        return lines

    def close(self) -> None:
        for process in self._pool._processes.values():  # one that hangs too
            process.kill()


def _begin(folders: list[str]) -> None:
    sys.path[:0] = folders  # multiprocessing has replaced it, and engines in processes of their own get it


def _call(function: str, *arguments: Any) -> Any:
    module, _, name = function.partition(".")
    return getattr(importlib.import_module(f"virtual_gpu.{module}"), name)(*arguments)
