"""Commands that were killed: nothing is half written, no process is left, and the same command goes on."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.paths import TESTS
from helpers.runs import SMALL, FinishedRuns, read_lines
from jackpot.training.interrupt import StopSignal

JACKPOT = Path(sys.executable).with_name("jackpot")
PATIENCE = 240.0  # seconds until a test gives up


@pytest.mark.slow
@pytest.mark.sweep
def test_eval_report_and_replay_leave_nothing_half_done(finished_run: FinishedRuns, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))

    result = subprocess.run(
        [sys.executable, TESTS / "helpers" / "kills.py", tmp_path, finished_run()],
        env=os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
    )

    assert result.returncode == 0

    kills = json.loads(result.stdout.splitlines()[-1])
    for command in ("eval", "report", "replay"):
        assert any(kill["code"] == -signal.SIGKILL for kill in kills if kill["command"] == command)

    expected_outcome = {"left": 0, "half_written": [], "again": 0, "differs": [], "reads_only": True}
    assert not [kill for kill in kills if expected_outcome != {name: kill[name] for name in expected_outcome}]


@pytest.mark.slow
def test_a_closed_terminal_stops_training_with_a_checkpoint(tmp_path: Path) -> None:
    """The terminal is gone when the run would print its next lines."""
    arguments = ["train", "quickstart", *SMALL, "iterations=500", "--run", str(tmp_path / "run")]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(JACKPOT, [str(JACKPOT), *arguments])

    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    os.set_blocking(terminal, False)
    while not log.exists() or '"iteration": 1,' not in log.read_text():
        assert time.monotonic() < deadline
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.05)

    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    last_iteration = read_lines(tmp_path / "run")[-1]["iteration"]
    assert 1 <= last_iteration < 500
    assert (tmp_path / "run" / "checkpoints" / "last").readlink() == Path(f"step-{last_iteration}")


def test_a_hangup_is_a_request_to_stop_unless_it_was_ignored() -> None:
    """As with nohup, whose processes go on."""
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, previous_handler)
