"""The math task: its prompts, which rows it leaves out and counts, which answers are right, benchmarks by name."""

import logging
from contextlib import closing
from pathlib import Path

import pytest

from helpers.published import data_folder
from helpers.texts import text_tokenizer, write_problems
from jackpot.config.tasks import INSTRUCTION, DataConfig, MathConfig
from jackpot.core.errors import ConfigError, DataError, TrainingError
from jackpot.core.types import DecodedResponse
from jackpot.rollout.tasks.data import DATA_FOLDER
from jackpot.rollout.tasks.math import Math, make_benchmark
from jackpot.rollout.tasks.registry import make_task
from tools.lessons import make_tokenizer

TOKENIZER = text_tokenizer()


def make_math(train: Path, test: Path | None = None, **settings) -> Math:
    """Return the task on files; the training file is the test file too where no other is named."""
    config = MathConfig(train=DataConfig(source=str(train)), test=DataConfig(source=str(test or train)), **settings)
    return make_task(config, TOKENIZER)


@pytest.fixture
def ten_problems(tmp_path) -> Path:
    """Return a file of the problems 0 to 9."""
    return write_problems(tmp_path / "ten.jsonl", range(10))


def test_a_prompt_has_text_tokens_answer_and_source(ten_problems):
    prompt = make_math(ten_problems).prompt("train", 3)
    assert prompt.text == f"<|user|>what is 3?\n{INSTRUCTION}<|end|><|assistant|>"
    assert TOKENIZER.decode(list(prompt.token_ids)) == prompt.text
    assert (prompt.answer, prompt.uid) == ("3", "ten/train/3")

    base_prompt = make_math(ten_problems, template="base").prompt("test", 3)
    assert base_prompt.text == f"Question:\nwhat is 3?\n{INSTRUCTION}\n\nAnswer:\n"


def test_a_problem_that_does_not_exist_is_refused(ten_problems):
    for index in (10, -1):
        with pytest.raises(DataError, match=r"ten \(train\) has no problem .*; they go from 0 to 9"):
            make_math(ten_problems).prompt("train", index)

    with pytest.raises(DataError, match=r"unknown split 'dev'. Valid: test, train"):
        make_math(ten_problems).prompt("dev", 0)


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, caplog):
    path = write_problems(
        tmp_path / "some.jsonl", ["1", None, "3", "4", "5", "6" * 2001], problem=[*"abc", "d" * 300, "e" * 200, "f"]
    )
    lengths = [len(make_math(path).prompt("train", index).token_ids) for index in range(4)]  # the second has no answer
    limit = sorted(lengths)[2]  # the longest of the four prompts is too long
    caplog.clear()

    task = make_math(path, max_prompt_tokens=limit)

    assert task.size("train") == 3
    assert [task.prompt("train", index).answer for index in range(3)] == ["1", "3", "5"]
    assert [record.message for record in caplog.records] == [
        "some (train): of 6 rows 1 have no answer and 1 have an answer of more than 2,000 characters and 1 are longer "
        f"than {limit} tokens; 3 are left"
    ]

    event = {"event": "data", "source": "some", "rows": 6, "without_answer": 1, "long_answer": 1, "too_long": 1}
    event |= {"max_prompt_tokens": limit, "unreadable_answer": 0, "unknown_tokens": 0}
    assert task.take_events() == [event | {"split": "train"}]
    assert task.take_events() == []

    assert task.size("test") == 3
    assert task.take_events() == [event | {"split": "test"}]


def test_data_used_whole_is_reported_without_a_warning(ten_problems, caplog):
    caplog.set_level(logging.INFO)
    task = make_math(ten_problems)
    assert task.size("train") == 10
    assert not caplog.records
    assert [(event["rows"], event["too_long"]) for event in task.take_events()] == [(10, 0)]


def test_answers_that_cannot_be_read_are_kept_with_a_warning(tmp_path, caplog):
    path = write_problems(tmp_path / "some.jsonl", ["1", r"\boxed{5}", "['5']", r"5\text{ apples}"])

    task = make_math(path)

    assert task.size("train") == 4
    assert [record.message for record in caplog.records] == [
        "some (train): the answers of 2 rows are no number, expression or words, so only the same text is right; see "
        "answers and columns.answer"
    ]
    assert [event["unreadable_answer"] for event in task.take_events()] == [2]


def test_wrong_data_is_refused_when_the_task_is_made(tmp_path):
    data_config = DataConfig(source=str(write_problems(tmp_path / "a.jsonl", [1])))

    with pytest.raises(DataError, match="unknown benchmark 'gsm9k'; did you mean 'gsm8k'"):
        Math(TOKENIZER, MathConfig(train=data_config, test=DataConfig(source="gsm9k")))
    with pytest.raises(DataError, match="no chat template"):
        Math(text_tokenizer(chat=None), MathConfig(train=data_config, test=data_config))


