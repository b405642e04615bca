"""`jackpot simulate` measures rollout models before training: what is printed and what lies in the folder."""

import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.pages import page_data
from helpers.runs import SMALL, small_config
from helpers.texts import write_problems
from jackpot.analysis.simulate.candidates import simulate_candidates
from jackpot.config.tasks import MathConfig
from jackpot.ui import cli
from jackpot.ui.results import write_results
from jackpot.ui.views.simulation import candidate_sections


def simulate(*arguments: str) -> str:
    """Return what the command prints, in one line of single spaces."""
    result = CliRunner().invoke(cli.app, ["simulate", *arguments], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def saved_numbers(folder: Path) -> dict:
    return json.loads((folder / "simulate.json").read_text())


def assert_page_and_numbers_alone(folder: Path) -> None:
    """There is a page, and the numbers, and nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == ["simulate.html", "simulate.json"]
    assert "Before you train" in page_data(folder / "simulate.html")


def test_a_recipe_with_candidates_shows_one_beside_the_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    candidates = ("--rollout-model", "starter:rollout_model", "--rollout-model", "starter:policy")

    output = simulate("quickstart", *SMALL, *candidates, "--prompts", "8")

    folder = tmp_path / "runs" / "simulate-quickstart"
    assert_page_and_numbers_alone(folder)

    rows = saved_numbers(folder)["candidates"]
    assert [row["name"] for row in rows] == ["starter:rollout_model", "starter:policy"]
    for row in rows:
        for text in (
            row["name"],
            f"{row['kl_rollout_policy']:.4f}",
            f"{row['acceptance']:.4f}",
            f"{row['accuracy']:.1%}",
        ):
            assert text in output

    assert "Use: no correction can be recommended Fix first: there are" in output  # 8 responses each
    assert "starter:rollout_model" in page_data(folder / "simulate.html")


@pytest.mark.slow
def test_a_recipe_alone_with_an_arm_and_a_folder_of_ones_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    simulate("quickstart", "--arm", "tis", "--prompts", "4")

    [candidate] = saved_numbers(tmp_path / "runs" / "simulate-quickstart-tis")["candidates"]
    assert candidate["name"] == "starter:rollout_model"
    assert candidate["responses"] == 4

    simulate("quickstart", "--prompts", "4", "--out", "here")
    assert_page_and_numbers_alone(tmp_path / "here")
    assert saved_numbers(tmp_path / "here")["candidates"] == [candidate]


def test_numbers_that_are_not_finite_are_null_in_the_folder(tmp_path: Path) -> None:
    results = {"a": math.nan, "b": [math.inf, 1.5, ({"c": -math.inf}, "d", None, True, 3)]}

    files = write_results(tmp_path, "simulate", "nothing", {}, results)

    assert [path.name for path in files] == ["simulate.html", "simulate.json"]
    assert saved_numbers(tmp_path) == {"a": None, "b": [None, 1.5, [{"c": None}, "d", None, True, 3]]}


def test_a_task_without_a_verdict_has_rewards(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards_of_mine.py").write_text("def longer(response, **_):\n    return len(response) / 10\n")
    write_problems(Path("p.jsonl"), range(8), problem=[f"{index}+1=" for index in range(8)])
    task = {"name": "math", "train": "p.jsonl", "test": "p.jsonl", "template": "plain", "instruction": ""}
    task |= {"rewards": "rewards_of_mine:longer", "reward_workers": 1}
    config = small_config().model_copy(update={"task": MathConfig.model_validate(task)})

    candidates = simulate_candidates(config, [], prompts=8, seed=0)
    [candidate] = candidates

    assert candidate.accuracy is None
    assert candidate.policy_accuracy is None
    assert candidate.reward > 0.0

    text = str(candidate_sections(candidates)["before"])
    assert f"('mean reward of its responses', '{candidate.reward:.3f}')" in text
    assert "high rewards" in text
    assert "accuracy" not in text
    assert "right answers" not in text


BAD_INPUT = {
    "no rollout model": (["quickstart", "--arm", "on_policy"], ["generates its own rollouts", "--rollout-model PATH"]),
    "an unknown recipe": (["quickstrat"], ["did you mean 'quickstart'"]),
    "an unknown key": (["quickstart", "batch.promts=3"], ["did you mean 'batch.prompts'"]),
    "a missing model": (["quickstart", "--rollout-model", "nowhere"], ["nowhere", "save_pretrained"]),
    "a truncated engine": (["quickstart", "sampling.top_k=5"], ["top_k 5", "sampling.top_k=0"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_says_what_to_do_and_writes_nothing(case: str, tmp_path: Path, capsys, monkeypatch) -> None:
    arguments, expected_texts = BAD_INPUT[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jackpot", "simulate", *arguments])

    with pytest.raises(SystemExit) as exit_info:
        cli.main()

    errors = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert "Traceback" not in errors
    assert all(text in errors for text in expected_texts), errors
    assert not list(tmp_path.iterdir())


def test_a_missing_model_is_refused_where_the_recipe_has_a_run(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "runs" / "quickstart-seed0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jackpot", "simulate", "quickstart", "--rollout-model", "nowhere"])

    with pytest.raises(SystemExit) as exit_info:
        cli.main()

    assert exit_info.value.code == 2
    assert "nowhere" in capsys.readouterr().err
