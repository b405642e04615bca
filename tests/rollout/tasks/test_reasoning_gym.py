"""Problems of reasoning-gym: how they are asked, mixed, held out and scored, and which data sets are refused."""

import pytest

from helpers.texts import text_tokenizer
from jackpot.config.tasks import ReasoningGymConfig
from jackpot.core.errors import ConfigError, DataError
from jackpot.core.types import DecodedResponse
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.reasoning_gym import ReasoningGym
from jackpot.rollout.tasks.registry import make_task

pytestmark = pytest.mark.slow


def task_of(*dataset, **settings) -> ReasoningGym:
    """Return the task of these data sets, or skip the test."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install '.[gym]'")
    return make_task(ReasoningGymConfig.model_validate({"dataset": dataset, **settings}), text_tokenizer())


@pytest.fixture(scope="module")
def task():
    """A quarter of the problems are sums, the others letters to count."""
    mixed_task = task_of("chain_sum", {"name": "letter_counting", "weight": 3.0})
    yield mixed_task
    mixed_task.close()


def test_the_tagged_answer_counts_or_all_of_the_response(task):
    prompt = task.prompt("test", 0)
    responses = [
        f"It is <answer> {prompt.answer} </answer>.",
        prompt.answer,
        f"It is {prompt.answer}.",
        "<answer></answer>",
    ]

    scores = task.scores([DecodedResponse(prompt, response, finished=True) for response in responses])

    assert [score.correct for score in scores] == [True, True, False, False]
    assert scores[0].reward == 1.0
    assert not any(score.reward_error for score in scores)


def test_another_pattern_finds_the_answer():
    task = task_of("chain_sum", answer_regex=r"-?\d+")
    prompt = task.prompt("test", 0)
    responses = [f"7 and 5 are {prompt.answer}.", f"{prompt.answer} is not 7", "no number"]

    scores = task.scores([DecodedResponse(prompt, response, finished=True) for response in responses])

    assert [score.correct for score in scores] == [True, False, False]

    task.close()


def test_the_same_index_is_the_same_problem_in_another_task(task):
    other_task = task_of("chain_sum", {"name": "letter_counting", "weight": 3.0})
    for index in range(6):
        assert other_task.prompt("train", index) == task.prompt("train", index)
    assert {task.prompt("test", index).uid.partition("/")[0] for index in range(2)} == {"chain_sum", "letter_counting"}


def test_settings_of_a_data_set_may_be_lists():
    task = task_of({"name": "basic_arithmetic", "kwargs": {"operators": ["+"]}})
    assert not any("*" in task.prompt("train", index).text for index in range(20))


def test_no_question_is_in_both_splits(task):
    train_texts, test_texts = ({task.prompt(split, index).text for index in range(200)} for split in ("train", "test"))
    assert not train_texts & test_texts


def test_prompts_are_mixed_by_weight(task):
    uids = [prompt.uid for prompt in PromptStream(task, "train", seed=0).next(400)]
    assert len(set(uids)) == 400  # indices that hash to one entry are two problems of a batch
    assert 0.6 < sum(uid.startswith("letter_counting") for uid in uids) / 400 < 0.9


@pytest.mark.parametrize("name", ["puzzle24", "spiral_matrix", "simple_integration"])
def test_a_scorer_that_executes_answers_is_refused(name):
    with pytest.raises(DataError, match="executes what a model writes"):
        task_of(name)


def test_bad_data_sets_are_refused_by_name():
    with pytest.raises(DataError, match="did you mean 'chain_sum'"):
        task_of("chain_sums")
    with pytest.raises(DataError, match="does not make chain_sum"):
        task_of({"name": "chain_sum", "kwargs": {"min_terms": 9, "max_terms": 2}})


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("jackpot.rollout.tasks.reasoning_gym.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.\[gym\]"):
        make_task(ReasoningGymConfig.model_validate({"dataset": "chain_sum"}), text_tokenizer())
