"""Decoding with a cache in place, against one forward pass over each whole sequence, for every kind of attention."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from helpers.engines.architectures import (
    CHANGES,
    WINDOW,
    check_log_probs,
    make_config,
    make_engine,
    make_model,
    make_requests,
)
from jackpot.rollout.engines.transformers import kv_cache as cache_module
from jackpot.rollout.engines.transformers.attention import GROUPED, grouped_attention
from jackpot.rollout.engines.transformers.decoding import _PASS_MASKS_ON
from jackpot.rollout.engines.transformers.kv_cache import BatchKVCache, BatchKVLayer, make_cache


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in CHANGES if name != "bloom"),
        *((name, "eager") for name in ("qwen3 with windows", "qwen3_moe", "gemma2", "gpt2", "lfm2", "bloom")),
    ],
)
def test_decoding_equals_one_pass_over_the_whole_sequence(name, attention):
    model = make_model(name, attention)
    reference = copy.deepcopy(model)
    rollouts = make_engine(model).generate(make_requests([5, 9, 2, 9]))

    assert len({len(rollout.token_ids) for rollout in rollouts}) > 5
    assert max(len(rollout.token_ids) for rollout in rollouts) > 2 * WINDOW
    check_log_probs(reference, rollouts)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_decoding_without_padding_equals_one_pass(name):
    model = make_model(name)
    reference = copy.deepcopy(model)
    check_log_probs(reference, make_engine(model).generate(make_requests([6, 6], group=2, num_new=20)))


def test_every_architecture_that_gets_masks_made_here_is_tried():
    assert {CHANGES[name][0] for name in CHANGES} >= _PASS_MASKS_ON


def test_responses_that_outgrow_the_cache_equal_one_pass(monkeypatch):
    monkeypatch.setattr(cache_module, "_MIN_GROWTH", 4)
    model = make_model("qwen3")
    reference = copy.deepcopy(model)
    check_log_probs(reference, make_engine(model).generate(make_requests([3, 8], group=1, num_new=60)))


@pytest.fixture
def mask_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of query tokens of every mask that transformers makes."""
    query_lengths: list[int] = []
    original_function = AttentionMaskInterface._global_mapping[GROUPED]

    def spy(*arguments: Any, q_length: int, **options: Any) -> Any:
        query_lengths.append(q_length)
        return original_function(*arguments, q_length=q_length, **options)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, GROUPED, spy)
    return query_lengths


def test_masks_of_padded_rows_are_made_once(mask_lengths):
    make_engine(make_model("llama"), eos_token_ids=[]).generate(make_requests([5, 9]))
    assert mask_lengths == [9]  # the longer prompt


def test_masks_are_made_anew_where_a_window_ends_and_not_before(mask_lengths):
    make_engine(make_model("mistral"), eos_token_ids=[]).generate(make_requests([5, 9], group=1, num_new=23))
    assert mask_lengths[0] == 9
    assert set(mask_lengths[1:]) == {1}
    # of 22 steps after the prompt of 9 tokens, those at which the window is full
    assert len(mask_lengths[1:]) == 9 + 22 - WINDOW


@pytest.mark.parametrize(
    ("name", "changes", "is_in_place"),
    [
        ("llama", {}, True),
        ("mistral", {}, True),
        ("gemma2", {}, True),
        ("qwen2 with windows", {}, True),
        ("gpt2", {}, True),
        ("lfm2", {}, False),
        ("llama", {"attention_chunk_size": 8}, False),
        ("llama", {"num_kv_shared_layers": 2}, False),
    ],
)
def test_only_full_attention_and_windows_are_written_in_place(name, changes, is_in_place):
    cache = make_cache(make_config(name, **changes), max_length=99)
    assert type(cache) is (BatchKVCache if is_in_place else DynamicCache)


def test_a_cache_has_the_sliding_window_of_its_model():
    assert make_cache(make_config("llama"), max_length=99).sliding_window is None
    assert make_cache(make_config("mistral without windows"), max_length=99).sliding_window is None
    assert make_cache(make_config("gemma2"), max_length=99).sliding_window == WINDOW  # of one of its layers
    assert make_cache(make_config("mistral", sliding_window=7), max_length=99).sliding_window == 7


