"""Every arm of every recipe that the package carries: its settings are valid, and with small models it trains."""

from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.runs import run
from helpers.trainable import learned
from jackpot.analysis.plan.tiny import tiny_run
from jackpot.config.recipes import load_recipe, recipe_names, resolve
from jackpot.launch.toy_models import STUDY_MODELS

# Not a recipe of the package: its models are made first. Here the starters stand in for them.
STUDY = str(ROOT / "benchmarks" / "study.yaml")
STAND_INS = {
    "runs/study/models/policy": "starter:policy",
    "runs/study/models/close": "starter:rollout_model",
}
ARMS = [(recipe, arm) for recipe in [*recipe_names(), STUDY] for arm in load_recipe(recipe)["arms"]]


@pytest.mark.parametrize(("recipe", "arm"), ARMS)
def test_every_arm_resolves(recipe: str, arm: str) -> None:
    config = resolve(recipe, arm, [])
    assert config.description and config.iterations * config.batch.steps_per_iteration >= 70


def test_the_studys_models_are_those_that_the_starter_command_makes() -> None:
    paths = {arm: resolve(STUDY, arm, []).policy.path for arm in load_recipe(STUDY)["arms"]}
    assert {Path(path).name for path in STAND_INS} < set(STUDY_MODELS)
    assert paths.pop("small_on_policy") == "runs/study/models/close"
    assert set(paths.values()) == {"runs/study/models/policy"}


def distinct() -> dict[str, tuple[str, str | None]]:
    """Every recipe as it stands, and every arm that is not just that, of papers only the former: they differ little."""
    found = {recipe: (recipe, None) for recipe in [*recipe_names(), STUDY]}
    own = {recipe for recipe, _ in ARMS if "published" not in load_recipe(recipe)}
    arms = [(recipe, arm) for recipe, arm in ARMS if recipe in own]
    arms = [(recipe, arm) for recipe, arm in arms if resolve(recipe, arm, []) != resolve(recipe, None, [])]
    return found | {f"{recipe}-{arm}": (recipe, arm) for recipe, arm in arms}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "arm"), distinct().values(), ids=[Path(name).name for name in distinct()])
def test_every_recipe_trains_in_this_process(recipe: str, arm: str | None, tmp_path: Path) -> None:
    original = resolve(recipe, arm, ["threads=1"])
    paths = {"policy": original.policy.path, "rollout_model": original.rollout_model and original.rollout_model.path}
    stand_ins = [f"{role}.path={STAND_INS[path]}" for role, path in paths.items() if path in STAND_INS]
    with tiny_run(resolve(recipe, arm, ["threads=1", *stand_ins]), tmp_path / "tiny") as made:
        lines = run(made.config, tmp_path)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        learned(line)
    assert made.config.batch.steps_per_iteration == original.batch.steps_per_iteration
