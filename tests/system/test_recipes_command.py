"""`jackpot recipes`: what a user types, and what is printed."""

import json

from typer.testing import CliRunner

from jackpot.config.recipes import load_recipe, recipe_names
from jackpot.config.recipes.listing import list_recipe
from jackpot.ui import cli


def printed(*arguments: str, width: int = 120) -> str:
    result = CliRunner().invoke(cli.app, ["recipes", *arguments], env={"COLUMNS": str(width)}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_the_list_has_one_row_a_recipe_and_fits_a_terminal() -> None:
    text = printed(width=80)
    for name in recipe_names():
        [row] = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert list_recipe(name).gpus or "a CPU" in row
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 80
    assert "Table 1, third block" not in text
    assert next(line for line in lines[3:] if line.strip()).split()[0] == "quickstart"


def test_all_has_every_recipe_every_arm_and_every_table() -> None:
    text = printed("--all")
    for name in recipe_names():
        assert name in text
        for arm in load_recipe(name)["arms"]:
            assert arm in text, arm
        for table in list_recipe(name).published:
            assert f"{table.paper}, {table.table}" in text


def test_the_list_has_the_numbers_with_their_arm() -> None:
    text = printed("--all", width=100)
    block = text.partition("Jackpot, Table 1, third block")[2].partition("\n\n")[0]
    heads = [cell.strip() for cell in lines_with(block, "arm")[0].strip("┃").split("┃")]
    [row] = lines_with(block, "math500 mean@4")
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert dict(zip(heads, cells, strict=True)) == {
        "arm": "math500 mean@4",
        "on_policy": "79.5",
        "tis_kl": "76.45",
        "jackpot": "82.65",
    }


def test_the_list_says_which_rows_cannot_run_yet() -> None:
    text = printed("--all", width=200)
    [line] = lines_with(text, "jet_rl_32b: ")
    assert "not yet runnable: an engine computes on one GPU" in line
    assert lines_with(text, "Not from a paper: jackpot_bf16, tis_bf16")


def test_one_recipe_in_full_has_sources_and_bases() -> None:
    text = printed("joint_8b")
    assert "meant for 8 x H100" in text
    assert lines_with(text, "policy: {path: Qwen/Qwen3-8B-Base}  # source: Jackpot 5, Setup")
    assert lines_with(text, "distill_weight: 1.0  # not published: lambda_distill")  # joint_4b's
    assert lines_with(text, "tis_kl", "{objective: {correction: {name: tis, cap: 3.0}}}")
    assert "Table 1, third block" in text and "Table 1, second block" not in text
    assert "small_on_policy" not in text  # an arm of joint_4b alone
    assert "published:\n" not in text  # shown as tables
    assert lines_with(text, "Jackpot is Jackpot: Optimal Budgeted Rejection Sampling", "arXiv 2602.06107")
    assert not lines_with(text, "Jet-RL is ")  # of no table of this recipe


def test_a_program_gets_all_recipes_or_one() -> None:
    every = json.loads(printed("--json"))
    assert {recipe["name"] for recipe in every} == set(recipe_names())
    assert json.loads(printed("stale_8b", "--json")) == next(one for one in every if one["name"] == "stale_8b")
    [row] = [
        row
        for recipe in every
        for row in recipe["published"]
        if (row["paper"], row["table"], row["arm"]) == ("submission", "Table 8", "lam_1.2")
    ]
    assert row["numbers"] == {
        "aime24 pass@1": 13.5,
        "amc22_23 pass@1": 45.8,
        "math500 pass@1": 74.1,
        "gsm8k pass@1": 91.9,
    }


def test_an_unknown_recipe_is_refused_with_a_guess() -> None:
    result = CliRunner().invoke(cli.app, ["recipes", "joint_9b"])
    assert result.exit_code == 1 and "did you mean 'joint_8b'" in str(result.exception)
