"""Weights & Biases gets a run's metrics and settings, nothing else, and only where it is asked for them."""

import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from helpers.runs import read_lines, run, small_config
from jackpot.config.changes import settings_of
from jackpot.core.errors import ConfigError
from jackpot.training.run_folder.folder import RunFolder

has_wandb = importlib.util.find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not has_wandb, reason="wandb is not installed; make test-all installs it")
OFFLINE = "tracking.wandb={project: tests, mode: offline}"


def records(folder: Path) -> Iterator[Any]:
    """Yield what one start of a run wrote for W&B: a LevelDB log of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    data, record = file.read_bytes(), b""
    offset = 7  # a header of 7 bytes comes first
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # no header fits into the rest of a block
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def start_folders(folder: Path) -> list[Path]:
    """Return the folders of what each start of a run wrote, once W&B's process has ended with all of it on the disk."""
    import wandb

    wandb.teardown()
    return sorted(path for path in (folder / "wandb").glob("offline-run-*") if path.is_dir())


def records_of(start: Path) -> dict[str, list[Any]]:
    """Return what one start of a run wrote for W&B, by kind."""
    records_by_kind: dict[str, list[Any]] = {}
    for record in records(start):
        kind = record.WhichOneof("record_type")
        records_by_kind.setdefault(kind, []).append(getattr(record, kind))
    return records_by_kind


def logged_lines(start: Path) -> list[dict[str, Any]]:
    """Return the lines that a start logged, without what W&B adds to each."""
    lines = (
        {item.nested_key[0]: json.loads(item.value_json) for item in record.item}
        for record in records_of(start)["history"]
    )
    return [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]


def without_empty_values(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics without the values that are null."""
    return {name: value for name, value in line.items() if value is not None}


@pytest.mark.slow
@needs_wandb
def test_a_continued_run_continues_its_wandb_run(tmp_path: Path) -> None:
    config, folder = small_config(OFFLINE), tmp_path / "killed"

    lines_before = run(config, folder, kill_after=3)  # the newest checkpoint is that of iteration 2
    run(config, folder)

    lines = read_lines(folder)
    first_start, second_start = start_folders(folder)
    both_records = [records_of(start) for start in (first_start, second_start)]
    assert [records["exit"][0].exit_code for records in both_records] == [1, 0]

    ids = {records["run"][0].run_id for records in both_records}
    assert len(ids) == 1
    assert all(records["run"][0].resume for records in both_records)
    assert (folder / "wandb" / "run_id").read_text().strip() == f"/tests/{ids.pop()}"

    assert logged_lines(first_start) == [without_empty_values(line) for line in lines_before]
    assert logged_lines(second_start) == [without_empty_values(line) for line in lines[3:]]
    assert lines[3]["iteration"] == 3

    run_record = both_records[1]["run"][0]
    settings = {item.key: json.loads(item.value_json) for item in run_record.config.update if item.key != "_wandb"}
    assert settings == settings_of(config)
    assert run_record.project == "tests"
    assert run_record.display_name == "killed"
    assert not run_record.host
    assert not run_record.HasField("git")
    assert both_records[1].keys() <= {"header", "run", "telemetry", "metric", "summary", "history", "exit", "footer"}


@needs_wandb
@pytest.mark.slow
def test_tracking_begun_later_has_the_earlier_lines(tmp_path: Path) -> None:
    plain, tracked = small_config(), small_config(OFFLINE)
    folder = RunFolder(tmp_path)
    folder.start(plain, threads=1, iteration=-1)
    for iteration in range(3):
        folder.report(iteration, {"loss": 1.0 / (iteration + 1), "never": float("nan")})
    folder.close()
    assert not (tmp_path / "wandb").exists()

    folder = RunFolder(tmp_path)
    folder.check(tracked)
    folder.start(tracked, threads=1, iteration=2)
    folder.report(3, {"loss": 0.1})
    folder.close()

    [start] = start_folders(tmp_path)
    assert [(line["iteration"], line["loss"]) for line in logged_lines(start)] == [
        (0, 1),
        (1, 1 / 2),
        (2, 1 / 3),
        (3, 0.1),
    ]
    assert not any("never" in line for line in logged_lines(start))

    folder = RunFolder(tmp_path)
    folder.start(tracked, threads=1, iteration=3)
    [core] = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.kill()
    core.wait()

    lines = [folder.report(4, {"loss": 0.1}), folder.report(5, {"loss": 0.1})]
    folder.close()

    assert [line["files/failed"] for line in lines] == [0, 1]
    [event, *_] = [event for event in folder.read("events.jsonl") if event["event"] == "write_failed"]
    assert event["file"] == "wandb"
    assert "onnection" in event["why"]

    folder = RunFolder(tmp_path)  # a second run in the same process
    folder.start(tracked, threads=1, iteration=5)
    folder.report(6, {"loss": 0.1})
    folder.close()

    assert folder.failed["files/failed"] == 0
    assert logged_lines(start_folders(tmp_path)[-1])[-1]["iteration"] == 6


@needs_wandb
@pytest.mark.slow
def test_without_a_login_a_new_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    online = small_config("tracking.wandb={project: tests}")

    with pytest.raises(ConfigError, match=r"No API key configured.*tracking\.wandb\.mode=offline"):
        RunFolder(tmp_path).start(online, threads=1, iteration=-1)

    folder = tmp_path / "continued"
    run(small_config(), folder, kill_after=3)

    lines = run(online, folder)

    assert {line["files/failed"] for line in lines} == {1}

    [event] = [event for event in RunFolder(folder).read("events.jsonl") if event["event"] == "write_failed"]
    assert event["file"] == "wandb"
    assert "No API key configured" in event["why"]


@needs_wandb
@pytest.mark.slow
def test_the_environment_switches_wandb_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()  # it reads the environment once
    monkeypatch.setenv("WANDB_MODE", "disabled")

    folder = RunFolder(tmp_path)
    folder.start(small_config("tracking.wandb={project: tests}"), threads=1, iteration=-1)
    assert folder.report(0, {"loss": 1.0})["files/failed"] == 0
    folder.close()
    wandb.teardown()
    assert not list((tmp_path / "wandb").glob("*run-*"))
    assert folder.failed["files/failed"] == 0


@pytest.mark.parametrize("module", [None, ModuleType("wandb")], ids=["nothing", "a folder of that name"])
def test_without_the_package_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    folder = RunFolder(tmp_path)
    folder.check(small_config())
    with pytest.raises(ConfigError, match=r"wandb is not installed; pip install -c constraints\.txt '\.\[wandb\]'"):
        folder.check(small_config(OFFLINE))
