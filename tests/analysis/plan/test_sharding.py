"""What one GPU of several holds of a run. Expectations: sums by hand, shapes as the models' own reports name them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.hub import without_hub
from helpers.runs import small_config
from jackpot.analysis.plan.cost_model import Gpu
from jackpot.analysis.plan.memory import MemoryPlan
from jackpot.analysis.plan.sharding import (
    ENGINE_BYTES,
    Blocks,
    EngineNeeds,
    Shard,
    blocks,
    cache_bytes,
    degree,
    engine_needs,
    shard,
    sharded,
)
from jackpot.config.engines import EngineConfig, TransformersEngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from jackpot.config.recipes import resolve

GB = 1e9
GPU = Gpu(bf16=1.0, fp32=1.0, bandwidth=1.0, memory=80 * GB)
BLOCKS = Blocks(layer=1_000, heads=3_000, reference=200, copied=500)
PLANNED = {name: 0 for name in MemoryPlan.__slots__} | {"weights": 40, "optimizer": 80, "gradients": 24, "training": 7}
MEMORY = MemoryPlan(**PLANNED)


def need(settings: EngineConfig, weights: float = 16 * GB) -> EngineNeeds:
    """What an engine of the policy needs."""
    return EngineNeeds("policy", settings, int(weights), 100_000, 10_000)  # 1 GB for the longest sequence


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is fetched from the hub, nor found in its cache."""
    without_hub(monkeypatch, tmp_path)


def test_weights_are_divided_and_activations_are_not() -> None:
    alone, four = (shard(MEMORY, BLOCKS, {}, GPU, gpus) for gpus in (1, 4))

    assert (alone.weights, alone.optimizer, alone.gradients, alone.training) == (40, 80, 24, 7)
    assert (four.weights, four.optimizer, four.gradients, four.training) == (10, 20, 6, 7)

    offloaded = shard(MEMORY, BLOCKS, {}, GPU, 4, offloads=True)
    assert offloaded == replace(four, weights=0.0, optimizer=0.0, gradients=0.0)
    assert shard(MEMORY, BLOCKS, {}, GPU, 1, offloads=True) == alone  # nothing is sharded

    # Two layers and all heads in float32, and the gradient of the larger of the two; alone, copies in bf16.
    assert (four.gathered, alone.gathered) == (4 * (2 * 1_000 + 3_000 + 200) + 4 * 3_000, 2 * 500)


def test_the_peak_is_the_larger_of_training_and_writing() -> None:
    known = Shard(
        gpus=1,
        limit=1_000,
        weights=1,
        optimizer=2,
        gradients=4,
        gathered=8,
        training=16,
        resting=32,
        generation=100,
        tensor_parallel={"engine": 1},
    )

    assert known.peak == 1 + 2 + 100
    assert replace(known, training=200).peak == 1 + 2 + 4 + 8 + 200 + 32
    assert known.fits and not replace(known, limit=102).fits
    assert not replace(known, training=None).fits and not replace(known, tensor_parallel={"engine": 0}).fits


def test_an_engine_that_sleeps_leaves_its_share_to_the_learner() -> None:
    for sleep, resting in ((False, 32 * GB), (True, 0)):
        engine = VLLMEngineConfig(gpu_memory_utilization=0.4, enable_sleep_mode=sleep)
        planned = shard(MEMORY, BLOCKS, {"engine": need(engine)}, GPU, 8)
        assert (planned.resting, planned.generation) == (resting, 32 * GB)

    two = {
        "engine": need(VLLMEngineConfig(enable_sleep_mode=True)),
        "evaluation.engine": need(VLLMEngineConfig(gpu_memory_utilization=0.3)),
    }
    planned = shard(MEMORY, BLOCKS, two, GPU, 8)

    assert (planned.resting, planned.generation) == (pytest.approx(24 * GB), pytest.approx(56 * GB))


def test_other_engines_take_weights_and_what_was_planned() -> None:
    memory = replace(MEMORY, generation=5)
    planned = shard(memory, BLOCKS, {"engine": need(TransformersEngineConfig(), 9)}, GPU, 2)

    assert (planned.resting, planned.generation) == (9, 14)

    servers = VLLMServerEngineConfig(urls=("http://127.0.0.1:1",), weights_folder="x")
    planned = shard(MEMORY, BLOCKS, {"engine": need(servers)}, GPU, 2)
    assert (planned.resting, planned.generation) == (0, 0)

    fixed = shard(MEMORY, BLOCKS, {"engine": need(VLLMEngineConfig(kv_cache_memory_bytes=2 * 2**30))}, GPU, 2)
    assert fixed.resting == 16 * GB + 2 * 2**30 + ENGINE_BYTES


