"""A start in a folder in which something stands continues the run or refuses, and removes nothing."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from helpers.runs import SHORT, FinishedRuns, assert_same_run, contents, metrics, run, small_config, weights
from jackpot.config.changes import changeable
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.launch.start import launch
from jackpot.training.run_folder.folder import RunFolder, run_config
from jackpot.training.trainer import MetricsLine

BOTH = ["policy", "rollout_model"]


def start(folder: Path, *overrides: str) -> None:
    """Begin or continue a run, and end it before its next iteration."""
    launch(small_config(*overrides), folder, lambda line: None).close()


def remove_folder(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)


def leave_a_dead_link(checkpoints: Path) -> None:
    """Leave what stands there where the disk of the checkpoints is not mounted."""
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to("/nowhere/checkpoints")


def empty_folder(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()


def leave_an_unfinished_checkpoint(checkpoints: Path) -> None:
    empty_folder(checkpoints)
    (checkpoints / "step-4.partial").mkdir()


@pytest.mark.parametrize(
    ("change_checkpoints", "reason"),
    [
        (remove_folder, "is not there"),
        (leave_a_dead_link, "is a link to /nowhere/checkpoints, which is not there"),
        (empty_folder, "holds none"),
        (leave_an_unfinished_checkpoint, "holds none"),
    ],
)
def test_iterations_without_a_checkpoint_are_refused_and_kept(
    change_checkpoints: Callable[[Path], None], reason: str, finished_run: FinishedRuns, tmp_path: Path
) -> None:
    finished_run.copy(tmp_path)
    change_checkpoints(tmp_path / "checkpoints")
    expected_files = contents(tmp_path)

    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"4 finished iterations and no checkpoint .* {reason}\. Bring the"):
            start(tmp_path)

    assert contents(tmp_path) == expected_files


def test_a_start_removes_no_finished_file_and_none_of_users(finished_run: FinishedRuns, tmp_path: Path) -> None:
    """It continues after iteration 2 of 3; what it runs again moves to superseded/."""
    finished_run.copy(tmp_path, "checkpoint.every=1", kill_after=3)
    shutil.rmtree(tmp_path / "checkpoints" / "step-3")
    (tmp_path / "rollouts" / "iteration-000003.parquet").write_bytes(b"superseded")
    for name in (
        "notes.md",
        "eval/iteration-000003-notes.txt",
        "rollouts/iteration-000003-mine.parquet",
        "tensorboard/notes",
        "checkpoints/step-9-mine.partial/notes",
        "checkpoints/notes.partial",
        "checkpoints/step-1/model",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    files_before = contents(tmp_path)
    (tmp_path / "rollouts" / "iteration-000003.parquet.partial").write_bytes(b"half a file")

    start(tmp_path, "checkpoint.every=1", "checkpoint.keep=1", "rollouts.keep=1")

    files_after = contents(tmp_path)
    assert "rollouts/iteration-000003.parquet.partial" not in files_after

    moved_names = {name for name in files_before if f"superseded/1/{name}" in files_after}
    assert moved_names >= {"metrics.jsonl", "rollouts/iteration-000003.parquet"}
    assert moved_names <= {"metrics.jsonl", "events.jsonl", "rollouts/iteration-000003.parquet"}
    assert files_before["metrics.jsonl"] == files_after["metrics.jsonl"] + files_after["superseded/1/metrics.jsonl"]

    changed_names = {*moved_names, "events.jsonl", "config.yaml", "environment.json", "checkpoints/last"}
    unchanged_names = files_before.keys() - changed_names
    assert {name: files_before[name] for name in unchanged_names} == {
        name: files_after[name] for name in unchanged_names
    }


def test_another_runs_checkpoint_is_refused(finished_run: FinishedRuns, tmp_path: Path) -> None:
    finished_run.copy(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    other_checkpoints = finished_run("iterations=2", arm="on_policy") / "checkpoints"
    shutil.copytree(other_checkpoints, tmp_path / "checkpoints", symlinks=True)
    expected_files = contents(tmp_path)

    with pytest.raises(CheckpointError, match=r"step-2 is of another run:\n(?s:.*)rollout_model: null in the folder"):
        start(tmp_path)

    assert contents(tmp_path) == expected_files


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_process_without_its_folder_ends_and_writes_nothing(is_replaced: bool, tmp_path: Path) -> None:
    """`rm -r RUN`, perhaps followed by another start."""
    folder = tmp_path / "run"

    def listen(line: MetricsLine) -> None:
        shutil.rmtree(folder)
        if is_replaced:
            RunFolder(folder).lock()

    trainer = launch(small_config(SHORT, "iterations=2"), folder, listen)

    with pytest.raises(CheckpointError, match="was removed or replaced while this process trained in it"):
        trainer.train()
    trainer.close()

    assert folder.exists() == is_replaced
    assert not contents(tmp_path / "run")


def test_settings_that_decide_no_number_may_change(finished_run: FinishedRuns, tmp_path: Path) -> None:
    finished_run.copy(tmp_path, kill_after=3)
    overrides = ["iterations=5", "evaluation.every=3", "rollouts.every=1", "engine.max_num_seqs=3", "description=hello"]

    start(tmp_path, *overrides)

    assert run_config(tmp_path) == small_config(*overrides)

    [event] = [line for line in RunFolder(tmp_path).read("events.jsonl") if line["event"] == "settings_changed"]
    assert event["iteration"] == 2
    assert event["changes"]["iterations"] == [4, 5]
    assert len(event["changes"]) == 5

    start(tmp_path, *overrides, "device=auto")

    text = (tmp_path / "config.yaml").read_text()
    assert [line.partition("Z: ")[2] for line in text.splitlines() if line.startswith("# after iteration 2, ")] == [
        f'description: "{small_config().description}" -> "hello"',
        "engine.max_num_seqs: 256 -> 3",
        "evaluation.every: 2 -> 3",
        "iterations: 4 -> 5",
        "rollouts.every: 10 -> 1",
        'device: "cpu" -> "auto"',
    ]
    assert Config.model_validate(yaml.safe_load(text)).device == "auto"


def test_a_run_that_got_more_iterations_is_the_longer_run(finished_run: FinishedRuns, tmp_path: Path) -> None:
    """But for what was measured more often: the last iteration saves its rollouts, and some metrics with them."""
    finished_run.copy(tmp_path, "iterations=2")
    longer_run = finished_run()

    run(small_config(), tmp_path)

    for role in BOTH:
        weights_here, longer_weights = weights(tmp_path, role), weights(longer_run, role)
        assert all(torch.equal(weights_here[name], longer_weights[name]) for name in longer_weights)

    assert metrics(tmp_path)[3:] == metrics(longer_run)[3:]
    assert metrics(tmp_path)[:2] == metrics(longer_run)[:2]


REFUSED_CHANGES = {
    "objective.correction.lam=2.0": r"objective\.correction\.lam: 1\.0 in the folder, 2\.0 now",
    "seed=1": "seed: 0 in the folder, 1 now",
    "evaluation.problems=9": r"evaluation\.problems: 8 in the folder, 9 now",
    "engine.dtype=bf16": r'engine\.dtype: "fp32" in the folder, "bf16" now',
    "iterations=2": "iterations: 4 in the folder, 2 now; 3 are finished",
}


@pytest.mark.parametrize("override", REFUSED_CHANGES)
def test_settings_of_numbers_computed_before_may_not_change(override: str, finished_run: FinishedRuns) -> None:
    with pytest.raises(CheckpointError, match=REFUSED_CHANGES[override]):
        RunFolder(finished_run(kill_after=3)).check(small_config(override))


def test_a_refused_start_leaves_nothing_but_what_was_there(tmp_path: Path) -> None:
    bad_config = small_config("sampling.num_top_log_probs=5000")

    with pytest.raises(ConfigError, match="num_top_log_probs is 5000"):
        run(bad_config, tmp_path / "new")

    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="num_top_log_probs is 5000"):
        run(bad_config, tmp_path / "mine")

    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_refused_start_leaves_the_lock_of_a_run(finished_run: FinishedRuns) -> None:
    folder = finished_run(kill_after=3)
    with pytest.raises(CheckpointError, match="seed"):
        run(small_config("seed=9"), folder)
    assert (folder / ".lock").exists()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("role", BOTH)
def test_iterations_are_fixed_where_rates_fall_towards_the_last(schedule: str, role: str, tmp_path: Path) -> None:
    schedule_override = f"{role}.optimizer.schedule={schedule}"
    folder = RunFolder(tmp_path)
    folder.lock()
    folder.start(small_config(schedule_override), threads=1, iteration=-1)
    (tmp_path / "checkpoints" / "step-2").mkdir()

    with pytest.raises(CheckpointError, match=rf"the rates used so far fell .* \({role}\.optimizer\.schedule\)"):
        folder.check(small_config(schedule_override, "iterations=9"))

    folder.check(small_config(schedule_override, "evaluation.every=3"))
    folder.close()


def test_only_what_decides_no_number_computed_before_may_change() -> None:
    engine_names = {"device", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes"}
    engine_names |= {"max_num_seqs", "urls", "weights_folder", "timeout", "max_retries", "connect_timeout"}
    engine_settings = [f"{block}.{name}" for block in ("engine", "evaluation.engine") for name in engine_names]
    cadence = ["evaluation.every", "checkpoint.every", "checkpoint.keep", "rollouts.every", "rollouts.keep"]
    machine = ["device", "threads", "batch.micro_batch_tokens", "activation_checkpointing", "task.reward_workers"]
    machine += ["head_kernel", "head_logits_memory", "placement.timeout", "placement.offload"]
    machine += [f"placement.{name}" for name in ("engines", "chunk", "ranks", "launcher", "restarts")]
    guards = ["guard.check_engine", "guard.max_non_finite_steps"]
    tracking = ["tracking.wandb", *(f"tracking.wandb.{name}" for name in ("project", "entity", "mode"))]

    assert changeable(Config) == {"description", "iterations", *cadence, *machine, *guards, *tracking, *engine_settings}


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing_but_timestamps(
    finished_run: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0 + (3600.0 if next(calls) % 3 else -3600.0))

    lines = run(small_config(), tmp_path)
    monkeypatch.undo()

    assert_same_run(finished_run(), tmp_path, BOTH)
    assert [line["time"] for line in lines] != sorted(line["time"] for line in lines)

    seconds = [value for line in lines for name, value in line.items() if name.startswith("seconds/")]
    assert seconds
    assert all(0.0 <= value < 60.0 for value in seconds)
