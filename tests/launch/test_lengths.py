"""What a prompt may be long, so that its response still fits everywhere."""

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
MODELS = [LlamaConfig(max_position_embeddings=length) for length in (4000, 3000)]


@pytest.mark.parametrize(
    ("override", "limit"),
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
    ("override", "said"),
    [
        ({"sampling": {"max_new_tokens": 3000}}, "3000 leaves no room for a prompt in the models' context of 3000"),
        ({"batch": RECIPE["batch"] | {"micro_batch_tokens": 64}}, "100 .* in batch.micro_batch_tokens of 64 tokens"),
    ],
)
def test_no_room_for_any_prompt_is_refused(override: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=f"sampling.max_new_tokens {said}"):
        prompt_limit(build_config(RECIPE | override), MODELS)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a config alone; its context is 3000."""
    MODELS[1].save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(("given", "longest"), [(None, 2900), (5000, 2900), (200, 200)])
def test_problems_without_room_are_left_out_and_counted(given: int | None, longest: int, model: str, tmp_path) -> None:
    data = str(write_problems(tmp_path / "a.jsonl", range(4), problem=["1", "2" * 500, "3" * 2900, "4" * 2901]))
    task = {
        "name": "math",
        "train": data,
        "test": data,
        "template": "plain",
        "instruction": "",
        "max_prompt_tokens": given,
    }
    made = run_task(build_config(RECIPE | {"task": task}), {"policy": model}, text_tokenizer())
    kept = [length for length in (1, 500, 2900, 2901) if length <= longest]
    assert [len(made.prompt("train", index).token_ids) for index in range(made.size("train"))] == kept
    event = made.take_events()[0]
    assert (event["too_long"], event["max_prompt_tokens"]) == (4 - len(kept), longest)


def sums(*overrides: str) -> Config:
    return small_config("task.min_terms=9", "task.max_terms=9", *overrides)  # prompts of up to 27 tokens


@pytest.mark.parametrize(
    ("tokens", "room", "said"),
    [
        (30, 48, r"30 do not fit the 48 tokens .*; lower max_new_tokens to at most (19|2\d), or shorten the prompts"),
        (1, 16, r"1 do not fit the 16 tokens .*; shorten the prompts, or raise"),  # it was: to at most -11
    ],
)
def test_prompts_of_other_tasks_that_do_not_fit_are_refused(tokens: int, room: int, said: str) -> None:
    config = sums(f"sampling.max_new_tokens={tokens}", f"batch.micro_batch_tokens={room}")
    with pytest.raises(ConfigError, match=rf"a prompt of \d+ tokens and sampling\.max_new_tokens {said}"):
        run_task(config, {"policy": "starter:policy"}, load_tokenizer("starter:policy"))


def test_a_task_that_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Task] = []
    monkeypatch.setattr(Task, "close", lambda task: closed.append(task))
    with pytest.raises(ConfigError, match="do not fit"):
        run_task(sums("batch.micro_batch_tokens=48"), {"policy": "starter:policy"}, load_tokenizer("starter:policy"))
    assert len(closed) == 1
