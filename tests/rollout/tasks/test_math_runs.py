"""The math task in a real run: rows left out are reported, and it trains and is evaluated on the others."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.runs import run
from helpers.texts import text_tokenizer, write_problems
from jackpot.config.arms import build_config
from jackpot.config.config import Config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small random model with a tokenizer for text."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), text_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    """40 problems: two have no answer, one is long."""
    answers = [None if index in (5, 30) else index for index in range(40)]
    problems = [f"what is {index}?" * (100 if index == 7 else 1) for index in range(40)]
    return write_problems(tmp_path / "forty.jsonl", answers, problem=problems)


def config_of(model: Path, train: dict, test: dict, iterations: int) -> Config:
    """Return the config of a run of six prompts, with two responses each, on a CPU."""
    task = {
        "name": "math",
        "train": train,
        "test": test,
        "rewards": ["helpers.reward_functions:remainder"],
    }

    return build_config(
        {
            "iterations": iterations,
            "task": task,
            "policy": {"path": str(model), "optimizer": {"learning_rate": 1e-3}},
            "rollout_model": None,
            "batch": {"prompts": 6, "group_size": 2, "micro_batch_tokens": 208},  # leaves 200 for prompts
            "sampling": {"max_new_tokens": 8},
            "evaluation": {"every": 2, "problems": 1000},
            "checkpoint": {"every": 2},
            "device": "cpu",
            "threads": 1,
        }
    )


def events(folder: Path, name: str) -> list[dict]:
    """Return the events of this name, without their times."""
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines if line["event"] == name]


def test_a_run_trains_on_the_problems_that_are_left(model, data, tmp_path):
    lines = run(
        config_of(model, {"source": str(data)}, {"source": str(data), "limit": 20}, iterations=1), tmp_path / "run"
    )

    common_fields = {"iteration": 0, "event": "data", "source": "forty", "long_answer": 0, "too_long": 1}
    common_fields |= {"max_prompt_tokens": 200, "unreadable_answer": 0, "unknown_tokens": 0}
    assert events(tmp_path / "run", "data") == [
        common_fields | {"split": "train", "rows": 40, "without_answer": 2},
        common_fields | {"split": "test", "rows": 20, "without_answer": 1},
    ]

    assert lines[-1]["iteration"] == 1
    assert 0.0 < lines[-1]["reward/mean"] < 1.0

    response_lines = (tmp_path / "run" / "eval" / "iteration-000001-policy.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt_uid"] for line in response_lines] == [
        f"forty/test/{index}" for index in range(20) if index not in (5, 7)
    ]
