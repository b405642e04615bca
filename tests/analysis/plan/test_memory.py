"""Memory as `--dry-run` predicts it; benchmarks/memory.py compares it with what whole processes take."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers.runs import small_config
from jackpot.analysis.plan import dry_step
from jackpot.analysis.plan.dry_step import MemoryTracker, MicroBatchShape
from jackpot.analysis.plan.memory import MemoryPlan, micro_batch, plan_memory
from jackpot.analysis.plan.sizes import model_sizes
from jackpot.objectives.kernels import autograd

V = 320  # tokens of the models that are traced
ALONE = ("rollout_model=null", "objective.correction=none")  # one model is traced in half the time


def planned(*overrides: str, arm: str | None = None) -> MemoryPlan:
    """Plan the memory of a small run with prompts of 6 tokens."""
    config = small_config(*overrides, arm=arm)
    return plan_memory(config, model_sizes(config), 6)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Settings with two models of one layer and 320 tokens, which are traced in a fraction of the starters' time."""
    folder = tmp_path_factory.mktemp("models")
    for name, width in (("policy", 64), ("rollout_model", 32), ("reference", 512)):
        shape = dict(hidden_size=width, intermediate_size=2 * width, num_attention_heads=4, num_key_value_heads=2)
        config = LlamaConfig(vocab_size=V, num_hidden_layers=1, head_dim=16, **shape)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder / name)
    return f"policy.path={folder / 'policy'}", f"rollout_model.path={folder / 'rollout_model'}"


@pytest.fixture(scope="module")
def plan(paths: tuple[str, str]) -> Callable[..., MemoryPlan]:
    """Plans a run of these models, each once."""
    return cache(lambda *overrides: planned(*paths, *overrides))


@pytest.fixture
def without_training(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MemoryPlan]:
    """Plans a run of the starters without tracing a training step, for what is counted from shapes alone."""
    monkeypatch.setattr("jackpot.analysis.plan.memory.dry_step", lambda config, shape: 0)
    return planned


def test_weights_gradients_and_moments_are_counted_by_parameters(without_training) -> None:
    plan = without_training
    policy, writer = 280_416, 88_512
    memory = plan()

    assert memory.weights == 4 * (policy + writer) == memory.engines == memory.gradients
    assert memory.optimizer == 8 * (policy + writer)

    frozen = plan("rollout_model.optimizer=null", "engine.dtype=bf16", "objective.reference.kl_loss_coef=0.1")
    assert frozen.weights == 4 * (2 * policy + writer)
    assert (frozen.engines, frozen.gradients, frozen.optimizer) == (2 * (policy + writer), 4 * policy, 8 * policy)

    alone = plan(arm="on_policy")
    assert (alone.weights, alone.engines) == (4 * policy, 4 * policy)

    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)  # of the writer's linear layers
    others = 2048 + 64 + 2 * (2 * 64 + 2 * 32)
    channels = 2 * (2 * 64 + 2 * 32 + 2 * 160 + 64)  # a scale each
    quantized = plan("engine.quantization=int8_w8a8", "evaluation.engine=transformers")

    assert weights + others == writer and quantized.engines == weights + 4 * (channels + others) + 4 * policy

    ahead = plan("batch.ahead=2")
    assert (ahead.copies, memory.copies, plan("batch.ahead=2", "guard.check_engine=false").copies) == (
        memory.gradients,
        0,
        0,
    )

    lora = plan("policy.lora.rank=8")
    assert lora.gradients == 4 * (39_168 + writer)


def test_the_peak_is_the_larger_of_training_and_writing() -> None:
    known = {name: 2**index for index, name in enumerate(MemoryPlan.__slots__)}  # no two sums are equal
    lasting = sum(known[name] for name in ("weights", "engines", "optimizer", "copies"))
    memory = MemoryPlan(**known)

    assert replace(memory, training=200).peak == lasting + known["gradients"] + 200 - known["sleeping"]

    memory = replace(memory, sleeping=0)
    assert memory.peak == lasting + known["generation"]  # 64 against 16 + 32
    assert replace(memory, training=100).peak == lasting + known["gradients"] + 100


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), MicroBatchShape(4, 16, 6, 24)),  # the whole step, four groups
        (("batch.micro_batch_tokens=120",), MicroBatchShape(1, 4, 6, 24)),
        (("batch.micro_batch_tokens=180",), MicroBatchShape(2, 6, 6, 24)),
        (("batch.mini_batch_size=8",), MicroBatchShape(4, 8, 6, 24)),  # shuffled: any prompt may be there
        (("batch.mini_batch_size=2",), MicroBatchShape(2, 2, 6, 24)),
    ],
)
def test_the_largest_micro_batch_is_what_the_budget_allows(
    overrides: tuple[str, ...], expected: MicroBatchShape
) -> None:
    assert micro_batch(small_config(*overrides), 6) == expected


def test_logits_that_forward_keeps_are_counted(plan) -> None:
    tokens = 16 * 24  # of the responses, with logits of two models
    assert plan().training - plan("head_logits_memory=0").training == 2 * tokens * V * 4


