"""The published gold answers: right as they are, wrong where something is changed (docs/rewards.md, "Agreement")."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from helpers.paths import ROOT
from helpers.published import SETS, data_folder, rows
from jackpot.config.tasks import RewardConfig
from jackpot.core.types import DecodedResponse, Prompt
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.rewards.verifier.compare import compare_without_algebra
from jackpot.rollout.rewards.verifier.expressions import equal_expressions
from jackpot.rollout.rewards.verifier.extract import hashed_answer

PAGE = (ROOT / "docs" / "rewards.md").read_text()
COUNTS = {  # rows, and rows without an answer
    "gsm8k_train": (7473, 0),
    "gsm8k_test": (1319, 0),
    "math_train": (7474, 4),
    "math500": (500, 0),
    "amc22_23": (83, 0),
    "aime24": (30, 0),
}


@pytest.fixture(scope="module")
def agreement() -> ModuleType:
    """benchmarks/verifier_agreement.py."""
    path = ROOT / "benchmarks" / "verifier_agreement.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reward_fn():
    one = RewardFn([RewardConfig(name="correct"), RewardConfig(name="format")], workers=1, timeout=20.0)
    yield one
    one.close()


def boxed(gold: str) -> DecodedResponse:
    return DecodedResponse(Prompt(uid="", text="", answer=gold, token_ids=(1,)), rf"So it is \boxed{{{gold}}}.", True)


@pytest.mark.parametrize("name", SETS)
def test_every_gold_answer_is_right_against_itself(name, agreement, reward_fn):
    golds = agreement.golds(data_folder(), name)
    count, without = COUNTS[name]
    assert len(golds) == count - without
    wrong = [
        gold
        for gold, score in zip(golds, reward_fn.scores(list(map(boxed, golds))), strict=True)
        if score.reward != 2.0
    ]
    assert wrong == []


def test_solutions_of_gsm8k_are_right_for_their_problem_alone(reward_fn):
    solutions = [row["answer"] for row in rows("gsm8k_test")]
    golds = [hashed_answer(solution) for solution in solutions]
    prompts = [Prompt(uid="", text="", answer=gold, token_ids=(1,)) for gold in golds]
    own = reward_fn.scores([DecodedResponse(*pair, True) for pair in zip(prompts, solutions, strict=True)])
    assert all(score.correct and score.reward == 2.0 for score in own)
    shifted = reward_fn.scores([DecodedResponse(*pair, True) for pair in zip(prompts[1:], solutions, strict=False)])
    values = [gold.replace(",", "") for gold in golds]
    assert [score.correct for score in shifted] == [a == b for a, b in zip(values[1:], values, strict=False)]


def test_near_misses_of_gold_answers_are_wrong(agreement):
    """Of some of them; the page, a slow test, is about all."""
    wanted = [
        case
        for gold in agreement.chosen(data_folder())[::8]
        for case in (*agreement.cases(gold), *agreement.spellings(gold))
    ]
    decided = [
        (case, equal) for case in wanted if (equal := compare_without_algebra(case.answer, case.gold)) is not None
    ]
    assert len(decided) > 2_000
    assert [case for case, equal in decided if equal is not case.is_right] == []


@pytest.mark.slow
def test_algebra_agrees_on_some_of_the_gold_answers_that_need_it(agreement):
    wanted = [case for gold in agreement.chosen(data_folder()) for case in agreement.cases(gold)]
    hard = [case for case in wanted if len(case.gold) < 25 and compare_without_algebra(case.answer, case.gold) is None][
        ::40
    ]
    assert len(hard) > 40
    from_algebra = [agreement.compare(case.answer, case.gold, equal_expressions) for case in hard]
    assert [case for case, equal in zip(hard, from_algebra, strict=True) if equal is not case.is_right] == []


def test_the_page_is_of_the_math_verify_that_is_installed_here():
    pinned = re.search(r"^math-verify==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert f"math-verify {pinned}" in PAGE


@pytest.mark.slow
@pytest.mark.sweep
def test_the_page_says_what_the_verifier_says(agreement):
    lines = "\n".join(agreement.report(data_folder(), workers=1))
    assert lines in PAGE