def test_a_layer_in_place_holds_what_one_that_copies_holds():
    draw = torch.Generator().manual_seed(0)
    layer_in_place, copying_layer = BatchKVLayer(max_length=500), DynamicLayer()
    rows = 3

    for step in range(300):
        states = [torch.randn(rows, 2, 7 if step == 0 else 1, 4, generator=draw) for _ in range(2)]
        for states_in_place, copied_states in zip(
            layer_in_place.update(*states), copying_layer.update(*states), strict=True
        ):
            assert torch.equal(states_in_place, copied_states)
        assert layer_in_place.get_seq_length() == copying_layer.get_seq_length()
        assert copying_layer.get_seq_length() == 7 + step

        if step == 0:
            order = torch.tensor([0, 0, 2, 1, 1, 1, 2, 0] * 10)
        elif step % 7 == 0 and rows > 1:
            order = torch.randperm(rows, generator=draw)[: rows - 1 - step % 2]
        else:
            continue
        rows = len(order)
        layer_in_place.reorder_cache(order)
        copying_layer.reorder_cache(order)

    assert rows < 40


def test_rows_that_stay_where_they_are_are_not_copied():
    layer = BatchKVLayer(max_length=100)
    states = torch.randn(4, 1, 3, 2)
    layer.update(states, states)
    layer.reorder_cache(torch.tensor([0, 1, 2, 3, 3]))
    old_address = layer.keys.data_ptr()

    keys, _ = layer.update(states.new_ones(5, 1, 1, 2), states.new_ones(5, 1, 1, 2))
    layer.reorder_cache(torch.tensor([0, 4, 2]))

    assert layer.keys.data_ptr() == keys.data_ptr()
    assert keys.data_ptr() == old_address
    assert torch.equal(layer.keys[[0, 1, 2], :, :4], keys[[0, 4, 2]])


def test_room_is_at_most_half_more_than_was_read():
    layer, rows = BatchKVLayer(max_length=450), 6
    states = torch.randn(rows, 1, 200, 2)
    layer.update(states, states)

    for length in range(201, 451):
        if length == 290:
            rows = 2
            layer.reorder_cache(torch.arange(rows))

        token_states = torch.randn(rows, 1, 1, 2)
        layer.update(token_states, token_states)
        assert layer.keys.shape == layer.values.shape
        assert length <= layer.keys.shape[2] <= min(450, 1.5 * length)

    assert layer.keys.shape[0] == rows  # those that left went when it grew
    assert rows == 2


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize(("heads", "length"), [(2, 3), (6, 1), (6, 3)])
def test_grouped_attention_is_what_transformers_computes(kind, heads, length):
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // 2, True
    draw = torch.Generator().manual_seed(heads)
    query = torch.randn(5, heads, length, 8, generator=draw)
    key, value = torch.randn(2, 5, 2, 11, 8, generator=draw)
    attention_mask = torch.rand(5, 1, length, 11, generator=draw) < 0.6
    attention_mask[..., 0] = True

    masks = {
        "none": None,
        "bool": attention_mask,
        "additive": torch.zeros(attention_mask.shape).masked_fill(~attention_mask, torch.finfo().min),
    }
    arguments = (module, query, key, value, masks[kind])

    output, _ = grouped_attention(*arguments, scaling=0.3)
    expected_output, _ = sdpa_attention_forward(*arguments, scaling=0.3)

    assert output.shape == expected_output.shape
    assert expected_output.shape == (5, length, heads, 8)
    assert torch.allclose(output, expected_output, atol=1e-6)


def test_keys_are_not_repeated_for_the_heads_that_share_them(monkeypatch):
    calls: Counter[str] = Counter()
    original_function = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        calls[f"{query.shape[1]} heads, {key.shape[1]} key heads"] += query.shape[2] == 2
        return original_function(query, key, *arguments, **options)

    monkeypatch.setattr("jackpot.rollout.engines.transformers.attention.scaled_dot_product_attention", spy)
    make_engine(make_model("llama"), eos_token_ids=[]).generate(make_requests([4], group=1, num_new=9))

    assert calls == {"2 heads, 2 key heads": 2 * 8}  # two layers, eight steps after the prompt


def test_only_the_model_of_the_engine_attends_in_groups():
    engine_model, other_model = make_model("llama"), make_model("llama")
    eager_model = make_model("gemma2", "eager")

    make_engine(engine_model)
    make_engine(eager_model)
    implementations = [model.config._attn_implementation for model in (engine_model, other_model, eager_model)]

    assert implementations == [GROUPED, "sdpa", "eager"]


def test_eager_attention_generates_the_same(monkeypatch):
    reference = make_model("qwen3")
    engine = make_engine(make_model("qwen3"), attn_implementation="eager")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    monkeypatch.setattr("jackpot.rollout.engines.transformers.attention.scaled_dot_product_attention", None)

    rollouts = engine.generate(make_requests([5, 9], num_new=20))
    scores = engine.score(rollouts, 1.0)
    monkeypatch.undo()

    check_log_probs(reference, rollouts)
    for rollout, score in zip(rollouts, scores, strict=True):
        assert torch.allclose(score, rollout.rollout_log_probs, atol=1e-4)
