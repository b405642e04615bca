"""Kills runs with SIGKILL at random moments, each until it has been killed often enough, and lets them end.

    python soak.py FOLDER SEED    reads lines "SCENARIO KILLS", runs each in FOLDER/SCENARIO/killed, and once without a
                                  kill in FOLDER/SCENARIO/whole, and answers with the JSON of `Soak`

Everything is imported once and every life is a fork, so that it costs a fraction of a second. Half of the kills come
while a life starts or trains its first iterations, the others while a checkpoint is written, linked or removed.
"""

import contextlib
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
from typing import NamedTuple

import torch
import transformers

from jackpot.config.config import Config
from jackpot.config.recipes import load_recipe, resolve
from jackpot.launch.start import launch
from jackpot.models.load import load_model
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder

SMALL = (  # every scenario; iterations take a tenth of a second
    "threads=1",
    "batch.prompts=2",
    "batch.group_size=2",
    "sampling.max_new_tokens=8",
    "evaluation.every=7",
    "evaluation.problems=2",
    "checkpoint.every=2",
    "rollouts.every=1",
    "rollouts.keep=100000",
)
MOST_LINES = 3  # of metrics.jsonl that a life writes before it is killed


class Scenario(NamedTuple):
    """The settings of a run that is killed."""

    recipe: str
    arm: str
    overrides: tuple[str, ...] = ()

    def config(self, kills: int) -> Config:
        """Return settings of a run of short iterations that cannot end before it was killed `kills` times."""
        sizes = [*SMALL, f"iterations={MOST_LINES * (kills + 1) + 2}"]
        config = resolve(self.recipe, self.arm, self.overrides)
        if config.batch.mini_batch_size:  # several optimizer steps an iteration
            sizes.append("batch.mini_batch_size=2")
        return resolve(self.recipe, self.arm, [*sizes, *self.overrides])


SCENARIOS = {arm: Scenario("regimes", arm) for arm in load_recipe("regimes")["arms"]} | {
    "ahead_3": Scenario("regimes", "ahead", ("batch.ahead=3",)),
    "ppo": Scenario("objectives", "ppo"),
    "dynamic_sampling": Scenario("objectives", "dapo", ("objective.overlong_buffer.len=4",)),
    "lora_on_both": Scenario("quickstart", "lora", ("rollout_model.lora={rank: 4, alpha: 8}",)),
    "tool": Scenario("quickstart", "tool"),
    "mixed": Scenario("mixed", "mixed_groups"),
    "annealed": Scenario("mixed", "annealed", ("rollout_model.share.hold=4",)),
    "drafted": Scenario("mixed", "drafted"),
}


@dataclass
class Soak:
    """What was seen of a run that was killed."""

    seconds: float = 0.0
    within_a_checkpoint: int = 0  # kills
    before_training: int = 0  # kills that came before the life wrote a line
    steps: list[int] = field(default_factory=list)  # the newest checkpoint after each kill
    lost: list[int] = field(default_factory=list)  # iterations that each kill threw away


class Life:
    """A process that trains the run in a folder."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.born = time.time()
        self._lines, lines = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os._exit(_train(config, folder, lines))
        os.close(lines)

    def wait_for_lines(self, count: int) -> None:
        """Wait until the process has written `count` lines of metrics, or has ended."""
        for _ in range(count):
            os.read(self._lines, 1)

    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self, kill: bool) -> int:
        """Return the exit code, -SIGKILL after a kill."""
        if kill:
            os.kill(self.process, signal.SIGKILL)
        os.close(self._lines)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def _train(config: Config, folder: Path, lines: int) -> int:
    """Train in this process and return its exit code; each line of metrics writes a byte to the pipe `lines`."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def listen(line: dict) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(lines, b".")

    try:
        with contextlib.closing(launch(config, folder, listen)) as trainer:
            trainer.train()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def soak(home: Path, scenario: Scenario, kills: int, seed: str) -> Soak:
    """Run a scenario without a kill, then kill it so many times, and let it end."""
    config = scenario.config(kills)
    moments, soaked = random.Random(seed), Soak()

    start = time.time()
    assert Life(config, home / "whole").end(kill=False) == 0
    times = [line["time"] for line in RunFolder(home / "whole").read("metrics.jsonl")]
    start_up, iteration_seconds = times[0] - start, (times[-1] - times[0]) / config.iterations

    folder = home / "killed"
    first_kind = moments.randrange(2)  # 1: the first kill comes within a checkpoint
    for kill_index in range(kills):
        old_remains = set(unfinished(folder / "checkpoints"))  # of lives before this one
        life = Life(config, folder)
        if kills == 1:
            life.wait_for_lines(1 + config.checkpoint.every)  # or there is nothing to continue from
        if (first_kind + kill_index) % 2:
            while not set(unfinished(folder / "checkpoints")) - old_remains and life.is_alive():
                time.sleep(0.001)
            time.sleep(moments.uniform(0.0, iteration_seconds))
        else:
            lines = moments.randint(0, MOST_LINES)
            life.wait_for_lines(lines)
            time.sleep(moments.uniform(0.0, iteration_seconds if lines else start_up + iteration_seconds))
        assert life.end(kill=True) == -signal.SIGKILL, f"a life ended by itself after {kill_index} kills"
        add_remains(soaked, folder, old_remains, life.born)

    assert Life(config, folder).end(kill=False) == 0
    soaked.seconds = time.time() - start
    return soaked


def add_remains(soaked: Soak, folder: Path, old_remains: set[tuple], born: float) -> None:
    """Add to `soaked` what a kill left in the folder."""
    newest, corrupt = Checkpoints(folder / "checkpoints", 2).find()
    assert not corrupt, corrupt
    lines = RunFolder(folder).read("metrics.jsonl")
    soaked.steps.append(newest.state["iteration"] if newest else 0)
    soaked.lost.append(max((line["iteration"] for line in lines), default=0) - soaked.steps[-1])
    soaked.within_a_checkpoint += bool(set(unfinished(folder / "checkpoints")) - old_remains)
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


def main() -> None:
    """Answer each line of the standard input with the result of its scenario."""
    home, seed = Path(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a life prints is no answer
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    load_model("starter:policy", torch.float32)  # what transformers imports late
    for line in sys.stdin:
        name, kills = line.split()
        result = soak(home / name, SCENARIOS[name], int(kills), f"{seed} {name}")
        print(json.dumps(asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    main()
