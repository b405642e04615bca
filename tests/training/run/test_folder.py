"""What a run folder still says after a kill."""

import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.runs import small_config
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.training.run.folder import RunFolder, run_config


def opened(path: Path, iteration: int = -1) -> RunFolder:
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    folder.rewind(iteration)
    return folder


def iterations(folder: RunFolder, name: str = "metrics.jsonl") -> list[int]:
    return [line["iteration"] for line in folder.read(name)]


def test_a_line_torn_at_the_end_is_left_out_and_forgotten(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for iteration in range(3):
        folder.report(iteration, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "loss": 1.0}')  # all but the end of the line
    assert iterations(folder) == [0, 1, 2]
    folder = opened(tmp_path, 2)
    folder.report(3, {"loss": 2.0})
    assert iterations(folder) == [0, 1, 2, 3] and folder.read("metrics.jsonl")[3]["loss"] == 2.0


def test_a_line_torn_in_the_middle_costs_itself_only_and_is_named(tmp_path: Path, caplog) -> None:
    folder = opened(tmp_path)
    for iteration in range(4):
        folder.report(iteration, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:10] + "\n", *lines[2:]]))
    assert iterations(folder) == [0, 2, 3]
    opened(tmp_path, 2)
    assert path.read_text() == lines[0] + lines[2]
    assert "metrics.jsonl: lines 2 cannot be read and are removed" in caplog.text


def test_rewinding_forgets_what_came_later_and_half_written_files(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for iteration in range(4):
        folder.event(iteration, {"event": "something"})
        folder.report(iteration, {"loss": 1.0})
    for name in ("rollouts/iteration-000002.parquet", "rollouts/iteration-000003.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "rollouts" / "iteration-000001.parquet.partial").touch()
    for _ in range(2):  # a kill on the way is made good by doing it again
        folder = opened(tmp_path, 2)
        assert iterations(folder) == iterations(folder, "events.jsonl") == [0, 1, 2]
        assert [path.name for path in folder.rollouts.iterdir()] == ["iteration-000002.parquet"]


def test_tensorboard_shows_every_iteration_once_after_a_kill(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for iteration in range(4):
        folder.report(iteration, {"loss": float(iteration), "never": float("nan")})
    with next((tmp_path / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"half a record")
    folder = opened(tmp_path, 2)
    folder.report(3, {"loss": 30.0})
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in shown.Scalars("loss")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert "never" not in shown.Tags()["scalars"] and "checkpoint/failed" in shown.Tags()["scalars"]


def test_a_failed_file_is_counted_named_and_shown(tmp_path: Path, caplog) -> None:
    folder = opened(tmp_path)
    with folder.dispensable(3, "rollouts"):
        (tmp_path / "nowhere" / "file").touch()
    line = folder.report(3, {})
    assert line["files/failed"] == 1 and line["checkpoint/failed"] == 0
    [event] = folder.read("events.jsonl")
    assert event["event"] == "write_failed" and event["file"] == "rollouts" and "No such file" in event["why"]
    assert "iteration 3: write_failed: rollouts: [Errno 2]" in caplog.text


def test_a_run_with_a_checkpoint_has_trained_whatever_its_metrics_say(tmp_path: Path) -> None:
    """Lines may have waited in the memory of a process that was killed."""
    folder = opened(tmp_path)
    folder.start(small_config(), 1)
    folder.check(small_config("iterations=9"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="iterations: 4 in the folder, 9 now"):
        folder.check(small_config("iterations=9"))
    assert folder.start(small_config(), 7) == json.loads((tmp_path / "environment.json").read_text())["threads"] == 1


def test_settings_of_an_earlier_version_are_refused_with_their_file_and_their_new_names(tmp_path: Path) -> None:
    settings = small_config().model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert run_config(tmp_path) == small_config()
    settings["batch"]["epochs"] = settings["batch"].pop("ppo_epochs")
    settings["engine"]["max_batch_size"] = settings["engine"].pop("max_num_seqs")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as error:
        run_config(tmp_path)
    first, *rest = str(error.value).splitlines()
    assert first == f"{tmp_path / 'config.yaml'} does not fit this version:"
    assert set(rest) == {
        "unknown setting 'batch.epochs'; it is now batch.ppo_epochs",
        "unknown setting 'engine.max_batch_size'; it is now engine.max_num_seqs",
    }
