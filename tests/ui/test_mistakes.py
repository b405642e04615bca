"""A missing model and a missing option are said before torch is imported, and leave no folder."""

from pathlib import Path

import pytest

from helpers.programs import run, without

MISTAKES = {  # what is typed, and words of the answer
    "train quickstart policy.path=nowhere/a/b": "policy: there is no model folder nowhere/a/b",
    "train quickstart rollout_model.path=MINE/OTHER": "rollout_model: there is no folder MINE/OTHER here",
    "train quickstart policy.path=starter:polcy --dry-run": "did you mean 'policy'",
    "train quickstart policy.path=nowhere/a/b --tiny": "policy: there is no model folder",
    "simulate quickstart --rollout-model nowhere/a/b": "--rollout-model nowhere/a/b: there is no model folder",
    "compare quickstart --arms obrs,tis policy.path=nowhere/a/b": "policy: there is no model folder",
    "mismatch nowhere/a/b": "model: there is no model folder",
    "eval nowhere/a/b": "model: there is no model folder",
    "eval starter:policy": "no benchmark was named; give --benchmarks",
    "replay .hidden --model nowhere/a/b": "model: there is no model folder",
    "launch joint_8b": "--slurm",
    "sample nowhere": "does not exist",
    "report nowhere": "does not exist",
    "replay nowhere": "does not exist",
    "export nowhere": "does not exist",
}
PROGRAM = """
import io, sys
from contextlib import redirect_stderr
from jackpot.ui.cli import main
for typed in sys.argv[1:]:
    sys.argv, errors = ["jackpot", *typed.split()], io.StringIO()
    try:
        with redirect_stderr(errors):
            main()
    except SystemExit as end:
        print(end.code, *errors.getvalue().replace("│", " ").split(), flush=True)
"""


def test_mistakes_are_said_before_torch_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no hub

    process = run(without(["torch", "transformers"]) + PROGRAM, *MISTAKES)
    lines = process.stdout.splitlines()

    assert len(lines) == len(MISTAKES), process.stderr
    for line, (command, words) in zip(lines, MISTAKES.items(), strict=True):
        assert line.startswith("2 "), (command, line)
        assert words in line, (command, line)
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]
