"""The rollout model steps once a rollout batch, or with the policy, on the sum of two gradients: PPO and distill."""

import math
from dataclasses import replace

import pytest
import torch

from helpers.learners import (
    LINEAR,
    assert_same_move,
    batches,
    double,
    flat,
    gradient,
    make_learner,
    parameters,
    policy_objective,
    reference_losses,
    rollout_model_objective,
    smallest_model,
    train,
    write,
)
from jackpot.config.config import OptimizerConfig
from jackpot.training.joint_optimizer import GradientAccumulator
from jackpot.training.optimizer import ModelOptimizer

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
WRITTEN = write(ROLLOUT_MODEL)
ROLES = {"policy": POLICY, "rollout_model": ROLLOUT_MODEL}
STILL = OptimizerConfig(learning_rate=1e-30, eps=1.0, max_grad_norm=1e6)  # moves nothing


def value(result, name):
    return result.metrics[name].value.item()


def gradient_parts(items, aggregate="token-mean", of_states=False):
    """Float64 gradients of eq. 6 and of eq. 7 alone, at the models as they begin: of all parameters, or of the hidden
    states that the head reads."""
    old_models = {role: double(model) for role, model in ROLES.items()}
    current_models = {role: double(model) for role, model in ROLES.items()}
    states = []  # of each sequence
    current_models["rollout_model"].lm_head.register_forward_pre_hook(lambda head, inputs: states.append(inputs[0]))

    def gradient_on(items):
        states.clear()
        _, loss = reference_losses(current_models, old_models, items, aggregate=aggregate)
        if of_states:
            return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, states)])
        return gradient(loss, current_models["rollout_model"])

    unrewarded_items = [replace(item, advantages=torch.zeros_like(item.advantages)) for item in items]
    whole_gradient, distill_gradient = gradient_on(items), gradient_on(unrewarded_items)
    return whole_gradient - distill_gradient, distill_gradient


def test_a_batch_without_the_rollout_model_leaves_it_in_place():
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_model_each_step=False)
    policy_before, rollout_model_before = (flat(learner.models[role]) for role in ("policy", "rollout_model"))

    results, _ = learner.train(batches(WRITTEN, mini_batch_size=6), trace=False, with_rollout_model=False)

    assert len(results) > 1
    assert not torch.equal(flat(learner.models["policy"]), policy_before)
    assert torch.equal(flat(learner.models["rollout_model"]), rollout_model_before)


@pytest.mark.parametrize(
    ("mini_batch_size", "aggregate"), [(3, "token-mean"), (4, "seq-mean-token-mean"), (6, "seq-mean-token-sum-norm")]
)
def test_the_rollout_model_steps_once_on_the_whole_batch(mini_batch_size, aggregate):
    """While the policy stays where it is, all steps together are one step on everything."""
    learner = make_learner(
        POLICY,
        ROLLOUT_MODEL,
        objective=policy_objective(aggregate=aggregate),
        rollout_objective=rollout_model_objective(aggregate=aggregate),
        rollout_model_each_step=False,
    )
    learner._optimizer._optimizers["policy"]._config = STILL

    results = learner.train(batches(WRITTEN, mini_batch_size=mini_batch_size), trace=True).steps

    assert len(results) == len(WRITTEN) // mini_batch_size
    assert learner.version.rollout_model == 1
    assert learner.version.policy == len(results)
    assert torch.allclose(parameters(learner, "policy"), flat(POLICY), rtol=0.0, atol=1e-12)

    expected_gradient = sum(gradient_parts(WRITTEN, aggregate))
    direction = expected_gradient / (expected_gradient.abs() + LINEAR.eps)  # of AdamW's first step
    expected_weights = flat(ROLLOUT_MODEL).double() - LINEAR.learning_rate * direction

    assert_same_move(parameters(learner, "rollout_model"), expected_weights, flat(ROLLOUT_MODEL))
    assert value(results[-1], "rollout_model/grad_norm") == pytest.approx(expected_gradient.norm().item(), rel=1e-4)
    assert not any("rollout_model/grad_norm" in result.metrics for result in results[:-1])


def test_the_rollout_model_keeps_its_weights_within_a_batch():
    """So fill-ins and the exact Z stay valid at `target: new`, in every step and every epoch."""
    learner = make_learner(
        POLICY,
        ROLLOUT_MODEL,
        objective=policy_objective(target="new", proximal="new", normalizer="exact"),
        rollout_model_each_step=False,
    )
    results = learner.train(batches(WRITTEN, mini_batch_size=4, epochs=2), trace=False).steps

    assert len(results) == 6
    assert learner.version.rollout_model == 1
    assert all(value(result, "lag/rollout_model_max") == 0.0 for result in results)
    assert value(results[-1], "lag/policy_max") == 5.0

    later_items = write(learner.models["rollout_model"], version=learner.version)
    results = learner.train(batches(later_items, mini_batch_size=6), trace=False).steps

    assert [value(result, "lag/policy_max") for result in results] == [0.0, 1.0]
    assert learner.version.rollout_model == 2


def test_by_default_the_rollout_model_steps_with_the_policy():
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    learner.train(batches(WRITTEN, mini_batch_size=4), trace=False)
    assert learner.version == (3, 3)


