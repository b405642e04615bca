"""Advantages against numpy, group by group."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.objectives.advantages import ADVANTAGES, all_equal, compute_advantages, gae, whiten

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1]), st.floats(-100.0, 100.0).map(lambda x: round(x, 6)))
batches = st.lists(st.tuples(reward, st.integers(0, 4)), min_size=1, max_size=20)


def by_hand(name, rewards, groups):
    advantages = np.zeros(len(rewards))
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        own = np.array([rewards[index] for index in members])
        if own.max() == own.min():
            continue  # exactly 0
        advantages[members] = own - own.mean()
        if name == "grpo":
            advantages[members] /= own.std(ddof=1)
    return advantages


@few
@given(batches, st.sampled_from(["grpo", "dr_grpo"]))
def test_advantages_are_those_of_numpy(batch, name):
    rewards, groups = zip(*batch, strict=True)
    found = compute_advantages(name, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    # cancellation: a mean of numbers up to 100 is good to 1e-14, and std may be as small as 1e-7
    assert found.numpy() == pytest.approx(by_hand(name, rewards, groups), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("value", [0.1, 1.0, -3.7, 1e30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_of_equal_rewards_gets_exactly_zero(name, value, size):
    """The mean of seven times 0.1 is not 0.1 in floats: rounding error over rounding error would be a big advantage."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.cat([torch.full((size,), value, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)])
        found = compute_advantages(name, rewards, torch.tensor([3] * size + [1, 1]))
        assert found[:size].tolist() == [0.0] * size
        assert (found[size:] != 0.0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("scale", [1.0, -1e6, 1e-12])
def test_rewards_that_differ_by_rounding_alone_are_equal(name, scale):
    """A weighted sum of the same parts in another order: 0.1 + 0.2 is not 0.3 in floats."""
    rewards = scale * torch.tensor([0.1 + 0.2, 0.3] * 4, dtype=torch.float64)
    assert all_equal(rewards.tolist())
    assert compute_advantages(name, rewards, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_that_differ_by_more_than_rounding_are_not_equal(name):
    for rewards in ([1.0, 1.0 + 2e-9], [0.0, 2e-9], [-1e6, -1e6 - 2e-3]):
        assert not all_equal(rewards)
        found = compute_advantages(name, torch.tensor(rewards, dtype=torch.float64), torch.tensor([0, 0]))
        assert found.sign().tolist() == [1.0, -1.0] if rewards[0] > rewards[1] else [-1.0, 1.0]


@few
@given(batches, st.sampled_from([0.05, 1.0, 20.0]))
def test_oapl_subtracts_the_log_of_the_mean_of_exponentials(batch, beta):
    rewards, groups = (np.array(one) for one in zip(*batch, strict=True))
    found = compute_advantages("oapl", torch.from_numpy(rewards), torch.from_numpy(groups), beta=beta)
    for group in set(groups):
        own = rewards[groups == group]
        highest = own.max()
        value = highest + beta * math.log(np.exp((own - highest) / beta).mean())
        assert found[groups == group].numpy() == pytest.approx(own - value, rel=1e-9, abs=1e-7)


def test_oapls_value_is_between_the_mean_and_the_best_reward():
    """By beta: the largest keeps the mean, the smallest the best, beneath which every other response lies."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    found = [compute_advantages("oapl", rewards, torch.zeros(4, dtype=torch.int64), beta=beta) for beta in (1e4, 1e-4)]
    assert found[0].tolist() == pytest.approx([-1.0, -1.0, 0.0, 2.0], abs=1e-3)
    assert found[1].tolist() == pytest.approx([-3.0, -3.0, -2.0, 0.0], abs=1e-3)


def test_a_standardised_group_has_mean_0_and_deviation_1():
    found = compute_advantages("grpo", torch.tensor([0.0, 0.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([0] * 4))
    assert found.mean().item() == pytest.approx(0.0, abs=1e-15)
    assert found.std(unbiased=True).item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_baseline_of_opo_weighs_rewards_by_length(seed):
    draw = np.random.default_rng(seed)
    rewards = draw.choice([0.0, 1.0, 2.0], 12)
    groups = draw.integers(0, 4, 12)
    lengths = draw.integers(0, 6, 12)
    rewards[:3], groups[:3], lengths[:3] = [0.0, 1.0, 2.0], 9, [1, 2, 5]  # a response with the mean of its group
    found = compute_advantages("opo", *map(torch.from_numpy, (rewards, groups, lengths)))
    for group in set(groups.tolist()):
        own, tokens = rewards[groups == group], lengths[groups == group]
        baseline = sum(own * tokens) / max(sum(tokens), 1)
        wanted = [0.0] * len(own) if len(set(own)) == 1 else (own - baseline).tolist()
        assert found[groups == group].tolist() == pytest.approx(wanted, rel=1e-12)


def test_no_response_has_no_advantage():
    for name in ADVANTAGES:
        assert compute_advantages(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


# Over all responses, and over tokens


def by_numpy(name, rewards, groups, lengths):
    """Compute RLOO and REINFORCE++ of every response with numpy, over a list of its tokens."""
    rewards, advantages = np.array(rewards), np.zeros(len(rewards))
    for number, group in enumerate(groups):
        others = [reward for n, reward in enumerate(rewards) if groups[n] == group and n != number]
        members = [reward for n, reward in enumerate(rewards) if groups[n] == group]
        baseline = {"rloo": others, "reinforce_pp_baseline": members}.get(name, [0.0])
        is_equal = len(set(members)) == 1 and name != "reinforce_pp"
        advantages[number] = 0.0 if is_equal else rewards[number] - np.mean(baseline)
    if name == "rloo":
        return advantages
    tokens = np.repeat(advantages, lengths)
    if len(tokens) < 2 or tokens.max() == tokens.min():
        return np.zeros(len(rewards))
    return np.where(np.array(lengths) > 0, (advantages - tokens.mean()) / tokens.std(ddof=1), 0.0)


def rewards_groups_lengths(seed, count=14):
    draw = np.random.default_rng(seed)
    rewards = draw.choice([0.0, 1.0, -0.3, 2.5], count)
    return rewards.tolist(), draw.integers(0, 4, count).tolist(), [0, *draw.integers(0, 9, count - 1).tolist()]


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("seed", range(6))
def test_leave_one_out_and_whitened_advantages_are_numpys(name, seed):
    rewards, groups, lengths = rewards_groups_lengths(seed)
    wanted = by_numpy(name, rewards, groups, lengths)
    found = compute_advantages(
        name, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)
    )

    assert found.numpy() == pytest.approx(wanted, rel=1e-11, abs=1e-13)
    assert np.abs(wanted).max() > 0.5


def test_long_responses_move_the_mean_of_reinforce_pp():
    rewards, groups = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0, 0])
    found = compute_advantages("reinforce_pp", rewards, groups, torch.tensor([1, 3]))
    # tokens 0 1 1 1: mean 3/4, sample variance 1/4
    assert found.tolist() == pytest.approx([-1.5, 0.5], rel=1e-12)


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("value", [0.1, -3.7, 0.0])
def test_equal_rewards_give_exactly_zero_by_every_name(name, value):
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((7,), value, dtype=dtype)
        found = compute_advantages(name, rewards, torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.arange(7))
        assert found.tolist() == [0.0] * 7


def test_a_group_of_one_gets_zero_by_leave_one_out():
    found = compute_advantages("rloo", torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))
    assert found.tolist() == [0.0, -1.0, 1.0]


@pytest.mark.parametrize("value", [0.1, 1e30, -7.3, 0.0])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5)])
def test_equal_values_whiten_to_exactly_zero(value, shape):
    """The mean of seven times 0.1 is not 0.1: without care, rounding over rounding would be a large number."""
    for dtype in (torch.float32, torch.float64):
        assert not whiten(torch.full(shape, value, dtype=dtype), torch.ones(shape)).any()


def test_whitening_looks_only_at_what_counts():
    values = torch.tensor([[1.0, 2.0, 900.0], [4.0, -700.0, 8.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    inside = np.array([1.0, 2.0, 4.0, 8.0])
    wanted = (inside - inside.mean()) / inside.std(ddof=1)

    found = whiten(values, mask)

    assert found[mask].numpy() == pytest.approx(wanted, rel=1e-12)
    assert not found[~mask].any()
    assert not whiten(values, torch.zeros_like(mask)).any()

    poisoned = torch.where(mask, values, torch.nan)
    assert whiten(poisoned, mask)[mask].numpy() == pytest.approx(wanted, rel=1e-12)


# GAE


def gae_by_recursion(rewards, values, mask, gamma, lam):
    """Compute GAE of one row by recursion over the list of its sampled tokens."""
    places = [t for t, is_sampled in enumerate(mask) if is_sampled]

    def advantage(n):
        if n == len(places):
            return 0.0
        after = values[places[n + 1]] if n + 1 < len(places) else 0.0
        delta = rewards[places[n]] + gamma * after - values[places[n]]
        return delta + gamma * lam * advantage(n + 1)

    row = [0.0] * len(mask)
    for n, t in enumerate(places):
        row[t] = advantage(n)
    return row


MASKS = torch.tensor(
    [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    dtype=torch.bool,
)


def random_states():
    """Draw rewards and values; masked entries are large numbers, which must not be read."""
    draw = torch.Generator().manual_seed(2)
    rewards, values = (torch.randn(MASKS.shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return torch.where(MASKS, rewards, 1e3), torch.where(MASKS, values, -1e3)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_its_recursion_over_the_sampled_tokens_alone(gamma, lam):
    rewards, values = random_states()
    advantages, returns = gae(rewards, values, MASKS, gamma, lam)
    for row, mask in enumerate(MASKS.tolist()):
        wanted = gae_by_recursion(rewards[row].tolist(), values[row].tolist(), mask, gamma, lam)
        assert advantages[row].tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        targets = [a + v if there else 0.0 for a, v, there in zip(wanted, values[row].tolist(), mask, strict=True)]
        assert returns[row].tolist() == pytest.approx(targets, rel=1e-12, abs=1e-12)


def test_with_lam_one_the_advantage_is_the_return_less_the_value():
    rewards, values = random_states()
    advantages, returns = gae(rewards, values, MASKS, 1.0, 1.0)
    to_come = np.flip(np.cumsum(np.flip(np.where(MASKS, rewards, 0.0), -1), -1), -1)
    assert returns.numpy() == pytest.approx(np.where(MASKS, to_come, 0.0), rel=1e-12)
    assert advantages.numpy() == pytest.approx(np.where(MASKS, to_come - values.numpy(), 0.0), rel=1e-12)


def test_what_a_tool_wrote_takes_no_time():
    """The same sampled tokens with and without holes between them: the same advantages."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.5, -0.3]])
    dense = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.8)
    mask = torch.tensor([[True, False, False, True, False, True]])

    spread = [torch.full((1, 6), 9.0).masked_scatter(mask, part) for part in (rewards, values)]

    for one, other in zip(dense, gae(*spread, mask, 0.9, 0.8), strict=True):
        assert torch.equal(other[mask], one[0])
