"""A run of two ranks, of which random ones were killed again and again, ends as a run without a kill.

`make soak-distributed` kills 20 times, `make test-all` a few.
"""

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


def kill_a_random_rank(folder: Path, moments: random.Random, killed_ranks: list[int]) -> Meanwhile:
    """Return what kills a random rank while a checkpoint is written, or some time after some lines of metrics."""

    def meanwhile(ranks: list[BaseProcess]) -> None:
        checkpoints, path = folder / "checkpoints", folder / "metrics.jsonl"
        leftovers, lines = set(unfinished(checkpoints)), _lines(path)
        line_quota = moments.randint(0, MOST_LINES)
        in_checkpoint = moments.random() < 0.5
        while all(rank.is_alive() for rank in ranks):
            if in_checkpoint:
                is_due = bool(set(unfinished(checkpoints)) - leftovers)
            else:
                is_due = _lines(path) >= lines + line_quota
            if is_due:
                break
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.01 if in_checkpoint else 0.5))
        killed_ranks.append(moments.randrange(RANKS))
        os.kill(ranks[killed_ranks[-1]].pid, signal.SIGKILL)

    return meanwhile


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kills_of_random_ranks_change_nothing(tmp_path: Path) -> None:
    print(f"JACKPOT_SOAK_SEED={SEED}")  # pytest shows it where something fails
    config, moments = REGIME.config(KILLS), random.Random(SEED)
    undisturbed_run, killed_run = tmp_path / "whole", tmp_path / "killed"
    assert run_ranks(RANKS, config, undisturbed_run).codes == [0, 0]

    killed_ranks: list[int] = []
    half_written = 0  # kills that left an unfinished checkpoint
    lost_iterations = []
    for kill_count in range(KILLS):
        leftovers = set(unfinished(killed_run / "checkpoints"))
        ending = run_ranks(
            RANKS, config, killed_run, patience=5.0, meanwhile=kill_a_random_rank(killed_run, moments, killed_ranks)
        )
        assert ending.codes[killed_ranks[-1]] == -signal.SIGKILL, (
            f"a group ended by itself after {kill_count} kills: {ending}"
        )
        newest_checkpoint, corrupt_checkpoints = Checkpoints(killed_run / "checkpoints", 2).find()
        assert not corrupt_checkpoints
        half_written += bool(set(unfinished(killed_run / "checkpoints")) - leftovers)
        last_iteration = max((line["iteration"] for line in RunFolder(killed_run).read("metrics.jsonl")), default=0)
        lost_iterations.append(last_iteration - (newest_checkpoint.state["iteration"] if newest_checkpoint else 0))

    ending = run_ranks(RANKS, config, killed_run)

    assert ending.codes == [0, 0], ending.printed

    print(
        f"{KILLS} kills, {killed_ranks.count(0)} of rank 0; {half_written} left an unfinished checkpoint; "
        f"iterations lost: {sum(lost_iterations) / KILLS:.1f} on average, {max(lost_iterations)} at most"
    )
    assert max(lost_iterations) <= config.checkpoint.every
    assert metrics(killed_run) == metrics(undisturbed_run)

    undisturbed_files, undisturbed_states = saved(undisturbed_run)
    killed_files, killed_states = saved(killed_run)
    assert undisturbed_files == killed_files
    assert_equal(undisturbed_states, killed_states)
