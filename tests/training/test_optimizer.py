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


def make(config=NO_CLIP, total_steps=10):
    """Two parameters of five numbers together, and one that is never reached."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(2, dtype=torch.float64)), nn.Parameter(torch.randn(3, dtype=torch.float64))]
    return [*weights, nn.Parameter(torch.zeros(1, dtype=torch.float64))], weights, config, total_steps


def give_gradients(weights, seed):
    """Random sums of gradients; returns them in a row."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return torch.cat([weight.grad for weight in weights])


def prepare(optimizer, denominator):
    """Gradients as they are stepped on; their norm before clipping."""
    optimizer.reduce(torch.tensor(denominator))
    return optimizer.clip().item()


def row(weights):
    return torch.cat([weight.detach().clone() for weight in weights])


def test_steps_are_adamw_on_the_mean_gradient():
    everything, weights, config, total = make()
    optimizer, reference = ModelOptimizer(everything, config, total), ReferenceAdamW(config)

    for seed, denominator in enumerate((4.0, 8.0, 0.5)):
        before, gradient = row(weights), give_gradients(weights, seed) / denominator
        assert prepare(optimizer, denominator) == pytest.approx(gradient.norm().item(), rel=1e-12)
        optimizer.step()
        torch.testing.assert_close(row(weights), reference.step(before, gradient), rtol=1e-12, atol=1e-14)
        assert all(weight.grad is None for weight in weights)
    assert optimizer.steps == 3


def test_gradients_are_clipped_after_they_are_divided():
    everything, weights, config, total = make(OptimizerConfig(learning_rate=0.1, max_grad_norm=0.5))
    optimizer = ModelOptimizer(everything, config, total)
    mean = give_gradients(weights, 0) / 2.0
    norm = mean.norm().item()

    assert norm > 0.5
    assert prepare(optimizer, 2.0) == pytest.approx(norm, rel=1e-12)

    found = torch.cat([weight.grad for weight in weights])
    torch.testing.assert_close(found, mean * 0.5 / norm, rtol=1e-5, atol=0)  # torch divides by norm + 1e-6

    small = give_gradients(weights, 0) / 100.0
    prepare(optimizer, 100.0)

    torch.testing.assert_close(torch.cat([weight.grad for weight in weights]), small, rtol=1e-12, atol=0)


def test_a_denominator_of_zero_leaves_zero_gradients_zero():
    everything, weights, config, total = make()
    optimizer = ModelOptimizer(everything, config, total)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    assert prepare(optimizer, 0.0) == 0.0
    assert all((weight.grad == 0).all() for weight in weights)


def test_weight_decay_pulls_towards_zero_at_the_scheduled_rate():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, max_grad_norm=1e6)
    everything, weights, _, total = make()
    optimizer = ModelOptimizer(everything, config, total)
    before, gradient = row(weights), give_gradients(weights, 0)
    prepare(optimizer, 1.0)
    optimizer.step()
    wanted = ReferenceAdamW(config).step(before, gradient) - 0.1 * 0.3 * before

    torch.testing.assert_close(row(weights), wanted, rtol=1e-12, atol=1e-14)


def test_discarding_forgets_gradients():
    everything, weights, config, total = make()
    optimizer = ModelOptimizer(everything, config, total)

    assert prepare(optimizer, 3.0) == 0.0

    give_gradients(weights, 0)
    before = row(weights)
    optimizer.discard()

    assert torch.equal(row(weights), before)
    assert optimizer.steps == 0
    assert weights[0].grad is None


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, *(0.5 + 0.5 * math.cos(math.pi * x / 4) for x in (1, 2, 3))]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule, expected):
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule=schedule)
    rates = [learning_rate(config, step, 8) for step in range(8)]
    assert rates == pytest.approx([2.0 * share for share in expected], rel=1e-12)
    after = learning_rate(config, 8, 8), learning_rate(config, 20, 8)
    assert after == pytest.approx((2.0, 2.0) if schedule == "constant" else (0.0, 0.0), abs=1e-12)


def test_a_warm_up_as_long_as_the_run_ends_at_the_full_rate():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, schedule="linear")
    assert [learning_rate(config, step, 3) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_each_step_is_taken_at_its_scheduled_rate():
    config = OptimizerConfig(learning_rate=0.1, schedule="linear", eps=1e-30, betas=(0.0, 0.0), max_grad_norm=1e6)
    everything, weights, _, _ = make()
    optimizer = ModelOptimizer(everything, config, 4)

    for step in range(4):
        before, gradient = row(weights), give_gradients(weights, step)
        assert optimizer.learning_rate == pytest.approx(0.1 * (1 - step / 4))
        prepare(optimizer, 1.0)
        optimizer.step()
        # without momentum AdamW moves every weight by the rate against its gradient's sign
        wanted = before - 0.1 * (1 - step / 4) * gradient.sign()
        torch.testing.assert_close(row(weights), wanted, rtol=1e-12, atol=1e-12)


def test_a_loaded_state_continues_bit_by_bit():
    (everything, weights, config, total), (others, copies, _, _) = make(), make()
    config = config.model_copy(update={"schedule": "cosine", "warmup_steps": 2})
    optimizer, resumed = ModelOptimizer(everything, config, total), ModelOptimizer(others, config, total)
    for seed in range(3):
        give_gradients(weights, seed)
        prepare(optimizer, 2.0)
        optimizer.step()
    moments = {name: moment.clone() for name, moment in optimizer.moments()}
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()), moments)
    with torch.no_grad():
        for weight, other in zip(weights, copies, strict=True):
            other.copy_(weight)
    for own, mine in ((optimizer, weights), (resumed, copies)):
        give_gradients(mine, 7)
        prepare(own, 2.0)
        own.step()

    assert torch.equal(row(weights), row(copies))
    assert resumed.steps == 4


@pytest.mark.parametrize(("change", "why"), [("missing", "0.exp_avg_sq"), ("shape", "it has the shape [1]")])
def test_moments_of_another_model_are_refused(change: str, why: str):
    everything, weights, config, total = make()
    optimizer = ModelOptimizer(everything, config, total)
    give_gradients(weights, 0)
    prepare(optimizer, 1.0)
    optimizer.step()
    moments = dict(optimizer.moments())
    moment = moments.pop("0.exp_avg_sq")
    if change == "shape":
        moments["0.exp_avg_sq"] = moment.new_zeros(1)

    with pytest.raises(CheckpointError, match=f"the moments of parameter 0 do not fit the model: .*{re.escape(why)}"):
        optimizer.load_state_dict(optimizer.state_dict(), moments)


def test_bf16_weights_lose_small_steps():
    start, found = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16().float(), {}
    for rate in (1e-6, 1e-2):
        for dtype in (None, "bf16"):
            weight = nn.Parameter(start.clone())
            optimizer = ModelOptimizer([weight], OptimizerConfig(learning_rate=rate, weights_dtype=dtype), 10)
            weight.grad = start.sign()
            optimizer.step()
            found[rate, dtype] = weight.detach()

    assert torch.equal(found[1e-6, "bf16"][start.abs() > 0.01], start[start.abs() > 0.01])
    assert not torch.equal(found[1e-6, None], start)
    assert torch.equal(found[1e-2, "bf16"], found[1e-2, None].bfloat16().float())
    assert not torch.equal(found[1e-2, None], found[1e-2, "bf16"])
