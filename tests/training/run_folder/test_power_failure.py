"""A power failure leaves whole files: content is flushed before its name, lines before their checkpoint."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.runs import run, small_config
from helpers.tensors import save
from jackpot.core.errors import CheckpointError
from jackpot.core.files import write_whole
from jackpot.training.run_folder.checkpoint import Checkpoints


class Disk:
    """Records what is flushed and renamed, in its order, and lets one of these calls fail.

    Args:
        home: the paths are relative to it.
        failing_call: number of the call that fails, from 1; 0: none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, failing_call: int = 0) -> None:
        self.calls: list[str] = []
        self._home, self._failing_call = home, failing_call
        monkeypatch.setattr(os, "fsync", self._recorded(os.fsync, lambda file: f"flush {self._name(_path(file))}"))
        for name in ("rename", "replace"):
            call = self._recorded(getattr(Path, name), lambda old, new: f"rename {self._name(old)} {self._name(new)}")
            monkeypatch.setattr(Path, name, call)

    def _recorded(self, call: Callable, describe: Callable[..., str]) -> Callable:
        def recorded(*arguments):
            self.calls.append(describe(*arguments))
            if len(self.calls) == self._failing_call:
                raise OSError(errno.EIO, "Input/output error")
            return call(*arguments)

        return recorded

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self._home)


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


@contextmanager
def recorded_disk(home: Path, failing_call: int = 0) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Disk(monkeypatch, home.resolve(), failing_call)


def test_a_file_is_flushed_then_named_then_its_folder_is_flushed(tmp_path: Path) -> None:
    with recorded_disk(tmp_path) as disk:
        write_whole(tmp_path / "a", b"new")
    assert disk.calls == ["flush a.partial", "rename a.partial a", "flush ."]


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_a_file_that_cannot_be_flushed_is_the_old_or_the_new_one(failing_call: int, tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")

    with recorded_disk(tmp_path, failing_call), pytest.raises(OSError, match="Input/output error"):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == (b"new" if failing_call == 3 else b"old")  # the third is of the folder
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_checkpoint_is_flushed_then_named_then_its_folder(tmp_path: Path) -> None:
    with recorded_disk(tmp_path) as disk:
        save(tmp_path, 2, is_best=True)

    naming = disk.calls.index("rename step-2.partial step-2")
    files = {path.relative_to(tmp_path / "step-2").as_posix() for path in (tmp_path / "step-2").rglob("*")}
    assert {"policy", "policy/model.safetensors", "state.pt", "checksums.json"} <= files

    flushes = {f"flush step-2.partial/{name}" for name in files} | {"flush step-2.partial"}
    assert set(disk.calls[:naming]) == flushes
    assert len(disk.calls[:naming]) == len(flushes)
    assert disk.calls[naming + 1] == "flush ."
    assert disk.calls[naming + 2 :] == ["rename .last last", "rename .best best"]


def test_a_checkpoint_that_cannot_be_flushed_leaves_the_others(tmp_path: Path) -> None:
    """At every flush and rename; the next attempt writes what is missing, and flushes it."""
    with recorded_disk(tmp_path) as disk:
        save(tmp_path / "whole", 4)
    naming = disk.calls.index("rename whole/step-4.partial whole/step-4")

    for failing_call in range(1, len(disk.calls) + 1):
        folder = tmp_path / str(failing_call)
        save(folder, 2)

        with (
            recorded_disk(folder, failing_call),
            pytest.raises(CheckpointError, match=r"step-4: OSError: .*Input/output error"),
        ):
            save(folder, 4)

        checkpoint, corrupt_checkpoints = Checkpoints(folder, 2).find()
        assert not corrupt_checkpoints
        assert checkpoint.state["iteration"] == (2 if failing_call <= naming + 1 else 4)  # calls count from 1
        assert not list(folder.glob("*.partial"))

        with recorded_disk(folder) as next_disk:
            save(folder, 4)

        assert "flush ." in next_disk.calls
        assert (folder / "last").readlink() == Path("step-4")


def test_lines_are_flushed_before_their_checkpoint(tmp_path: Path) -> None:
    with recorded_disk(tmp_path) as disk:
        run(small_config("iterations=1"), tmp_path)

    naming = disk.calls.index("rename checkpoints/step-1.partial checkpoints/step-1")
    for name in ("metrics.jsonl", "events.jsonl"):
        assert f"flush {name}" in disk.calls[:naming]

    for name in ("config.yaml", "environment.json", "rollouts/iteration-000001.parquet"):
        rename_index = disk.calls.index(f"rename {name}.partial {name}")
        assert disk.calls[rename_index - 1] == f"flush {name}.partial"
        assert disk.calls[rename_index + 1] == f"flush {Path(name).parent}"
