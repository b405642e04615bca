"""A process that has the virtual GPU, and works for a test whose own process has none."""

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from site import addsitedir
from typing import Any

import pytest

HERE = Path(__file__).parent


class VirtualGpu:
    """A process with the device of a built library; `folder` is for what it notes."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._hazards = folder / "hazards"
        root = HERE.parents[1]
        spawn, more = multiprocessing.get_context("spawn"), (str(root / "benchmarks"),)
        self._pool = ProcessPoolExecutor(1, spawn, initializer=addsitedir, initargs=more)
        folders = [library.parent, HERE / "site", HERE.parent, root / "src"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VIRTUAL_GPU_HAZARDS", str(self._hazards))
            patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
            self._pool.submit(int).result()

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Return what a function gives in the process, such as "mixes.not_refused"; it raises what that raises."""
        return self._pool.submit(_call, function, *arguments).result()

    def hazards(self) -> list[str]:
        """Return what has been written early since the last call, in this process and those that it started."""
        lines = self._hazards.read_text().splitlines() if self._hazards.exists() else []
        self._hazards.unlink(missing_ok=True)
        return lines

    def close(self) -> None:
        self._pool.shutdown()


def _call(function: str, *arguments: Any) -> Any:
    module, _, name = function.partition(".")
    return getattr(importlib.import_module(f"virtual_gpu.{module}"), name)(*arguments)
