"""The quickstart learns with OBRS and less without, and its starters can be made again: part of `make test-all`."""

import os
from pathlib import Path

import pytest
import torch

from helpers.runs import metrics, run
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.recipes import resolve
from jackpot.config.sampling import Sampling
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.types import Version
from jackpot.models.load import eos_token_ids, load_model, load_tokenizer
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.evaluate import evaluate
from jackpot.rollout.tasks.arithmetic import Arithmetic
from tools.toy_models import TOY_MODELS, make_toy_models

pytestmark = pytest.mark.slow


def accuracy(path: str) -> float:
    """Sampled, on 512 held-out problems: a standard error of 2 points."""
    model, tokenizer = load_model(path, torch.float32), load_tokenizer(path)
    engine = TransformersEngine(
        model,
        TransformersEngineConfig(max_num_seqs=512),
        eos_token_ids=eos_token_ids(model),
        version=Version(0, 0),
    )
    task = Arithmetic(tokenizer, ArithmeticConfig())
    prompts = [task.prompt("test", index) for index in range(512)]
    return evaluate(engine, task, tokenizer, prompts, Sampling(max_new_tokens=32), seed=7, k=1).accuracy


@pytest.mark.skipif("JACKPOT_STARTERS" not in os.environ, reason="five CPU minutes: make starters")
def test_starters_can_be_made_again_with_the_same_accuracy(tmp_path: Path) -> None:
    make_toy_models(tmp_path, TOY_MODELS)
    for role in ("policy", "rollout_model"):
        assert accuracy(str(tmp_path / role)) == pytest.approx(accuracy(f"starter:{role}"), abs=0.08)


def test_obrs_learns_and_none_learns_less(tmp_path: Path) -> None:
    """Gains in accuracy over 60 of the 250 iterations; three full seeds of each are in docs/tutorial.md."""
    overrides = ["iterations=60", "evaluation.every=60", "seed=7", "threads=1"]
    gains = {}

    for arm in ("obrs", "none"):
        run(resolve("quickstart", arm, overrides), tmp_path / arm)
        first_line, *_, last_line = metrics(tmp_path / arm)
        gains[arm] = last_line["eval/policy_accuracy"] - first_line["eval/policy_accuracy"]

    assert gains["obrs"] > 0.15
    assert gains["none"] < gains["obrs"] - 0.05
