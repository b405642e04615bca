"""Memory as `--dry-run` predicts it; benchmarks/memory.py compares it with what whole processes take."""

import platform
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers.runs import small_config
from jackpot.analysis.plan.dry_step import counted
from jackpot.analysis.plan.memory import Memory, Shape, micro_batch, plan_memory
from jackpot.analysis.plan.sizes import model_sizes
from jackpot.objectives.kernels import autograd


@cache  # tracing a step takes a second
def plan(*overrides: str, arm: str | None = None) -> Memory:
    config = small_config(*overrides, arm=arm)
    return plan_memory(config, model_sizes(config), 6)


def test_weights_gradients_and_moments_are_counted_by_parameters() -> None:
    policy, writer = 280_416, 88_512
    memory = plan()
    assert memory.weights == 4 * (policy + writer) == memory.engines == memory.gradients
    assert memory.optimizer == 8 * (policy + writer)
    frozen = plan("rollout_model.optimizer=null", "engine.dtype=bf16", "objective.reference.kl_loss_coef=0.1")
    assert frozen.weights == 4 * (2 * policy + writer)
    assert (frozen.engines, frozen.gradients, frozen.optimizer) == (2 * (policy + writer), 4 * policy, 8 * policy)
    alone = plan(arm="on_policy")
    assert (alone.weights, alone.engines) == (4 * policy, 4 * policy)
    weights, others = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160), 2048 + 64 + 2 * (2 * 64 + 2 * 32)  # of the writer
    channels = 2 * (2 * 64 + 2 * 32 + 2 * 160 + 64)  # a scale each
    quantized = plan("engine.quantization=int8_w8a8", "evaluation.engine=transformers")
    assert weights + others == writer and quantized.engines == weights + 4 * (channels + others) + 4 * policy
    lora = plan("policy.lora.rank=8")
    assert lora.gradients == 4 * (39_168 + writer) and lora.training > 0


def test_the_peak_is_the_larger_of_training_and_writing() -> None:
    known = {name: 2**number for number, name in enumerate(Memory.__slots__)}
    lasting = sum(known[name] for name in ("process", "weights", "engines", "optimizer"))
    memory = Memory(**known)
    assert memory.peak == lasting + known["writing"]  # 128 against 16 + 32 + 64
    assert replace(memory, training=100).peak == lasting + known["gradients"] + 100 + known["wasted"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Shape(4, 16, 6, 24)),  # the whole step, four groups
        (("batch.micro_batch_tokens=120",), Shape(1, 4, 6, 24)),
        (("batch.micro_batch_tokens=180",), Shape(2, 6, 6, 24)),
        (("batch.mini_batch_size=8",), Shape(4, 8, 6, 24)),  # shuffled: any prompt may be there
        (("batch.mini_batch_size=2",), Shape(2, 2, 6, 24)),
    ],
)
def test_the_largest_micro_batch_is_what_the_budget_allows(overrides: tuple[str, ...], expected: Shape) -> None:
    assert micro_batch(small_config(*overrides), 6) == expected


def test_a_vocabulary_of_many_tiles_is_planned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan().training
    monkeypatch.setattr(autograd, "MAX_TILE_LOGITS", 256)
    assert 0 < plan.__wrapped__().training <= whole


def test_a_critic_is_planned_too() -> None:
    settings = ("objective.advantage=gae", "critic.optimizer.learning_rate=1e-4")
    config = small_config(*settings)
    sizes = model_sizes(config)
    assert sizes["critic"].parameters == sizes["policy"].parameters + 96 + 1  # a value head with a bias
    memory = plan_memory(config, sizes, 6)
    assert memory.gradients == 4 * sum(size.parameters for size in sizes.values())
    assert (
        memory.gradients + memory.training >= plan().gradients + plan().training
    )  # the critic's activations come later
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


def test_a_gradient_that_waits_for_the_end_of_the_iteration_is_counted() -> None:
    writer = 88_512
    waiting = plan("rollout_model.update=iteration", "batch.mini_batch_size=8")
    assert waiting.gradients == plan("batch.mini_batch_size=8").gradients + 4 * writer


def test_a_reference_is_read_too() -> None:
    for estimate in ("exact", "k3"):
        assert plan(f"objective.reference={{kl_loss_coef: 0.1, kl_loss_type: {estimate}}}").training > plan().training


def test_the_weights_that_an_adapter_changes_are_made_to_be_sent() -> None:
    width, queries, keys, inner, layers = 96, 4 * 32, 2 * 32, 192, 3  # of the starter
    changed = 4 * layers * (2 * width * queries + 2 * width * keys + 3 * width * inner)
    few = ("batch.prompts=1", "batch.group_size=2", "evaluation.problems=1")
    memory = plan("policy.lora.rank=8", "policy.lora.target_modules=all-linear", *few)
    assert memory.writing == changed > plan(*few).writing


def test_tensors_are_counted_while_they_are_there() -> None:
    with counted(reserves=False) as tally:
        first = torch.zeros(256)
        view, second = first[1:], torch.zeros(512)
        assert tally.alive == 4 * (256 + 512)
        del first
        assert tally.alive == 4 * (256 + 512)  # the view still needs it
        del view, second
        assert tally.alive == 0 and tally.peak == 4 * (256 + 512)
    assert tally.wasted == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator wastes otherwise")
def test_the_allocator_is_asked_for_the_same_and_its_gaps_are_waste() -> None:
    """Every second one of many tensors goes, and what comes is larger than any: no gap is used again. In a process of
    its own, for this one has free places already."""
    size, pairs = 2**16, 1024  # of less than what glibc maps by itself
    command = (
        "import torch; from jackpot.analysis.plan.dry_step import counted\n"
        "with counted(reserves=True) as tally:\n"
        f"    tensors = [torch.zeros({size // 4}) for _ in range({2 * pairs})]\n"
        "    del tensors[::2]\n"
        f"    larger = [torch.zeros({size}) for _ in range({pairs // 4})]\n"
        "    reached = tally.alive, tally.peak\n"
        "    del tensors, larger\n"
        "print(*reached, tally.alive, tally.wasted)"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    alive, peak, left, wasted = map(int, done.stdout.split())
    assert alive == peak == 2 * pairs * size and left == 0
    assert 0.5 * pairs * size < wasted < 1.5 * pairs * size


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
