"""How long a prompt may be so that its response still fits everywhere, and what happens to longer ones."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from helpers.runs import small_config
from helpers.texts import text_tokenizer, write_problems
from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.core.errors import ConfigError
from jackpot.launch.build import run_task
from jackpot.launch.checks import prompt_limit
from jackpot.models.load import load_tokenizer
from jackpot.rollout.tasks.base import Task

RECIPE = {
    "iterations": 1,
    "policy": {"path": "p", "optimizer": {"learning_rate": 1e-4}},
    "rollout_model": None,
    "batch": {"prompts": 1, "group_size": 2, "micro_batch_tokens": 5000},
    "sampling": {"max_new_tokens": 100},
}
MODELS = [LlamaConfig(max_position_embeddings=length) for length in (4000, 3000)]  # contexts in tokens


@pytest.mark.parametrize(
    ("override", "limit"),  # the smallest room, less the response of 100 tokens
    [
        ({}, 2900),
        ({"sampling": {"max_new_tokens": 2999}}, 1),
        ({"batch": RECIPE["batch"] | {"micro_batch_tokens": 2000}}, 1900),
        ({"engine": {"name": "vllm", "max_model_len": 1000}}, 900),
        ({"evaluation": {"engine": {"name": "vllm", "max_model_len": 800}}}, 700),
    ],
)
def test_the_smallest_room_decides(override: dict, limit: int) -> None:
    assert prompt_limit(build_config(RECIPE | override), MODELS) == limit


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ({"sampling": {"max_new_tokens": 3000}}, "3000 leaves no room for a prompt in the models' context of 3000"),
        ({"batch": RECIPE["batch"] | {"micro_batch_tokens": 64}}, "100 .* in batch.micro_batch_tokens of 64 tokens"),
    ],
)
def test_no_room_for_any_prompt_is_refused(override: dict, error: str) -> None:
    config = build_config(RECIPE | override)

    with pytest.raises(ConfigError, match=f"sampling.max_new_tokens {error}"):
        prompt_limit(config, MODELS)


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    """A folder with a config alone; its context is 3000."""
    MODELS[1].save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(("max_prompt_tokens", "limit"), [(None, 2900), (5000, 2900), (200, 200)])
def test_problems_without_room_are_left_out_and_counted(
    max_prompt_tokens: int | None, limit: int, model_folder: str, tmp_path: Path
) -> None:
    data = str(write_problems(tmp_path / "a.jsonl", range(4), problem=["1", "2" * 500, "3" * 2900, "4" * 2901]))
    task_block = {
        "name": "math",
        "train": data,
        "test": data,
        "template": "plain",
        "instruction": "",
        "max_prompt_tokens": max_prompt_tokens,
    }

    task = run_task(build_config(RECIPE | {"task": task_block}), {"policy": model_folder}, text_tokenizer())

    fitting_lengths = [length for length in (1, 500, 2900, 2901) if length <= limit]
    assert [len(task.prompt("train", index).token_ids) for index in range(task.size("train"))] == fitting_lengths
    event = task.take_events()[0]
    assert event["too_long"] == 4 - len(fitting_lengths)
    assert event["max_prompt_tokens"] == limit


def config_of_long_sums(*overrides: str) -> Config:
    """Return settings of a run on sums of nine terms: prompts of up to 27 tokens."""
    return small_config("task.min_terms=9", "task.max_terms=9", *overrides)


@pytest.mark.parametrize(
    ("max_new_tokens", "room", "error"),
    [
        (30, 48, r"30 do not fit the 48 tokens .*; lower max_new_tokens to at most (19|2\d), or shorten the prompts"),
        (1, 16, r"1 do not fit the 16 tokens .*; shorten the prompts, or raise"),  # it was: to at most -11
    ],
)
def test_prompts_of_other_tasks_that_do_not_fit_are_refused(max_new_tokens: int, room: int, error: str) -> None:
    config = config_of_long_sums(f"sampling.max_new_tokens={max_new_tokens}", f"batch.micro_batch_tokens={room}")

    with pytest.raises(ConfigError, match=rf"a prompt of \d+ tokens and sampling\.max_new_tokens {error}"):
        run_task(config, {"policy": "starter:policy"}, load_tokenizer("starter:policy"))


def test_a_task_that_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_tasks: list[Task] = []
    monkeypatch.setattr(Task, "close", lambda task: closed_tasks.append(task))
    config = config_of_long_sums("batch.micro_batch_tokens=48")

    with pytest.raises(ConfigError, match="do not fit"):
        run_task(config, {"policy": "starter:policy"}, load_tokenizer("starter:policy"))

    assert len(closed_tasks) == 1
