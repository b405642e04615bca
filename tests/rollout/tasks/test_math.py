"""The math task: prompts, the length filter and its count, benchmarks by name."""

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


def make(train: Path, test: Path | None = None, **settings) -> Math:
    config = MathConfig(train=DataConfig(source=str(train)), test=DataConfig(source=str(test or train)), **settings)
    return make_task(config, TOKENIZER)


@pytest.fixture
def ten(tmp_path) -> Path:
    return write_problems(tmp_path / "ten.jsonl", range(10))


def test_a_prompt_has_text_tokens_answer_and_source(ten):
    prompt = make(ten).prompt("train", 3)
    assert prompt.text == f"<|user|>what is 3?\n{INSTRUCTION}<|end|><|assistant|>"
    assert TOKENIZER.decode(list(prompt.token_ids)) == prompt.text
    assert (prompt.answer, prompt.uid) == ("3", "ten/train/3")
    assert make(ten, template="base").prompt("test", 3).text == f"Question:\nwhat is 3?\n{INSTRUCTION}\n\nAnswer:\n"


def test_a_problem_that_does_not_exist_is_refused(ten):
    for index in (10, -1):
        with pytest.raises(DataError, match=r"ten \(train\) has no problem .*; they go from 0 to 9"):
            make(ten).prompt("train", index)
    with pytest.raises(DataError, match=r"unknown split 'dev'. Valid: test, train"):
        make(ten).prompt("dev", 0)


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, caplog):
    path = write_problems(
        tmp_path / "some.jsonl", ["1", None, "3", "4", "5", "6" * 2001], problem=[*"abc", "d" * 300, "e" * 200, "f"]
    )
    lengths = [len(make(path).prompt("train", index).token_ids) for index in range(4)]  # the second has no answer
    caplog.clear()
    task = make(path, max_prompt_tokens=sorted(lengths)[2])
    assert task.size("train") == 3 and [task.prompt("train", n).answer for n in range(3)] == ["1", "3", "5"]
    assert [record.message for record in caplog.records] == [
        "some (train): of 6 rows 1 have no answer and 1 have an answer of more than 2,000 characters and 1 are longer "
        f"than {sorted(lengths)[2]} tokens; 3 are left"
    ]
    expected = {"event": "data", "source": "some", "rows": 6, "without_answer": 1, "long_answer": 1, "too_long": 1}
    expected |= {"max_prompt_tokens": sorted(lengths)[2], "unreadable_answer": 0, "unknown_tokens": 0}
    assert task.take_events() == [expected | {"split": "train"}]
    assert task.take_events() == []
    assert task.size("test") == 3 and task.take_events() == [expected | {"split": "test"}]


def test_data_that_is_used_whole_is_told_without_a_warning(ten, caplog):
    caplog.set_level(logging.INFO)
    task = make(ten)
    assert task.size("train") == 10 and not caplog.records
    assert [(event["rows"], event["too_long"]) for event in task.take_events()] == [(10, 0)]


def test_answers_that_cannot_be_read_are_kept_with_a_warning(tmp_path, caplog):
    path = write_problems(tmp_path / "some.jsonl", ["1", r"\boxed{5}", "['5']", r"5\text{ apples}"])
    task = make(path)
    assert task.size("train") == 4
    assert [record.message for record in caplog.records] == [
        "some (train): the answers of 2 rows are no number, expression or words, so only the same text is right; see "
        "answers and columns.answer"
    ]
    assert [event["unreadable_answer"] for event in task.take_events()] == [2]


def test_wrong_data_is_refused_when_the_task_is_made(tmp_path):
    data = write_problems(tmp_path / "a.jsonl", [1])
    with pytest.raises(DataError, match="unknown benchmark 'gsm9k'; did you mean 'gsm8k'"):
        Math(TOKENIZER, MathConfig(train=DataConfig(source=str(data)), test=DataConfig(source="gsm9k")))
    with pytest.raises(DataError, match="no chat template"):
        Math(
            text_tokenizer(chat=None), MathConfig(train=DataConfig(source=str(data)), test=DataConfig(source=str(data)))
        )


