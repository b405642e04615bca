"""Advantages of responses and tokens are those that numpy computes group by group; equal rewards give exactly zero."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.objectives.advantages import ADVANTAGES, all_equal, compute_advantages, gae, whiten

MANY_EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, database=None)
REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1]), st.floats(-100.0, 100.0).map(lambda x: round(x, 6)))
BATCHES = st.lists(st.tuples(REWARD, st.integers(0, 4)), min_size=1, max_size=20)


def grpo_by_numpy(name, rewards, groups):
    """Compute the advantages of `grpo` or `dr_grpo` with numpy."""
    advantages = np.zeros(len(rewards))
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        group_rewards = np.array([rewards[index] for index in members])
        if group_rewards.max() == group_rewards.min():
            continue  # exactly 0
        advantages[members] = group_rewards - group_rewards.mean()
        if name == "grpo":
            advantages[members] /= group_rewards.std(ddof=1)
    return advantages


@MANY_EXAMPLES
@given(BATCHES, st.sampled_from(["grpo", "dr_grpo"]))
def test_grpo_and_dr_grpo_are_those_of_numpy(batch, name):
    rewards, groups = zip(*batch, strict=True)

    advantages = compute_advantages(name, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))

    # cancellation: a mean of numbers up to 100 is good to 1e-14, and std may be as small as 1e-7
    assert advantages.numpy() == pytest.approx(grpo_by_numpy(name, rewards, groups), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("value", [0.1, 1.0, -3.7, 1e30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_of_equal_rewards_gets_exactly_zero(name, value, size):
    """The mean of seven times 0.1 is not 0.1 in floats: rounding error over rounding error would be a big advantage."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.cat([torch.full((size,), value, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)])

        advantages = compute_advantages(name, rewards, torch.tensor([3] * size + [1, 1]))

        assert advantages[:size].tolist() == [0.0] * size
        assert (advantages[size:] != 0.0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("scale", [1.0, -1e6, 1e-12])
def test_rewards_that_differ_by_rounding_alone_are_equal(name, scale):
    """A weighted sum of the same parts in another order: 0.1 + 0.2 is not 0.3 in floats."""
    rewards = scale * torch.tensor([0.1 + 0.2, 0.3] * 4, dtype=torch.float64)
    assert all_equal(rewards.tolist())
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert compute_advantages(name, rewards, groups).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_that_differ_by_more_than_rounding_are_not_equal(name):
    for rewards in ([1.0, 1.0 + 2e-9], [0.0, 2e-9], [-1e6, -1e6 - 2e-3]):
        assert not all_equal(rewards)

        advantages = compute_advantages(name, torch.tensor(rewards, dtype=torch.float64), torch.tensor([0, 0]))
        assert advantages.sign().tolist() == [1.0, -1.0] if rewards[0] > rewards[1] else [-1.0, 1.0]


@MANY_EXAMPLES
@given(BATCHES, st.sampled_from([0.05, 1.0, 20.0]))
def test_oapl_subtracts_the_log_of_the_mean_of_exponentials(batch, beta):
    rewards = np.array([reward for reward, _ in batch])
    groups = np.array([group for _, group in batch])

    advantages = compute_advantages("oapl", torch.from_numpy(rewards), torch.from_numpy(groups), beta=beta)

    for group in set(groups):
        group_rewards = rewards[groups == group]
        highest = group_rewards.max()
        value = highest + beta * math.log(np.exp((group_rewards - highest) / beta).mean())
        assert advantages[groups == group].numpy() == pytest.approx(group_rewards - value, rel=1e-9, abs=1e-7)


def test_oapls_value_is_the_mean_or_the_best_reward_by_beta():
    """By beta: the largest keeps the mean, the smallest the best, beneath which every other response lies."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.int64)

    less_mean = compute_advantages("oapl", rewards, group, beta=1e4)
    less_best = compute_advantages("oapl", rewards, group, beta=1e-4)

    assert less_mean.tolist() == pytest.approx([-1.0, -1.0, 0.0, 2.0], abs=1e-3)
    assert less_best.tolist() == pytest.approx([-3.0, -3.0, -2.0, 0.0], abs=1e-3)


def test_a_standardised_group_has_mean_0_and_deviation_1():
    rewards = torch.tensor([0.0, 0.0, 1.0, 3.0], dtype=torch.float64)

    advantages = compute_advantages("grpo", rewards, torch.tensor([0] * 4))

    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-15)
    assert advantages.std(unbiased=True).item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_baseline_of_opo_weighs_rewards_by_length(seed):
    draw = np.random.default_rng(seed)
    rewards = draw.choice([0.0, 1.0, 2.0], 12)
    groups = draw.integers(0, 4, 12)
    lengths = draw.integers(0, 6, 12)
    # a group with a response that has the mean of the rewards
    rewards[:3] = [0.0, 1.0, 2.0]
    groups[:3] = 9
    lengths[:3] = [1, 2, 5]

    advantages = compute_advantages("opo", *map(torch.from_numpy, (rewards, groups, lengths)))

    for group in set(groups.tolist()):
        group_rewards = rewards[groups == group]
        group_lengths = lengths[groups == group]
        baseline = sum(group_rewards * group_lengths) / max(sum(group_lengths), 1)
        expected = [0.0] * len(group_rewards) if len(set(group_rewards)) == 1 else (group_rewards - baseline).tolist()
        assert advantages[groups == group].tolist() == pytest.approx(expected, rel=1e-12)


def test_no_response_has_no_advantage():
    for name in ADVANTAGES:
        assert compute_advantages(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


# Over all responses, and over tokens


def advantages_by_numpy(name, rewards, groups, lengths):
    """Compute RLOO and REINFORCE++ of every response with numpy, over a list of its tokens."""
    rewards = np.array(rewards)
    advantages = np.zeros(len(rewards))
    for index, group in enumerate(groups):
        group_rewards = [reward for reward, other_group in zip(rewards, groups, strict=True) if other_group == group]
        other_rewards = [
            reward
            for other_index, reward in enumerate(rewards)
            if groups[other_index] == group and other_index != index
        ]
        baseline = {"rloo": other_rewards, "reinforce_pp_baseline": group_rewards}.get(name, [0.0])
        is_equal = len(set(group_rewards)) == 1 and name != "reinforce_pp"
        advantages[index] = 0.0 if is_equal else rewards[index] - np.mean(baseline)
    if name == "rloo":
        return advantages
    tokens = np.repeat(advantages, lengths)
    if len(tokens) < 2 or tokens.max() == tokens.min():
        return np.zeros(len(rewards))
    return np.where(np.array(lengths) > 0, (advantages - tokens.mean()) / tokens.std(ddof=1), 0.0)


def rewards_groups_lengths(seed, count=14):
    """Draw rewards and groups of responses, and their lengths, of which the first is 0."""
    draw = np.random.default_rng(seed)
    rewards = draw.choice([0.0, 1.0, -0.3, 2.5], count)
    return rewards.tolist(), draw.integers(0, 4, count).tolist(), [0, *draw.integers(0, 9, count - 1).tolist()]


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("seed", range(6))
def test_leave_one_out_and_whitened_advantages_are_numpys(name, seed):
    rewards, groups, lengths = rewards_groups_lengths(seed)
    expected = advantages_by_numpy(name, rewards, groups, lengths)

    advantages = compute_advantages(
        name, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)
    )

    assert advantages.numpy() == pytest.approx(expected, rel=1e-11, abs=1e-13)
    assert np.abs(expected).max() > 0.5


def test_long_responses_move_the_mean_of_reinforce_pp():
    rewards = torch.tensor([0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0])

    advantages = compute_advantages("reinforce_pp", rewards, groups, torch.tensor([1, 3]))

    # tokens 0 1 1 1: mean 3/4, sample variance 1/4
    assert advantages.tolist() == pytest.approx([-1.5, 0.5], rel=1e-12)


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("value", [0.1, -3.7, 0.0])
def test_equal_rewards_give_exactly_zero_over_all_responses(name, value):
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((7,), value, dtype=dtype)
        advantages = compute_advantages(name, rewards, torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.arange(7))
        assert advantages.tolist() == [0.0] * 7


def test_a_group_of_one_gets_zero_by_leave_one_out():
    advantages = compute_advantages("rloo", torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))
    assert advantages.tolist() == [0.0, -1.0, 1.0]


@pytest.mark.parametrize("value", [0.1, 1e30, -7.3, 0.0])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5)])
def test_equal_values_whiten_to_exactly_zero(value, shape):
    """The mean of seven times 0.1 is not 0.1: without care, rounding over rounding would be a large number."""
    for dtype in (torch.float32, torch.float64):
        assert not whiten(torch.full(shape, value, dtype=dtype), torch.ones(shape)).any()


def test_whitening_looks_only_at_what_counts():
    values = torch.tensor([[1.0, 2.0, 900.0], [4.0, -700.0, 8.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    counted_values = np.array([1.0, 2.0, 4.0, 8.0])
    expected = (counted_values - counted_values.mean()) / counted_values.std(ddof=1)

    whitened_values = whiten(values, mask)

    assert whitened_values[mask].numpy() == pytest.approx(expected, rel=1e-12)
    assert not whitened_values[~mask].any()
    assert not whiten(values, torch.zeros_like(mask)).any()

    values_with_nan = torch.where(mask, values, torch.nan)
    assert whiten(values_with_nan, mask)[mask].numpy() == pytest.approx(expected, rel=1e-12)


# GAE


def gae_by_recursion(rewards, values, mask, gamma, lam):
    """Compute GAE of one row by recursion over the list of its sampled tokens."""
    sampled_positions = [t for t, is_sampled in enumerate(mask) if is_sampled]

    def advantage(n):
        if n == len(sampled_positions):
            return 0.0
        after = values[sampled_positions[n + 1]] if n + 1 < len(sampled_positions) else 0.0
        delta = rewards[sampled_positions[n]] + gamma * after - values[sampled_positions[n]]
        return delta + gamma * lam * advantage(n + 1)

    row = [0.0] * len(mask)
    for n, t in enumerate(sampled_positions):
        row[t] = advantage(n)
    return row


MASKS = torch.tensor(  # of the sampled tokens; a tool's are between
    [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    dtype=torch.bool,
)


def random_states():
    """Draw rewards and values; masked entries are large numbers, which must not be read."""
    draw = torch.Generator().manual_seed(2)
    rewards = torch.randn(MASKS.shape, generator=draw, dtype=torch.float64)
    values = torch.randn(MASKS.shape, generator=draw, dtype=torch.float64)
    return torch.where(MASKS, rewards, 1e3), torch.where(MASKS, values, -1e3)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_its_recursion_over_the_sampled_tokens_alone(gamma, lam):
    rewards, values = random_states()

    advantages, returns = gae(rewards, values, MASKS, gamma, lam)

    for row, mask in enumerate(MASKS.tolist()):
        row_values = values[row].tolist()
        expected_advantages = gae_by_recursion(rewards[row].tolist(), row_values, mask, gamma, lam)
        assert advantages[row].tolist() == pytest.approx(expected_advantages, rel=1e-12, abs=1e-12)

        sums = [advantage + value for advantage, value in zip(expected_advantages, row_values, strict=True)]
        expected_returns = [total if is_sampled else 0.0 for total, is_sampled in zip(sums, mask, strict=True)]
        assert returns[row].tolist() == pytest.approx(expected_returns, rel=1e-12, abs=1e-12)


def test_with_lam_one_the_advantage_is_the_return_less_the_value():
    rewards, values = random_states()

    advantages, returns = gae(rewards, values, MASKS, gamma=1.0, lam=1.0)

    rewards_to_come = np.flip(np.cumsum(np.flip(np.where(MASKS, rewards, 0.0), -1), -1), -1)
    assert returns.numpy() == pytest.approx(np.where(MASKS, rewards_to_come, 0.0), rel=1e-12)
    assert advantages.numpy() == pytest.approx(np.where(MASKS, rewards_to_come - values.numpy(), 0.0), rel=1e-12)


def test_what_a_tool_wrote_takes_no_time():
    """The same sampled tokens with and without holes between them: the same advantages."""
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.5, -0.3]])
    mask = torch.tensor([[True, False, False, True, False, True]])
    spread_rewards = torch.full((1, 6), 9.0).masked_scatter(mask, rewards)
    spread_values = torch.full((1, 6), 9.0).masked_scatter(mask, values)

    dense_results = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.9, lam=0.8)
    spread_results = gae(spread_rewards, spread_values, mask, gamma=0.9, lam=0.8)

    for dense_result, spread_result in zip(dense_results, spread_results, strict=True):  # advantages, then returns
        assert torch.equal(spread_result[mask], dense_result[0])
