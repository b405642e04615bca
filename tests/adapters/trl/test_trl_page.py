"""docs/trl.md: its script of TRL's runs, and with its diff, an import and two arguments, it is ours and runs too."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.trl
PAGE = (ROOT / "docs" / "trl.md").read_text()
[SCRIPT] = re.findall(r"```python\n(# train_grpo.py\n.*?)```", PAGE, re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
TRAINERS = ["JackpotGRPOTrainer", "CorrectedGRPOTrainer"]


def patched(trainer: str) -> str:
    """Return the page's script with the diff to one of our trainers."""
    text, [diff] = SCRIPT, [candidate for candidate in DIFFS if trainer in candidate]
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("trainer", [*TRAINERS, pytest.param(None, marks=pytest.mark.sweep)])
def test_the_pages_script_runs_as_it_is_and_with_each_diff(
    adapter: ModuleType, tmp_path: Path, trainer: str | None
) -> None:
    text = patched(trainer) if trainer else SCRIPT
    short = {"max_steps=30": "max_steps=2", "logging_steps=10": "logging_steps=1", "size=128": "size=16"}
    for old, new in short.items():
        assert old in text
        text = text.replace(old, new)

    (tmp_path / "train_grpo.py").write_text(text)
    shutil.copy(ROOT / "examples" / "word_problems.jsonl", tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "train_grpo.py"]

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr[-3000:]
    assert ("jackpot/obrs/kappa" in done.stdout) == (trainer is not None)
    assert ("jackpot/rollout_model/loss" in done.stdout) == (trainer == "JackpotGRPOTrainer")
    assert len(re.findall(r"'reward':", done.stdout)) == 2