def test_a_benchmark_has_the_tasks_template_and_all_problems(tmp_path, monkeypatch):
    write_problems(tmp_path / "aime24.jsonl", range(3), problem=["a", "b", "c" * 500])
    own = write_problems(tmp_path / "own.jsonl", range(2))
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    data = DataConfig(source=str(own))
    settings = MathConfig(train=data, test=data, system_prompt="Be brief.", max_prompt_tokens=100)
    task = make_benchmark(DataConfig(source="aime24"), TOKENIZER, settings)
    assert task.size("test") == 3 and task.prompt("test", 2).uid == "aime24/test/2"
    assert task.prompt("test", 0).text.startswith("<|system|>Be brief.<|end|><|user|>a\n")
    with pytest.raises(DataError, match="unknown benchmark 'aime2024'; did you mean 'aime24'"):
        make_benchmark(DataConfig(source="aime2024"), TOKENIZER, settings)


def test_problems_of_real_sets_are_asked_and_scored(monkeypatch):
    """The published answer is right and another number wrong, in a box and in GSM8K's form."""
    monkeypatch.setenv(DATA_FOLDER, str(data_folder()))
    settings = MathConfig(train=DataConfig(source="gsm8k", limit=10), test=DataConfig(source="math500", limit=10))
    with closing(Math(TOKENIZER, settings)) as task:
        sets = [("train", task), ("test", task)]
        for name in ("amc22_23", "aime24"):
            sets.append(("test", make_benchmark(DataConfig(source=name), TOKENIZER, settings, task.reward_fn)))
        for split, one in sets:
            prompts = [one.prompt(split, index) for index in range(10)]
            assert all(INSTRUCTION in prompt.text and "####" not in prompt.text for prompt in prompts)
            for form in ("so it is \\boxed{{{}}}.", "so\n#### {}"):
                right = one.scores([DecodedResponse(prompt, form.format(prompt.answer), True) for prompt in prompts])
                wrong = one.scores([DecodedResponse(prompt, form.format("-987654321"), True) for prompt in prompts])
                assert all(score.correct and score.reward == 1.0 for score in right)
                assert not any(score.correct or score.reward for score in wrong)
            if one is not task:
                one.close()
        prompt = task.prompt("test", 0)
        assert task.score(prompt, f"\\boxed{{{prompt.answer}}}", True).correct  # its workers still run


def test_any_of_several_answers_is_right(tmp_path):
    task = make(write_problems(tmp_path / "a.jsonl", [["5", "1/2"], ["7"]]))
    several, one = (task.prompt("train", index) for index in range(2))
    assert (several.answer, several.other_answers, several.answers) == ("5", ("1/2",), "5 or 1/2")
    assert (one.answer, one.other_answers, one.answers) == ("7", (), "7")
    given = {"5": True, "0.5": True, "7": False, "x": False}
    with closing(task):
        scores = task.scores([DecodedResponse(several, f"\\boxed{{{text}}}", True) for text in given])
    assert [score.correct for score in scores] == [*given.values()]


DIGITS = make_tokenizer()  # of the starters: digits and signs alone


def test_the_tokenizer_is_judged_by_the_prompts(tmp_path, caplog):
    def task_of(problems, **settings):
        path = write_problems(tmp_path / "a.jsonl", range(len(problems)), problem=problems)
        data = DataConfig(source=str(path))
        settings = {"template": "plain", "instruction": "", **settings}
        return Math(DIGITS, MathConfig(train=data, test=DataConfig(source=str(path)), **settings))

    sums = [f"{number}+1=" for number in range(8)]
    assert task_of(sums).prompt("train", 3).text == "3+1=" and not caplog.records
    some = task_of([*sums, "what?"])
    assert [some.prompt("train", index).text for index in (0, 8)] == ["0+1=", "what?"]
    assert some.take_events()[0]["unknown_tokens"] == 1
    for problems, settings in (
        (["1+1=", "what?"], {}),
        (sums, {"instruction": "Think."}),
        (sums, {"template": "base"}),
    ):
        with pytest.raises(DataError, match=r"a\.jsonl line \d: the tokenizer has no tokens for parts of this prompt"):
            task_of(problems, **settings).prompt("train", 0)


def test_rewards_begin_and_end_with_the_task(ten):
    for name, said in (("corect", "did you mean 'correct'"), ("no.such.module:function", "no.such.module")):
        with pytest.raises(ConfigError, match=said):
            make(ten, rewards=[name])
    with closing(make(ten, rewards=["helpers.reward_functions:remainder"])) as task:
        prompt = task.prompt("train", 1)
        assert task.score(prompt, "12345", True).reward == pytest.approx(5 / 7)
    with pytest.raises(TrainingError, match="closed"):
        task.score(prompt, "12345", True)
