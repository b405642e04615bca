"""Sums in English: how they are asked, which are held out, and which answers are right."""

import pytest

from helpers.texts import text_tokenizer
from jackpot.config.tasks import SumsConfig
from jackpot.core.types import Prompt
from jackpot.rollout.tasks.arithmetic import Sums
from jackpot.rollout.tasks.registry import make_task


@pytest.fixture(scope="module")
def task() -> Sums:
    return make_task(SumsConfig(), text_tokenizer())


def test_a_sum_is_asked_by_the_chat_template(task):
    prompt = task.prompt("train", 0)
    first, second = task.operands("train", 0)
    question = f"What is {first} + {second}? Answer with the number."

    assert prompt.text == f"<|user|>{question}<|end|><|assistant|>"
    assert prompt.answer == str(first + second)
    assert text_tokenizer().decode(prompt.token_ids) == prompt.text


def test_the_question_may_be_another_one():
    task = make_task(SumsConfig(question="{sum} = ?", max_terms=3, min_terms=3), text_tokenizer())
    terms = task.operands("test", 4)
    assert f"<|user|>{' + '.join(map(str, terms))} = ?<|end|>" in task.prompt("test", 4).text


def test_a_question_without_the_sum_is_refused():
    with pytest.raises(ValueError, match="question"):
        SumsConfig(question="What is it?")


def test_no_held_out_sum_is_trained_on_in_either_order(task):
    train_pairs, test_pairs = ({task.operands(split, index) for index in range(4000)} for split in ("train", "test"))
    assert len(train_pairs | test_pairs) == 400  # all pairs of 1 to 20
    assert not {tuple(sorted(terms)) for terms in train_pairs} & {tuple(sorted(terms)) for terms in test_pairs}
    assert len(test_pairs) == 104  # what the hash holds out of the 400, where a third is asked for


@pytest.mark.parametrize(
    ("response", "is_correct"),
    [
        ("14 + 9 = 23", True),
        ("The answer is 23.", True),
        ("23", True),
        ("23 apples, not 24", False),
        ("1,023 - 1,000 is 23", True),
        ("-23", False),
        ("14 + 9 = 230", False),
        ("twenty-three", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_the_last_number_counts(task, response, is_correct, finished):
    prompt = Prompt(uid="p", text="What is 14 + 9?", answer="23", token_ids=())
    assert task.score(prompt, response, finished).correct is is_correct
    assert task.score(prompt, response, finished).reward == float(is_correct)
