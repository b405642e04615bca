"""Small real runs for tests: the quickstart's models and task, few sequences."""

import contextlib
import fcntl
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.launch.start import train_run
from jackpot.models.cost import ForwardCost
from jackpot.training.run_folder.checkpoint import load_state
from jackpot.training.trainer import MetricsLine

SMALL = (
    "iterations=4",
    "batch.prompts=4",
    "batch.group_size=4",
    "sampling.max_new_tokens=24",
    "evaluation.every=2",
    "evaluation.problems=8",
    "checkpoint.every=2",
    "threads=1",
)

SHORT = "sampling.max_new_tokens=8"  # most of a small run is decoding; for tests to which answers do not matter
BRIEF = (SHORT, "evaluation.every=4", "evaluation.problems=2")  # a kill after 3 leaves the checkpoint of 2

COST = ForwardCost(per_token=1, per_pair=0)  # then FLOPs are tokens read


def small_config(*overrides: str, arm: str | None = None) -> Config:
    """Return the quickstart's settings with those of `SMALL` and further ones."""
    return resolve("quickstart", arm, [*SMALL, *overrides])


class Killed(BaseException):
    """Ends a run as abruptly as an exception can: no checkpoint, nothing closed."""


def run(config: Config, folder: Path, kill_after: int | None = None) -> list[MetricsLine]:
    """Train until the end, or until the line of iteration `kill_after` is written; return the lines of metrics."""
    lines: list[MetricsLine] = []

    def listen(line: MetricsLine) -> None:
        lines.append(line)
        if line["iteration"] == kill_after:
            raise Killed

    with contextlib.suppress(Killed):
        train_run(config, folder, listen)
    return lines


def run_and_copy(config: Config, folder: Path, copy: Path, after: int) -> None:
    """Train until the end; `copy` is the folder as a kill leaves it once the line of iteration `after` is written."""

    def listen(line: MetricsLine) -> None:
        if line["iteration"] == after:
            shutil.copytree(folder, copy, symlinks=True)

    train_run(config, folder, listen)


class FinishedRuns:
    """Trains each small run that tests only read once, for all tests and all processes of the session.

    Args:
        home: the folder of the runs; processes that name the same one share them.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        home.mkdir(parents=True, exist_ok=True)

    def __call__(self, *overrides: str, arm: str | None = None, kill_after: int | None = None) -> Path:
        """Return the folder of `run(small_config(*overrides, arm=arm), folder, kill_after)`. Nothing may change it."""
        config = small_config(*overrides, arm=arm)
        name = hashlib.sha256(f"{config.model_dump_json()} {kill_after}".encode()).hexdigest()[:16]
        folder = self._home / name
        with (self._home / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process trains it: wait
            if not folder.exists():
                unfinished = self._home / f"{name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                run(config, unfinished, kill_after)
                unfinished.rename(folder)
        return folder

    def copy(self, folder: Path, *overrides: str, arm: str | None = None, kill_after: int | None = None) -> Path:
        """Copy such a run to `folder`, for a test that changes or continues it."""
        source = self(*overrides, arm=arm, kill_after=kill_after)
        return shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return what every file in a folder holds, and where every link leads; the lock says who took it last."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.name != ".lock"}
    links = {name: str(path.readlink()) for name, path in paths.items() if path.is_symlink()}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()} | links


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, role: str) -> dict[str, Any]:
    """Return the tensors of a model in the newest checkpoint."""
    files = (folder / "checkpoints" / "last" / role).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what a clock says."""
    return [
        {
            key: value
            for key, value in line.items()
            if key != "time" and not key.startswith(("seconds/", "cpu_seconds/", "speed/"))
        }
        for line in read_lines(folder)
    ]


def assert_same_run(first: Path, second: Path, roles: list[str]) -> None:
    """Weights, metrics and the saved rollouts of two runs are equal to the bit."""
    for role in roles:
        first_weights, second_weights = weights(first, role), weights(second, role)
        assert first_weights.keys() == second_weights.keys()
        assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)
    assert metrics(first) == metrics(second)

    first_files, second_files = (
        sorted(path.name for path in (run / "rollouts").glob("*.parquet")) for run in (first, second)
    )
    assert first_files
    assert first_files == second_files
    for name in first_files:
        assert pq.read_table(first / "rollouts" / name) == pq.read_table(second / "rollouts" / name)


def assert_equal(first, second) -> None:
    """Nested containers are equal, and the tensors in them to the bit."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_equal(first[name], second[name])
    elif isinstance(first, list | tuple):
        for first_item, second_item in zip(first, second, strict=True):
            assert_equal(first_item, second_item)
    else:
        assert first == second


def saved(run: Path) -> tuple[dict[str, bytes | str], list[dict]]:
    """Return the files of all checkpoints, and what is in the state.pt of each: equal ones may have other bytes."""
    files, states = contents(run / "checkpoints"), []
    for name in [name for name in files if name.endswith("state.pt")]:
        states.append(load_state((run / "checkpoints" / name).parent))
        del files[name], files[name.replace("state.pt", "checksums.json")]
    return files, states
