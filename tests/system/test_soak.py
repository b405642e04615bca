"""A run that was killed many times at random moments is the run that never was. Part of `make test-all`; `make soak`
kills it 100 times."""

import os
import random
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from jackpot.checkpoint import Checkpoints
from jackpot.telemetry import RunFolder
from runs import metrics, weights
from soak import Soak, soak

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("JACKPOT_SOAK_KILLS", "12"))
SEED = int(os.environ.get("JACKPOT_SOAK_SEED", random.randrange(2**32)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Soak]:
    """The whole run, the killed one, and what happened to that."""
    home, began = tmp_path_factory.mktemp("soak"), time.monotonic()
    print(f"JACKPOT_SOAK_SEED={SEED}")  # pytest shows it where something fails
    soaked = soak(home / "whole", home / "killed", KILLS, SEED)
    print(
        f"{soaked.kills} kills in {time.monotonic() - began:.0f} s, {soaked.within_a_checkpoint} within a checkpoint; "
        f"iterations lost by a kill: {sum(soaked.lost) / KILLS:.1f} on average, {max(soaked.lost)} at most"
    )
    return home / "whole", home / "killed", soaked


def test_a_kill_loses_the_steps_since_the_last_checkpoint_and_no_checkpoint(folders) -> None:
    _, killed, soaked = folders
    assert soaked.kills == KILLS and soaked.within_a_checkpoint >= KILLS // 10
    assert soaked.steps == sorted(soaked.steps)
    assert max(soaked.lost) <= soaked.config.checkpoint.every
    assert not list((killed / "checkpoints").glob("*.corrupt*"))


def test_models_optimizers_and_prompts_end_bit_equal(folders) -> None:
    whole, killed, soaked = folders
    for role in ("policy", "rollout_model"):
        ours, theirs = weights(whole, role), weights(killed, role)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    states = [Checkpoints(folder / "checkpoints", 2).find()[0].state for folder in (whole, killed)]
    assert states[0]["iteration"] == soaked.config.iterations
    assert_equal(*states)


def assert_equal(ours, theirs) -> None:
    """Nested containers with bit-equal tensors."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name])
    elif isinstance(ours, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert ours == theirs


def test_every_line_of_metrics_is_there_once_and_the_same(folders) -> None:
    whole, killed, soaked = folders
    assert metrics(killed) == metrics(whole)
    assert [line["iteration"] for line in metrics(killed)] == list(range(soaked.config.iterations + 1))


def test_every_prompt_is_trained_on_once_in_its_own_iteration(folders) -> None:
    whole, killed, soaked = folders
    batches = [prompts(folder, soaked.config.iterations) for folder in (whole, killed)]
    assert batches[0] == batches[1]
    given = [uid for batch in batches[1] for uid in batch]
    assert len(given) == len(set(given)) == soaked.config.iterations * soaked.config.batch.prompts


def prompts(folder: Path, iterations: int) -> list[set[str]]:
    """The prompt uids of each rollout batch."""
    files = [folder / "rollouts" / f"iteration-{n:06d}.parquet" for n in range(1, iterations + 1)]
    return [set(pq.read_table(file)["prompt_uid"].to_pylist()) for file in files]


def test_checkpoints_and_other_files_are_the_same(folders) -> None:
    whole, killed, _ = folders
    for name in ("checkpoints", "rollouts", "eval"):
        ours, theirs = ({path.name for path in (folder / name).iterdir()} for folder in (whole, killed))
        assert ours == theirs
    for name in ("last", "best"):
        assert (whole / "checkpoints" / name).readlink() == (killed / "checkpoints" / name).readlink()
    assert events(whole) == events(killed)


def events(folder: Path) -> list[dict]:
    return [{name: line[name] for name in line if name != "time"} for line in RunFolder(folder).read("events.jsonl")]
