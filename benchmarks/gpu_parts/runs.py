"""Trains small runs on the GPU and on the CPU, and compares their metrics: corrections, objectives, regimes, formats.

Each has two iterations or so. In fp32 all metrics must be equal to rounding; in bf16, FP8 and INT8 a run must end, with
finite metrics, as a GPU samples other tokens.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_parts.machine import Machine
from gpu_parts.results import Result, Row

import jackpot
from jackpot.config.recipes import resolve
from jackpot.launch.start import train_run

RUNS = yaml.safe_load(Path(__file__).with_name("runs.yaml").read_text())
GROUPS = ("equal", "flex", "resumed", "rounded")  # two_ranks take a GPU each
MOST_AT_ONCE = 12
TOLERANCE = 1e-3  # of a metric in fp32, relative to the larger one, 0.01 at least
BIN = 0.03  # of percentiles, which are those of a histogram
CLOCKS = ("seconds/", "cpu_seconds/", "speed/")


class Stopped(Exception):
    """Ends a run at the iteration at which it is resumed."""


def rows(machine: Machine) -> list[Row]:
    names = [(group, name) for group in GROUPS for name in RUNS[group]]
    names = names[:2] if machine.tiny else names
    return [Row(name, partial(result_of, machine, tuple(names), group, name), 150.0) for group, name in names]


def result_of(machine: Machine, names: tuple[tuple[str, str], ...], group: str, name: str) -> Result:
    return _futures(machine.device.type, names)[group, name].result()


@cache
def _futures(device: str, names: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Future[Result]]:
    """Begin all runs, several at once."""
    workers = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) - 2, len(names)))
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # of the processes that begin now
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    return {key: pool.submit(compare, device, *key) for key in names}


def compare(device: str, group: str, name: str) -> Result:
    """Train a run on the device and on the CPU, and count the metrics that differ, or are not finite.

    Raises:
        RuntimeError: the run ended with an error, of whatever kind: not all of them can be sent between processes.
    """
    warnings.simplefilter("ignore")
    try:
        return _compare(device, group, name)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _compare(device: str, group: str, name: str) -> Result:
    recipe, *overrides = flat(RUNS[group][name])
    overrides = [*RUNS["common"], *overrides]

    with tempfile.TemporaryDirectory() as home:
        folder, other = Path(home, "device"), Path(home, "cpu")
        drive = train_twice if group == "resumed" else train
        drive(recipe, [*overrides, f"device={device}"], folder)
        lines = metrics(folder)
        memory = {"GB": torch.cuda.max_memory_reserved() / 1e9} if device == "cuda" else {}
        if group == "rounded":
            is_finite = all(_is_finite(value) for line in lines for value in line.values())
            return {"metrics": len(lines[-1]), "differ": "", "right": is_finite} | memory

        train(recipe, [*overrides, "device=cpu", "head_kernel=eager"], other)
        differences = list(differing(folder, other))
        result = {"metrics": len(lines[-1]), "differ": len(differences), "right": not differences} | memory
        return result | ({"first": differences[0]} if differences else {})


def flat(items: list) -> list[str]:
    return [text for item in items for text in (flat(item) if isinstance(item, list) else [item])]


def train(recipe: str, overrides: list[str], folder: Path) -> None:
    recipe, _, arm = recipe.partition(":")
    jackpot.train(recipe, *overrides, folder=folder, arm=arm or None)


def train_twice(recipe: str, overrides: list[str], folder: Path) -> None:
    """Train to the first iteration, and once more to the end."""

    def stop(line: dict[str, Any]) -> None:
        if line["iteration"] == 1:
            raise Stopped

    name, _, arm = recipe.partition(":")
    try:
        train_run(resolve(name, arm or None, overrides), folder, stop)
    except Stopped:
        train(recipe, overrides, folder)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what a clock says."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key != "time" and not key.startswith(CLOCKS)} for line in lines
    ]


def differing(folder: Path, other: Path) -> Iterator[str]:
    """Yield a line for every metric that two runs do not share up to rounding."""
    for line, same in zip(metrics(folder), metrics(other), strict=True):
        if line.keys() != same.keys():
            yield f"metrics of one run alone: {sorted(line.keys() ^ same.keys())}"
        for name in line.keys() & same.keys():
            if not _is_close(line[name], same[name], BIN if "ratio_p" in name else TOLERANCE):
                yield f"{name} of iteration {line['iteration']}: {line[name]}, on the CPU {same[name]}"


def _is_close(value: Any, other: Any, tolerance: float) -> bool:
    if isinstance(value, float | int) and isinstance(other, float | int):
        return abs(value - other) <= tolerance * max(abs(value), abs(other), 0.01)
    return value == other


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
