"""Every arm of every recipe that the package carries: its settings are valid; where its models are here, it trains."""

import math
from pathlib import Path

import pytest

from jackpot.models.starters import STUDY_STARTERS
from jackpot.recipes import load_recipe, recipe_names, resolve
from runs import run

# Not a recipe of the package: its models are made first. Here the starters stand in for them.
STUDY = str(Path(__file__).parents[2] / "benchmarks" / "study.yaml")
STAND_INS = {
    "runs/study/models/policy": "starter:policy",
    "runs/study/models/close": "starter:rollout_model",
}
ARMS = [(recipe, arm) for recipe in [*recipe_names(), STUDY] for arm in load_recipe(recipe)["arms"]]
HERE = [(recipe, arm) for recipe, arm in ARMS if "published" not in load_recipe(recipe)]  # the others' models are large


@pytest.mark.parametrize(("recipe", "arm"), ARMS)
def test_every_arm_resolves(recipe: str, arm: str) -> None:
    config = resolve(recipe, arm, [])
    assert config.description and config.iterations * config.batch.steps_per_iteration >= 70


def test_the_studys_models_are_those_that_the_starter_command_makes() -> None:
    paths = {arm: resolve(STUDY, arm, []).policy.path for arm in load_recipe(STUDY)["arms"]}
    assert {Path(path).name for path in STAND_INS} < set(STUDY_STARTERS)
    assert paths.pop("small_on_policy") == "runs/study/models/close"
    assert set(paths.values()) == {"runs/study/models/policy"}


def small(recipe: str, arm: str) -> list[str]:
    """Overrides that keep the regime (steps, epochs, models, objective) and shrink the batch."""
    config = resolve(recipe, arm, [])
    batch = config.batch
    paths = {"policy": config.policy.path, "rollout_model": config.rollout_model and config.rollout_model.path}
    steps = batch.steps_per_iteration // batch.epochs
    prompts = max(4, math.ceil(steps / 4))
    return [
        "iterations=2",
        f"batch.prompts={prompts}",
        "batch.group_size=4",
        f"batch.step_size={prompts * 4 // steps}",
        "evaluation.every=2",
        "evaluation.problems=8",
        "threads=1",
        *(f"{role}.path={STAND_INS[path]}" for role, path in paths.items() if path in STAND_INS),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "arm"), HERE)
def test_every_arm_trains(recipe: str, arm: str, tmp_path: Path) -> None:
    config, original = resolve(recipe, arm, small(recipe, arm)), resolve(recipe, arm, [])
    assert config.batch.steps_per_iteration == original.batch.steps_per_iteration
    lines = run(config, tmp_path)
    assert lines[-1]["iteration"] == 2
    assert all(line["policy/skipped_steps"] < 1.0 and line["policy/grad_norm"] > 0.0 for line in lines[1:])
    assert all(math.isfinite(line["policy/loss"]) for line in lines[1:])
