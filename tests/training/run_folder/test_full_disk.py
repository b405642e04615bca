"""A run on a full disk goes on, says so, counts it, and writes what it can when there is room again."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.disks import OVERRIDES, largest_file
from helpers.paths import TESTS
from helpers.runs import FinishedRuns, Killed, contents, metrics, run, small_config, weights
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError
from jackpot.launch.start import launch
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.trainer import MetricsLine

NO_CHECKPOINT = 300_000  # bytes of the largest file: the policy has 1.1 million, everything else less than this
NO_LINE = 500  # bytes of the largest file, in which no further line of metrics fits


@pytest.fixture(scope="module")
def undisturbed_run(finished_run: FinishedRuns) -> Path:
    """The run of four iterations that always had room."""
    return finished_run(*OVERRIDES)


def run_limited(
    config: Config, folder: Path, size: int, first_iteration: int, last_iteration: int, kill_after: int = -1
) -> list[MetricsLine]:
    """Train with no file larger than `size` between the ends of two iterations; return the lines of metrics."""
    lines: list[MetricsLine] = []

    def listen(line: MetricsLine) -> None:
        lines.append(line)
        if line["iteration"] == first_iteration:
            limit.enter_context(largest_file(size))
        if line["iteration"] == last_iteration:
            limit.close()
        if line["iteration"] == kill_after:
            raise Killed

    with closing(launch(config, folder, listen)) as trainer, ExitStack() as limit, suppress(Killed):
        trainer.train()
    return lines


def assert_same_but_for_failures(first: Path, second: Path) -> None:
    """Check that weights are bit-equal, and metrics but for the counts of failures."""
    for role in ("policy", "rollout_model"):
        first_weights, second_weights = weights(first, role), weights(second, role)
        assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)
    counts = dict.fromkeys(RunFolder(first).failed)
    assert [line | counts for line in metrics(first)] == [line | counts for line in metrics(second)]


def column(folder: Path, name: str) -> list[float]:
    """Return a metric of every iteration."""
    return [line[name] for line in metrics(folder)]


def events_named(folder: Path, name: str) -> list[dict]:
    return [event for event in RunFolder(folder).read("events.jsonl") if event["event"] == name]


def test_a_checkpoint_that_does_not_fit_is_tried_again(undisturbed_run, tmp_path, caplog) -> None:
    config = small_config(*OVERRIDES, "checkpoint.every=1", "checkpoint.keep=4")

    run_limited(config, tmp_path, NO_CHECKPOINT, first_iteration=0, last_iteration=2)

    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-3", "step-4", "last", "best"}
    assert column(tmp_path, "checkpoint/failed") == [0, 0, 1, 2, 2]  # a line is written before its checkpoint

    failures = events_named(tmp_path, "checkpoint_failed")
    assert [event["iteration"] for event in failures] == [1, 2]
    assert "step-1: SafetensorError" in failures[0]["why"]
    assert "File too large" in failures[0]["why"]
    assert "checkpoint_failed" in caplog.text
    for role in ("policy", "rollout_model"):
        assert all(
            torch.equal(tensor, weights(undisturbed_run, role)[name])
            for name, tensor in weights(tmp_path, role).items()
        )


def test_the_best_policy_is_not_lost_by_a_write_that_failed(tmp_path, monkeypatch) -> None:
    config = small_config("iterations=2", "evaluation.every=1", "evaluation.problems=16", "checkpoint.every=9")
    run(config, tmp_path / "whole")
    save = Checkpoints.save
    failures = iter([True])

    def fail_once(*arguments: object) -> None:
        if next(failures, False):
            raise CheckpointError("no space left on device")
        save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", fail_once)
    run(config, tmp_path / "failed")

    best_name, best_name_after_failure = (
        (tmp_path / name / "checkpoints" / "best").readlink().name for name in ("whole", "failed")
    )
    assert best_name_after_failure == best_name
    assert len(events_named(tmp_path / "failed", "checkpoint_failed")) == 1


@pytest.mark.slow
def test_a_run_continues_after_a_last_checkpoint_that_failed(undisturbed_run, tmp_path) -> None:
    config = small_config(*OVERRIDES)

    with pytest.raises(CheckpointError, match=r"Free space there and run the same command.* iteration 2"):
        run_limited(config, tmp_path, NO_CHECKPOINT, first_iteration=2, last_iteration=-1)

    assert metrics(tmp_path)[-1]["iteration"] == 4
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-2"]

    run(config, tmp_path)
    assert_same_but_for_failures(undisturbed_run, tmp_path)


@pytest.mark.slow
def test_a_run_whose_checkpoints_never_fitted_begins_anew(undisturbed_run, tmp_path, caplog) -> None:
    config = small_config(*OVERRIDES, "iterations=2")

    with pytest.raises(CheckpointError, match="the same command: it begins again"), largest_file(NO_CHECKPOINT):
        run(config, tmp_path)

    assert column(tmp_path, "iteration") == list(range(3))
    assert not list(tmp_path.glob("checkpoints/*"))

    files_before = contents(tmp_path)
    run(config, tmp_path)

    assert "2 finished iterations without a checkpoint move to superseded/; the run begins anew" in caplog.text
    assert metrics(tmp_path) == metrics(undisturbed_run)[:3]

    superseded_files = contents(tmp_path / "superseded" / "1")
    assert {name: files_before[name] for name in superseded_files} == superseded_files
    assert files_before.keys() - superseded_files.keys() == {"environment.json"}


@pytest.mark.slow
def test_a_checkpoint_that_fitted_after_failures_is_missed(tmp_path: Path) -> None:
    config = small_config(*OVERRIDES)

    run_limited(config, tmp_path, NO_CHECKPOINT, first_iteration=0, last_iteration=2, kill_after=4)

    assert column(tmp_path, "checkpoint/failed") == [0, 0, 0, 1, 1]

    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    expected_files = contents(tmp_path)

    with pytest.raises(CheckpointError, match="4 finished iterations and no checkpoint to continue from"):
        launch(config, tmp_path, lambda line: None)

    assert contents(tmp_path) == expected_files


@pytest.mark.slow
def test_the_count_of_failures_survives_a_kill(tmp_path: Path) -> None:
    config = small_config(*OVERRIDES, "iterations=3")

    run_limited(config, tmp_path, NO_LINE, first_iteration=0, last_iteration=1, kill_after=2)
    run(config, tmp_path)

    assert column(tmp_path, "files/failed") == [0, 1, 1, 1]


def test_lines_wait_for_room_and_other_files_are_given_up(undisturbed_run, tmp_path, caplog) -> None:
    config = small_config(*OVERRIDES, "checkpoint.every=100")

    run_limited(config, tmp_path, NO_LINE, first_iteration=1, last_iteration=3)

    assert_same_but_for_failures(undisturbed_run, tmp_path)
    assert column(tmp_path, "iteration") == list(range(5))
    assert column(tmp_path, "files/failed") == [0, 0, 3, 4, 4]  # rollouts and two evaluations; rollouts

    evaluations = [f"eval/iteration-000002-{role}.jsonl" for role in ("policy", "rollout_model")]
    assert [event["file"] for event in events_named(tmp_path, "write_failed")] == ["rollouts", *evaluations, "rollouts"]
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "rollouts" / "iteration-000003.parquet").exists()
    assert caplog.text.count("metrics.jsonl: [Errno 27] File too large; new lines wait in memory") == 1

    points = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [point.step for point in points] == list(range(1, 5))


def test_lines_that_never_fit_are_named_as_lost(tmp_path: Path, caplog) -> None:
    folder = RunFolder(tmp_path)
    folder.event(0, {"event": "first"})

    with largest_file((tmp_path / "events.jsonl").stat().st_size + 10):
        folder.event(1, {"event": "second"})
        folder.close()

    assert re.search(r"events\.jsonl: \d+ bytes did not fit on the disk and are lost", caplog.text)
    assert [event["event"] for event in folder.read("events.jsonl")] == ["first"]
    assert (tmp_path / "events.jsonl").read_bytes().endswith(b"\n")


def test_a_run_is_not_begun_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is the disk full"), largest_file(0):
        launch(small_config(), tmp_path / "run", lambda line: None)


@pytest.mark.slow
def test_a_run_goes_on_where_a_small_disk_fills_up(undisturbed_run: Path, tmp_path: Path) -> None:
    """ENOSPC itself, on a file system of our own."""
    disk = tmp_path / "disk"
    copied_run = tmp_path / "kept"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(disk)]
    own_mounts = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*own_mounts, *mount], capture_output=True).returncode:
        pytest.skip("this system lets us mount no file system of our own")
    train = f"{sys.executable} {TESTS / 'helpers' / 'disks.py'} {disk / 'run'}"
    script = f"{' '.join(mount)} && {train} && cp -r {disk / 'run'} {copied_run}"
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))

    process = subprocess.run(
        [*own_mounts, "sh", "-c", script], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr

    assert "No space left on device" in process.stdout
    assert "checkpoint_failed" in process.stderr
    assert_same_but_for_failures(undisturbed_run, copied_run)
    assert column(copied_run, "checkpoint/failed") == [0, 0, 0, 1, 1]
    assert column(copied_run, "files/failed") == [0, 0, 3, 3, 3]

    [event] = events_named(copied_run, "checkpoint_failed")
    assert event["iteration"] == 2
    assert "No space left on device" in event["why"]
