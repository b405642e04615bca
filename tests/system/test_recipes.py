"""Every arm of every recipe that the package carries: its settings are valid, and with small models it trains."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.runs import run
from helpers.trainable import learned
from jackpot.analysis.plan import tiny
from jackpot.config.recipes import load_recipe, recipe_names, resolve
from tools.toy_models import STUDY_MODELS

# Not a recipe of the package: its models are made first. Here the starters stand in for them.
STUDY = str(ROOT / "research" / "study.yaml")
STAND_INS = {
    "runs/study/models/policy": "starter:policy",
    "runs/study/models/close": "starter:rollout_model",
}
STUDY_ARMS = (  # of 42, which combine what these have: two minutes for all
    *("expected", "prefix", "dppo_topk", "annealed_linear", "frozen_annealed", "mixed_half", "drafted"),
    *("stale_64_mask_only", "stale_128_obrs", "foreign_tis"),
)
MANY_STEPS = 16
RECIPES = [*recipe_names(), STUDY]
ALWAYS_TRAINED = ("jet_rl", "joint_3b", "stale_8b")  # of the papers' recipes; `make sweeps` trains the others too
MARKS = {
    name: [pytest.mark.sweep]
    for name in recipe_names()
    if "published" in load_recipe(name) and name not in ALWAYS_TRAINED
}


def test_every_arm_of_every_recipe_resolves() -> None:
    for recipe in RECIPES:
        for arm in load_recipe(recipe)["arms"]:
            config = resolve(recipe, arm, [])
            assert config.description, (recipe, arm)
            assert config.iterations * config.batch.steps_per_iteration >= 16, (recipe, arm)


def test_the_studys_models_are_made_again() -> None:
    paths = {arm: resolve(STUDY, arm, []).policy.path for arm in load_recipe(STUDY)["arms"]}
    assert {Path(path).name for path in STAND_INS} < set(STUDY_MODELS)
    assert set(paths.values()) == {"runs/study/models/policy"}


def distinct_arms(recipe: str) -> list[str | None]:
    """None for the recipe as it stands, and its arms that differ from it. A paper's arms differ little: None alone.

    Of several arms with many steps an iteration, the first: what else they set, others have. Of arms that differ in
    the correction alone, every third.
    """
    loaded = load_recipe(recipe)
    arms = STUDY_ARMS if recipe == STUDY else [] if "published" in loaded else loaded["arms"]
    standing = resolve(recipe, None, [])
    configs = {arm: config for arm in arms if (config := resolve(recipe, arm, [])) != standing}
    if find_spec("reasoning_gym") is None:  # an extra of its own
        configs = {arm: config for arm, config in configs.items() if config.task.name != "reasoning_gym"}

    alike: dict[str, list[str]] = {}
    for arm, config in configs.items():
        other_settings = config.model_dump_json(exclude={"description": True, "objective": {"correction"}})
        is_stale = config.batch.steps_per_iteration >= MANY_STEPS
        alike.setdefault("many steps" if is_stale else other_settings, []).append(arm)
    stale = alike.pop("many steps", [])[:1]
    return [None, *stale, *(arm for group in alike.values() for arm in group[::3])]  # every third


def assert_trains(recipe: str, arm: str | None, folder: Path) -> None:
    """Make an arm tiny, train it for an iteration, and check that it learned."""
    original = resolve(recipe, arm, [])
    paths = {"policy": original.policy.path, "rollout_model": original.rollout_model and original.rollout_model.path}
    stand_ins = [f"{role}.path={STAND_INS[path]}" for role, path in paths.items() if path in STAND_INS]
    short = ("threads=1", "iterations=1", "evaluation.problems=2", "evaluation.k=1")
    tiny_arm = tiny.make_tiny(resolve(recipe, arm, [*short, *stand_ins]), folder / "tiny")

    lines = run(tiny_arm.config, folder)
    assert [line["iteration"] for line in lines] == [0, 1]
    if original.task.name in ("sums", "reasoning_gym"):  # of which a model with random weights answers none
        assert lines[1]["tokens/rollout"] > 0
        assert lines[1]["response/tokens"] > 1.0
    else:
        learned(lines[1])
    assert tiny_arm.config.batch.steps_per_iteration == original.batch.steps_per_iteration


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, id=Path(recipe).name, marks=MARKS.get(recipe, [])) for recipe in RECIPES]
)
def test_every_recipe_trains_in_this_process(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if recipe != "jet_rl":  # whose mixture has more answers to hit upon
        monkeypatch.setattr(tiny, "SEQUENCES", 16)  # half of what --tiny generates, and of half the length
    monkeypatch.setattr(tiny, "NEW_TOKENS", 16)
    monkeypatch.setattr(tiny, "STEP_SEQUENCES", 1)

    for arm in distinct_arms(recipe):
        assert_trains(recipe, arm, tmp_path / str(arm))
