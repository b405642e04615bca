"""Rollouts become optimizer steps and tensors: nothing is lost, cut, or dependent on who shares a batch."""

import hashlib
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.core.errors import ConfigError
from jackpot.core.types import Prompt, Rollout, Score, TrainingSample, Version
from jackpot.training.batching import collate, micro_batches, mini_batches, regroup

few_examples = settings(max_examples=25, deadline=None, derandomize=True, database=None)
K = 3  # entries of a top-k list
# of each response, those of its prompt and of itself
lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=14)


def make_rollouts(sizes, seed=0, share_prompts=False):
    """Return a response for each (prompt length, response length), numbers random; every fourth token is a tool's."""
    draw = random.Random(seed)
    samples = []
    for index, (prompt_length, length) in enumerate(sizes):
        first_id = 7 if share_prompts else 100 + index
        prompt = Prompt(uid=f"p{index}", text="", answer="", token_ids=(first_id, *range(1, prompt_length)))
        generator = torch.Generator().manual_seed(draw.randrange(2**32))
        sampled = torch.arange(length) % 4 != 3
        log_probs = -torch.rand(length, generator=generator) - 0.1
        samples.append(
            TrainingSample(
                rollout=Rollout(
                    uid=f"r{index}",
                    prompt=prompt,
                    finish="stop",
                    token_ids=torch.randint(2, 50, (length,), generator=generator),
                    rollout_log_probs=torch.where(sampled, log_probs, math.nan),
                    sampled_mask=sampled,
                    top_ids=torch.randint(0, 50, (length, K), generator=generator),
                    top_log_probs=-torch.rand(length, K, generator=generator) - 0.1,
                    versions=torch.tensor([Version(index, 2 * index)] * length, dtype=torch.int64).view(length, 2),
                ),
                score=Score(reward=0.0, correct=False),
                advantages=torch.full((length,), draw.uniform(-1, 1)),
            )
        )
    return samples


def uids(step):
    return [uid for batch in step for uid in batch.uids]


def size(batch, pads):
    """Return the count of tokens, the prompt of each response included, and padding where it is read."""
    if not pads:
        return int(batch.prompt_mask[batch.prompt_index].sum() + batch.attention_mask.sum())
    return len(batch.uids) * (batch.prompt_ids.shape[1] + batch.response_ids.shape[1])


def splitmix64(key, position):
    """Return number `position` of the stream that begins with a key, with Python's integers."""
    mask = 2**64 - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


