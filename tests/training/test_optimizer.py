"""AdamW with its denominators, clipping and schedule, against formulas."""

import copy
import math
import re

import pytest
import torch
from torch import nn

from helpers.learners import ReferenceAdamW
from jackpot.config.config import OptimizerConfig
from jackpot.core.errors import CheckpointError
from jackpot.training.optimizer import ModelOptimizer, learning_rate

NO_CLIP = OptimizerConfig(learning_rate=0.1, max_grad_norm=1e6)


def optimizer_and_weights(config=NO_CLIP, total_steps=10):
    """An optimizer of two parameters of five numbers together, and of one that no gradient reaches; and the two."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(2, dtype=torch.float64)), nn.Parameter(torch.randn(3, dtype=torch.float64))]
    unreached = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return ModelOptimizer([*weights, unreached], config, total_steps), weights


def give_gradients(weights, seed):
    """Give the weights random sums of gradients, and return these in a row."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return torch.cat([weight.grad for weight in weights])


def prepare(optimizer, denominator):
    """Divide and clip the gradients, as before a step, and return their norm before clipping."""
    optimizer.reduce(torch.tensor(denominator))
    return optimizer.clip().item()


def row(weights):
    """A copy of all weights in a row."""
    return torch.cat([weight.detach().clone() for weight in weights])


def test_steps_are_adamw_on_the_mean_gradient():
    optimizer, weights = optimizer_and_weights(NO_CLIP)
    reference = ReferenceAdamW(NO_CLIP)

    for seed, denominator in enumerate((4.0, 8.0, 0.5)):
        last_weights, gradient = row(weights), give_gradients(weights, seed) / denominator
        assert prepare(optimizer, denominator) == pytest.approx(gradient.norm().item(), rel=1e-12)

        optimizer.step()
        torch.testing.assert_close(row(weights), reference.step(last_weights, gradient), rtol=1e-12, atol=1e-14)
        assert all(weight.grad is None for weight in weights)

    assert optimizer.steps == 3


def test_gradients_are_clipped_after_they_are_divided():
    optimizer, weights = optimizer_and_weights(OptimizerConfig(learning_rate=0.1, max_grad_norm=0.5))
    mean_gradient = give_gradients(weights, seed=0) / 2.0
    norm = mean_gradient.norm().item()

    assert norm > 0.5
    assert prepare(optimizer, denominator=2.0) == pytest.approx(norm, rel=1e-12)

    clipped_gradient = torch.cat([weight.grad for weight in weights])
    expected_gradient = mean_gradient * 0.5 / norm
    torch.testing.assert_close(clipped_gradient, expected_gradient, rtol=1e-5, atol=0)  # torch divides by norm + 1e-6

    small_gradient = give_gradients(weights, seed=0) / 100.0
    prepare(optimizer, denominator=100.0)

    torch.testing.assert_close(torch.cat([weight.grad for weight in weights]), small_gradient, rtol=1e-12, atol=0)


def test_a_denominator_of_zero_leaves_zero_gradients_zero():
    optimizer, weights = optimizer_and_weights()
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    assert prepare(optimizer, denominator=0.0) == 0.0
    assert all((weight.grad == 0).all() for weight in weights)


def test_weight_decay_pulls_towards_zero_at_the_scheduled_rate():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, max_grad_norm=1e6)
    optimizer, weights = optimizer_and_weights(config)
    first_weights, gradient = row(weights), give_gradients(weights, seed=0)

    prepare(optimizer, denominator=1.0)
    optimizer.step()

    decay = 0.1 * 0.3 * first_weights
    expected_weights = ReferenceAdamW(config).step(first_weights, gradient) - decay
    torch.testing.assert_close(row(weights), expected_weights, rtol=1e-12, atol=1e-14)


