"""Checkpoints are whole, or known not to be: damage is named, and a kill or a full disk leaves one to continue from."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.disks import largest_file
from helpers.kill_points import Kill
from helpers.runs import Killed
from helpers.tensors import TOKENIZER, OneTensor, save
from jackpot.core.errors import CheckpointError, RankError
from jackpot.training.run_folder.checkpoint import Checkpoints, CorruptCheckpoint, load_state, resolve_model_path


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite_state(path: Path) -> None:
    """Write what is no torch file, and its checksum."""
    path.write_bytes(b"not a state")
    checksum_file = path.with_name("checksums.json")
    entry = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    checksum_file.write_text(json.dumps(json.loads(checksum_file.read_text()) | {"state.pt": entry}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "flipped byte": (flip_a_byte, "policy/model.safetensors", "has changed since it was written"),
    "truncated state": (truncate, "state.pt", "were written"),
    "missing weights": (Path.unlink, "rollout_model/model.safetensors", "No such file"),
    "missing config": (Path.unlink, "policy/config.json", "No such file"),
    "truncated checksums": (truncate, "checksums.json", "cannot be read"),
    "no state": (rewrite_state, "state.pt", "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_checkpoint_is_named_and_that_before_is_used(damage: str, tmp_path: Path) -> None:
    damage_file, file, reason = DAMAGE[damage]
    for iteration in (2, 4):
        save(tmp_path, iteration)
    damage_file(tmp_path / "step-4" / file)
    expected_files = sorted(tmp_path.rglob("*"))

    checkpoint, [corrupt_checkpoint] = Checkpoints(tmp_path, 2).find()

    assert checkpoint.folder.name == "step-2"
    assert checkpoint.state["iteration"] == 2
    assert corrupt_checkpoint.folder.name == "step-4"
    assert corrupt_checkpoint.file == file
    assert reason in corrupt_checkpoint.why
    assert sorted(tmp_path.rglob("*")) == expected_files


@pytest.mark.parametrize("damage", DAMAGE)
def test_where_all_checkpoints_are_corrupt_none_is_found(damage: str, tmp_path: Path) -> None:
    damage_file, file, _ = DAMAGE[damage]
    for iteration in (2, 4):
        save(tmp_path, iteration)
        damage_file(tmp_path / f"step-{iteration}" / file)
    checkpoints = Checkpoints(tmp_path, 2)

    with pytest.raises(CheckpointError, match="every checkpoint") as error:
        checkpoints.find()
    assert all(f"step-{iteration}/{file}" in str(error.value) for iteration in (2, 4))

    checkpoints.set_aside(tmp_path / "step-2")
    checkpoints.set_aside(tmp_path / "step-4")

    with pytest.raises(CheckpointError, match=r"every checkpoint[^$]*step-4\.corrupt, set aside"):
        checkpoints.find()


def test_an_intact_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, 2).find() == (None, [])

    save(tmp_path, 2)
    (tmp_path / "step-2" / "notes.txt").write_text("a file of somebody else")

    checkpoint, corrupt_checkpoints = Checkpoints(tmp_path, 2).find()

    assert corrupt_checkpoints == []
    assert checkpoint.state["learner"]["moment"].sum() == 2000  # as many ones

    checksums = json.loads((tmp_path / "step-2" / "checksums.json").read_text())
    assert {"state.pt", "policy/model.safetensors", "rollout_model/tokenizer.json"} <= checksums.keys()
    assert checksums["state.pt"]["size"] == (tmp_path / "step-2" / "state.pt").stat().st_size


def test_a_checkpoint_without_checksums_is_corrupt(tmp_path: Path) -> None:
    for iteration in (2, 4):
        save(tmp_path, iteration)
    (tmp_path / "step-4" / "checksums.json").unlink()

    checkpoint, [corrupt_checkpoint] = Checkpoints(tmp_path, 2).find()

    assert checkpoint.folder.name == "step-2"
    assert corrupt_checkpoint.file == "checksums.json"


def test_each_checkpoint_set_aside_is_kept_under_another_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(tmp_path, 2)

    for expected_name in ("step-4.corrupt", "step-4.corrupt1", "step-4.corrupt2"):
        save(tmp_path, 4, keep=2)
        checkpoints.set_aside(tmp_path / "step-4")
        assert (tmp_path / expected_name / "state.pt").is_file()

    checkpoints.restore_links(None)
    save(tmp_path, 6, keep=1)

    expected_names = {"step-6", "step-4.corrupt", "step-4.corrupt1", "step-4.corrupt2", "last"}
    assert {path.name for path in tmp_path.iterdir()} == expected_names


def test_the_newest_are_kept_and_a_best_that_is_older(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration, keep=1, is_best=iteration == 4, best=4)

    assert {path.name for path in tmp_path.iterdir()} == {"step-4", "step-8", "best", "last"}

    save(tmp_path, 10, keep=1, is_best=True)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "best", "last"}
    assert (tmp_path / "best").readlink() == Path("step-10")
    assert (tmp_path / "last").readlink() == Path("step-10")


def test_links_to_a_checkpoint_set_aside_are_mended(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save(tmp_path, 2)
    save(tmp_path, 4, is_best=True)

    checkpoints.set_aside(tmp_path / "step-4")

    assert checkpoints.restore_links({"iteration": 1, "accuracy": 0.5}) is None  # pruned when step-4 was better
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-4.corrupt", "last"}
    assert (tmp_path / "last").readlink() == Path("step-2")


# bytes of the largest file that fits, by the first file that does not
SIZE_LIMITS = {"config": 1, "tokenizer": 1000, "weights": 3000, "state": 6000}


@pytest.mark.parametrize("size", SIZE_LIMITS.values(), ids=SIZE_LIMITS)
def test_a_checkpoint_that_does_not_fit_leaves_those_before_it(size: int, tmp_path: Path) -> None:
    """Each library has its own error for it: all say what the system said."""
    save(tmp_path, 2, is_best=True)

    with largest_file(size), pytest.raises(CheckpointError, match=r"step-4: .*File too large"):
        save(tmp_path, 4, is_best=True)

    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "best", "last"}

    save(tmp_path, 4, is_best=True)
    assert (tmp_path / "best").resolve().name == "step-4"


def test_a_rank_lost_while_saving_is_an_error_of_the_run(tmp_path: Path) -> None:
    """A run goes on without a checkpoint, and not without a part of its models."""

    class LostRank(OneTensor):
        def state_dict(self) -> dict:
            raise RankError("rank 1 was lost")

    with pytest.raises(RankError, match="rank 1 was lost"):
        Checkpoints(tmp_path, 2).save(2, LostRank(2), ["policy"], TOKENIZER, {}, is_best=False)

    assert not list(tmp_path.iterdir())


def test_a_kill_while_saving_leaves_the_old_or_new_checkpoint(tmp_path: Path) -> None:
    """At every call that changes the disk: those of writing, linking and removing."""
    surviving_iterations = set()

    for call_index in range(1, 1000):
        folder = tmp_path / str(call_index)
        save(folder, 2, keep=1, is_best=True)
        save(folder, 4, keep=1, best=2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill = Kill(monkeypatch, call_index)
            with contextlib.suppress(Killed):
                save(folder, 6, keep=1, is_best=True)

        checkpoints = Checkpoints(folder, 1)
        checkpoint, corrupt_checkpoints = checkpoints.find()
        newest_iteration = checkpoint.state["iteration"]
        assert not corrupt_checkpoints
        assert newest_iteration in (4, 6)
        surviving_iterations.add(newest_iteration)

        best_state = checkpoints.restore_links(checkpoint.state["best"])
        checkpoints.prune()
        assert best_state["iteration"] == {4: 2, 6: 6}[newest_iteration]
        expected_names = {"step-4", "step-2", "last", "best"} if newest_iteration == 4 else {"step-6", "last", "best"}
        assert {path.name for path in folder.iterdir()} == expected_names
        assert (folder / "last").readlink().name == f"step-{newest_iteration}"
        assert (folder / "best").readlink().name == f"step-{int(best_state['iteration'])}"

        if kill.left > 0:
            break

    assert kill.left > 0  # the last kill came after every call
    assert call_index > 20  # calls were tried
    assert surviving_iterations == {4, 6}


def test_a_kill_while_a_start_tidies_up_is_made_good_by_the_next(tmp_path: Path) -> None:
    for call_index in range(1, 1000):
        folder = tmp_path / str(call_index)
        checkpoints = Checkpoints(folder, 1)
        for iteration in (2, 4, 6):
            save(folder, iteration, keep=3)
        (folder / "step-8.partial").mkdir()
        (folder / "last").unlink()

        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(Killed):
            kill = Kill(monkeypatch, call_index)
            checkpoints.restore_links({"iteration": 4, "accuracy": 0.5})
            checkpoints.prune()

        assert checkpoints.find()[0].state["iteration"] == 6
        checkpoints.restore_links({"iteration": 4, "accuracy": 0.5})
        checkpoints.prune()
        assert {path.name for path in folder.iterdir()} == {"step-4", "step-6", "last", "best"}

        if kill.left > 0:
            break

    assert kill.left > 0
    assert call_index > 5


def test_a_checkpoint_that_lacks_its_links_is_not_written_again(tmp_path: Path) -> None:
    save(tmp_path, 2)
    modification_time = (tmp_path / "step-2" / "state.pt").stat().st_mtime_ns
    (tmp_path / "last").unlink()

    save(tmp_path, 2)

    assert (tmp_path / "step-2" / "state.pt").stat().st_mtime_ns == modification_time
    assert (tmp_path / "last").readlink() == Path("step-2")


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"state\.pt cannot be read: FileNotFoundError"):
        load_state(tmp_path)


def test_a_checkpoint_removed_by_half_is_not_continued_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)

    def remove_a_file(path: Path) -> None:
        (path / "state.pt").unlink()
        raise OSError("the disk went away")

    monkeypatch.setattr("shutil.rmtree", remove_a_file)

    with pytest.raises(OSError, match="went away"):
        Checkpoints(tmp_path, 1).prune()

    (tmp_path / "step-4" / "state.pt").unlink()  # the newest is damaged: is the one before it taken?
    with pytest.raises(CheckpointError, match="every checkpoint of this run is corrupt") as error:
        Checkpoints(tmp_path, 1).find()

    assert "step-4" in str(error.value)
    assert "step-2" not in str(error.value)


def test_links_that_are_right_already_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a start needs no room on a full disk."""
    save(tmp_path, 2, is_best=True)

    def raise_full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "symlink_to", raise_full_disk)

    best_state = {"iteration": 2.0, "accuracy": 0.5}
    assert Checkpoints(tmp_path, 1).restore_links(best_state) == best_state
    (tmp_path / "last").unlink()
    with pytest.raises(CheckpointError, match="No space left"):
        Checkpoints(tmp_path, 1).restore_links(best_state)


def test_the_best_checkpoint_is_what_a_link_beside_it_names(tmp_path: Path) -> None:
    for iteration in (2, 4):
        save(tmp_path, iteration)
    best = tmp_path / "best"
    best.unlink(missing_ok=True)

    best.symlink_to("step-2")
    assert Checkpoints(tmp_path, 2).best() == (tmp_path / "step-2").resolve()

    best.unlink()
    best.symlink_to(tmp_path / "step-2")  # the same folder, by a path that leads anywhere
    assert Checkpoints(tmp_path, 2).best() is None


def test_a_model_that_is_no_run_folder_stands_for_itself(tmp_path: Path) -> None:
    assert resolve_model_path("starter:policy") == "starter:policy"
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