def test_an_engine_spreads_over_as_few_gpus_as_hold_it() -> None:
    engine = VLLMEngineConfig(gpu_memory_utilization=0.4)  # 32 GB of a GPU, of which 2 go to activations

    assert [degree(need(engine, size * GB), GPU, 8) for size in (16, 28.9, 29.1, 65, 400)] == [1, 1, 2, 4, 0]
    assert degree(need(engine, 65 * GB), GPU, 2) == 0  # it would need four
    assert degree(need(engine, 29.1 * GB), GPU, 3) == 0  # two do not divide three
    assert cache_bytes(need(engine, 65 * GB), 4, GPU) == pytest.approx(4 * 30 * GB - 65 * GB)
    assert not shard(MEMORY, BLOCKS, {"engine": need(engine, 65 * GB)}, GPU, 2).fits


@pytest.mark.usefixtures("offline")
def test_what_is_gathered_as_a_whole_is_a_layer_and_both_heads() -> None:
    attention, mlp = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 12_288
    config = resolve("joint_8b", None, [])
    gathered = blocks(config)

    assert gathered.layer == attention + mlp + 2 * 4096 + 2 * 128  # and its norms
    assert gathered.heads == 151_936 * (4096 + 2048)

    small = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144
    assert gathered.copied == 36 * (attention + mlp) + 28 * small

    frozen = resolve("joint_8b", None, ["rollout_model.optimizer=null"])
    assert blocks(frozen).copied == 36 * (attention + mlp)
    assert blocks(resolve("joint_8b", None, ["precision=fp32"])).copied == gathered.reference == 0
    assert blocks(resolve("joint_8b", None, ["objective.reference.kl_loss_coef=0.1"])).reference == 151_936 * 4096


@pytest.mark.usefixtures("offline")
def test_a_run_has_the_engines_that_the_launcher_makes() -> None:
    needs = engine_needs(resolve("joint_8b", None, []), 1024)

    assert {name: engine.role for name, engine in needs.items()} == {
        "engine": "rollout_model",
        "evaluation.engine": "policy",
    }
    assert (needs["engine"].weights, needs["evaluation.engine"].weights) == (2 * 1_720_574_976, 2 * 8_190_735_360)
    assert (needs["engine"].token, needs["engine"].longest) == (2 * 2 * 28 * 8 * 128, 1024 + 8192)

    same = engine_needs(resolve("joint_8b", None, ["evaluation.engine=null", "engine.enable_sleep_mode=false"]), 1024)
    assert same["evaluation.engine"].role == "policy" and same["evaluation.engine"].settings == same["engine"].settings

    alone = engine_needs(resolve("joint_8b", "on_policy", []), 1024)
    assert {name: engine.role for name, engine in alone.items()} == {"engine": "policy"}

    drafted = engine_needs(small_config("rollout_model.share=0.0", "engine={name: vllm, draft: {}}"), 6)
    plain = engine_needs(small_config("rollout_model.share=0.0", "engine=vllm"), 6)
    for attribute in ("weights", "token"):  # one vLLM holds the policy and the model that drafts for it
        both = sum(getattr(engine, attribute) for engine in plain.values())
        assert getattr(drafted["evaluation.engine"], attribute) == both
        assert both != getattr(plain["evaluation.engine"], attribute)

    other = engine_needs(small_config("evaluation.engine=transformers", arm="on_policy"), 6)
    assert {name: engine.role for name, engine in other.items()} == {"engine": "policy", "evaluation.engine": "policy"}


def test_autocast_keeps_no_copies_of_sharded_weights() -> None:
    weight = torch.ones(2, 2, requires_grad=True)

    def casts() -> set[int]:
        with torch.autocast("cpu", torch.bfloat16):
            results = [weight @ torch.ones(2, 2) for _ in range(2)]
        return {result.grad_fn.next_functions[0][0] for result in results}

    assert len(casts()) == 1  # the second product takes the copy of the first
    with sharded():
        assert len(casts()) == 2
    assert len(casts()) == 1
