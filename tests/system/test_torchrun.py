"""torchrun, typed as in docs/distributed.md, starts a killed group again and leaves no process behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers.led import assert_close_runs
from helpers.runs import SMALL, FinishedRuns

pytestmark = pytest.mark.slow


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


def wait_for_a_checkpoint(run: Path, group: subprocess.Popen, output: Path) -> None:
    """Wait until a run has a checkpoint; fail with what its group printed where that ended before."""
    while not (run / "checkpoints" / "last").exists():
        assert group.poll() is None, output.read_text()
        time.sleep(0.05)


def test_torchrun_starts_a_killed_group_again(finished_run: FinishedRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*torchrun, "-m", "--", "jackpot", "train", "quickstart", *SMALL, "--run", str(run)]

    with (tmp_path / "output").open("w") as output:
        group = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
        try:
            wait_for_a_checkpoint(run, group, tmp_path / "output")
            os.kill(json.loads((run / "ranks" / "1.json").read_text())["pid"], signal.SIGKILL)
            code = group.wait(300)
        finally:
            group.kill()
            group.wait()

    assert code == 0, (tmp_path / "output").read_text()

    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [(start["ranks"], start["after_iteration"]) for start in starts] == [(2, -1), (2, 2)]
    assert_close_runs(finished_run(), run)


def test_nothing_stays_of_a_group_whose_launcher_was_killed(tmp_path: Path) -> None:
    """Ranks and their engine processes see the end of their parent; none waits for a time limit."""
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}", "--nproc-per-node", "2"]
    train = ["-m", "--", "jackpot", "train", "quickstart", *SMALL, "iterations=1000", "placement.engines=2"]

    with (tmp_path / "output").open("w") as output:
        command = [*torchrun, *train, "--run", str(run)]
        group = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
        try:
            wait_for_a_checkpoint(run, group, tmp_path / "output")
            descendants = psutil.Process(group.pid).children(recursive=True)
        finally:
            group.kill()
            group.wait()

    assert len(descendants) >= 4  # two ranks and two engine processes
    _, remaining_processes = psutil.wait_procs(descendants, timeout=10.0)
    assert not remaining_processes, [process.cmdline() for process in remaining_processes]
