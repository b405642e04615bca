"""The cost model (docs/cost.md). Expectations: sums by hand, numeric integrals, torch's own count, published speeds."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from jackpot.analysis.plan.cost_model import (
    ALL_REDUCE_SECONDS,
    BANDWIDTH_SHARE,
    GENERATION_SHARE,
    GPUS,
    OPTIMIZER_BYTES,
    STEP_SECONDS,
    TRAINING_SHARE,
    WEIGHT_BYTES_PER_SECOND,
    Drafts,
    EngineSpeed,
    Gpu,
    Hours,
    Lengths,
    Linear,
    ModelCost,
    Work,
    evaluation_hours,
    mean_response,
    on_policy,
    run_hours,
)
from jackpot.models.cost import forward_cost, head_cost
from jackpot.models.forward import backbone, checkpoint_activations

GPU = Gpu(bf16=1000.0, fp32=100.0, bandwidth=50.0, memory=1e6)  # FLOPs/s, bytes/s, bytes
FIXED = Lengths(prompt=3, mean=5, limit=5)  # every response is 5 tokens
MODEL = ModelCost(parameters=100, trained=100, body=10, head=4, pair=2, cache=6, layers=3)
BODY = 10 * 8 + 2 * 8 * 8 / 2  # FLOPs of one sequence of FIXED: 8 tokens, half of all pairs
HEAD = 4 * 5
WORK = Work(sequences=8, steps=4, epochs=2, micro_batches=9, generated=1.0, lengths=FIXED, checkpoints=False, extra=1.0)


def writing(**settings: object) -> EngineSpeed:
    """An engine with MODEL on one GPU, or with settings changed."""
    known = {
        "model": MODEL,
        "weight_bytes": 2,
        "number_bytes": 2,
        "max_num_seqs": 256,
        "cache_bytes": math.inf,
        "gpus": 1,
    }
    return EngineSpeed(**known | {"peak": GPU.bf16} | settings)


@pytest.mark.parametrize(("mean", "limit"), [(2048.0, 8192), (200.0, 256), (700.0, 8192), (30.0, 1_000_000)])
def test_lengths_have_the_moments_of_a_cut_exponential(mean: float, limit: int) -> None:
    lengths = Lengths(prompt=10, mean=mean, limit=limit)
    scale = lengths.scale
    width = min(limit, 40 * scale) / 40_000
    times = [width * (step + 0.5) for step in range(40_000)]
    shares = [math.exp(-time / scale) for time in times]  # the share that is longer

    assert sum(shares) * width == pytest.approx(mean, rel=1e-4)
    square = sum(2 * time * share for time, share in zip(times, shares, strict=True)) * width
    assert square == pytest.approx(lengths.square, rel=1e-4)


def test_the_longest_of_some_responses() -> None:
    free = Lengths(prompt=0, mean=10.0, limit=10**6, endless=0.0)
    assert free.longest(1) == pytest.approx(10, rel=1e-6)
    assert free.longest(4) == pytest.approx(10 * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.01)
    assert Lengths(prompt=0, mean=2048.0, limit=8192).longest(512) == 8192
    assert FIXED.longest(7) == 5


def test_a_batch_of_thousands_has_a_response_that_does_not_end() -> None:
    ended, some = (Lengths(prompt=0, mean=10.0, limit=1000, endless=share) for share in (0.0, 0.004))
    assert some.longest(5000) == pytest.approx(1000, rel=1e-6) and ended.longest(5000) < 100
    expected = 0.004 * 1000 + 0.996 * 10  # of one response: its mean, and the limit in 0.4 % of the cases
    assert some.longest(1) == pytest.approx(expected, rel=1e-3)


def test_the_mean_response_is_a_quarter_of_the_longest() -> None:
    assert [mean_response(limit) for limit in (8192, 20_480, 3072, 256, 100)] == [2048, 5120, 768, 200, 100]


@pytest.mark.parametrize(
    ("settings", "checkpoints", "extra", "expected"),
    [
        ({}, False, 0.0, 3 * BODY + 4 * HEAD),  # the head forms its logits again in backward
        ({}, True, 0.0, 4 * BODY + 4 * HEAD),
        ({}, False, 1.0, 4 * BODY + 5 * HEAD),
        ({"trained": 7}, False, 0.0, 2 * BODY + 3 * HEAD),  # an adapter: no gradient of the weights themselves
        ({"trained": 0}, True, 0.0, BODY + HEAD),  # frozen: only scored
        ({"trained": 0}, True, 1.0, 2 * BODY + 2 * HEAD),
    ],
)
def test_training_a_sequence_costs_its_passes(
    settings: dict[str, int], checkpoints: bool, extra: float, expected: float
) -> None:
    assert replace(MODEL, **settings).training(FIXED, checkpoints, extra) == expected


@pytest.mark.parametrize(("checkpoints", "passes"), [(False, 3), (True, 4)])
def test_the_passes_are_those_that_torch_counts(checkpoints: bool, passes: int) -> None:
    """But for the last matrix of each layer, which torch does not multiply again: no gradient asks for its result."""
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=False, **shape)
    config._attn_implementation = "eager"  # computes every pair, the masked ones too
    model, tokens = LlamaForCausalLM(config).eval(), 13
    if checkpoints:
        checkpoint_activations(model)

    with FlopCounterMode(display=False) as counter:
        backbone(model)(torch.arange(tokens)[None], use_cache=False).last_hidden_state.sum().backward()

    forward = forward_cost(model)
    body = forward.per_token - head_cost(model)

    assert head_cost(model) == 2 * 24 * 50

    spared = 3 * 2 * 24 * 40 * tokens if checkpoints else 0
    assert counter.get_total_flops() == passes * (body * tokens + forward.per_pair * tokens**2) - spared


def test_decoding_reads_weights_and_cache_at_every_step() -> None:
    slow = GPU._replace(bf16=1e12)
    pairs = 3 * 5 + 5 * 5 / 2
    moved = 2 * (5 * 100 + 4 * pairs * 6)
    seconds = moved / (50 * BANDWIDTH_SHARE) + 5 * STEP_SECONDS

    assert writing(peak=slow.bf16).seconds(4, FIXED, slow) == pytest.approx(seconds, rel=1e-6)

    added = 5 * 2 * 3 * ALL_REDUCE_SECONDS  # in 5 steps, twice in each of 3 layers
    assert writing(peak=slow.bf16, gpus=2).seconds(4, FIXED, slow) == pytest.approx(
        moved / (100 * BANDWIDTH_SHARE) + 5 * STEP_SECONDS + added, rel=1e-6
    )

    in_turns = 2 * (10 * 100 + 4 * pairs * 6) / (50 * BANDWIDTH_SHARE) + 10 * STEP_SECONDS  # two, then two
    assert writing(peak=slow.bf16, max_num_seqs=2).seconds(4, FIXED, slow) == pytest.approx(in_turns, rel=1e-6)


def test_an_engine_is_done_when_its_last_response_is() -> None:
    fast = GPU._replace(bandwidth=1e15)
    lengths = Lengths(prompt=0, mean=10.0, limit=10**6, endless=0.0)
    longest = 10 * (1 + 1 / 2 + 1 / 3 + 1 / 4)

    assert writing(peak=1e15).seconds(4, lengths, fast) == pytest.approx(longest * STEP_SECONDS, rel=0.01)

    in_turns = writing(peak=1e15, max_num_seqs=4).seconds(12, lengths, fast)  # 8 x 10 tokens by 4 at a time, before
    assert in_turns == pytest.approx((20 + longest) * STEP_SECONDS, rel=0.01)

    of_all = longest + 10 * (1 / 5 + 1 / 6 + 1 / 7 + 1 / 8)  # two engines wait for the longest of eight
    assert writing(peak=1e15).seconds(4, lengths, fast, engines=2) == pytest.approx(of_all * STEP_SECONDS, rel=0.01)

    work = replace(WORK, sequences=8, generated=1.0, lengths=lengths)
    hours = run_hours(work, writing(peak=1e15), [], 0.0, 3600, fast, 2, 1e15)
    assert hours.generation == pytest.approx(of_all * STEP_SECONDS, rel=0.01)
    assert evaluation_hours([(writing(peak=1e15), 8)], 3600, lengths, fast, 2) == pytest.approx(hours.generation)


def test_decoding_takes_its_operations_where_those_take_longer() -> None:
    fast = GPU._replace(bandwidth=1e12)
    decoding = 4 * (14 * 5 + 2 * (3 * 5 + 5 * 5 / 2))
    prefill = 4 * (10 * 3 + 2 * 3 * 3 / 2 + 4)
    expected = (decoding + prefill) / (1000 * GENERATION_SHARE) + 5 * STEP_SECONDS
    assert writing().seconds(4, FIXED, fast) == pytest.approx(expected, rel=1e-6)


def test_an_engine_holds_what_its_batch_and_its_cache_allow() -> None:
    halfway = 3 + 5 / 2  # tokens of a sequence in the mean of its time
    assert writing().concurrent(4, FIXED) == 4
    assert writing(max_num_seqs=3).concurrent(4, FIXED) == 3
    assert writing(cache_bytes=2 * halfway * 6 * 2).concurrent(4, FIXED) == pytest.approx(2)
    assert writing(cache_bytes=1.0).concurrent(4, FIXED) == 1


def test_an_iteration_is_writing_training_and_sending() -> None:
    hours = run_hours(WORK, writing(), [MODEL], 11.0, 3600, GPU, 2, GPU.bf16)
    # Twice over 8 sequences; the anchors' forward pass once.
    flops = 8 * (2 * (3 * BODY + 4 * HEAD + 11) + BODY + HEAD)
    steps = OPTIMIZER_BYTES * 100 * 4 / (2 * 50 * BANDWIDTH_SHARE)

    assert hours.training == pytest.approx(flops / (2 * 1000 * TRAINING_SHARE) + steps)
    assert hours.generation == writing().seconds(4, FIXED, GPU)  # on each of two GPUs
    assert hours.sending == 200 / WEIGHT_BYTES_PER_SECOND
    assert hours.rollout_share == hours.generation / (hours.generation + hours.training + hours.sending)

    two = run_hours(replace(WORK, generated=2.0), writing(), [MODEL], 11.0, 3600, GPU, 2, GPU.bf16)
    assert two.generation == writing().seconds(8, FIXED, GPU) and two.training == hours.training


def test_gpus_without_a_micro_batch_only_share_the_optimizer() -> None:
    few = replace(WORK, micro_batches=1)
    one_gpu, two_gpus = (run_hours(few, writing(), [MODEL], 11.0, 3600, GPU, gpus, GPU.bf16) for gpus in (1, 2))
    moved = OPTIMIZER_BYTES * 100 * 4 / (50 * BANDWIDTH_SHARE)
    assert one_gpu.training - two_gpus.training == pytest.approx(moved / 2)


def test_evaluations_are_beside_the_iterations() -> None:
    hours = Hours(generation=6.0, training=3.0, sending=1.0, evaluating=5.0)
    assert (hours.all, hours.iterations, hours.rollout_share) == (15, 10, 0.6)
    engine = writing(gpus=2)
    expected = 10 * (engine.seconds(8, FIXED, GPU) + engine.seconds(4, FIXED, GPU)) / 3600
    assert evaluation_hours([(engine, 16), (engine, 8)], 10, FIXED, GPU, 4) == pytest.approx(expected)


def test_on_policy_responses_come_in_smaller_batches() -> None:
    alone, times = on_policy(WORK)  # 2 steps an epoch
    assert (alone.sequences, alone.steps, alone.epochs, alone.extra, times) == (4, 1, 1, 0.0, 2)


def llama(parameters: float, hidden: int, layers: int) -> ModelCost:
    """Of Llama 2, with its vocabulary of 32,000; attention as in models/cost.py."""
    head = 32_000 * hidden
    body = 2 * int(parameters - 2 * head)

    return ModelCost(
        parameters=int(parameters),
        trained=int(parameters),
        body=body,
        head=2 * head,
        pair=4 * layers * hidden,
        cache=2 * layers * hidden,
        layers=layers,
    )


@pytest.mark.parametrize(
    ("model", "checkpoints", "published"),
    [
        (llama(6.74e9, 4096, 32), False, 7500),
        (llama(13.0e9, 5120, 40), False, 3800),  # checkpointed in part, there
    ],
)
def test_training_is_as_fast_as_published_for_fsdp_on_h100(model: ModelCost, checkpoints: bool, published: int) -> None:
    lengths = Lengths(prompt=0, mean=4096, limit=4096)
    body = model.training(lengths, checkpoints, 0.0) - lengths.mean * model.head  # their head computes nothing twice
    assert GPUS["H100"].bf16 * TRAINING_SHARE * 4096 / body == pytest.approx(published, rel=0.1)


def test_one_stream_decodes_as_fast_as_published_for_vllm() -> None:
    """Llama 3.1 8B on an A100 of 40 GB, 1,024 tokens read and 128 written: 75 tokens/s."""
    model = ModelCost(
        parameters=8_030_261_248,
        trained=0,
        body=2 * 6_979_321_856,
        head=2 * 128_256 * 4096,
        pair=4 * 32 * 4096,
        cache=2 * 32 * 8 * 128,
        layers=32,
    )
    gpu = Gpu(bf16=312e12, fp32=19.5e12, bandwidth=1.555e12, memory=40e9)
    lengths = Lengths(prompt=1024, mean=128, limit=128)

    engine = EngineSpeed(
        model=model, weight_bytes=2, number_bytes=2, max_num_seqs=256, cache_bytes=math.inf, gpus=1, peak=gpu.bf16
    )

    assert 128 / engine.seconds(1, lengths, gpu) == pytest.approx(75, rel=0.1)


DRAFT = ModelCost(parameters=20, trained=20, body=3, head=1, pair=1, cache=2, layers=1)


@pytest.mark.parametrize("bandwidth", [50.0, 1e9], ids=["limited by memory", "limited by operations"])
def test_a_pass_over_drafts_costs_more_and_gives_more_tokens(bandwidth: float) -> None:
    gpu = GPU._replace(bandwidth=bandwidth)
    drafts = Drafts(DRAFT, tokens=2, acceptance=0.5)
    tokens_of_pass = 1 + 0.5 + 0.25  # its own token, and the drafts that are accepted
    pairs = 5 * 3 + 5 * 5 / 2  # of a response token and one before it, of one sequence
    passes = 5 / tokens_of_pass  # all four sequences at once
    moved = passes * (100 + 2 * 20) + 4 * pairs * (6 + 2 * 2) / tokens_of_pass
    flops = 4 * 3 * ((14 + 4) * 5 + (2 + 1) * pairs) / tokens_of_pass
    prefill = 4 * ((10 + 3) * 3 + (2 + 1) * 9 / 2 + 4 + 1)
    speed = GPU.bf16 * GENERATION_SHARE
    decoding = max(flops / speed, moved * 2 / (bandwidth * BANDWIDTH_SHARE))
    expected = decoding + passes * STEP_SECONDS + prefill / speed  # scheduled once

    assert writing(drafts=drafts).seconds(4, FIXED, gpu) == pytest.approx(expected)


def test_drafts_need_room_for_the_keys_of_both_models() -> None:
    room = 2.5 * 6 * 2 * (3 + 25 / 10)  # of two and a half sequences of the model alone
    alone, drafted = writing(cache_bytes=room), writing(cache_bytes=room, drafts=Drafts(DRAFT, 2, 0.5))
    assert drafted.concurrent(100, FIXED) == pytest.approx(alone.concurrent(100, FIXED) * 6 / 8)


def test_fewer_bits_are_read_sooner_and_multiplied_sooner() -> None:
    slow = GPU._replace(bandwidth=1e9)  # so that operations decide
    read = writing(weight_bytes=1.0).seconds(4, FIXED, GPU) - writing(weight_bytes=0.0).seconds(4, FIXED, GPU)

    assert read == pytest.approx(5 * MODEL.parameters / (GPU.bandwidth * BANDWIDTH_SHARE))  # 5 steps read all weights

    plain, half = writing(peak=1.0), writing(peak=1.0, linear=0.5)
    saved = plain.seconds(4, FIXED, slow) - half.seconds(4, FIXED, slow)
    assert saved == pytest.approx(4 * 8 * MODEL.body / 2 / GENERATION_SHARE)  # of 4 sequences of 8 tokens


def test_fp8_speeds_rollouts_up_by_what_is_published_at_most() -> None:
    plain = writing().seconds(4, FIXED, GPU)
    fast = writing(weight_bytes=1.0, linear=0.5)
    assert fast.seconds(4, FIXED, GPU) < plain / 1.1
    assert replace(fast, most_gain=1.1).seconds(4, FIXED, GPU) == pytest.approx(plain / 1.1)
    assert replace(fast, most_gain=9.0).seconds(4, FIXED, GPU) == fast.seconds(4, FIXED, GPU)


def test_a_head_that_drafts_is_a_layer_and_an_output_layer() -> None:
    head = MODEL.drafting_head()
    assert (head.body, head.pair, head.cache, head.head) == (10 // 3, 0, 2, 4)
    assert (head.parameters, head.trained) == ((3 + 4) // 2, 0)


def test_quantized_layers_train_sooner_in_both_passes() -> None:
    tokens, again = 8 * MODEL.body, True
    plain = MODEL.training(FIXED, again, 1.0)

    assert plain - MODEL.training(FIXED, again, 1.0, Linear(0.5, 1.0)) == tokens * 3 / 2  # forward, again, and extra
    assert plain - MODEL.training(FIXED, again, 1.0, Linear(1.0, 0.5)) == tokens * 2 / 2  # backward is two passes

    frozen = replace(MODEL, trained=0)
    assert frozen.training(FIXED, again, 0.0, Linear(0.5, 0.1)) == frozen.forward(FIXED) - tokens / 2
