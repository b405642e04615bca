"""`jackpot recipes`: what a user types, and what is printed."""

import re

from typer.testing import CliRunner

from jackpot.config.recipes import recipe_names
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


def test_one_recipe_in_full_has_the_sources_of_its_settings() -> None:
    text = printed("joint_8b")
    assert "meant for 8 x H100" in text
    assert lines_with(text, "policy: {path: Qwen/Qwen3-8B-Base}  # source: Jackpot 5, Setup")
    assert lines_with(text, "distill_weight: 1.0  # not published: lambda_distill")  # joint_4b's
    assert "arms: jackpot, tis_kl, on_policy, none\n" in text  # small_on_policy is one of joint_4b alone
    own, base = re.split(r"\n.*/joint_4b\.yaml \(of a base the settings count, .*\n", text)
    assert "objective: {correction: {name: tis, cap: 3.0}}" in own
    assert "Table 1, third block" in own and "Table 1, third block" not in base
    assert (
        "{row: JACKPOT (Ours), arm: jackpot, numbers: [93.57, 82.65, 62.04, 54.44, 25.00, 36.57, 19.16, 27.69]}" in own
    )
    assert lines_with(text, "Jackpot is Jackpot: Optimal Budgeted Rejection Sampling", "arXiv 2602.06107")
    assert not lines_with(text, "Jet-RL is ")  # of no table of this recipe


def test_an_unknown_recipe_is_refused_with_a_guess() -> None:
    result = CliRunner().invoke(cli.app, ["recipes", "joint_9b"])
    assert result.exit_code == 1 and "did you mean 'joint_8b'" in str(result.exception)
