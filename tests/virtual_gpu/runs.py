"""Trains the runs of runs.yaml on the virtual GPU and on the CPU, and compares their metrics."""

import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jackpot
from helpers.runs import metrics
from virtual_gpu.cuda import waits


class Outcome(NamedTuple):
    """What a run on the virtual GPU was like."""

    gap: float  # the largest relative difference of a metric from that on the CPU
    metric: str
    hazards: list[str]
    waits: int


def compare(group: str, arguments: list[str], folder: Path) -> Outcome:
    """Train on both devices."""
    warnings.simplefilter("ignore")
    waits.seen.clear()
    drivers = {"resumed": _train_twice, "two_ranks": _train_on_two_ranks}
    drivers.get(group, _train)([*arguments, "device=cuda"], folder / "cuda")
    hazards, count = waits.take("hazard"), waits.count()
    _train([*arguments, "device=cpu"], folder / "cpu")
    gap, metric = max(_gaps(folder / "cuda", folder / "cpu"))
    return Outcome(gap, metric, hazards, count)


def _train(arguments: list[str], folder: Path) -> None:
    recipe, _, arm = arguments[0].partition(":")
    jackpot.train(recipe, *arguments[1:], folder=folder, arm=arm or None)


def _train_twice(arguments: list[str], folder: Path) -> None:
    _train([*arguments, "iterations=1"], folder)
    _train(arguments, folder)


def _train_on_two_ranks(arguments: list[str], folder: Path) -> None:
    recipe, _, arm = arguments[0].partition(":")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "-m", "--"]
    command += ["jackpot", "train", recipe, *(["--arm", arm] if arm else []), *arguments[1:], "--run", str(folder)]
    ended = subprocess.run(command, env=os.environ | {"VIRTUAL_GPUS": "2"}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stdout[-2000:] + ended.stderr[-4000:])


def _gaps(run: Path, other: Path) -> Iterator[tuple[float, str]]:
    """Yield how far apart the metrics of two runs are, relative to the larger one, 0.01 at least."""
    for line, same in zip(metrics(run), metrics(other), strict=True):
        assert line.keys() == same.keys(), line.keys() ^ same.keys()
        for name, value in line.items():
            yield _gap(value, same[name]), f"{name} of iteration {line['iteration']}: {value}, {same[name]}"


def _gap(value: Any, other: Any) -> float:
    if value == other:
        return 0.0
    if not isinstance(value, float | int) or not isinstance(other, float | int):
        return math.inf
    return abs(value - other) / max(abs(value), abs(other), 0.01)
