"""Trains the runs of benchmarks/gpu_parts/runs.yaml on the virtual GPU and on the CPU, and compares their metrics."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_parts.runs import RUNS, differing, flat, train, train_twice

from jackpot.models.packed_flex import flex_kernel
from virtual_gpu import cuda


def compare(group: str, name: str, folder: Path) -> tuple[list[str], int]:
    """Train on both devices, and return the metrics that differ, and the waits of this process for the virtual GPU."""
    warnings.simplefilter("ignore")
    recipe, *overrides = flat(RUNS[group][name])
    overrides = ["head_kernel=eager", *RUNS["common"], *overrides]  # Triton's interpreter would take minutes
    drivers = {"flex": _train_with_flex, "resumed": train_twice, "two_ranks": _train_on_two_ranks}

    cuda.waits.take()
    drivers.get(group, train)(recipe, [*overrides, "device=cuda"], folder / "cuda")
    count = cuda.waits.take().total()
    train(recipe, [*overrides, "device=cpu"], folder / "cpu")
    return list(differing(folder / "cuda", folder / "cpu")), count


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


def _train_with_flex(recipe: str, overrides: list[str], folder: Path) -> None:
    with flex_attention():
        train(recipe, overrides, folder)


def _train_on_two_ranks(recipe: str, overrides: list[str], folder: Path) -> None:
    recipe, _, arm = recipe.partition(":")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command += ["jackpot", "train", recipe, *(["--arm", arm] if arm else []), *overrides, "--run", str(folder)]
    process = subprocess.run(
        command, env=os.environ | {"VIRTUAL_GPUS": "2"}, capture_output=True, text=True, timeout=300
    )
    if process.returncode:
        raise RuntimeError(process.stdout[-2000:] + process.stderr[-4000:])