def test_each_rollout_batch_divides_by_its_own_tokens():
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_model_each_step=False)
    for optimizer in learner._optimizer._optimizers.values():
        optimizer._config = STILL
    trainings = [learner.train(batches(WRITTEN, mini_batch_size=4), trace=False) for _ in range(2)]
    norms = [value(training.steps[-1], "rollout_model/grad_norm") for training in trainings]

    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("budget", "mini_batch_size", "each_step"), [(40, 12, True), (40, 4, False), (10_000, 4, True)]
)
def test_parts_of_the_gradient_are_those_of_two_losses(budget, mini_batch_size, each_step):
    """In every optimizer step, whether the rollout model moves in it or not."""
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_model_each_step=each_step)
    for optimizer in learner._optimizer._optimizers.values():
        optimizer._config = STILL
    steps = batches(WRITTEN, budget=budget, mini_batch_size=mini_batch_size)

    for step, result in zip(steps, learner.train(steps, trace=True).steps, strict=True):
        uids = {uid for batch in step for uid in batch.uids}
        items = [item for item in WRITTEN if item.rollout.uid in uids]
        ppo, distill = gradient_parts(items, of_states=True)
        assert value(result, "rollout_model/ppo_grad_norm") == pytest.approx(ppo.norm().item(), rel=1e-4)
        assert value(result, "rollout_model/distill_grad_norm") == pytest.approx(distill.norm().item(), rel=1e-4)

        cosine = torch.cosine_similarity(ppo, distill, dim=0).item()
        assert value(result, "rollout_model/grad_cosine") == pytest.approx(cosine, rel=1e-3, abs=1e-5)
        assert ppo.norm() > 1e-3
        assert distill.norm() > 1e-3
        assert abs(cosine) < 0.99
        assert not any("split" in name for name in result.metrics)


def test_measuring_the_parts_of_a_gradient_moves_no_weight():
    traced_learner, untraced_learner = (make_learner(POLICY, ROLLOUT_MODEL) for _ in range(2))
    traced_result = traced_learner.train(batches(WRITTEN, budget=40), trace=True).steps[0]
    untraced_result = untraced_learner.train(batches(WRITTEN, budget=40), trace=False).steps[0]

    assert "rollout_model/grad_cosine" in traced_result.metrics
    assert "rollout_model/grad_cosine" not in untraced_result.metrics
    for role in ROLES:
        assert torch.equal(parameters(traced_learner, role), parameters(untraced_learner, role))


def test_a_part_that_is_not_there_has_norm_zero_and_no_cosine():
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_objective=rollout_model_objective(distill_weight=0.0))
    (result,) = train(learner, batches(WRITTEN))

    assert value(result, "rollout_model/distill_grad_norm") < 1e-6 * value(result, "rollout_model/ppo_grad_norm")
    assert "rollout_model/grad_cosine" not in result.metrics

    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_objective=rollout_model_objective(ppo_weight=0.0))
    (result,) = train(learner, batches(WRITTEN))

    assert value(result, "rollout_model/ppo_grad_norm") == 0.0
    assert "rollout_model/grad_cosine" not in result.metrics


def test_a_last_step_without_a_token_loses_no_gradient():
    items_without_token = [
        replace(item, rollout=replace(item.rollout, sampled_mask=torch.zeros_like(item.rollout.sampled_mask)))
        for item in WRITTEN[:2]
    ]

    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_model_each_step=False)
    [first_step] = batches(WRITTEN)
    [last_step] = batches(items_without_token)

    *_, result = learner.train([first_step, last_step], trace=False).steps

    assert [event["model"] for event in result.events] == ["policy"]
    assert learner.version.rollout_model == 1
    assert not torch.equal(parameters(learner, "rollout_model"), flat(ROLLOUT_MODEL))


@pytest.mark.parametrize("broken_step", [0, 1, 2])
def test_a_step_that_is_not_finite_is_left_out_of_the_sum(broken_step):
    """For all models, whichever step it is; the rollout model steps on what the other steps gave."""
    steps = batches(WRITTEN, mini_batch_size=4)
    infinite_step = [replace(batch, advantages=batch.advantages * torch.inf) for batch in steps[broken_step]]
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_model_each_step=False)

    results = learner.train([*steps[:broken_step], infinite_step, *steps[broken_step + 1 :]], trace=True).steps

    skipped_counts = [value(result, "health/non_finite_steps") for result in results]
    assert skipped_counts == [float(index == broken_step) for index in range(3)]

    assert learner.version.policy == 2
    assert learner.version.rollout_model == 1
    assert parameters(learner, "rollout_model").isfinite().all()
    assert not torch.equal(parameters(learner, "rollout_model"), flat(ROLLOUT_MODEL))


def test_where_no_step_is_finite_the_rollout_model_stays():
    steps = [
        [replace(batch, advantages=batch.advantages * torch.inf) for batch in step]
        for step in batches(WRITTEN, mini_batch_size=6)
    ]
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_model_each_step=False)

    results = learner.train(steps, trace=False).steps

    assert all(value(result, "health/non_finite_steps") == 1.0 for result in results)
    assert learner.version == (0, 0)
    assert torch.equal(parameters(learner, "rollout_model"), flat(ROLLOUT_MODEL))


def test_a_gradient_counts_where_all_models_are_finite():
    weight, additions = torch.nn.Parameter(torch.zeros(2)), []
    accumulator = GradientAccumulator(ModelOptimizer([weight], LINEAR, 1))
    for size, others_are_finite in ((2.0, True), (math.nan, True), (1.0, False)):
        weight.grad = torch.full_like(weight, size)
        additions.append(accumulator.add(torch.tensor(3.0), torch.tensor(others_are_finite)).item())

    assert additions == [True, False, False]
    assert accumulator.pop() == 3.0
    assert weight.grad.tolist() == [2.0, 2.0]
