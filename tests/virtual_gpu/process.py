"""A process that has the virtual GPU, and works for a test whose own process has none."""

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class VirtualGpu:
    """A process with the device that is built there."""

    def __init__(self, library: Path) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        folders = [HERE / "site", HERE.parent, HERE.parents[1] / "src", HERE.parents[1] / "benchmarks"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VIRTUAL_GPU", str(library))
            patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
            self._pool.submit(int).result()

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Return what a function gives in the process, such as "mixes.not_refused"; it raises what that raises."""
        return self._pool.submit(_call, function, *arguments).result()

    def close(self) -> None:
        self._pool.shutdown()


def _call(function: str, *arguments: Any) -> Any:
    module, _, name = function.partition(".")
    return getattr(importlib.import_module(f"virtual_gpu.{module}"), name)(*arguments)