def stream_key(*values):
    """Return the key of the stream that values name."""
    data = b"".join(f"{type(value).__name__}:{len(str(value))}:{value}".encode() for value in values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# Steps


@few_examples
@given(lengths, st.integers(1, 5), st.integers(1, 3), st.integers(15, 60))
def test_every_sequence_is_in_exactly_one_step_of_every_epoch(sizes, mini_batch_size, epochs, budget):
    items = make_rollouts(sizes)
    options = dict(mini_batch_size=mini_batch_size, epochs=epochs, micro_batch_tokens=budget, seed=0)

    steps = [uids(step) for step in mini_batches(items, **options)]

    steps_per_epoch = math.ceil(len(items) / mini_batch_size)
    assert len(steps) == steps_per_epoch * epochs
    for epoch in range(epochs):
        epoch_uids = [uid for step in steps[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch] for uid in step]
        assert sorted(epoch_uids) == sorted(item.rollout.uid for item in items)
    if len(items) % mini_batch_size == 0:
        assert all(len(step) == mini_batch_size for step in steps)


def test_several_steps_are_shuffled_and_one_step_is_not():
    items = make_rollouts([(2, 3)] * 24)
    options = dict(micro_batch_tokens=1000)

    def order(seed, epochs=1, mini_batch_size=6):
        return [
            uids(step)
            for step in mini_batches(items, mini_batch_size=mini_batch_size, epochs=epochs, seed=seed, **options)
        ]

    first_epoch, second_epoch = order(seed=0, epochs=2)[:4], order(seed=0, epochs=2)[4:]
    assert order(seed=0) == first_epoch
    assert order(seed=1) != first_epoch
    assert second_epoch != first_epoch
    assert {uid for step in first_epoch for uid in step} == {uid for step in second_epoch for uid in step}

    assert order(seed=0, mini_batch_size=24) == [[item.rollout.uid for item in items]]
    assert items[0].rollout.uid == "r0"  # the caller's list keeps its order


def test_different_rollout_batches_are_shuffled_differently():
    """The uid of the first rollout names the batch; else every iteration would cut its groups at the same places."""
    items, other_items = make_rollouts([(2, 3)] * 12), make_rollouts([(2, 3)] * 13)[1:]
    options = dict(mini_batch_size=4, epochs=1, micro_batch_tokens=1000, seed=0)

    def places_by_step(batch_items):
        return [
            [index for index, item in enumerate(batch_items) if item.rollout.uid in uids(step)]
            for step in mini_batches(batch_items, **options)
        ]

    assert places_by_step(items) != places_by_step(other_items)


def test_no_rollouts_make_no_steps():
    assert list(mini_batches([], mini_batch_size=4, epochs=2, micro_batch_tokens=10, seed=0)) == []


# Micro-batches


@few_examples
@given(lengths, st.integers(15, 80), st.booleans())
def test_no_micro_batch_has_more_tokens_than_the_budget(sizes, budget, pads):
    batches = micro_batches(make_rollouts(sizes), budget, seed=0, epoch=0, pads=pads)
    assert all(0 < size(batch, pads) <= budget for batch in batches)
    assert sorted(uid for batch in batches for uid in batch.uids) == sorted(f"r{index}" for index in range(len(sizes)))


def test_like_lengths_share_a_batch_where_padding_is_read():
    items = make_rollouts([(2, 8), (2, 1), (2, 8), (2, 1), (2, 1), (2, 8)])
    batches = micro_batches(items, 30, seed=0, epoch=0, pads=True)
    assert [sorted(batch.uids) for batch in batches] == [["r1", "r3", "r4"], ["r0", "r2", "r5"]]


def test_responses_to_one_prompt_share_a_micro_batch():
    """Two prompts of 40 tokens with responses of 1 and 3, together 41 + 43 tokens, or padded 2 x 43."""
    items = make_rollouts([(40, 1), (40, 1), (40, 3), (40, 3)])
    prompts = [items[0].rollout.prompt, items[1].rollout.prompt]
    items = [
        replace(item, rollout=replace(item.rollout, prompt=prompts[index % 2])) for index, item in enumerate(items)
    ]

    for pads in (False, True):
        batches = micro_batches(items, 90, seed=0, epoch=0, pads=pads)
        assert sorted(sorted(batch.uids) for batch in batches) == [["r0", "r2"], ["r1", "r3"]]


def test_responses_to_prompts_of_one_token_are_batched_by_length():
    """Two prompts of one token with responses of 1 and 3: padding costs more than reading a prompt twice."""
    items = make_rollouts([(40, 1), (40, 1), (40, 3), (40, 3)])
    short_prompts = [make_rollouts([(1, 1), (1, 1)])[index % 2].rollout.prompt for index in range(4)]
    items = [
        replace(item, rollout=replace(item.rollout, prompt=prompt))
        for item, prompt in zip(items, short_prompts, strict=True)
    ]

    batches = micro_batches(items, 8, seed=0, epoch=0, pads=True)

    assert sorted(sorted(batch.uids) for batch in batches) == [["r0", "r1"], ["r2", "r3"]]


@pytest.mark.parametrize(("pads", "tokens"), [(True, 40), (False, 22)])
def test_the_budget_counts_padding_where_models_read_it(pads, tokens):
    """Eleven tokens each, but as a rectangle 2 x (10 + 10)."""
    items = make_rollouts([(10, 1), (1, 10)])
    assert len(micro_batches(items, tokens - 1, seed=0, epoch=0, pads=pads)) == 2
    assert len(micro_batches(items, tokens, seed=0, epoch=0, pads=pads)) == 1


def test_a_sequence_longer_than_the_budget_is_refused_and_named():
    items = make_rollouts([(3, 2), (4, 9), (1, 1)])

    with pytest.raises(
        ConfigError, match=r"rollout r1 has 13 tokens, more than batch\.micro_batch_tokens 12; raise it"
    ):
        micro_batches(items, 12, seed=0, epoch=0)

    assert sum(len(batch.uids) for batch in micro_batches(items, 13, seed=0, epoch=0)) == 3


# Tensors


@few_examples
@given(lengths, st.booleans())
def test_a_batch_holds_what_its_rollouts_hold_and_no_more(sizes, share_prompts):
    items = make_rollouts(sizes, share_prompts=share_prompts)

    batch = collate(items, seed=0, epoch=0)

    width = max(length for _, length in sizes)
    assert batch.response_ids.shape == (len(items), width)
    assert batch.top_ids.shape == (len(items), width, K)
    for row, item in enumerate(items):
        rollout, length = item.rollout, len(item.rollout.token_ids)
        prompt = batch.prompt_ids[batch.prompt_index[row]][batch.prompt_mask[batch.prompt_index[row]]]
        assert tuple(prompt.tolist()) == rollout.prompt.token_ids
        assert batch.attention_mask[row].tolist() == [True] * length + [False] * (width - length)
        assert batch.response_mask[row].tolist() == rollout.sampled_mask.tolist() + [False] * (width - length)
        assert torch.equal(batch.response_ids[row, :length], rollout.token_ids)
        assert torch.equal(batch.top_ids[row, :length], rollout.top_ids)
        assert torch.equal(batch.top_log_probs[row, :length], rollout.top_log_probs)
        assert torch.equal(batch.versions[row, :length], rollout.versions)
        sampled = batch.response_mask[row]
        assert torch.equal(batch.rollout_log_probs[row][sampled], rollout.rollout_log_probs[rollout.sampled_mask])
        assert (batch.rollout_log_probs[row][~sampled] == 0).all()
        assert torch.equal(batch.advantages[row, :length], item.advantages)
        assert (batch.advantages[row, length:] == 0).all()

    assert torch.equal(batch.response_ids.flatten()[batch.response_index], batch.response_ids[batch.response_mask])


def test_prompts_are_padded_left_and_responses_right():
    batch = collate(make_rollouts([(1, 1), (3, 2)]), seed=0, epoch=0)
    assert batch.prompt_mask.tolist() == [[False, False, True], [True, True, True]]
    assert batch.prompt_ids.tolist() == [[0, 0, 100], [101, 1, 2]]
    assert batch.attention_mask.tolist() == [[True, False], [True, True]]


def test_each_prompt_stands_once_however_many_responses_it_has():
    items = make_rollouts([(2, 1), (3, 1), (2, 2), (2, 3)], share_prompts=True)  # three with the same two ids
    batch = collate(items, seed=0, epoch=0)
    assert batch.prompt_ids.tolist() == [[0, 7, 1], [7, 1, 2]]
    assert batch.prompt_index.tolist() == [0, 1, 0, 0]


def test_each_tensor_of_a_batch_has_its_dtype():
    batch = collate(make_rollouts([(2, 3), (1, 0)]), seed=0, epoch=0)

    columns = {name: getattr(batch, name) for name in batch.__slots__ if name not in ("uids", "packed")}
    assert columns.pop("values") is None  # a critic's alone
    assert columns.pop("returns") is None

    dtypes = {name: column.dtype for name, column in columns.items()}
    integers, flags = torch.int64, torch.bool

    assert dtypes == {
        **dict.fromkeys(
            ("prompt_ids", "prompt_index", "response_ids", "top_ids", "versions", "response_index"), integers
        ),
        **dict.fromkeys(("prompt_mask", "attention_mask", "response_mask", "by_policy"), flags),
        **dict.fromkeys(("rollout_log_probs", "advantages", "top_log_probs"), torch.float32),
        "uniforms": torch.float64,
    }


def test_a_batch_of_empty_responses_is_a_batch():
    batch = collate(make_rollouts([(2, 0), (1, 0)]), seed=0, epoch=0)
    assert batch.response_ids.shape == (2, 0)
    assert batch.top_ids.shape == (2, 0, K)
    assert batch.response_mask.dtype == torch.bool


# Coins


@few_examples
@given(lengths, st.integers(15, 60), st.permutations(range(14)))
def test_coins_depend_on_seed_uid_position_and_epoch_alone(sizes, budget, order):
    items = make_rollouts(sizes)
    shuffled = [items[index] for index in order if index < len(items)]

    for batch in micro_batches(shuffled, budget, seed=5, epoch=2):
        for row, uid in enumerate(batch.uids):
            expected_coins = [
                splitmix64(stream_key(5, "accept", uid, 2), position) for position in range(batch.uniforms.shape[1])
            ]
            assert batch.uniforms[row].tolist() == expected_coins


def test_another_seed_or_epoch_throws_other_coins():
    items = make_rollouts([(2, 6), (2, 6)])

    coins = collate(items, seed=0, epoch=0).uniforms
    coins_of_seed_1 = collate(items, seed=1, epoch=0).uniforms
    coins_of_epoch_1 = collate(items, seed=0, epoch=1).uniforms

    rows = [tuple(row.tolist()) for tensor in (coins, coins_of_seed_1, coins_of_epoch_1) for row in tensor]
    assert len(set(rows)) == 6  # two responses, three throws

    first_step, second_step = mini_batches(items, mini_batch_size=2, epochs=2, micro_batch_tokens=99, seed=0)
    assert torch.equal(first_step[0].uniforms, coins)
    assert torch.equal(second_step[0].uniforms, coins_of_epoch_1)


@few_examples
@given(lengths.filter(lambda sizes: len(sizes) > 1), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_chosen_rows_are_dealt_again_with_all_that_a_model_reads(sizes, share_prompts, pads, seed):
    """In as few batches as a budget of the largest batch leaves; what is read is what the same samples have alone."""
    items = make_rollouts(sizes, seed, share_prompts)
    middle = len(items) // 2
    old_batches = [collate(items[:middle], seed=0, epoch=0), collate(items[middle:], seed=0, epoch=0)]
    draw = random.Random(seed)
    chosen_rows = [[row for row in range(len(batch.uids)) if draw.random() < 0.6] for batch in old_batches]
    chosen_items = [items[start + row] for start, rows in zip((0, middle), chosen_rows, strict=True) for row in rows]

    new_batches = regroup(old_batches, chosen_rows, pads)

    assert sorted(uids(new_batches)) == sorted(item.rollout.uid for item in chosen_items)

    largest = max(size(batch, pads) for batch in old_batches)
    assert len(new_batches) <= 3
    assert all(size(batch, pads) <= largest for batch in new_batches)

    by_uid = {item.rollout.uid: item for item in items}
    for batch in new_batches:
        expected_batch = collate([by_uid[uid] for uid in batch.uids], seed=0, epoch=0)
        for name in ("prompt_ids", "prompt_mask", "prompt_index", "response_ids", "attention_mask", "response_mask"):
            assert torch.equal(getattr(batch, name), getattr(expected_batch, name)), name
        for name in ("response_index", "rollout_log_probs", "advantages", "versions"):
            assert torch.equal(getattr(batch, name), getattr(expected_batch, name)), name
