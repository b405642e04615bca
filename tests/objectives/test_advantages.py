"""Advantages against numpy, group by group."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.objectives.advantages import compute_advantages

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


def test_a_standardised_group_has_mean_zero_and_sample_deviation_one():
    found = compute_advantages("grpo", torch.tensor([0.0, 0.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([0] * 4))
    assert found.mean().item() == pytest.approx(0.0, abs=1e-15)
    assert found.std(unbiased=True).item() == pytest.approx(1.0, rel=1e-12)


def test_no_response_has_no_advantage():
    for name in ("grpo", "dr_grpo"):
        assert compute_advantages(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpro'; did you mean 'grpo'.*dr_grpo, grpo, reinforce_pp"):
        compute_advantages("gpro", torch.zeros(1), torch.zeros(1, dtype=torch.int64))


def test_rewards_and_groups_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(2,\), groups \(3,\)"):
        compute_advantages("grpo", torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must all be \[B\]"):
        compute_advantages("grpo", torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64))
