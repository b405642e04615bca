"""Arithmetic with a calculator: when it is called, what it answers, and that nothing else of the task changes."""

import pytest

from jackpot.config.tasks import ArithmeticConfig, ToolArithmeticConfig
from jackpot.core.types import Prompt
from jackpot.rollout.tasks.arithmetic import Arithmetic, ToolArithmetic
from jackpot.rollout.tasks.registry import make_task
from tools.lessons import make_tokenizer

PROMPT = Prompt(uid="p", text="12+34+5=", answer="51", token_ids=())


@pytest.fixture(scope="module")
def task() -> ToolArithmetic:
    return make_task(ToolArithmeticConfig(), make_tokenizer())


def test_the_model_calls_with_equals_signs_alone(task):
    assert isinstance(task, ToolArithmetic)
    assert make_tokenizer().convert_ids_to_tokens(list(task.turn_end_token_ids)) == ["="]
    assert Arithmetic(make_tokenizer(), ArithmeticConfig()).turn_end_token_ids == ()


def test_a_token_that_ends_with_an_equals_sign_is_a_call_too():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["+1=", "=+"])
    end_ids = ToolArithmetic(tokenizer, ToolArithmeticConfig()).turn_end_token_ids
    assert tokenizer.convert_ids_to_tokens(list(end_ids)) == ["=", "+1="]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("46+5=", "51"),
        ("1+2=3+4=", "7"),
        ("46+5=51#51+1=", "52"),
        ("#=1+2=", "3"),
        ("007+5=", "12"),
        ("999999999+999999999=", "1999999998"),
        ("1000000000+1=", "?"),  # ten digits
        ("1+1000000000=", "?"),
        ("9" * 100 + "+1=", "?"),
        ("46+5+1=", "?"),
        ("46=", "?"),
        ("+5=", "?"),
        ("46+=", "?"),
        ("=", "?"),
        ("1+2==", "?"),
        ("46-5=", "?"),
        ("-46+5=", "?"),
        ("46*5=", "?"),
        ("4 6+5=", "?"),
        ("x46+5=", "?"),
        ("1+2#46=", "?"),
        ("\u0664\u0666+\u0665=", "?"),  # digits, but not these
        ("46+5!=", "?"),
    ],
)
def test_it_adds_two_numbers_written_since_the_last_separator(task, response, answer):
    assert task.step(PROMPT, response) == answer


def test_problems_and_rewards_are_those_of_arithmetic(task):
    plain_task = Arithmetic(make_tokenizer(), ArithmeticConfig())

    for split in ("train", "test"):
        for index in range(20):
            assert task.prompt(split, index) == plain_task.prompt(split, index)
        assert task.size(split) is None

    for response in ("46+5=51#51", "#51", "46+5=?#51", "46+5=51", "#51#51", "#46+5=51"):
        for finished in (True, False):
            assert task.score(PROMPT, response, finished) == plain_task.score(PROMPT, response, finished)

    assert task.score(PROMPT, "46+5=51#51", finished=True).correct
