"""Every command of the README runs, in its order and in its short form: part of `make test-all`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.slow
README = (ROOT / "README.md").read_text()
SHORT = ["iterations=1", "batch.prompts=4", "evaluation.problems=8", "threads=1"]


def commands() -> list[str]:
    """Return the lines that begin with jackpot, and those in backticks that are whole commands."""
    lines = re.findall(r"^(?:\.venv/bin/)?(jackpot .*?)(?:\s+#.*)?$", README, re.MULTILINE)
    return lines + re.findall(r"`(jackpot (?:recipes|train) [^`]+)`", README)


def shortened(command: str) -> list[str]:
    words = [
        str(Path(sys.executable).with_name("jackpot")),
        *shlex.split(command.replace("--seeds 3", "--seeds 1"))[1:],
    ]
    if words[1:] == ["train", "quickstart"]:
        words += ["--run", "runs/quickstart-seed0"]  # settings of its own would give the folder another name
    return [*words, *SHORT] if words[1] in ("train", "compare") and "quickstart" in words else words


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    found = commands()
    assert {command.split()[1] for command in found} == {"train", "diagnose", "report", "compare", "recipes"}
    for command in found:
        done = subprocess.run(shortened(command), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout or done.stderr


def test_the_line_of_python_trains_and_reads_a_run(tmp_path: Path) -> None:
    train, load_run = re.findall(r"`(jackpot\.\w+\([^`]*\))`", README)
    script = (
        f"import jackpot; {train.replace('iterations=20', 'iterations=1')}; folder = 'runs/first'; print({load_run})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "runs/first" in done.stdout, done.stderr
