"""A process that called `end_with_parent` ends soon after its parent, in a session of its own or not."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import time
from jackpot.core.parent import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(1000)
"""
# Starts the child, waits until it watches, and prints its process id.
PARENT = """
import subprocess, sys, time
leads = sys.argv[2] == "leads"
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=leads)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("session", ["leads", "follows"])
def test_a_process_ends_with_a_parent_that_was_killed(session: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, session]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_stat = Path("/proc") / parent.stdout.readline().strip() / "stat"
        assert child_stat.exists()
        parent.kill()

    deadline = time.monotonic() + 60.0
    # the state follows the name in parentheses; a zombie (Z) has ended, and nobody has waited for it
    while child_stat.exists() and child_stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
