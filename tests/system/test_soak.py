"""A run that was killed many times at random moments is the run that never was. Part of `make test-all`; `make soak`
kills it 100 times."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from helpers.paths import TESTS
from helpers.runs import metrics, weights
from helpers.soak import Soak, soak_config
from jackpot.training.run.checkpoint import Checkpoints
from jackpot.training.run.folder import RunFolder

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("JACKPOT_SOAK_KILLS", "12"))
CONFIG = soak_config(KILLS)
SEED = int(os.environ.get("JACKPOT_SOAK_SEED", random.randrange(2**32)))


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Soak]:
    """The whole run, the killed one, and what happened to that."""
    home = tmp_path_factory.mktemp("soak")
    print(f"JACKPOT_SOAK_SEED={SEED}")  # pytest shows it where something fails
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    server = subprocess.run(
        [sys.executable, TESTS / "helpers" / "soak.py", str(home), str(KILLS), str(SEED)],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.returncode == 0
    seen = Soak(**json.loads(server.stdout.splitlines()[-1]))
    print(
        f"{KILLS} kills in {seen.seconds:.0f} s, {seen.within_a_checkpoint} within a checkpoint and "
        f"{seen.before_training} before the first line; iterations lost: {sum(seen.lost) / KILLS:.1f} on average, "
        f"{max(seen.lost)} at most"
    )
    return home / "whole", home / "killed", seen


def test_a_kill_loses_the_steps_since_the_last_checkpoint_and_no_checkpoint(soaked) -> None:
    _, killed, seen = soaked
    assert len(seen.steps) == KILLS and seen.within_a_checkpoint >= KILLS // 10
    assert seen.steps == sorted(seen.steps)
    assert max(seen.lost) <= CONFIG.checkpoint.every
    assert not list((killed / "checkpoints").glob("*.corrupt*"))


def test_models_optimizers_and_prompts_end_bit_equal(soaked) -> None:
    whole, killed, _ = soaked
    for role in ("policy", "rollout_model"):
        ours, theirs = weights(whole, role), weights(killed, role)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    states = [Checkpoints(folder / "checkpoints", 2).find()[0].state for folder in (whole, killed)]
    assert states[0]["iteration"] == CONFIG.iterations
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


def test_every_line_of_metrics_is_there_once_and_the_same(soaked) -> None:
    whole, killed, _ = soaked
    assert metrics(killed) == metrics(whole)
    assert [line["iteration"] for line in metrics(killed)] == list(range(CONFIG.iterations + 1))


def test_every_prompt_is_trained_on_once_in_its_own_iteration(soaked) -> None:
    whole, killed, _ = soaked
    batches = [prompts(folder, CONFIG.iterations) for folder in (whole, killed)]
    assert batches[0] == batches[1]
    given = [uid for batch in batches[1] for uid in batch]
    assert len(given) == len(set(given)) == CONFIG.iterations * CONFIG.batch.prompts


def prompts(folder: Path, iterations: int) -> list[set[str]]:
    """The prompt uids of each rollout batch."""
    files = [folder / "rollouts" / f"iteration-{n:06d}.parquet" for n in range(1, iterations + 1)]
    return [set(pq.read_table(file)["prompt_uid"].to_pylist()) for file in files]


def test_checkpoints_and_other_files_are_the_same(soaked) -> None:
    whole, killed, _ = soaked
    for name in ("checkpoints", "rollouts", "eval"):
        ours, theirs = ({path.name for path in (folder / name).iterdir()} for folder in (whole, killed))
        assert ours == theirs
    for name in ("last", "best"):
        assert (whole / "checkpoints" / name).readlink() == (killed / "checkpoints" / name).readlink()
    assert events(whole) == events(killed)


def events(folder: Path) -> list[dict]:
    """What happened, but for when, and for the check of the engine after every start."""
    lines = RunFolder(folder).read("events.jsonl")
    return [{name: line[name] for name in line if name != "time"} for line in lines if line["event"] != "engine_check"]