@pytest.mark.slow
def test_a_critic_is_planned_too(paths: tuple[str, str], plan) -> None:
    settings = (*paths, *ALONE, "objective.advantage=gae", "critic.optimizer.learning_rate=1e-4")
    config = small_config(*settings)
    sizes = model_sizes(config)

    assert sizes["critic"].parameters == sizes["policy"].parameters - 64 * V + 64 + 1  # a value head with a bias

    memory = plan_memory(config, sizes, 6)
    assert memory.gradients == 4 * sum(size.parameters for size in sizes.values())

    without = plan(*ALONE)  # the critic's activations come later
    assert memory.gradients + memory.training >= without.gradients + without.training

    adapter = plan_memory(small_config(*settings, "policy.lora.rank=1"), sizes, 6)
    assert adapter.training > 0.5 * memory.training  # the critic's own activations, though it is after the others


def test_an_engine_takes_its_cache_its_tokens_and_a_step(without_training) -> None:
    rows, length = 16, 6 + 24
    written, vocabulary = 24 * (2 + 2 * 20) * 4, 3 * 4 * 32
    policy = 2 * 3 * 2 * 32 * length * 4  # of the starter: layers, key heads, their size

    assert without_training("evaluation.problems=16").generation == rows * (policy + written + vocabulary)

    several = without_training("evaluation.problems=16", "evaluation.k=3").generation
    assert several == 3 * rows * (policy + written + vocabulary)


def test_checkpointed_activations_take_less(plan) -> None:
    assert 0 < plan(*ALONE, "activation_checkpointing=true").training < plan(*ALONE).training


def test_a_gradient_that_waits_for_the_iteration_is_counted(without_training) -> None:
    writer = 88_512
    waiting = without_training("rollout_model.update=iteration", "batch.mini_batch_size=8")
    assert waiting.gradients == without_training("batch.mini_batch_size=8").gradients + 4 * writer


def test_a_reference_is_read_too(paths: tuple[str, str], plan) -> None:
    wide = paths[0].partition("=")[2].replace("policy", "reference")
    for estimate in ("exact", "k3"):
        settings = f"objective.reference={{path: {wide}, kl_loss_coef: 0.1, kl_loss_type: {estimate}}}"
        assert plan(*ALONE, settings).training > plan(*ALONE).training


def test_a_longer_output_layer_is_cut_in_the_plan_too(paths: tuple[str, str], plan, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(paths[0].partition("=")[2])
    config.vocab_size = V + 16
    config.save_pretrained(tmp_path)
    output_layer = 4 * 64 * (V + 16)

    longer = planned(*paths, f"policy.path={tmp_path}")
    added = longer.gradients + longer.training - plan().gradients - plan().training

    assert 0 <= added <= 2 * output_layer, "backward makes a gradient of all rows of one of those that are read"


def test_the_weights_that_an_adapter_changes_are_made_to_be_sent(without_training) -> None:
    # of the starter
    layers = 3
    width, inner = 96, 192
    queries, keys = 4 * 32, 2 * 32
    changed = 4 * layers * (2 * width * queries + 2 * width * keys + 3 * width * inner)
    few = ("batch.prompts=1", "batch.group_size=2", "evaluation.problems=1")

    memory = without_training("policy.lora.rank=8", "policy.lora.target_modules=all-linear", *few)

    assert memory.generation == changed > without_training(*few).generation


def test_tensors_are_counted_while_they_are_there() -> None:
    with FakeTensorMode(), MemoryTracker() as tracker:
        first = torch.zeros(256)
        view, second = first[1:], torch.zeros(512)
        assert tracker.alive == 4 * (256 + 512)
        del first
        assert tracker.alive == 4 * (256 + 512)  # the view still needs it
        del view, second
        assert tracker.alive == 0 and tracker.peak == 4 * (256 + 512)


@pytest.mark.parametrize(
    "settings",
    [ALONE, pytest.param(("policy.lora.rank=4",), marks=pytest.mark.slow)],  # of two, one without a gradient
)
def test_later_tiles_are_not_run_and_the_peak_is_the_same(
    settings: tuple[str, ...], paths: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vocabulary of 5 tiles, in micro-batches of one sequence."""
    monkeypatch.setattr(autograd, "MAX_TILE_LOGITS", dict.fromkeys(autograd.MAX_TILE_LOGITS, 24 * 64))
    config = small_config(*paths, "batch.micro_batch_tokens=30", *settings)
    peak = dry_step.dry_step(config, micro_batch(config, 6))

    assert peak > 0

    monkeypatch.setattr(dry_step, "RUN_TILES", 1000)
    assert peak == pytest.approx(dry_step.dry_step(config, micro_batch(config, 6)), rel=0.01)


def test_shapes_that_depend_on_values_are_planned_roughly(tmp_path: Path) -> None:
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

    memory = planned(f"policy.path={tmp_path}", "rollout_model=null", "objective.correction=none")

    assert memory.weights == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert memory.training is None and memory.peak > 4 * memory.weights
