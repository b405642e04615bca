"""KL to a reference and the entropy bonus against float64 autograd on the logits of the whole vocabulary."""

import copy
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
    smallest_model,
    train,
    vocabulary_log_probs,
    write,
)
from helpers.sums import assert_equal_sums
from jackpot.core.errors import CheckpointError
from jackpot.objectives.losses import k2, k3
from jackpot.training.reference import Reference

POLICY, ROLLOUT_MODEL, FROZEN = smallest_model(0), smallest_model(1), smallest_model(2)
WRITTEN = write(ROLLOUT_MODEL, temperature=0.8, seed=3)
TEMPERATURE = 0.8


def learner_with(estimate, kl_loss_coef=0.0, entropy_coeff=0.0, optimizer=LINEAR):
    """Return a learner and its reference model."""
    objective = replace(policy_objective(), kl_loss_coef=kl_loss_coef, entropy_coeff=entropy_coeff)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, temperature=TEMPERATURE, optimizer=optimizer)
    frozen_model = copy.deepcopy(FROZEN)
    if estimate:
        policy = learner.models["policy"]
        learner._forward.reference = Reference(frozen_model, policy, estimate=estimate, temperature=TEMPERATURE)
    return learner, frozen_model


def kl_and_entropy_by_loops(policy, items, estimate):
    """Compute the mean KL to the reference and the mean entropy over the sampled tokens, with the policy's gradient."""
    frozen_model = double(FROZEN)
    kl, entropy = 0.0, 0.0
    count = 0
    for item in items:
        p = vocabulary_log_probs(policy, item.rollout, TEMPERATURE)
        with torch.no_grad():
            q = vocabulary_log_probs(frozen_model, item.rollout, TEMPERATURE)
        for t, token in enumerate(item.rollout.token_ids.tolist()):
            log_ratio = q[t, token] - p[t, token]
            estimates = {
                "exact": (p[t].exp() * (p[t] - q[t])).sum(),
                "k2": log_ratio**2 / 2.0,
                "k3": log_ratio.exp() - 1.0 - log_ratio,
            }
            kl = kl + estimates[estimate]
            entropy = entropy - (p[t].exp() * p[t]).sum()
            count += 1
    return kl / count, entropy / count


def without_advantage(items):
    """Return the same responses with advantages of 0."""
    return [replace(item, advantages=torch.zeros_like(item.advantages)) for item in items]


def loss_without_regularizers(items):
    """Return the loss in float64 and the policy that it was computed with."""
    models = {"policy": double(POLICY), "rollout_model": double(ROLLOUT_MODEL)}
    current_models = {role: double(model) for role, model in models.items()}
    return reference_losses(current_models, models, items, temperature=TEMPERATURE)[0], current_models["policy"]


@pytest.mark.parametrize(("estimate", "budget"), [("exact", 40), ("k2", 40), ("k3", 40), ("k3", 10_000)])
def test_the_loss_and_gradient_hold_the_kl_to_the_reference(estimate, budget):
    learner, frozen_model = learner_with(estimate, kl_loss_coef=0.7)

    (result,) = train(learner, batches(WRITTEN, budget=budget))

    loss, policy = loss_without_regularizers(WRITTEN)
    kl, _ = kl_and_entropy_by_loops(policy, WRITTEN, estimate)
    regularized_loss = loss + 0.7 * kl

    assert kl.item() > 0.05
    assert result.metrics["policy/reference_kl"].value.item() == pytest.approx(kl.item(), rel=1e-4)
    assert result.metrics["policy/loss"].value.item() == pytest.approx(regularized_loss.item(), rel=1e-4, abs=1e-6)

    slope = gradient(regularized_loss, policy)
    assert result.metrics["policy/grad_norm"].value.item() == pytest.approx(slope.norm().item(), rel=1e-4)

    # AdamW's first step
    expected_parameters = flat(POLICY).double() - LINEAR.learning_rate * slope / (slope.abs() + LINEAR.eps)
    assert_same_move(parameters(learner, "policy"), expected_parameters, flat(POLICY))

    assert torch.equal(flat(frozen_model), flat(FROZEN))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in frozen_model.parameters())


def test_the_loss_and_gradient_hold_the_entropy_bonus():
    learner, _ = learner_with(estimate=None, entropy_coeff=0.4)

    (result,) = train(learner, batches(WRITTEN, budget=60))

    loss, policy = loss_without_regularizers(WRITTEN)
    _, entropy = kl_and_entropy_by_loops(policy, WRITTEN, "exact")
    regularized_loss = loss - 0.4 * entropy

    assert result.metrics["policy/entropy"].value.item() == pytest.approx(entropy.item(), rel=1e-4)
    assert result.metrics["policy/loss"].value.item() == pytest.approx(regularized_loss.item(), rel=1e-4)

    slope = gradient(regularized_loss, policy)
    # AdamW's first step
    expected_parameters = flat(POLICY).double() - LINEAR.learning_rate * slope / (slope.abs() + LINEAR.eps)

    assert_same_move(parameters(learner, "policy"), expected_parameters, flat(POLICY))


