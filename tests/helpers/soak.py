"""Kills a run again and again with SIGKILL at random moments, until it has been killed often enough, then lets it end.

    python soak.py FOLDER KILLS SEED    runs in FOLDER/killed, and once without a kill in FOLDER/whole

Everything is imported once and every life is a fork, so that it costs a fraction of a second. Half of the kills come at
a moment drawn uniformly from a whole life, the others while a checkpoint is written, linked or removed. The last line
that it prints is the JSON of `Soak`.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from helpers.runs import run, small_config
from jackpot.config.run import Config
from jackpot.models.load import load_model
from jackpot.training.run.checkpoint import Checkpoints
from jackpot.training.run.folder import RunFolder


def soak_config(kills: int) -> Config:
    """A run of short iterations that cannot end before it was killed often enough: a life gets one or two done."""
    return small_config(
        f"iterations={40 + 2 * kills}",
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
    """What was seen of a run that was killed."""

    seconds: float = 0.0
    within_a_checkpoint: int = 0  # kills
    before_training: int = 0  # kills that came before the life wrote a line
    steps: list[int] = field(default_factory=list)  # the newest checkpoint after each kill
    lost: list[int] = field(default_factory=list)  # iterations that each kill threw away


def soak(home: Path, kills: int, seed: int) -> Soak:
    config, moments, soaked = soak_config(kills), random.Random(seed), Soak()
    began = time.time()
    assert finish(start(config, home / "whole")) == 0
    times = [line["time"] for line in RunFolder(home / "whole").read("metrics.jsonl")]
    start_up, iteration = times[0] - began, (times[-1] - times[0]) / config.iterations
    folder = home / "killed"
    for number in range(kills):
        left = set(unfinished(folder / "checkpoints"))  # by lives before this one
        born = time.time()
        life = start(config, folder)
        if number % 2:
            while not set(unfinished(folder / "checkpoints")) - left and is_alive(life):
                time.sleep(0.001)
            time.sleep(moments.uniform(0.0, iteration))
        else:
            time.sleep(moments.uniform(0.0, start_up + 5.0 * iteration))
        os.kill(life, signal.SIGKILL)
        assert finish(life) == -signal.SIGKILL, f"a life ended by itself after {number} kills"
        look(soaked, folder, left, born)
    assert finish(start(config, folder)) == 0
    soaked.seconds = time.time() - began
    return soaked


def look(soaked: Soak, folder: Path, left: set[tuple], born: float) -> None:
    """Add what a kill left."""
    newest, corrupt = Checkpoints(folder / "checkpoints", 2).find()
    assert not corrupt, corrupt
    lines = RunFolder(folder).read("metrics.jsonl")
    soaked.steps.append(newest.state["iteration"] if newest else 0)
    soaked.lost.append(max((line["iteration"] for line in lines), default=0) - soaked.steps[-1])
    soaked.within_a_checkpoint += bool(set(unfinished(folder / "checkpoints")) - left)
    soaked.before_training += not lines or lines[-1]["time"] < born


def unfinished(checkpoints: Path) -> Iterator[tuple]:
    """What is there only while a checkpoint is written, linked or removed, with something that tells it from others."""
    for pattern in ("step-*.partial", ".last", ".best"):
        for path in checkpoints.glob(pattern):
            try:
                yield path.name, path.lstat().st_ino
            except FileNotFoundError:
                continue  # it was being finished
    steps = [int(name) for path in checkpoints.glob("step-*") if (name := path.name.removeprefix("step-")).isdigit()]
    if steps and Path(os.path.realpath(checkpoints / "last")).name != f"step-{max(steps)}":
        yield "last", max(steps)


def start(config: Config, folder: Path) -> int:
    """A process that trains."""
    life = os.fork()
    if life == 0:
        try:
            run(config, folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return life


def is_alive(life: int) -> bool:
    return os.waitid(os.P_PID, life, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def finish(life: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(life, 0)[1])


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    load_model("starter:policy", torch.float32)  # what transformers imports late
    print(json.dumps(asdict(soak(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