def test_a_benchmark_has_the_tasks_template_and_all_problems(tmp_path, monkeypatch):
    write_problems(tmp_path / "aime24.jsonl", range(3), problem=["a", "b", "c" * 500])
    own_file = write_problems(tmp_path / "own.jsonl", range(2))
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))

    data_config = DataConfig(source=str(own_file))
    settings = MathConfig(train=data_config, test=data_config, system_prompt="Be brief.", max_prompt_tokens=100)

    task = make_benchmark(DataConfig(source="aime24"), TOKENIZER, settings)
    assert task.size("test") == 3
    assert task.prompt("test", 2).uid == "aime24/test/2"
    assert task.prompt("test", 0).text.startswith("<|system|>Be brief.<|end|><|user|>a\n")

    with pytest.raises(DataError, match="unknown benchmark 'aime2024'; did you mean 'aime24'"):
        make_benchmark(DataConfig(source="aime2024"), TOKENIZER, settings)


def test_problems_of_real_sets_are_asked_and_scored(monkeypatch):
    """The published answer is right and another number wrong, in a box and in GSM8K's form."""
    monkeypatch.setenv(DATA_FOLDER, str(data_folder()))
    settings = MathConfig(train=DataConfig(source="gsm8k", limit=10), test=DataConfig(source="math500", limit=10))
    with closing(Math(TOKENIZER, settings)) as task:
        split_tasks = [("train", task), ("test", task)]
        for name in ("amc22_23", "aime24"):
            split_tasks.append(("test", make_benchmark(DataConfig(source=name), TOKENIZER, settings, task.reward_fn)))

        for split, set_task in split_tasks:
            prompts = [set_task.prompt(split, index) for index in range(10)]
            assert all(INSTRUCTION in prompt.text and "####" not in prompt.text for prompt in prompts)

            for form in ("so it is \\boxed{{{}}}.", "so\n#### {}"):
                right_scores = set_task.scores(
                    [DecodedResponse(prompt, form.format(prompt.answer), finished=True) for prompt in prompts]
                )
                wrong_scores = set_task.scores(
                    [DecodedResponse(prompt, form.format("-987654321"), finished=True) for prompt in prompts]
                )
                assert all(score.correct and score.reward == 1.0 for score in right_scores)
                assert not any(score.correct or score.reward for score in wrong_scores)

            if set_task is not task:
                set_task.close()

        prompt = task.prompt("test", 0)
        assert task.score(prompt, f"\\boxed{{{prompt.answer}}}", finished=True).correct  # its workers still run


def test_any_of_several_answers_is_right(tmp_path):
    task = make_math(write_problems(tmp_path / "a.jsonl", [["5", "1/2"], ["7"]]))
    double_prompt, single_prompt = (task.prompt("train", index) for index in range(2))
    assert (double_prompt.answer, double_prompt.other_answers, double_prompt.answers) == ("5", ("1/2",), "5 or 1/2")
    assert (single_prompt.answer, single_prompt.other_answers, single_prompt.answers) == ("7", (), "7")

    is_right_by_text = {"5": True, "0.5": True, "7": False, "x": False}

    with closing(task):
        scores = task.scores(
            [DecodedResponse(double_prompt, f"\\boxed{{{text}}}", finished=True) for text in is_right_by_text]
        )

    assert [score.correct for score in scores] == [*is_right_by_text.values()]


DIGITS = make_tokenizer()  # of the starters: digits and signs alone


def test_the_tokenizer_is_judged_by_the_prompts(tmp_path, caplog):
    def task_of(problems, **settings):
        path = write_problems(tmp_path / "a.jsonl", range(len(problems)), problem=problems)
        data_config = DataConfig(source=str(path))
        settings = {"template": "plain", "instruction": "", **settings}
        return Math(DIGITS, MathConfig(train=data_config, test=data_config, **settings))

    sums = [f"{addend}+1=" for addend in range(8)]
    assert task_of(sums).prompt("train", 3).text == "3+1="
    assert not caplog.records

    mixed_task = task_of([*sums, "what?"])
    assert [mixed_task.prompt("train", index).text for index in (0, 8)] == ["0+1=", "what?"]
    assert mixed_task.take_events()[0]["unknown_tokens"] == 1

    for problems, settings in (
        (["1+1=", "what?"], {}),
        (sums, {"instruction": "Think."}),
        (sums, {"template": "base"}),
    ):
        with pytest.raises(DataError, match=r"a\.jsonl line \d: the tokenizer has no tokens for parts of this prompt"):
            task_of(problems, **settings).prompt("train", 0)


def test_a_reward_that_does_not_exist_is_refused_by_the_task(ten_problems):
    for name, message in (("corect", "did you mean 'correct'"), ("no.such.module:function", "no.such.module")):
        with pytest.raises(ConfigError, match=message):
            make_math(ten_problems, rewards=[name])


def test_rewards_end_with_the_task(ten_problems):
    with closing(make_math(ten_problems, rewards=["helpers.reward_functions:remainder"])) as task:
        prompt = task.prompt("train", 1)
        assert task.score(prompt, "12345", finished=True).reward == pytest.approx(5 / 7)

    with pytest.raises(TrainingError, match="closed"):
        task.score(prompt, "12345", finished=True)
