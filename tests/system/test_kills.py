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
PATIENCE = 240.0


@pytest.mark.slow
@pytest.mark.sweep
def test_eval_report_and_replay_leave_nothing_half_done(finished_run: FinishedRuns, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, TESTS / "helpers" / "kills.py", tmp_path, finished_run()],
        env=os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    kills = json.loads(done.stdout.splitlines()[-1])
    for command in ("eval", "report", "replay"):
        assert any(kill["code"] == -signal.SIGKILL for kill in kills if kill["command"] == command)
    wanted = {"left": 0, "half_written": [], "again": 0, "differs": [], "reads_only": True}
    assert not [kill for kill in kills if wanted != {name: kill[name] for name in wanted}]


@pytest.mark.slow
def test_a_closed_terminal_stops_training_with_a_checkpoint(tmp_path: Path) -> None:
    """The terminal is gone when the run would print its next lines."""
    arguments = ["train", "quickstart", *SMALL, "iterations=500", "--run", str(tmp_path / "run")]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(JACKPOT, [str(JACKPOT), *arguments])
    log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE
    os.set_blocking(terminal, False)
    while not log.exists() or '"iteration": 1,' not in log.read_text():
        assert time.monotonic() < deadline
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    newest = read_lines(tmp_path / "run")[-1]["iteration"]
    assert 1 <= newest < 500 and (tmp_path / "run" / "checkpoints" / "last").readlink() == Path(f"step-{newest}")


def test_a_hangup_is_a_request_to_stop_unless_it_was_ignored() -> None:
    """As with nohup, whose processes go on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
