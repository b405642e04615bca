"""A run of two ranks, a random one of which was killed again and again, ends as one that was not. `make
soak-distributed` kills 20 times, `make test-all` a few."""

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from helpers.led import Meanwhile, run_ranks
from helpers.runs import assert_equal, metrics, saved
from helpers.soak import MOST_LINES, Scenario, unfinished
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("JACKPOT_RANK_KILLS", "2"))
SEED = int(os.environ.get("JACKPOT_SOAK_SEED", random.randrange(2**32)))
RANKS = 2
REGIME = Scenario("regimes", "ahead", ("batch.micro_batch_tokens=64",))  # several micro-batches in each rank


def killing(folder: Path, moments: random.Random, killed: list[int]) -> Meanwhile:
    """Kill a random rank while a checkpoint is written, or some time after some lines of metrics."""

    def meanwhile(ranks: list[BaseProcess]) -> None:
        checkpoints, path = folder / "checkpoints", folder / "metrics.jsonl"
        left, lines = set(unfinished(checkpoints)), _lines(path)
        wanted = moments.randint(0, MOST_LINES)
        in_checkpoint = moments.random() < 0.5
        while all(one.is_alive() for one in ranks):
            if set(unfinished(checkpoints)) - left if in_checkpoint else _lines(path) >= lines + wanted:
                break
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.01 if in_checkpoint else 0.5))
        killed.append(moments.randrange(RANKS))
        os.kill(ranks[killed[-1]].pid, signal.SIGKILL)

    return meanwhile


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kills_of_random_ranks_change_nothing(tmp_path: Path) -> None:
    print(f"JACKPOT_SOAK_SEED={SEED}")  # pytest shows it where something fails
    config, moments = REGIME.config(KILLS), random.Random(SEED)
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert run_ranks(RANKS, config, whole).codes == [0, 0]
    killed: list[int] = []
    half_written, lost = 0, []
    for number in range(KILLS):
        left = set(unfinished(folder / "checkpoints"))
        ended = run_ranks(RANKS, config, folder, patience=5.0, meanwhile=killing(folder, moments, killed))
        assert ended.codes[killed[-1]] == -signal.SIGKILL, f"a group ended by itself after {number} kills: {ended}"
        newest, corrupt = Checkpoints(folder / "checkpoints", 2).find()
        assert not corrupt
        half_written += bool(set(unfinished(folder / "checkpoints")) - left)
        done = max((line["iteration"] for line in RunFolder(folder).read("metrics.jsonl")), default=0)
        lost.append(done - (newest.state["iteration"] if newest else 0))
    ended = run_ranks(RANKS, config, folder)
    assert ended.codes == [0, 0], ended.printed
    print(
        f"{KILLS} kills, {killed.count(0)} of rank 0; {half_written} left an unfinished checkpoint; iterations lost: "
        f"{sum(lost) / KILLS:.1f} on average, {max(lost)} at most"
    )
    assert max(lost) <= config.checkpoint.every
    assert metrics(folder) == metrics(whole)
    (ours, mine), (theirs, other) = map(saved, (whole, folder))
    assert ours == theirs
    assert_equal(mine, other)
