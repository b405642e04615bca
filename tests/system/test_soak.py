"""A run that was killed at random moments ends as a run without a kill.

The scenarios are every arm of `regimes`, PPO, dynamic sampling, adapters on both models, a tool. `make soak` deals 100
kills out among them; `make test-all` kills four once, chosen anew every time.
"""

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from helpers.paths import TESTS
from helpers.runs import assert_equal, metrics, weights
from helpers.soak import SCENARIOS, Soak
from jackpot.config.config import Config
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("JACKPOT_SOAK_KILLS", "4"))  # of all scenarios together
ONE_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # the same in all of pytest's processes
SEED = int(os.environ.get("JACKPOT_SOAK_SEED", random.Random(ONE_RUN).randrange(2**32)))
SHUFFLED = random.Random(SEED).sample(list(SCENARIOS), len(SCENARIOS))
KILLS_EACH, MORE = divmod(KILLS, len(SHUFFLED))  # the first ones get one more
KILLS_OF = {name: KILLS_EACH + (index < MORE) for index, name in enumerate(SHUFFLED)}
SOAKED = [name for name in SCENARIOS if KILLS_OF[name]]


class SoakedRun:
    """A run without a kill, the same run killed many times, and what happened to that."""

    def __init__(self, home: Path, scenario: str, record: Soak) -> None:
        self.undisturbed_folder = home / "whole"
        self.killed_folder = home / "killed"
        self.record = record
        self.kills = KILLS_OF[scenario]
        self.config: Config = SCENARIOS[scenario].config(self.kills)
        self.roles = ["policy"]
        self.roles += ["rollout_model"] if self.config.rollout_model else []
        self.roles += ["critic"] if self.config.critic else []


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], SoakedRun]]:
    """Soak a scenario when a test first asks for it."""
    home = tmp_path_factory.mktemp("soak")
    print(f"JACKPOT_SOAK_SEED={SEED}")  # pytest shows it where something fails
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [sys.executable, TESTS / "helpers" / "soak.py", str(home), str(SEED)],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    @functools.cache
    def soaked_run(scenario: str) -> SoakedRun:
        kills = KILLS_OF[scenario]
        print(scenario, kills, file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"the soak of {scenario} failed; its reason is on standard error, the seed is {SEED}"
        record = Soak(**json.loads(answer))
        print(
            f"{scenario}: {kills} kills in {record.seconds:.0f} s, {record.within_a_checkpoint} within a checkpoint "
            f"and {record.before_training} before the first line; "
            f"iterations lost: {sum(record.lost) / kills:.1f} on average, {max(record.lost)} at most"
        )
        return SoakedRun(home / scenario, scenario, record)

    yield soaked_run
    server.stdin.close()
    assert server.wait() == 0


def events(folder: Path) -> list[dict]:
    """Return what happened, but for when, and for what every start records."""
    at_starts = {"engine_check", "quantized", "computed_differently", "fp8_training", "int8_training"}
    lines = [line for line in RunFolder(folder).read("events.jsonl") if line["event"] not in at_starts]
    return [{name: line[name] for name in line if name != "time"} for line in lines]


def prompts(folder: Path, iterations: int) -> list[set[str]]:
    """Return the prompt uids of each rollout batch."""
    files = [folder / "rollouts" / f"iteration-{iteration:06d}.parquet" for iteration in range(1, iterations + 1)]
    return [set(pq.read_table(file)["prompt_uid"].to_pylist()) for file in files]


@pytest.mark.parametrize("scenario", SOAKED)
def test_a_kill_loses_steps_and_no_checkpoint(scenario: str, soak) -> None:
    run = soak(scenario)

    assert len(run.record.steps) == run.kills
    assert run.record.within_a_checkpoint >= run.kills // 10
    assert run.record.steps == sorted(run.record.steps)
    assert max(run.record.lost) <= run.config.checkpoint.every
    assert not list((run.killed_folder / "checkpoints").glob("*.corrupt*"))


@pytest.mark.parametrize("scenario", SOAKED)
def test_models_optimizers_and_prompts_end_bit_equal(scenario: str, soak) -> None:
    run = soak(scenario)

    for role in run.roles:
        undisturbed_weights, killed_weights = weights(run.undisturbed_folder, role), weights(run.killed_folder, role)
        assert undisturbed_weights.keys() == killed_weights.keys()
        assert all(torch.equal(undisturbed_weights[name], killed_weights[name]) for name in undisturbed_weights)

    undisturbed_state, killed_state = (
        Checkpoints(folder / "checkpoints", 2).find()[0].state for folder in (run.undisturbed_folder, run.killed_folder)
    )
    assert undisturbed_state["iteration"] == run.config.iterations
    assert undisturbed_state["version"][0] > 0
    assert_equal(undisturbed_state, killed_state)


@pytest.mark.parametrize("scenario", SOAKED)
def test_every_line_of_metrics_is_there_once(scenario: str, soak) -> None:
    run = soak(scenario)
    assert [line["iteration"] for line in metrics(run.killed_folder)] == list(range(run.config.iterations + 1))


@pytest.mark.parametrize("scenario", SOAKED)
def test_metrics_events_and_checkpoints_are_the_same(scenario: str, soak) -> None:
    run = soak(scenario)

    assert metrics(run.killed_folder) == metrics(run.undisturbed_folder)
    assert events(run.undisturbed_folder) == events(run.killed_folder)

    undisturbed_names, killed_names = (
        {path.name for path in (folder / "checkpoints").iterdir()}
        for folder in (run.undisturbed_folder, run.killed_folder)
    )
    assert undisturbed_names == killed_names
    assert (run.undisturbed_folder / "checkpoints" / "best").readlink() == (
        run.killed_folder / "checkpoints" / "best"
    ).readlink()


@pytest.mark.parametrize("scenario", SOAKED)
def test_every_prompt_is_trained_on_once_in_its_own_iteration(scenario: str, soak) -> None:
    run = soak(scenario)
    undisturbed_batches = prompts(run.undisturbed_folder, run.config.iterations)
    killed_batches = prompts(run.killed_folder, run.config.iterations)

    assert undisturbed_batches == killed_batches

    prompt_uids = [uid for batch in killed_batches for uid in batch]
    assert len(prompt_uids) == len(set(prompt_uids))

    if not run.config.batch.filter_groups:  # which leaves groups out
        assert len(prompt_uids) == run.config.iterations * run.config.batch.prompts


@pytest.mark.parametrize("scenario", SOAKED)
def test_files_of_rollouts_and_evaluations_are_the_same(scenario: str, soak) -> None:
    run = soak(scenario)

    for name in ("rollouts", "eval"):
        undisturbed_names, killed_names = (
            {path.name for path in (folder / name).iterdir()} for folder in (run.undisturbed_folder, run.killed_folder)
        )
        assert undisturbed_names == killed_names

    assert (run.undisturbed_folder / "checkpoints" / "last").readlink() == (
        run.killed_folder / "checkpoints" / "last"
    ).readlink()
