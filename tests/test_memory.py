"""Memory as `--dry-run` predicts it; benchmarks/memory.py compares it with what whole processes take."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from jackpot.launch.local import load_tokenizers, model_paths
from jackpot.launch.memory import Memory, Shape, longest_prompt, micro_batch, plan_memory
from jackpot.launch.plan import model_sizes
from jackpot.ops import tiled_heads
from runs import small_config


@cache  # tracing a step takes a second
def plan(*overrides: str, arm: str | None = None) -> Memory:
    config = small_config(*overrides, arm=arm)
    return plan_memory(config, model_sizes(config), 6)


def test_weights_gradients_and_moments_are_counted_by_parameters() -> None:
    policy, writer = 280_416, 88_512
    memory = plan()
    assert memory.weights == 4 * (policy + writer) == memory.engines == memory.gradients
    assert memory.optimizer == 8 * (policy + writer)
    frozen = plan("rollout_model.optimizer=null", "engine.dtype=bf16", "objective.reference.weight=0.1")
    assert frozen.weights == 4 * (2 * policy + writer)
    assert (frozen.engines, frozen.gradients, frozen.optimizer) == (2 * (policy + writer), 4 * policy, 8 * policy)
    alone = plan(arm="on_policy")
    assert (alone.weights, alone.engines) == (4 * policy, 4 * policy)
    weights, others = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160), 2048 + 64 + 2 * (2 * 64 + 2 * 32)  # of the writer
    channels = 2 * (2 * 64 + 2 * 32 + 2 * 160 + 64)  # a scale each
    quantised = plan("engine.quantization=int8_w8a8", "evaluation.engine=transformers")
    assert weights + others == writer and quantised.engines == weights + 4 * (channels + others) + 4 * policy
    lora = plan("policy.lora.rank=8")
    assert lora.gradients == 4 * (39_168 + writer) and lora.training > 0


def test_the_peak_is_the_larger_of_training_and_writing() -> None:
    known = {name: 2**number for number, name in enumerate(Memory.__slots__)}
    lasting = sum(known[name] for name in ("process", "weights", "engines", "optimizer"))
    memory = Memory(**known)
    assert memory.peak == lasting + known["writing"]  # 64 against 16 + 32
    assert replace(memory, training=100).peak == lasting + known["gradients"] + 100


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Shape(4, 16, 6, 24)),  # the whole step, four groups
        (("batch.micro_batch_tokens=120",), Shape(1, 4, 6, 24)),
        (("batch.micro_batch_tokens=180",), Shape(2, 6, 6, 24)),
        (("batch.step_size=8",), Shape(4, 8, 6, 24)),  # shuffled: any prompt may be there
        (("batch.step_size=2",), Shape(2, 2, 6, 24)),
    ],
)
def test_the_largest_micro_batch_is_what_the_budget_allows(overrides: tuple[str, ...], expected: Shape) -> None:
    assert micro_batch(small_config(*overrides), 6) == expected


def test_a_vocabulary_of_many_tiles_is_planned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan().training
    monkeypatch.setattr(tiled_heads, "MAX_TILE_LOGITS", 256)
    assert 0 < plan.__wrapped__().training <= whole


def test_a_critic_is_planned_too() -> None:
    settings = ("objective.advantage=gae", "critic.optimizer.learning_rate=1e-4")
    config = small_config(*settings)
    sizes = model_sizes(config)
    assert sizes["critic"].parameters == sizes["policy"].parameters + 96 + 1  # a value head with a bias
    memory = plan_memory(config, sizes, 6)
    assert memory.gradients == 4 * sum(size.parameters for size in sizes.values())
    assert memory.training >= plan().training  # the others' activations, which are gone when the critic's come
    adapter = plan_memory(small_config(*settings, "policy.lora.rank=1", "rollout_model.optimizer=null"), sizes, 6)
    assert adapter.training > 0.5 * memory.training  # the critic's own activations, though it is after the others


def test_what_an_engine_takes_is_its_keys_and_values_what_it_wrote_and_a_step() -> None:
    rows, length, written, vocabulary = 16, 6 + 24, 24 * (2 + 2 * 20) * 4, 3 * 4 * 32
    policy = 2 * 3 * 2 * 32 * length * 4  # of the starter: layers, key heads, their size
    assert plan("evaluation.problems=16").writing == rows * (policy + written + vocabulary)


def test_checkpointed_activations_take_less_and_longer_responses_more() -> None:
    long, short = plan("sampling.max_new_tokens=48"), plan()
    assert long.training > 1.5 * short.training
    assert plan("activation_checkpointing=true").training < short.training


def test_a_model_whose_shapes_depend_on_values_is_planned_without_its_activations(tmp_path) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )
    model.save_pretrained(tmp_path)
    memory = plan(f"policy.path={tmp_path}", "rollout_model=null", "objective.correction=none")
    assert memory.weights == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert memory.training is None and memory.peak > memory.process


def test_the_longest_prompt_is_that_of_the_task() -> None:
    config = small_config("task.max_terms=3", "task.max_operand=40")
    tokenizer = load_tokenizers(model_paths(config, None))
    assert longest_prompt(config, tokenizer) == len("10+10+10=")
