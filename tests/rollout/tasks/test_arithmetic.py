"""Arithmetic: which problems exist, which split they belong to, and what counts as a right answer."""

from itertools import permutations

import pytest
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerFast

from helpers.paths import ROOT
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.errors import DataError
from jackpot.core.types import Prompt
from jackpot.rollout.tasks.arithmetic import Arithmetic, split_of
from tools.lessons import make_tokenizer


@pytest.fixture(scope="module")
def task() -> Arithmetic:
    return Arithmetic(make_tokenizer(), ArithmeticConfig())


def summands(prompt: Prompt) -> list[int]:
    """Return the numbers that a prompt adds."""
    return [int(word) for word in prompt.text.removesuffix("=").split("+")]


def test_a_prompt_has_the_sum_its_answer_and_its_tokens(task):
    tokenizer = make_tokenizer()
    for index in range(200):
        prompt = task.prompt("train", index)

        assert prompt.answer == str(sum(summands(prompt)))
        assert tokenizer.decode(list(prompt.token_ids)) == prompt.text
        assert prompt.uid == f"arithmetic/train/{index}"


def test_numbers_and_terms_take_every_value_of_the_settings():
    task = Arithmetic(make_tokenizer(), ArithmeticConfig(min_terms=2, max_terms=4, max_operand=11))

    problems = [task.operands("train", index) for index in range(2000)]

    assert {len(problem) for problem in problems} == {2, 3, 4}
    assert {operand for problem in problems for operand in problem} == set(range(1, 12))


def test_no_problem_is_in_both_splits_in_any_order_of_terms(task):
    train_problems = {tuple(sorted(task.operands("train", index))) for index in range(5000)}
    test_problems = {tuple(sorted(task.operands("test", index))) for index in range(5000)}
    assert not train_problems & test_problems


def test_a_tenth_of_all_problems_is_held_out():
    pairs = [(a, b) for a in range(1, 101) for b in range(a, 101)]
    held_out_share = sum(split_of(pair, 0.1) == "test" for pair in pairs) / len(pairs)
    assert held_out_share == pytest.approx(0.1, abs=0.02)  # five standard deviations of 5,050 fair draws


def test_the_order_of_the_numbers_does_not_change_the_split():
    for a in range(1, 30):
        assert len({split_of(order, 0.1) for order in permutations((a, 31, 7))}) == 1


def test_problems_follow_from_split_and_index_in_any_order(task):
    forward_problems = [task.operands("test", index) for index in range(20)]
    backward_problems = [task.operands("test", index) for index in reversed(range(20))]
    assert backward_problems == list(reversed(forward_problems))


def test_the_first_problems_never_change(task):
    """In any process: Python's own `hash` of a text is another one in each."""
    assert [task.prompt("train", index).text for index in range(3)] == ["10+23+1=", "29+9=", "33+2+18="]
    assert [task.prompt("test", index).text for index in range(3)] == ["36+7=", "25+36=", "28+19="]


def test_both_splits_are_endless(task):
    assert task.size("train") is None
    assert task.size("test") is None
    assert task.operands("test", 10**12) == task.operands("test", 10**12)


@pytest.mark.parametrize(
    ("response", "finished", "is_correct"),
    [
        ("46+5=51#51", True, True),
        ("#51", True, True),
        ("99+5=51#51", True, True),  # the way is not scored
        ("46+5=51#51", False, False),  # cut at the limit, maybe in the middle of a number
        ("46+5=51#52", True, False),
        ("46+5=51#510", True, False),
        ("46+5=51#051", True, False),
        ("46+5=51#51#51", True, False),
        ("46+5=51#50#51", True, False),
        ("46+5=51# 51", True, False),
        ("46+5=51#", True, False),
        ("46+5=51", True, False),
        ("51", True, False),
        ("#", True, False),
        ("", True, False),
        ("", False, False),
    ],
)
def test_only_what_follows_the_first_hash_counts(task, response, finished, is_correct):
    prompt = Prompt(uid="p", text="12+34+5=", answer="51", token_ids=())
    score = task.score(prompt, response, finished)
    assert score.correct is is_correct
    assert score.reward == (1.0 if is_correct else 0.0)


def test_the_pages_name_the_count_of_distinct_held_out_prompts(task):
    assert len({task.prompt("test", index).text for index in range(512)}) == 371
    for page in ("docs/tutorial.md", "docs/compare.md"):
        assert "371" in (ROOT / page).read_text()


@pytest.mark.parametrize(
    "settings", [{"min_terms": 1}, {"min_terms": 4, "max_terms": 3}, {"max_operand": 8}, {"max_operand": 0}]
)
def test_settings_without_problems_are_refused(settings):
    with pytest.raises(ValueError, match=r"max_operand|min_terms"):
        ArithmeticConfig(**settings)


def test_an_unknown_split_is_refused(task):
    with pytest.raises(DataError, match="valid: train, test"):
        task.prompt("validation", 0)


def test_a_tokenizer_without_digits_is_refused():
    backend = make_tokenizer().backend_tokenizer
    backend.normalizer = normalizers.Replace(Regex("[0-9]"), "?")
    lossy_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    with pytest.raises(DataError, match="starter models"):
        Arithmetic(lossy_tokenizer, ArithmeticConfig()).prompt("train", 0)
