"""The command of docs/distributed.md, typed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.led import assert_close_runs
from helpers.runs import SMALL, FinishedRuns

pytestmark = pytest.mark.slow


def test_torchrun_starts_a_killed_group_again(finished_run: FinishedRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--master-port={port}"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*torchrun, "-m", "--", "jackpot", "train", "quickstart", *SMALL, "--run", str(run)]
    with (tmp_path / "output").open("w") as output:
        group = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
        try:
            while not (run / "checkpoints" / "last").exists():
                assert group.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.05)
            os.kill(json.loads((run / "ranks" / "1.json").read_text())["pid"], signal.SIGKILL)
            code = group.wait(300)
        finally:
            group.kill()
            group.wait()
    assert code == 0, (tmp_path / "output").read_text()
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [(one["ranks"], one["after_iteration"]) for one in starts] == [(2, -1), (2, 2)]
    assert_close_runs(finished_run(), run)
