"""Kills a real run again and again with SIGKILL, at random moments, until it has been killed often enough.

A fork server imports everything once, so that a life costs a fraction of a second. Half of the kills come at a moment
drawn uniformly from a whole life, the others while a checkpoint is written, its links are moved or old ones removed.
"""

import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from jackpot.checkpoint import Checkpoints
from jackpot.config import Config
from jackpot.models.load import load_model
from jackpot.telemetry import RunFolder
from runs import run, small_config

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
load_model("starter:policy", torch.float32)  # in the fork server: what transformers imports late


def soak_config(kills: int) -> Config:
    """A run of short iterations that cannot end before it was killed often enough: a life gets two or three done."""
    return small_config(
        f"iterations={4 * kills}",
        "batch.prompts=2",
        "batch.group_size=2",
        "sampling.max_new_tokens=8",
        "evaluation.every=7",
        "evaluation.problems=4",
        "checkpoint.every=2",
        "rollouts.every=1",
        "rollouts.keep=100000",
    )


@dataclass
class Soak:
    """A run that is killed, and what was seen of it."""

    config: Config
    folder: Path
    start: float  # seconds from the start of a process to its first line of metrics
    iteration: float  # seconds of one
    random: random.Random
    kills: int = 0
    within_a_checkpoint: int = 0
    lost: list[int] = field(default_factory=list)  # iterations that each kill threw away
    steps: list[int] = field(default_factory=list)  # the newest checkpoint after each kill

    def kill(self) -> None:
        """One life, from its start to its death."""
        life = forked(self.config, self.folder)
        if self.kills % 2:
            while life.is_alive() and not any(unfinished(self.folder / "checkpoints")):
                time.sleep(0.001)
            time.sleep(self.random.uniform(0.0, 2.0 * self.iteration))
        else:
            time.sleep(self.random.uniform(0.0, self.start + 5.0 * self.iteration))
        life.kill()
        life.join()
        assert life.exitcode == -9, f"a life ended by itself with {life.exitcode} after {self.kills} kills"
        self.kills += 1
        self._look()

    def finish(self) -> None:
        """The life that is not killed."""
        life = forked(self.config, self.folder)
        life.join()
        assert life.exitcode == 0

    def _look(self) -> None:
        folder = self.folder / "checkpoints"
        self.within_a_checkpoint += any(unfinished(folder))
        newest, corrupt = Checkpoints(folder, 2).find()
        assert not corrupt
        self.steps.append(newest.state["iteration"] if newest else 0)
        done = max((line["iteration"] for line in RunFolder(self.folder).read("metrics.jsonl")), default=0)
        self.lost.append(done - self.steps[-1])


def forked(config: Config, folder: Path) -> multiprocessing.Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soak"])
    life = context.Process(target=run, args=(config, folder))
    life.start()
    return life


def unfinished(checkpoints: Path) -> Iterator[Path]:
    """What stands in the folder only while a checkpoint is written, linked or removed."""
    for pattern in ("step-*.partial", ".last", ".best"):
        yield from checkpoints.glob(pattern)
    steps = sorted(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*") if path.suffix == "")
    last = checkpoints / "last"
    if steps and (not last.is_symlink() or last.readlink().name != f"step-{steps[-1]}"):
        yield last


def soak(whole: Path, folder: Path, kills: int, seed: int) -> Soak:
    """The same run in both folders, in `folder` killed `kills` times."""
    config, began = soak_config(kills), time.time()
    forked(config, whole).join()
    times = [line["time"] for line in RunFolder(whole).read("metrics.jsonl")]
    soaked = Soak(
        config=config,
        folder=folder,
        start=times[0] - began,
        iteration=(times[-1] - times[0]) / config.iterations,
        random=random.Random(seed),
    )
    while soaked.kills < kills:
        soaked.kill()
    soaked.finish()
    return soaked
