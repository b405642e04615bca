"""What `correct` and `estimate_z` notice of tensors that cannot be healthy; of healthy ones they notice nothing."""

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from jackpot import correct, estimate_z
from jackpot.core.errors import DataError

V, K = 50, 10  # vocabulary, length of the top-k lists


class Pair(NamedTuple):
    """Two models on the tokens that the first one sampled."""

    rollout: Tensor  # [B, T] log p_inf
    target: Tensor  # [B, T] log p_target
    mask: Tensor  # [B, T]
    top_ids: Tensor  # [B, T, K]
    top: Tensor  # [B, T, K]
    policy_logits: Tensor  # [B, T, V]


def draw_pair(seed: int, sharpness: float, distance: float, shape: tuple[int, int] = (16, 20)) -> Pair:
    """Two models whose logits spread by `sharpness` and differ by `distance`, and the responses of the first."""
    rng = torch.Generator().manual_seed(seed)
    common_logits, noise = (torch.randn(*shape, V, generator=rng) for _ in range(2))
    rollout, policy = sharpness * common_logits, sharpness * common_logits + distance * noise
    p_inf = rollout.log_softmax(-1)
    ids = torch.multinomial(p_inf.flatten(0, 1).exp(), 1, generator=rng).view(*shape, 1)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=rng)
    target = policy.log_softmax(-1).gather(-1, ids)[..., 0]
    top, top_ids = p_inf.topk(K)
    return Pair(p_inf.gather(-1, ids)[..., 0], target, torch.arange(shape[1]) < lengths, top_ids, top, policy)


def correct_and_estimate(pair: Pair, name: str = "tis") -> None:
    """Give the pair to `correct` and to `estimate_z`."""
    arguments = {"rollout_log_probs": pair.rollout, "target_log_probs": pair.target, "response_mask": pair.mask}
    correct(name, **arguments)
    estimate_z(rollout_top_ids=pair.top_ids, rollout_top_log_probs=pair.top, policy_logits=pair.policy_logits)


@pytest.mark.parametrize("shape", [(16, 20), (1, 400), (200, 1), (2, 3)])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 6.0])
def test_healthy_models_are_not_noticed(shape: tuple[int, int], sharpness: float) -> None:
    """Near and far ones, flat and sharp ones, short and long responses."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, distance in enumerate([0.0, 0.001, 0.1, 1.0, 4.0] * 4):
            correct_and_estimate(draw_pair(seed, sharpness, distance, shape))


def test_healthy_models_that_repeat_themselves_are_not_noticed() -> None:
    """A text of period two, on which both models are nearly sure; and one of a single token."""
    for period in (1, 2):
        pair = draw_pair(seed=0, sharpness=1.0, distance=0.3)
        favourite_logits = 12.0 * torch.nn.functional.one_hot(torch.arange(20) % period, V)
        p_inf = (pair.policy_logits + favourite_logits + 0.1).log_softmax(-1)
        top, top_ids = p_inf.topk(K)

        correct_and_estimate(
            pair._replace(top=top, top_ids=top_ids, policy_logits=pair.policy_logits + favourite_logits)
        )


def test_a_policy_that_learned_these_tokens_is_not_noticed() -> None:
    """The target of `target: new` after many steps on the batch: all its tokens have become more likely."""
    for gain in (0.03, 0.1, 0.3):
        pair = draw_pair(seed=1, sharpness=1.0, distance=0.01, shape=(64, 40))
        correct_and_estimate(
            pair._replace(target=(pair.rollout + gain * torch.rand(pair.rollout.shape)).clamp(max=0.0))
        )


@pytest.mark.parametrize("distance", [0.4, 1.0, 2.0])
def test_swapped_models_are_noticed(distance: float) -> None:
    pair = draw_pair(seed=2, sharpness=1.0, distance=distance, shape=(64, 40))
    with pytest.warns(UserWarning, match="are the two swapped"):
        correct_and_estimate(pair._replace(rollout=pair.target, target=pair.rollout))


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_log_probs_and_logits_are_noticed(shift: int) -> None:
    pair = draw_pair(seed=3, sharpness=3.0, distance=0.5)
    with pytest.raises(DataError, match="shifted by a token"):
        correct_and_estimate(pair._replace(target=pair.target.roll(shift, 1)))
    with pytest.raises(DataError, match="predict the tokens of the lists"):
        correct_and_estimate(pair._replace(policy_logits=pair.policy_logits.roll(shift, 1)))


def test_shifted_hidden_states_are_noticed() -> None:
    pair, head = draw_pair(seed=4, sharpness=3.0, distance=0.5), torch.nn.Linear(V, V, bias=False)
    head.weight.data.copy_(torch.eye(V))
    lists = {"rollout_top_ids": pair.top_ids, "rollout_top_log_probs": pair.top, "head": head}
    estimate_z(**lists, hidden_states=pair.policy_logits)

    with pytest.raises(DataError, match="predict the tokens of the lists"):
        estimate_z(**lists, hidden_states=pair.policy_logits.roll(1, 1))


@pytest.mark.parametrize("column", ["rollout", "target"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probs_of_bfloat16_are_warned_of(column: str, dtype: torch.dtype) -> None:
    pair = draw_pair(seed=5, sharpness=1.0, distance=0.1)
    with pytest.warns(UserWarning, match="rounded to bfloat16"):
        correct_and_estimate(pair._replace(**{column: getattr(pair, column).bfloat16().to(dtype)}))


@pytest.mark.parametrize("shape", [(4, 5), (0, 5), (3, 0)])
def test_a_mask_without_a_token_is_refused(shape: tuple[int, int]) -> None:
    zeros = torch.zeros(shape)
    with pytest.raises(DataError, match="nothing to correct; leave this batch out"):
        correct("tis", rollout_log_probs=zeros, target_log_probs=zeros, response_mask=zeros.bool())
