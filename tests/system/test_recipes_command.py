"""`jackpot recipes` lists the recipes, and prints one with the sources of its settings."""

import re

from typer.testing import CliRunner

from jackpot.config.recipes import recipe_names
from jackpot.config.recipes.listing import list_recipe
from jackpot.ui import cli


def output_of_recipes(*arguments: str, width: int = 120) -> str:
    """Return what the command prints on a terminal of that many columns."""
    result = CliRunner().invoke(cli.app, ["recipes", *arguments], env={"COLUMNS": str(width)}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_the_list_has_one_row_a_recipe_and_fits_a_terminal() -> None:
    text = output_of_recipes(width=80)

    for name in recipe_names():
        [row] = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert list_recipe(name).gpus or "a CPU" in row

    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 80
    assert "Table 1, third block" not in text

    first_row = next(line for line in lines[3:] if line.strip())  # below the heading
    assert first_row.split()[0] == "quickstart"


def test_one_recipe_in_full_has_the_sources_of_its_settings() -> None:
    text = output_of_recipes("joint_8b")

    assert "meant for 8 x H100" in text
    assert lines_with(text, "policy: {path: Qwen/Qwen3-8B-Base}  # source: Jackpot 5, Setup")
    assert lines_with(text, "distill_weight: 1.0  # not published: lambda_distill")  # joint_4b's
    assert "arms: jackpot, tis_kl, on_policy, none\n" in text  # small_on_policy is one of joint_4b alone

    joint_8b, joint_4b = re.split(r"\n.*/joint_4b\.yaml \(of a base the settings count, .*\n", text)
    assert "objective: {correction: {name: tis, cap: 3.0}}" in joint_8b
    assert "Table 1, third block" in joint_8b
    assert "Table 1, third block" not in joint_4b
    assert (
        "{row: JACKPOT (Ours), arm: jackpot, numbers: [93.57, 82.65, 62.04, 54.44, 25.00, 36.57, 19.16, 27.69]}"
        in joint_8b
    )
    assert lines_with(text, "Jackpot is Jackpot: Optimal Budgeted Rejection Sampling", "arXiv 2602.06107")
    assert not lines_with(text, "Jet-RL is ")  # of no table of this recipe


def test_an_unknown_recipe_is_refused_with_a_guess() -> None:
    result = CliRunner().invoke(cli.app, ["recipes", "joint_9b"])
    assert result.exit_code == 1
    assert "did you mean 'joint_8b'" in str(result.exception)
