"""A run that a damaged disk, another process or a signal got in the way of is continued, or refused by name."""

import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest

from helpers.runs import SHORT, FinishedRuns, assert_same_run, metrics, run, small_config
from jackpot.analysis.evaluate.sample import sample_answers
from jackpot.core.errors import CheckpointError
from jackpot.launch.start import launch
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.trainer import MetricsLine

BOTH = ["policy", "rollout_model"]
KEEP_EVERY_CHECKPOINT = (SHORT, "checkpoint.every=1", "checkpoint.keep=4")


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE = {
    "policy/model.safetensors": flip_a_byte,
    "state.pt": truncate,
    "rollout_model/config.json": Path.unlink,
}


@pytest.fixture(scope="module")
def undisturbed_run(finished_run: FinishedRuns) -> Path:
    return finished_run(*KEEP_EVERY_CHECKPOINT)


def test_corrupt_checkpoints_are_named_set_aside_and_passed_over(undisturbed_run: Path, tmp_path: Path, caplog) -> None:
    """The run continues from the newest one that is intact, which here is the oldest."""
    shutil.copytree(undisturbed_run, tmp_path, symlinks=True, dirs_exist_ok=True)
    checkpoints = tmp_path / "checkpoints"
    damaged_files = {}
    file_of_step = dict(zip(("step-4", "step-3", "step-2"), DAMAGE, strict=True))
    for step, file in file_of_step.items():
        DAMAGE[file](checkpoints / step / file)
        damaged_files |= {path: path.read_bytes() for path in (checkpoints / step).rglob("*") if path.is_file()}

    run(small_config(*KEEP_EVERY_CHECKPOINT), tmp_path)

    assert_same_run(undisturbed_run, tmp_path, BOTH)

    events = [line for line in RunFolder(tmp_path).read("events.jsonl") if line["event"] == "corrupt_checkpoint"]
    assert [(event["iteration"], event["checkpoint"], event["file"]) for event in events] == [
        (1, step, file) for step, file in file_of_step.items()
    ]
    assert all(
        f"corrupt_checkpoint: {event['checkpoint']}: {event['file']}: {event['why']}" in caplog.text for event in events
    )

    for path, content in damaged_files.items():
        step, *path_in_step = path.relative_to(checkpoints).parts
        assert (checkpoints / f"{step}.corrupt").joinpath(*path_in_step).read_bytes() == content
    for link in ("last", "best"):
        assert (checkpoints / link).readlink() == (undisturbed_run / "checkpoints" / link).readlink()


def test_links_lead_to_older_ones_when_the_best_is_corrupt(finished_run: FinishedRuns, tmp_path: Path) -> None:
    config, checkpoints = small_config(*KEEP_EVERY_CHECKPOINT), tmp_path / "checkpoints"
    finished_run.copy(tmp_path, *KEEP_EVERY_CHECKPOINT)
    (checkpoints / "best").unlink()
    (checkpoints / "best").symlink_to("step-4")
    truncate(checkpoints / "step-4" / "state.pt")

    launch(config, tmp_path, lambda line: None).close()

    assert (checkpoints / "last").readlink().name == "step-3"
    assert (checkpoints / "best").readlink().name == "step-2"  # the first one evaluated


@pytest.mark.slow
@pytest.mark.parametrize("file", DAMAGE)
def test_a_run_with_only_corrupt_checkpoints_is_refused(file: str, finished_run: FinishedRuns, tmp_path: Path) -> None:
    config = small_config(SHORT, "checkpoint.every=1")
    finished_run.copy(tmp_path, SHORT, "checkpoint.every=1", kill_after=3)
    for iteration in (2, 3):
        DAMAGE[file](tmp_path / "checkpoints" / f"step-{iteration}" / file)
    expected_lines = metrics(tmp_path)

    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"(?s)step-3/{file}.*step-2/{file}"):
            launch(config, tmp_path, lambda line: None)

    assert metrics(tmp_path) == expected_lines


def test_sample_answers_from_the_checkpoint_that_is_not_corrupt(undisturbed_run: Path, tmp_path: Path, caplog) -> None:
    shutil.copytree(undisturbed_run, tmp_path, symlinks=True, dirs_exist_ok=True)
    _, answers_before = sample_answers(tmp_path, problems=1, seed=0)
    for path in (tmp_path / "checkpoints" / "step-4").rglob("*"):
        if path.is_file() and path.name != "checksums.json":
            path.unlink()
    expected_files = sorted(tmp_path.rglob("*"))

    _, answers = sample_answers(tmp_path, problems=1, seed=0)

    assert all(len(evaluation.responses) == 1 for evaluation in (*answers_before.values(), *answers.values()))
    assert "step-4" in caplog.text
    assert "taking the checkpoint before it" in caplog.text
    assert sorted(tmp_path.rglob("*")) == expected_files


def test_a_folder_in_use_is_refused_and_one_that_was_left_is_not(tmp_path: Path) -> None:
    config = small_config(SHORT, "iterations=1", "evaluation.problems=2")
    other_config = small_config(SHORT, "iterations=1", "evaluation.problems=2", "batch.prompts=8")

    with closing(launch(config, tmp_path, lambda line: None)) as trainer:
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on"):
            launch(config, tmp_path, lambda line: None)
        assert trainer.train()

    with pytest.raises(CheckpointError, match="other settings"):
        launch(other_config, tmp_path, lambda line: None)

    launch(config, tmp_path, lambda line: None).close()  # a start that failed holds nothing


def test_a_signal_ends_the_run_with_a_checkpoint(undisturbed_run: Path, tmp_path: Path) -> None:
    config = small_config(SHORT, "checkpoint.every=100", "evaluation.every=2", "checkpoint.keep=2")
    kinds = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(kind) for kind in kinds]

    for kind, last_iteration in zip(kinds, (1, 3), strict=True):

        def listen(line: MetricsLine, kind: int = kind, last_iteration: int = last_iteration) -> None:
            if line["iteration"] == last_iteration:
                signal.raise_signal(kind)

        with closing(launch(config, tmp_path, listen)) as trainer:
            assert trainer.train() is False
        assert (tmp_path / "checkpoints" / "last").readlink().name == f"step-{last_iteration}"
        assert [signal.getsignal(kind) for kind in kinds] == handlers

    run(config, tmp_path)
    assert_same_run(undisturbed_run, tmp_path, BOTH)


def test_the_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    def listen(line: MetricsLine) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    with closing(launch(small_config(), tmp_path, listen)) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert trainer.iteration == 0


def test_the_second_ctrl_c_counts_where_sigint_was_ignored(tmp_path: Path) -> None:
    """As in `jackpot train ... &` of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    try:
        test_the_second_signal_ends_the_run_at_once(tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_an_old_checkpoint_that_stays_is_told_and_counted(tmp_path: Path, monkeypatch) -> None:
    """As on a network file system while somebody reads it."""

    def refuse_to_remove(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr("jackpot.training.run_folder.checkpoint.shutil.rmtree", refuse_to_remove)
    overrides = ("iterations=3", "checkpoint.every=1", "checkpoint.keep=1", "evaluation.problems=2")

    lines = run(small_config(SHORT, *overrides), tmp_path)

    assert (tmp_path / "checkpoints" / "last").readlink().name == "step-3"
    assert [line["files/failed"] for line in lines] == [0, 0, 0, 1]  # after 2; a line comes first
    assert [line["checkpoint/failed"] for line in lines] == [0] * 4
