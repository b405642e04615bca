"""`jackpot train --tiny` trains a small stand-in of a recipe and says what it changed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.commands import jackpot
from jackpot.analysis.plan import tiny
from jackpot.rollout.tasks.data import DATA_FOLDER
from jackpot.ui import cli

RECIPE = """
base: joint_3b
threads: 1
evaluation: {benchmarks: []}
policy: {path: Qwen/Qwen3-8B-Base}
rollout_model: {path: Qwen/Qwen3-1.7B-Base}
arms:
  frozen: {rollout_model: {optimizer: null}}
"""


@pytest.fixture(autouse=True, scope="module")
def without_data() -> Iterator[None]:
    """No data on this disk, and a smaller run than a user gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DATA_FOLDER, raising=False)
        patch.setattr(tiny, "SEQUENCES", 8)
        patch.setattr(tiny, "GROUP", 2)
        yield


@pytest.fixture(scope="module")
def trained(without_data: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Somebody's own recipe, and what the command printed."""
    cwd = tmp_path_factory.mktemp("home")
    (cwd / "mine.yaml").write_text(RECIPE)
    result = jackpot("train", "mine.yaml", "--arm", "frozen", "--tiny", "seed=7", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return cwd, result.stdout


def table_cells(output: str, key: str) -> list[str]:
    """Return what the table of changes says of a setting: the recipe's value and the tiny one."""
    [line] = [line for line in output.splitlines() if line.startswith(f"│ {key} ")]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_tiny_says_what_it_changes_and_what_came_out(trained: tuple[Path, str]) -> None:
    _, output = trained

    assert "Its numbers mean nothing" in output
    assert table_cells(output, "engine") == ["vllm", "transformers"]
    assert table_cells(output, "iterations") == ["218", "2"]

    folder = "runs/mine-frozen-tiny-seed7"
    assert table_cells(output, "policy.path") == ["Qwen/Qwen3-8B-Base", f"{folder}/tiny/models/Qwen--Qwen3-8B-Base"]

    assert "train/math.jsonl: made up in place of the problems of math" in output
    assert "iteration 2/2" in output
    assert f"Run folder: {folder}" in output

    assert "objective" not in output.partition("iteration 0/2")[0]
    assert "seed" not in table_cells(output, "policy.path")[0]


def test_the_same_command_finds_the_run_which_can_be_sampled(trained: tuple[Path, str]) -> None:
    cwd, _ = trained

    second_train = jackpot("train", "mine.yaml", "--arm", "frozen", "--tiny", "seed=7", cwd=cwd)
    assert second_train.returncode == 0, second_train.stderr
    assert "finished (2 iterations)" in second_train.stdout, second_train.stderr

    run = "runs/mine-frozen-tiny-seed7"
    sample = jackpot("sample", run, "--problems", "1", cwd=cwd)
    assert sample.returncode == 0, sample.stderr
    assert "before" in sample.stdout, sample.stderr


def test_a_model_of_unknown_architecture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["joint_3b", "--tiny", "policy.path=google/gemma-2-2b", "--run", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["jackpot", "train", *arguments])

    with pytest.raises(SystemExit) as exit_info:
        cli.main()

    errors = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert "Traceback" not in errors
    assert "the architecture of 'google/gemma-2-2b'" in errors
    assert "policy.path=" in errors


def test_a_run_and_a_plan_at_once_are_refused() -> None:
    result = CliRunner().invoke(cli.app, ["train", "joint_3b", "--tiny", "--dry-run"])
    assert result.exit_code == 1
    assert "give one of them" in str(result.exception)
