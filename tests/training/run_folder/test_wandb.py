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
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def starts(folder: Path) -> list[Path]:
    """The folders of what each start of a run wrote, once W&B's process has ended with all of it on the disk."""
    import wandb

    wandb.teardown()
    return sorted(path for path in (folder / "wandb").glob("offline-run-*") if path.is_dir())


def kinds(start: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for record in records(start):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def logged(start: Path) -> list[dict[str, Any]]:
    """The lines that a start logged, without what W&B adds to each."""
    lines = ({item.nested_key[0]: json.loads(item.value_json) for item in one.item} for one in kinds(start)["history"])
    return [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]


def counted(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if value is not None}


@pytest.mark.slow
@needs_wandb
def test_a_continued_run_continues_its_wandb_run(tmp_path: Path) -> None:
    config, folder = small_config(OFFLINE), tmp_path / "killed"
    before = run(config, folder, kill_after=3)  # the newest checkpoint is that of iteration 2
    run(config, folder)
    lines = read_lines(folder)
    first, second = starts(folder)

    both = [kinds(start) for start in (first, second)]

    assert [one["exit"][0].exit_code for one in both] == [1, 0]

    ids = {one["run"][0].run_id for one in both}
    assert len(ids) == 1
    assert all(one["run"][0].resume for one in both)
    assert (folder / "wandb" / "run_id").read_text().strip() == f"/tests/{ids.pop()}"
    assert logged(first) == [counted(line) for line in before]
    assert logged(second) == [counted(line) for line in lines[3:]]
    assert lines[3]["iteration"] == 3

    sent = both[1]["run"][0]
    settings = {one.key: json.loads(one.value_json) for one in sent.config.update if one.key != "_wandb"}

    assert settings == settings_of(config)
    assert (sent.project, sent.display_name) == ("tests", "killed")
    assert not sent.host
    assert not sent.HasField("git")
    assert both[1].keys() <= {"header", "run", "telemetry", "metric", "summary", "history", "exit", "footer"}


@needs_wandb
@pytest.mark.slow
def test_tracking_begun_later_has_the_earlier_lines(tmp_path: Path) -> None:
    plain, tracked = small_config(), small_config(OFFLINE)
    folder = RunFolder(tmp_path)
    folder.start(plain, 1, -1)
    for iteration in range(3):
        folder.report(iteration, {"loss": 1.0 / (iteration + 1), "never": float("nan")})
    folder.close()
    assert not (tmp_path / "wandb").exists()
    folder = RunFolder(tmp_path)
    folder.check(tracked)
    folder.start(tracked, 1, 2)
    folder.report(3, {"loss": 0.1})
    folder.close()
    [start] = starts(tmp_path)
    assert [(line["iteration"], line["loss"]) for line in logged(start)] == [(0, 1), (1, 1 / 2), (2, 1 / 3), (3, 0.1)]
    assert not any("never" in line for line in logged(start))

    folder = RunFolder(tmp_path)
    folder.start(tracked, 1, 3)
    [core] = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.kill()
    core.wait()
    lines = [folder.report(4, {"loss": 0.1}), folder.report(5, {"loss": 0.1})]
    folder.close()
    assert [line["files/failed"] for line in lines] == [0, 1]
    [event, *_] = [one for one in folder.read("events.jsonl") if one["event"] == "write_failed"]
    assert event["file"] == "wandb"
    assert "onnection" in event["why"]

    folder = RunFolder(tmp_path)  # a second run in the same process
    folder.start(tracked, 1, 5)
    folder.report(6, {"loss": 0.1})
    folder.close()
    assert folder.failed["files/failed"] == 0
    assert logged(starts(tmp_path)[-1])[-1]["iteration"] == 6


@needs_wandb
@pytest.mark.slow
def test_without_a_login_a_new_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    online = small_config("tracking.wandb={project: tests}")

    with pytest.raises(ConfigError, match=r"No API key configured.*tracking\.wandb\.mode=offline"):
        RunFolder(tmp_path).start(online, 1, -1)

    folder = tmp_path / "continued"
    run(small_config(), folder, kill_after=3)
    lines = run(online, folder)

    assert {line["files/failed"] for line in lines} == {1}

    [event] = [one for one in RunFolder(folder).read("events.jsonl") if one["event"] == "write_failed"]
    assert event["file"] == "wandb"
    assert "No API key configured" in event["why"]


@needs_wandb
@pytest.mark.slow
def test_the_environment_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()  # it reads the environment once
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = RunFolder(tmp_path)
    folder.start(small_config("tracking.wandb={project: tests}"), 1, -1)
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
