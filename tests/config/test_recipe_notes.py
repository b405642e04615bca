"""GPUs and published numbers of recipes: read, checked, and no part of a run."""

from pathlib import Path
from textwrap import dedent

import pytest

from jackpot.config.recipes import load_recipe, recipe_files, recipe_notes, resolve, resolve_arms
from jackpot.core.errors import ConfigError

RECIPE = """\
base: quickstart
gpus: {kind: H100, count: 2}
arms:
  plain: {objective: {correction: none}}
published:
  - paper: Jackpot
    table: Table 9
    columns: [gsm8k, aime24]
    rows:
      - {row: Plain, arm: plain, numbers: [92.5, null]}
      - {row: FP8, arm: fp8, numbers: [91, 20.25], not_runnable: no FP8 here}
"""


def write(folder: Path, text: str = RECIPE, name: str = "mine.yaml") -> str:
    """Write a recipe, and return its path."""
    path = folder / name
    path.write_text(dedent(text))
    return str(path)


def test_a_run_does_not_depend_on_the_notes(tmp_path: Path) -> None:
    bare = write(tmp_path, "base: quickstart\narms:\n  plain: {objective: {correction: none}}\n", "bare.yaml")
    assert resolve(write(tmp_path), "plain", []) == resolve(bare, "plain", [])


def test_a_row_that_cannot_run_yet_says_why(tmp_path: Path) -> None:
    name = write(tmp_path)
    with pytest.raises(ConfigError, match=r"arm 'fp8' of recipe .* is not yet runnable: no FP8 here"):
        resolve(name, "fp8", [])
    with pytest.raises(ConfigError, match="not yet runnable"):
        resolve_arms(name, ["plain", "fp8"], [1], [])
    assert len(resolve_arms(name, [], [1], [])) == 1


def test_a_base_gives_its_gpus_and_not_its_numbers(tmp_path: Path) -> None:
    base = write(tmp_path)
    recipe = load_recipe(heir := write(tmp_path, f"base: {base}\niterations: 7\n", "heir.yaml"))
    assert recipe["gpus"] == {"kind": "H100", "count": 2} and recipe["iterations"] == 7
    assert not {"arms", "published", "base"} & recipe.keys()
    assert [path.name for path in recipe_files(heir)] == ["heir.yaml", "mine.yaml", "quickstart.yaml"]


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"base: {second}\n")
    second.write_text(f"base: {first}\n")
    with pytest.raises(ConfigError, match=r"circle, .*first\.yaml -> .*second\.yaml -> .*first\.yaml"):
        load_recipe(str(first))


MISTAKES = {  # what stands in RECIPE, what is written there by mistake, and the words that name it
    "an arm that is nowhere": ("arm: plain, numbers", "arm: plan, numbers", "'plan', which the recipe has not"),
    "a reason for an arm that is there": ("arm: fp8", "arm: plain", "'plain', which the recipe has"),
    "a number too few": ("[91, 20.25]", "[91]", "1 numbers for 2 columns"),
    "another machine": ("H100", "H1000", "did you mean 'H100'"),
    "no machine": ("count: 2", "count: 0", "gpus.count"),
    "another paper": ("paper: Jackpot", "paper: Jackpod", "did you mean 'Jackpot'"),
    "a key with a typing error": ("columns:", "colums:", "published.0.colums"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_before_anything_runs(mistake: str, tmp_path: Path) -> None:
    right, wrong, message = MISTAKES[mistake]
    assert RECIPE.count(right) == 1
    with pytest.raises(ConfigError, match=message):
        resolve(write(tmp_path, RECIPE.replace(right, wrong)), "plain", [])


def test_our_own_recipes_have_no_notes() -> None:
    notes = recipe_notes("quickstart", load_recipe("quickstart"))
    assert notes.gpus is None and notes.published == ()
