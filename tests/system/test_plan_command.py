"""`jackpot plan` as a user types it."""

import json
import re

import pytest
from typer.testing import CliRunner

from helpers.runs import SMALL, FinishedRuns, small_config
from jackpot.analysis.plan.cost_model import ACCEPTANCE
from jackpot.training.run_folder.folder import RunFolder
from jackpot.ui import cli
from jackpot.ui.terminal.plan import unpriced


def typed(*arguments: str):
    return CliRunner().invoke(cli.app, ["plan", "quickstart", *SMALL, *arguments], env={"COLUMNS": "200"})


def test_the_plan_names_the_cheapest_placement_and_where_its_lengths_are_from(
    finished_run: FinishedRuns,
) -> None:
    folder = finished_run()
    lines = RunFolder(folder).read("metrics.jsonl")
    mean = next(line["response/tokens"] for line in reversed(lines) if "response/tokens" in line)
    result = typed("--gpus", "3", "--kind", "H200", "--run", str(folder), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["gpus"], found["gpu"]) == (3, "H200")
    assert found["response"]["mean"] == mean and f"the last 1 iterations of {folder}" in found["response"]["source"]
    hours = {
        (one["placement"], ahead): each["hours"]
        for one in found["placements"]
        for ahead, each in one["by_ahead"].items()
    }
    splits = [(split, ahead) for split in ("1 + 2", "2 + 1") for ahead in ("0", "1", "3", "7")]
    assert sorted(hours) == [*splits, ("shared", "0")]
    cheapest = found["cheapest"]
    assert cheapest["hours"] == min(hours.values()) == hours[cheapest["placement"], str(cheapest["ahead"])]
    int8 = ("precision=int8", "engine.quantization=int8_w8a8")
    shown = typed("--gpus", "3", "--kind", "H200", "--response-length", "20", *int8).stdout
    assert "These hours do not hold for precision int8" in shown
    assert shown.index("Cheapest: ") < shown.index("Seconds an iteration")
    assert re.search(r"Cheapest: .* hours, [\d,]+ GPU hours\. Evaluations, one every 2 iterations, take \d+% of", shown)
    assert "Responses of 20 tokens in the mean: given by --response-length. Prompts of" in shown
    assert "3 H200, by arithmetic" in shown


def test_the_acceptance_of_drafts_is_that_of_a_run_which_drafted(finished_run: FinishedRuns) -> None:
    drafted = ("rollout_model.share=0", "engine.draft.tokens=2")
    folder = finished_run(*drafted)
    measured = RunFolder(folder).read("metrics.jsonl")[-1]["draft/acceptance"]
    found = [
        json.loads(typed("--gpus", "2", *given, "--json", *drafted).stdout)
        for given in (("--run", str(folder)), ("--response-length", "9"))
    ]
    assert 0.0 < measured < 1.0 and found[0]["drafts"]["acceptance"] == measured
    assert str(folder) in found[0]["drafts"]["source"]
    assert found[1]["drafts"]["acceptance"] == ACCEPTANCE and found[1]["drafts"]["source"].startswith("assumed")
    shown = typed("--gpus", "2", "--run", str(folder), *drafted).stdout
    assert f"2 drafts for each pass of the policy, of which each is accepted with the chance {measured:.2f}" in shown


def test_only_plans_of_int8_training_say_that_their_hours_do_not_hold() -> None:
    assert unpriced(small_config("precision=int8", "engine.quantization=int8_w8a8")) and not unpriced(small_config())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["--run FOLDER", "--response-length TOKENS", "--dry-run guesses it"]),
        (("--response-length", "9", "--run", "."), ["give one of"]),
        (("--run", "."), ["not a run folder"]),
        (("--response-length", "25"), ["25 tokens", "sampling.max_new_tokens 24"]),
        (("--response-length", "9", "--kind", "B200"), ["B200", "H200"]),
    ],
)
def test_a_length_is_never_guessed(arguments: tuple[str, ...], expected: list[str], tmp_path) -> None:
    result = typed(*(str(tmp_path) if one == "." else one for one in arguments))
    assert result.exit_code != 0 and all(text in str(result.exception) for text in expected), result.exception


def test_dry_run_says_who_goes_where() -> None:
    result = CliRunner().invoke(cli.app, ["train", "quickstart", "--dry-run", *SMALL], env={"COLUMNS": "200"})
    text = " ".join(result.stdout.replace("│", " ").split())
    assert "placement this process: learner of policy, rollout model, transformers engine of rollout model, for" in text