def test_discarding_forgets_gradients():
    optimizer, weights = optimizer_and_weights()

    assert prepare(optimizer, denominator=3.0) == 0.0

    give_gradients(weights, seed=0)
    last_weights = row(weights)
    optimizer.discard()

    assert torch.equal(row(weights), last_weights)
    assert optimizer.steps == 0
    assert weights[0].grad is None


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, *(0.5 + 0.5 * math.cos(math.pi * x / 4) for x in (1, 2, 3))]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule, shares):
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule=schedule)
    rates = [learning_rate(config, step, total_steps=8) for step in range(8)]
    assert rates == pytest.approx([2.0 * share for share in shares], rel=1e-12)

    later_rates = tuple(learning_rate(config, step, total_steps=8) for step in (8, 20))
    last_rate = 2.0 if schedule == "constant" else 0.0
    assert later_rates == pytest.approx((last_rate, last_rate), abs=1e-12)


def test_a_warm_up_as_long_as_the_run_ends_at_the_full_rate():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, schedule="linear")
    assert [learning_rate(config, step, total_steps=3) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_each_step_is_taken_at_its_scheduled_rate():
    config = OptimizerConfig(learning_rate=0.1, schedule="linear", eps=1e-30, betas=(0.0, 0.0), max_grad_norm=1e6)
    optimizer, weights = optimizer_and_weights(config, total_steps=4)

    for step in range(4):
        last_weights, gradient = row(weights), give_gradients(weights, step)
        assert optimizer.learning_rate == pytest.approx(0.1 * (1 - step / 4))
        prepare(optimizer, denominator=1.0)
        optimizer.step()

        # without momentum AdamW moves every weight by the rate against its gradient's sign
        expected_weights = last_weights - 0.1 * (1 - step / 4) * gradient.sign()
        torch.testing.assert_close(row(weights), expected_weights, rtol=1e-12, atol=1e-12)


def test_a_loaded_state_continues_bit_by_bit():
    config = NO_CLIP.model_copy(update={"schedule": "cosine", "warmup_steps": 2})
    optimizer, weights = optimizer_and_weights(config)
    resumed_optimizer, resumed_weights = optimizer_and_weights(config)
    for seed in range(3):
        give_gradients(weights, seed)
        prepare(optimizer, denominator=2.0)
        optimizer.step()

    moments = {name: moment.clone() for name, moment in optimizer.moments()}
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()), moments)
    with torch.no_grad():
        for weight, resumed_weight in zip(weights, resumed_weights, strict=True):
            resumed_weight.copy_(weight)

    for any_optimizer, any_weights in ((optimizer, weights), (resumed_optimizer, resumed_weights)):
        give_gradients(any_weights, seed=7)
        prepare(any_optimizer, denominator=2.0)
        any_optimizer.step()

    assert torch.equal(row(weights), row(resumed_weights))
    assert resumed_optimizer.steps == 4


@pytest.mark.parametrize(("change", "why"), [("missing", "0.exp_avg_sq"), ("shape", "it has the shape [1]")])
def test_moments_of_another_model_are_refused(change: str, why: str):
    optimizer, weights = optimizer_and_weights()
    give_gradients(weights, seed=0)
    prepare(optimizer, denominator=1.0)
    optimizer.step()

    moments = dict(optimizer.moments())
    moment = moments.pop("0.exp_avg_sq")
    if change == "shape":
        moments["0.exp_avg_sq"] = moment.new_zeros(1)

    with pytest.raises(CheckpointError, match=f"the moments of parameter 0 do not fit the model: .*{re.escape(why)}"):
        optimizer.load_state_dict(optimizer.state_dict(), moments)


def test_bf16_weights_lose_small_steps():
    start = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    weights = {}  # by learning rate and dtype, None for fp32
    for rate in (1e-6, 1e-2):
        for dtype in (None, "bf16"):
            weight = nn.Parameter(start.clone())
            optimizer = ModelOptimizer([weight], OptimizerConfig(learning_rate=rate, weights_dtype=dtype), 10)
            weight.grad = start.sign()
            optimizer.step()
            weights[rate, dtype] = weight.detach()

    is_large = start.abs() > 0.01  # where bf16's steps are larger than 1e-6
    assert torch.equal(weights[1e-6, "bf16"][is_large], start[is_large])
    assert not torch.equal(weights[1e-6, None], start)
    assert torch.equal(weights[1e-2, "bf16"], weights[1e-2, None].bfloat16().float())
    assert not torch.equal(weights[1e-2, None], weights[1e-2, "bf16"])