@pytest.mark.parametrize("estimate", ["exact", "k2", "k3"])
def test_without_advantages_a_regularized_policy_gets_nearer(estimate):
    """Equal rewards skip the policy's step only where the loss has no regularizer."""
    items = without_advantage(WRITTEN)
    small_steps = LINEAR.model_copy(update={"learning_rate": 0.05})
    learner, _ = learner_with(estimate, kl_loss_coef=1.0, optimizer=small_steps)

    last_kl = None

    for _ in range(3):
        (result,) = train(learner, batches(items))
        assert result.metrics["policy/skipped_steps"].value == 0.0
        kl = result.metrics["policy/reference_kl"].value.item()
        assert last_kl is None or kl < last_kl
        last_kl = kl

    assert learner.version.policy == 3


def test_without_advantages_a_bonus_raises_the_entropy():
    learner, _ = learner_with(estimate=None, entropy_coeff=1.0)
    entropies = [
        train(learner, batches(without_advantage(WRITTEN)))[0].metrics["policy/entropy"].value for _ in range(3)
    ]

    assert entropies == sorted(entropies)
    assert entropies[0] < entropies[-1]


def test_a_weight_of_zero_is_the_step_without_a_reference():
    """With coefficient 0 the reference is measured and has no gradient."""
    plain_learner, _ = learner_with(estimate=None)
    measured_learner, _ = learner_with("exact")

    plain_result, measured_result = (
        train(learner, batches(WRITTEN, budget=60))[0] for learner in (plain_learner, measured_learner)
    )

    assert torch.equal(parameters(plain_learner, "policy"), parameters(measured_learner, "policy"))

    for result in (plain_result, measured_result):
        del result.metrics["seconds/prepass"]
    assert measured_result.metrics.pop("policy/reference_kl").value > 0.05
    assert plain_result.metrics.pop("policy/reference_kl").value == 0.0
    assert_equal_sums(plain_result.metrics, measured_result.metrics)

    skipping_learner, _ = learner_with("exact")
    (result,) = train(skipping_learner, batches(without_advantage(WRITTEN)))
    assert result.metrics["policy/skipped_steps"].value == 1.0
    assert skipping_learner.version.policy == 0


def test_the_regularizer_acts_on_rejected_tokens_too():
    """With lam so large that every token is rejected, the gradient is the regularizer's alone."""
    objective = replace(policy_objective(lam=1e6, kappa="none"), kl_loss_coef=0.5)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, temperature=TEMPERATURE)
    policy = learner.models["policy"]
    learner._forward.reference = Reference(copy.deepcopy(FROZEN), policy, estimate="exact", temperature=TEMPERATURE)

    (result,) = train(learner, batches(WRITTEN))

    assert result.metrics["correction/accepted"].value == 0.0

    policy_copy = double(POLICY)
    kl, _ = kl_and_entropy_by_loops(policy_copy, WRITTEN, "exact")
    slope = gradient(0.5 * kl, policy_copy)

    assert result.metrics["policy/grad_norm"].value.item() == pytest.approx(slope.norm().item(), rel=1e-4)


def test_a_run_continues_beside_its_own_reference_alone(tmp_path):
    learner, frozen_model = learner_with("exact")
    saved_state = learner.state_dict()
    learner.load(tmp_path, saved_state)
    frozen_model.model.norm.weight.data[0] += 1e-3
    learner._forward.reference = Reference(
        frozen_model, learner.models["policy"], estimate="exact", temperature=TEMPERATURE
    )

    with pytest.raises(CheckpointError, match=r"objective\.reference are not those"):
        learner.load(tmp_path, saved_state)


def test_the_gradient_of_k2_and_k3_on_policy_is_that_of_the_kl():
    """By enumeration: E_p[d k2] = dKL(policy || reference), E_p[d k3] = dKL(reference || policy)."""
    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.tensor([-0.4, 0.2, 0.5, 1.1], dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    weights = p.detach().exp()

    def slope(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    torch.testing.assert_close(slope((weights * k2(p, q)).sum()), slope((p.exp() * (p - q)).sum()))
    torch.testing.assert_close(slope((weights * k3(p, q)).sum()), slope((q.exp() * (q - p)).sum()))
    assert (weights * k3(p, q)).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-12)
    assert (k3(p, q) >= 0.0).all()
    assert k3(p, p).abs().max() == 0.0
