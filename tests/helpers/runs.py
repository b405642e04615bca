"""Small real runs for tests: the quickstart's models and task, few sequences."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from jackpot.config.recipes import resolve
from jackpot.config.run import Config
from jackpot.launch.local import launch
from jackpot.models.cost import ForwardCost
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

COST = ForwardCost(per_token=1, per_pair=0)  # then FLOPs are tokens read


def small_config(*overrides: str, arm: str | None = None) -> Config:
    return resolve("quickstart", arm, [*SMALL, *overrides])


class Killed(BaseException):
    """Ends a run as abruptly as an exception can: no checkpoint, nothing closed."""


def run(config: Config, folder: Path, kill_after: int | None = None) -> list[MetricsLine]:
    """Train until the end, or until the line of iteration `kill_after` is written; the lines seen."""
    lines: list[MetricsLine] = []

    def listen(line: MetricsLine) -> None:
        lines.append(line)
        if line["iteration"] == kill_after:
            raise Killed

    with contextlib.closing(launch(config, folder, listen)) as trainer, contextlib.suppress(Killed):
        trainer.train()
    return lines


def run_and_copy(config: Config, folder: Path, copy: Path, after: int) -> None:
    """Train until the end; `copy` is the folder as a kill leaves it once the line of iteration `after` is written."""

    def listen(line: MetricsLine) -> None:
        if line["iteration"] == after:
            shutil.copytree(folder, copy, symlinks=True)

    with contextlib.closing(launch(config, folder, listen)) as trainer:
        trainer.train()


def weights(folder: Path, role: str) -> dict[str, Any]:
    """The tensors of the newest checkpoint."""
    return load_file(folder / "checkpoints" / "last" / role / "model.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in line.items()
            if key != "time" and not key.startswith(("seconds/", "cpu_seconds/", "speed/"))
        }
        for line in lines
    ]


def assert_same_run(first: Path, second: Path, roles: list[str]) -> None:
    """Weights, metrics and the saved rollouts of a run of four iterations."""
    for role in roles:
        ours, theirs = weights(first, role), weights(second, role)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(first) == metrics(second)
    for name in ("iteration-000001.parquet", "iteration-000004.parquet"):
        assert pq.read_table(first / "rollouts" / name) == pq.read_table(second / "rollouts" / name)
