"""Trains the runs of runs.yaml on the virtual GPU and on the CPU, and compares their metrics."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jackpot
from helpers.runs import metrics, run
from jackpot.config.recipes import resolve
from jackpot.models.packed_flex import flex_kernel
from virtual_gpu import cuda

TOLERANCE = 1e-3  # of a metric in fp32, relative to the larger one, 0.01 at least
BIN = 0.03  # of percentiles, which are those of a histogram


def compare(group: str, arguments: list[str], folder: Path) -> tuple[list[str], int]:
    """Train on both devices, and return the metrics that differ, and the waits of this process for the virtual GPU."""
    warnings.simplefilter("ignore")
    cuda.waits.take()
    drivers = {"flex": _train_with_flex, "resumed": _train_twice, "two_ranks": _train_on_two_ranks}
    drivers.get(group, _train)([*arguments, "device=cuda"], folder / "cuda")
    count = cuda.waits.take().total()
    _train([*arguments, "device=cpu"], folder / "cpu")
    return list(_differing(folder / "cuda", folder / "cpu")), count


def _train(arguments: list[str], folder: Path) -> None:
    recipe, _, arm = arguments[0].partition(":")
    jackpot.train(recipe, *arguments[1:], folder=folder, arm=arm or None)


@contextmanager
def flex_attention() -> Iterator[None]:
    """Let flex attention run in the body, not compiled, which takes seconds for its first shapes."""
    cuda.traces = True
    flex_kernel.cache_clear()
    try:
        yield
    finally:
        cuda.traces = False
        flex_kernel.cache_clear()


def _train_with_flex(arguments: list[str], folder: Path) -> None:
    with flex_attention():
        _train(arguments, folder)


def _train_twice(arguments: list[str], folder: Path) -> None:
    recipe, _, arm = arguments[0].partition(":")
    run(resolve(recipe, arm or None, arguments[1:]), folder, kill_after=1)
    _train(arguments, folder)


def _train_on_two_ranks(arguments: list[str], folder: Path) -> None:
    recipe, _, arm = arguments[0].partition(":")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command += ["jackpot", "train", recipe, *(["--arm", arm] if arm else []), *arguments[1:], "--run", str(folder)]
    ended = subprocess.run(command, env=os.environ | {"VIRTUAL_GPUS": "2"}, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise RuntimeError(ended.stdout[-2000:] + ended.stderr[-4000:])


def _differing(folder: Path, other: Path) -> Iterator[str]:
    for line, same in zip(metrics(folder), metrics(other), strict=True):
        assert line.keys() == same.keys(), line.keys() ^ same.keys()
        for name, value in line.items():
            if not _is_close(value, same[name], BIN if "ratio_p" in name else TOLERANCE):
                yield f"{name} of iteration {line['iteration']}: {value}, on the CPU {same[name]}"


def _is_close(value: Any, other: Any, tolerance: float) -> bool:
    if isinstance(value, float | int) and isinstance(other, float | int):
        return abs(value - other) <= tolerance * max(abs(value), abs(other), 0.01)
    return value == other
