"""docs/own-problem.md: its files, typed in an empty folder, train; what it says of data and arms is so."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from helpers.commands import jackpot
from helpers.paths import ROOT
from jackpot.config.recipes import resolve

PAGE = (ROOT / "docs" / "own-problem.md").read_text()
# The files of the page, by the name in their first line.
FILES = {name: body for name, body in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)}
SHORT = ("iterations=2", "batch.prompts=4", "evaluation.problems=8", "threads=1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with what the page has one copy and type."""
    assert FILES.keys() == {"my_reward.py", "my_problem.yaml", "ask.py"}
    for path in (ROOT / "examples").glob("word_problems*.jsonl"):
        shutil.copy(path, tmp_path)
    for name, body in FILES.items():
        (tmp_path / name).write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    return tmp_path


def test_the_files_of_the_page_train_and_its_model_is_loaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = jackpot("train", "my_problem.yaml", *SHORT, "--run", "runs/my_problem-seed0", cwd=folder)
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in (folder / "runs/my_problem-seed0/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(line["reward/mean"] > 0.0 and line["reward/errors"] == 0.0 for line in lines[1:])

    exec(compile((folder / "ask.py").read_text(), "ask.py", "exec"), {})
    assert re.fullmatch(r"3\+4=\d+\n", capsys.readouterr().out)  # of 3 eggs and 4 more; trained models write a sum


def test_the_rows_and_their_number_are_those_of_the_files(folder: Path) -> None:
    rows = (folder / "word_problems.jsonl").read_text().splitlines()
    held_out = (folder / "word_problems_test.jsonl").read_text().splitlines()
    assert rows[0] in PAGE and f"{len(rows)} rows in" in PAGE and f"{len(held_out)} others in" in PAGE
    assert not set(rows) & set(held_out)


def test_the_real_arm_changes_what_the_page_says_only(folder: Path) -> None:
    starter, real = (resolve("my_problem.yaml", arm, []).model_dump() for arm in (None, "qwen"))
    for model in ("policy", "rollout_model"):
        for settings in (starter, real):
            del settings[model]["path"], settings[model]["optimizer"]["learning_rate"]
    for settings in (starter, real):
        del settings["sampling"]["max_new_tokens"], settings["batch"]["micro_batch_tokens"]
        del settings["precision"], settings["engine"]["dtype"], settings["device"]

    assert starter == real


@pytest.mark.slow
def test_the_arm_of_real_models_runs_with_tiny_ones(folder: Path) -> None:
    done = jackpot("train", "my_problem.yaml", "--arm", "qwen", "--tiny", cwd=folder)
    assert done.returncode == 0, done.stderr


def test_the_environment_recipe_is_that_of_the_examples() -> None:
    assert (ROOT / "examples" / "own_reset_step.yaml").read_text().partition("\n")[2] in PAGE
    assert yaml.safe_load(FILES["my_problem.yaml"])["policy"]["path"] == "starter:text_policy"
