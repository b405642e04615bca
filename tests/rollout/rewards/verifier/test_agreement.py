"""Published gold answers are right as they are, and wrong where something is changed (docs/rewards.md, "Agreement")."""

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
    """The module benchmarks/verifier_agreement.py."""
    path = ROOT / "benchmarks" / "verifier_agreement.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reward_fn():
    """Yield a reward_fn that gives 1 for what is right and 1 for the format."""
    published_fn = RewardFn([RewardConfig(name="correct"), RewardConfig(name="format")], workers=1, timeout=20.0)
    yield published_fn
    published_fn.close()


def boxed(gold: str) -> DecodedResponse:
    """Return a response that boxes the gold answer."""
    return DecodedResponse(
        Prompt(uid="", text="", answer=gold, token_ids=(1,)), rf"So it is \boxed{{{gold}}}.", finished=True
    )


@pytest.mark.parametrize("name", SETS)
def test_every_gold_answer_is_right_against_itself(name, agreement, reward_fn):
    golds = agreement.golds(data_folder(), name)
    count, missing_count = COUNTS[name]
    assert len(golds) == count - missing_count

    wrong_golds = [
        gold
        for gold, score in zip(golds, reward_fn.scores(list(map(boxed, golds))), strict=True)
        if score.reward != 2.0  # right, and of the right format
    ]

    assert wrong_golds == []


def test_solutions_of_gsm8k_are_right_for_their_problem_alone(reward_fn):
    solutions = [row["answer"] for row in rows("gsm8k_test")]
    golds = [hashed_answer(solution) for solution in solutions]
    prompts = [Prompt(uid="", text="", answer=gold, token_ids=(1,)) for gold in golds]

    # each solution against its own gold answer
    own_scores = reward_fn.scores(
        [DecodedResponse(*pair, finished=True) for pair in zip(prompts, solutions, strict=True)]
    )
    assert all(score.correct and score.reward == 2.0 for score in own_scores)

    # each solution against the gold answer of the next problem
    shifted_scores = reward_fn.scores(
        [DecodedResponse(*pair, finished=True) for pair in zip(prompts[1:], solutions, strict=False)]
    )
    values = [gold.replace(",", "") for gold in golds]
    assert [score.correct for score in shifted_scores] == [
        gold_value == solution_value for gold_value, solution_value in zip(values[1:], values, strict=False)
    ]


def test_near_misses_of_gold_answers_are_wrong(agreement):
    """Of some of them; the page, a slow test, is about all."""
    cases = [
        case
        for gold in agreement.chosen(data_folder())[::8]  # every eighth
        for case in (*agreement.cases(gold), *agreement.spellings(gold))
    ]

    decided_cases = [
        (case, equal) for case in cases if (equal := compare_without_algebra(case.answer, case.gold)) is not None
    ]

    assert len(decided_cases) > 2_000
    assert [case for case, equal in decided_cases if equal is not case.is_right] == []


@pytest.mark.slow
def test_algebra_agrees_on_some_of_the_gold_answers_that_need_it(agreement):
    cases = [case for gold in agreement.chosen(data_folder()) for case in agreement.cases(gold)]

    hard_cases = [
        case for case in cases if len(case.gold) < 25 and compare_without_algebra(case.answer, case.gold) is None
    ][::40]
    assert len(hard_cases) > 40

    verdicts = [agreement.compare(case.answer, case.gold, equal_expressions) for case in hard_cases]

    assert [case for case, equal in zip(hard_cases, verdicts, strict=True) if equal is not case.is_right] == []


def test_the_page_is_of_the_math_verify_that_is_installed_here():
    pinned_version = re.search(r"^math-verify==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert f"math-verify {pinned_version}" in PAGE


@pytest.mark.slow
@pytest.mark.sweep
def test_the_page_says_what_the_verifier_says(agreement):
    lines = "\n".join(agreement.report(data_folder(), workers=1))
    assert lines in PAGE
