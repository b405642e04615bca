"""File writes that a kill or a full disk cannot leave half done, and the lock of a run folder."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from helpers.disks import largest_file
from jackpot.core import files
from jackpot.core.errors import CheckpointError
from jackpot.core.files import AppendedFile, checkpoint_error_in, hold_lock, write_whole


def test_records_that_do_not_fit_wait_and_come_in_order(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "log")
    file.append(b"one\n")
    with largest_file(6):
        for record in (b"two\n", b"three\n"):
            with pytest.raises(OSError, match="too large"):
                file.append(record)
            assert file.path.read_bytes() == b"one\n"  # the two bytes that did fit are gone again

    file.append(b"four\n")
    assert file.path.read_bytes() == b"one\ntwo\nthree\nfour\n" and not file.waiting


def test_a_file_is_whole_or_what_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"old")
    with largest_file(2), pytest.raises(OSError, match="too large"):
        write_whole(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_run_needs_is_refused_with_advice(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"cannot begin in .*No such file.*, or give another folder$"),
        checkpoint_error_in(tmp_path),
    ):
        (tmp_path / "nowhere" / "file").write_text("")


def test_a_lock_names_its_holder_and_a_kill_opens_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with hold_lock(path):
            os.write(tell, b"!")
            signal.pause()
    os.read(ready, 1)

    try:
        with pytest.raises(CheckpointError, match=rf"in use by process {child} on .*, or give another folder$"):
            hold_lock(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    with hold_lock(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")

    hold_lock(path).close()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without locks of files, where leases end after 0.6 seconds."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(files, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(files, "_SETTLES", 0.05)


@pytest.mark.usefixtures("without_locks")
def test_a_lease_stands_for_a_lock_where_there_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / ".lock"
    with hold_lock(path):
        assert not caplog.records  # nobody was there before
        time.sleep(1.0)
        with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on .*, or give another folder$"):
            hold_lock(path)
    assert "cannot lock" in caplog.text

    time.sleep(0.5)  # of the thread that renewed it
    hold_lock(path).close()  # nobody renews it


@pytest.mark.usefixtures("without_locks")
def test_of_two_that_take_a_lease_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"

    def sleep(seconds: float) -> None:
        if seconds == files._SETTLES:
            path.write_text("process 1 on another\n")

    monkeypatch.setattr(files.time, "sleep", sleep)
    with pytest.raises(CheckpointError, match="in use by process 1 on another"):
        hold_lock(path)


@pytest.mark.usefixtures("without_locks")
def test_an_owner_whose_lease_was_taken_over_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    child = os.fork()
    if child == 0:
        with hold_lock(path):
            time.sleep(60.0)
        os._exit(0)

    deadline = time.monotonic() + 30.0
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
    time.sleep(0.2)

    path.write_text("process 1 on another\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
