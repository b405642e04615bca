"""A whole optimizer step of both models against a float64 reference, and everything that must not change it."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.learners import (
    EOS,
    LINEAR,
    MAX_NEW,
    OBRS,
    VOCAB,
    ReferenceAdamW,
    assert_same_move,
    batches,
    cut,
    double,
    flat,
    gradient,
    make_learner,
    parameters,
    policy_objective,
    reference_losses,
    rollout_model_objective,
    sampled_log_probs,
    smallest_model,
    train,
    vocabulary_log_probs,
    write,
)
from helpers.sums import assert_equal_sums
from jackpot.config.config import OptimizerConfig
from jackpot.config.objective import ObjectiveConfig
from jackpot.core.types import Score, Version
from jackpot.objectives.kernels import linear_head
from jackpot.training import objectives
from jackpot.training.batching import collate
from jackpot.training.old_policy import MicroBatch

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
WRITTEN = write(ROLLOUT_MODEL)
HALF = WRITTEN[::2]  # every second item
LONGEST = max(len(item.rollout.prompt.token_ids) + len(item.rollout.token_ids) for item in WRITTEN)  # one a micro-batch
ADAM = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="cosine")
few = settings(max_examples=3, deadline=None, derandomize=True, database=None)


def one_step(learner, items, **batching):
    """The result of one optimizer step on these items."""
    return train(learner, batches(items, **batching))[0]


def why(result):
    """Why each model that took no step took none."""
    return {event["model"]: event["why"] for event in result.events if event["event"] == "skipped_step"}


def value(result, name):
    return result.metrics[name].value.item()


def with_advantages(items, advantage):
    return [replace(item, advantages=torch.full_like(item.advantages, advantage)) for item in items]


# The step itself


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({}, 1.0),
        ({"target": "new"}, 1.0),
        ({"target": "new", "proximal": "new"}, 1.0),
        ({"proximal": "rollout", "mask": "expected"}, 1.0),
        ({"aggregate": "seq-mean-token-mean", "count": "accepted"}, 0.7),
        ({"aggregate": "seq-mean-token-sum-norm", "mask": "expected"}, 1.5),
    ],
)
def test_two_steps_are_those_of_the_float64_reference(changes, temperature):
    """The second step has moved weights, so the anchor, PPO's ratio and its clip are at work; K = V makes Z exact."""
    items = write(ROLLOUT_MODEL, group=2, temperature=temperature, seed=5)
    optimizer_config = OptimizerConfig(learning_rate=2.0, eps=1.0, max_grad_norm=1e6)
    learner = make_learner(
        POLICY,
        ROLLOUT_MODEL,
        objective=policy_objective(**changes),
        rollout_objective=rollout_model_objective(aggregate=changes.get("aggregate", "token-mean")),
        temperature=temperature,
        optimizer=optimizer_config,
    )
    roles = {"policy": POLICY, "rollout_model": ROLLOUT_MODEL}
    old_models = {role: double(model) for role, model in roles.items()}
    adamw = {role: ReferenceAdamW(optimizer_config) for role in roles}

    for epoch, step in enumerate(learner.compute_old_log_probs(batches(items, epochs=2, budget=24))):
        assert len(step) > 2
        last_weights = {role: parameters(learner, role) for role in roles}
        current_models = {role: double(learner.models[role]) for role in roles}
        losses = reference_losses(current_models, old_models, items, epoch=epoch, temperature=temperature, **changes)

        result, _ = learner.update(step)

        for role, loss in zip(roles, losses, strict=True):
            assert value(result, f"{role}/loss") == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
            expected_gradient = gradient(loss, current_models[role])
            assert value(result, f"{role}/grad_norm") == pytest.approx(expected_gradient.norm().item(), rel=1e-4)
            expected_weights = adamw[role].step(last_weights[role].double(), expected_gradient)
            assert_same_move(parameters(learner, role), expected_weights, last_weights[role])

    # the clip is at work, unless the proximal policy is the current one
    assert 0.0 < value(result, "policy/clip_frac") < 1.0 or changes.get("proximal") == "new"


@pytest.mark.parametrize(("target", "mask"), [("old", "sampled"), ("new", "expected")])
def test_a_budget_chooses_lam_so_that_z_is_the_budget(target, mask, monkeypatch):
    """Two optimizer steps on a batch, the second on what is stored of the old policy; few positions at a time."""
    monkeypatch.setattr(linear_head, "_SORTED_AT_ONCE", 7 * VOCAB)  # the logits of 7 positions
    budget_settings = dict(budget=0.8, target=target, mask=mask)
    objective = policy_objective(**budget_settings, lam=1.0, normalizer="exact")
    models = (POLICY, ROLLOUT_MODEL)
    learner = make_learner(*models, objective=objective, is_frozen=True)
    old_models = {role: double(model) for role, model in zip(("policy", "rollout_model"), models, strict=True)}
    adamw, items = ReferenceAdamW(LINEAR), HALF

    for epoch, step in enumerate(learner.compute_old_log_probs(batches(items, epochs=2, budget=40))):
        last_weights = parameters(learner, "policy")
        current_models = old_models | {"policy": double(learner.models["policy"])}
        loss, _ = reference_losses(current_models, old_models, items, epoch=epoch, **budget_settings)

        result, _ = learner.update(step)

        assert value(result, "obrs/z") == pytest.approx(0.8, abs=1e-6)
        assert result.metrics["obrs/lam"].variance.sqrt() > 0.05
        assert value(result, "policy/loss") == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        expected_weights = adamw.step(last_weights.double(), gradient(loss, current_models["policy"]))
        assert_same_move(parameters(learner, "policy"), expected_weights, last_weights)


def test_a_budget_rejects_evenly_what_the_policy_generated():
    learner = make_learner(POLICY, None, objective=policy_objective(budget=0.8, lam=1.0, normalizer="exact"))
    result = one_step(learner, write(POLICY))

    assert value(result, "obrs/lam") == pytest.approx(1.25, rel=1e-5)  # 1 / 0.8
    assert value(result, "obrs/acceptance") == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregate", "count", "mask", "target", "budget"),
    [
        ("token-mean", "accepted", "sampled", "old", 40),
        ("seq-mean-token-mean", "proposed", "expected", "new", 40),
        ("seq-mean-token-mean", "accepted", "sampled", "new", LONGEST),
        ("seq-mean-token-sum-norm", "proposed", "expected", "old", 40),
    ],
)
def test_a_step_in_micro_batches_is_the_step_on_the_whole_batch(aggregate, count, mask, target, budget):
    """Loss, kappa, denominators and gradients of both models, whatever the micro-batches, anchored or not."""
    objective = policy_objective(aggregate=aggregate, count=count, mask=mask, target=target)
    whole_learner, parts_learner = (make_learner(POLICY, ROLLOUT_MODEL, objective=objective) for _ in range(2))
    steps = batches(WRITTEN, epochs=2, budget=budget)

    assert len(steps[0]) > 2
    parts_results, whole_results = train(parts_learner, steps), train(whole_learner, batches(WRITTEN, epochs=2))
    for parts_result, whole_result in zip(parts_results, whole_results, strict=True):
        for name in ("policy/loss", "rollout_model/loss", "obrs/kappa", "policy/grad_norm", "obrs/acceptance"):
            assert value(parts_result, name) == pytest.approx(value(whole_result, name), rel=1e-4, abs=1e-6), name
        for role in ("policy", "rollout_model"):
            loss, whole_loss = parts_result.metrics[f"{role}/loss"], whole_result.metrics[f"{role}/loss"]
            assert loss.count == pytest.approx(whole_loss.count)
        assert parts_result.traces.keys() == whole_result.traces.keys()

    for role, model in (("policy", POLICY), ("rollout_model", ROLLOUT_MODEL)):
        assert_same_move(parameters(parts_learner, role), parameters(whole_learner, role), flat(model))


def test_kappa_is_the_one_of_the_whole_step():
    """With a truncated top k, kappa is far from 1, and every micro-batch has another one of its own."""
    items = write(ROLLOUT_MODEL, num_top_log_probs=2)
    learner = make_learner(POLICY, ROLLOUT_MODEL, exact_engines=())
    result = one_step(learner, items, budget=30)

    total_accepted, total_z = 0.0, 0.0
    item_kappas = []
    for item in items:
        log_p = vocabulary_log_probs(double(POLICY), item.rollout, 1.0)
        log_q = vocabulary_log_probs(double(ROLLOUT_MODEL), item.rollout, 1.0)
        log_inf = item.rollout.rollout_log_probs.double()
        chosen_log_probs = log_p.gather(-1, item.rollout.token_ids[:, None])[:, 0]
        accepted = (chosen_log_probs - log_inf).exp().div(OBRS["lam"]).clamp(max=1.0).sum().item()
        z = torch.minimum(log_q.exp(), log_p.exp() / OBRS["lam"]).gather(-1, item.rollout.top_ids).sum().item()
        total_accepted += accepted
        total_z += z
        item_kappas.append(accepted / z)

    assert max(item_kappas) > 1.1 * min(item_kappas)
    assert total_accepted / total_z > 1.1
    assert value(result, "obrs/kappa") == pytest.approx(total_accepted / total_z, rel=1e-4)


@pytest.mark.parametrize("kappa", ["prepass", "auto", "none"])
def test_a_prepass_is_taken_only_where_kappa_needs_it(kappa, monkeypatch):
    forwards = []
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=policy_objective(kappa=kappa))
    scores = learner._forward.scores
    monkeypatch.setattr(learner._forward, "scores", lambda *args: forwards.append(1) or scores(*args))

    def cost_of_update(micro_batches):
        """Forward passes, whether a prepass took time, and whether kappa was repaired."""
        forwards.clear()
        result, _ = learner.update(micro_batches)
        return len(forwards), 0.0 < value(result, "seconds/prepass") < 60.0, "obrs/kappa_error" in result.metrics

    whole_batches, part_batches = batches(WRITTEN)[0], batches(WRITTEN, budget=40)[0]
    needs_prepass, repairs_kappa = kappa == "prepass", kappa == "auto"

    assert cost_of_update([MicroBatch(tokens=batch, old=None) for batch in whole_batches]) == (1, False, False)

    unanchored_step = [MicroBatch(tokens=batch, old=None) for batch in part_batches]
    assert cost_of_update(unanchored_step) == (len(part_batches) * (1 + needs_prepass), needs_prepass, repairs_kappa)

    anchored_step = learner.compute_old_log_probs([part_batches, part_batches])[1]
    reads_totals = kappa != "none"  # target old: the old log-probs hold them
    assert cost_of_update(anchored_step) == (len(part_batches), reads_totals, False)


# Old log-probs


@pytest.mark.parametrize("epochs", [1, 2])
def test_old_log_probs_are_those_before_the_first_update(epochs):
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    steps = learner.compute_old_log_probs(batches(WRITTEN, mini_batch_size=4, epochs=epochs, budget=60))

    assert len(steps) == 3 * epochs

    first_policy = double(POLICY)
    first_log_probs = {
        item.rollout.uid: sampled_log_probs(first_policy, item.rollout, 1.0).detach() for item in WRITTEN
    }
    trained_uids = []

    for step in steps:
        result, _ = learner.update(step)
        for uid, trace in result.traces.items():
            torch.testing.assert_close(trace["old_log_probs"].double(), first_log_probs[uid], rtol=0, atol=1e-5)
            trained_uids.append(uid)

    assert sorted(trained_uids) == sorted([*first_log_probs] * epochs)

    # the policy itself has moved on by the last step
    assert any(
        (trace["log_probs"].double() - first_log_probs[uid]).abs().max() > 1e-2 for uid, trace in result.traces.items()
    )


def test_a_single_step_costs_no_extra_forward_pass(monkeypatch):
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    monkeypatch.setattr(learner._forward, "outputs", lambda *args: pytest.fail("a forward pass"))

    [step] = learner.compute_old_log_probs(batches(WRITTEN, budget=40))

    assert all(micro.old is None for micro in step)


@pytest.mark.parametrize("changes", [{}, {"epochs": 2}])
def test_the_exact_normalizer_serves_all_steps_on_a_batch(changes):
    """Z belongs to the old policy and the writing weights: the anchor holds it after both models have moved."""
    items = write(ROLLOUT_MODEL, num_top_log_probs=0)
    exact = policy_objective(normalizer="exact")
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=exact)
    steps = batches(items, mini_batch_size=len(items) // 2, **changes)

    results = train(learner, steps)

    assert learner.version == Version(len(steps), len(steps))

    old_policy, writer = double(POLICY), double(ROLLOUT_MODEL)
    for item in items:
        p, q = (vocabulary_log_probs(model, item.rollout, 1.0).exp() for model in (old_policy, writer))
        z = torch.minimum(q, p / OBRS["lam"]).sum(-1).float()
        for result in results:
            if item.rollout.uid in result.traces:
                torch.testing.assert_close(result.traces[item.rollout.uid]["z"], z, rtol=1e-4, atol=1e-5)


def test_the_exact_normaliser_refuses_a_batch_of_older_weights():
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=policy_objective(normalizer="exact"))
    one_step(learner, WRITTEN)

    with pytest.raises(ValueError, match="were not sampled from the weights"):
        one_step(learner, WRITTEN)

    one_step(learner, write(learner.models["rollout_model"], version=learner.version))


@pytest.mark.parametrize(("version", "exact_engines"), [(Version(0, 0), ()), (Version(0, 1), ("rollout_model",))])
def test_fill_ins_need_the_writing_weights_in_training(version, exact_engines):
    items = write(ROLLOUT_MODEL, num_top_log_probs=2, version=version)
    result_without_fill_ins = one_step(make_learner(POLICY, ROLLOUT_MODEL, exact_engines=exact_engines), items)

    assert value(result_without_fill_ins, "obrs/z_bound_width") > 0.01
    assert value(result_without_fill_ins, "obrs/union") == 0.0

    result_with_fill_ins = one_step(make_learner(POLICY, ROLLOUT_MODEL), write(ROLLOUT_MODEL, num_top_log_probs=2))
    assert value(result_with_fill_ins, "obrs/z_bound_width") < 1e-5
    assert value(result_with_fill_ins, "obrs/union") == 1.0
    assert value(result_with_fill_ins, "obrs/z") > value(result_without_fill_ins, "obrs/z") + 0.01


# The policy as its own rollout model


@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("is_separate", [False, True])
def test_on_policy_obrs_is_plain_grpo(lam, is_separate):
    """rho = 1 up to rounding, so all is accepted at weight Z max(lam, rho) = 1."""
    items = write(POLICY)
    learners = [
        make_learner(POLICY, POLICY if is_separate else None, objective=objective)
        for objective in (policy_objective(lam=lam, normalizer="exact"), policy_objective("none"))
    ]

    obrs_result, plain_result = (one_step(learner, items, budget=60) for learner in learners)

    assert value(obrs_result, "correction/accepted") == 1.0
    for result in (obrs_result, plain_result):
        assert value(result, "correction/weight") == pytest.approx(1.0, abs=1e-5)
    assert_same_move(*(parameters(learner, "policy") for learner in learners), flat(POLICY))


def test_without_correction_the_step_is_grpo_by_hand():
    items = write(POLICY)
    learner = make_learner(POLICY, None, objective=policy_objective("none"))

    one_step(learner, items, budget=40)

    model = double(POLICY)
    total = sum(-(item.advantages * sampled_log_probs(model, item.rollout, 1.0)).sum() for item in items)
    loss = total / sum(len(item.rollout.token_ids) for item in items)
    expected_weights = ReferenceAdamW(LINEAR).step(flat(POLICY).double(), gradient(loss, model))

    assert_same_move(parameters(learner, "policy"), expected_weights, flat(POLICY))
    assert learner.version == Version(1, 1)
    assert torch.equal(parameters(learner, "rollout_model"), parameters(learner, "policy"))


# Steps that are not taken


def test_equal_rewards_skip_the_policy_alone():
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    result = one_step(learner, with_advantages(WRITTEN, 0.0), budget=60)

    assert why(result) == {"policy": "all groups have equal rewards"}
    assert torch.equal(parameters(learner, "policy"), flat(POLICY))
    assert not torch.equal(parameters(learner, "rollout_model"), flat(ROLLOUT_MODEL))
    assert learner.version == Version(0, 1)
    assert value(result, "policy/skipped_steps") == 1.0
    assert value(result, "rollout_model/skipped_steps") == 0.0
    assert result.metrics["policy/loss"].count == sum(len(item.rollout.token_ids) for item in WRITTEN)


def oapl_learner(beta):
    no_correction = {"name": "none", "proximal": "rollout"}
    config = ObjectiveConfig(surrogate="oapl", advantage="oapl", oapl_beta=beta, correction=no_correction)
    return make_learner(
        POLICY, ROLLOUT_MODEL, objective=objectives.policy_objective(config), advantage="oapl", beta=beta
    )


def test_oapl_pulls_to_the_sampler_where_rewards_are_equal():
    """Its advantage is 0 there, and beta log of the ratio to the sampler is not."""
    learner = oapl_learner(beta=0.5)
    equal_rewards = [replace(item, score=Score(reward=1.0)) for item in WRITTEN]

    result = one_step(learner, learner.compute_advantages(equal_rewards), budget=60)

    policy, total, tokens = double(POLICY), 0.0, 0
    for item in WRITTEN:
        mask = item.rollout.sampled_mask
        log_ratio = (sampled_log_probs(policy, item.rollout, 1.0) - item.rollout.rollout_log_probs)[mask].sum().item()
        total += (0.5 * log_ratio) ** 2 / (2.0 * 0.5)  # (beta log ratio)^2 / (2 beta)
        tokens += int(mask.sum())
    assert why(result) == {}
    assert value(result, "policy/loss") == pytest.approx(total / tokens, rel=1e-4)


def test_oapl_advantages_are_rewards_less_the_best_value():
    """The best value of a group is beta log of its mean of exp(reward / beta), with the beta of the settings."""
    learner = oapl_learner(beta=0.5)
    mixed_rewards = [replace(item, score=Score(reward=float(index % 2))) for index, item in enumerate(WRITTEN)]

    samples = learner.compute_advantages(mixed_rewards)

    first_prompt = WRITTEN[0].rollout.prompt.uid
    group_rewards = [item.score.reward for item in mixed_rewards if item.rollout.prompt.uid == first_prompt]
    best_value = 0.5 * math.log(sum(math.exp(reward / 0.5) for reward in group_rewards) / len(group_rewards))
    assert samples[0].advantages[0].item() == pytest.approx(group_rewards[0] - best_value, rel=1e-6)


@pytest.mark.parametrize("name", ["response", "token"])
def test_the_rate_is_scaled_by_the_root_of_the_ess(name):
    """Of the whole step, in several micro-batches: by the ratios of responses, or by what TIS makes of tokens."""
    objective = policy_objective("tis", cap=1.2)

    moves, rates = [], []
    for scaling in (None, name):
        learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, ess_scaling=scaling)
        result = one_step(learner, WRITTEN, budget=40)
        moves.append((parameters(learner, "policy") - flat(POLICY)).double())
        rates.append(value(result, "policy/learning_rate"))

    policy, ess_weights = double(POLICY), []
    for item in WRITTEN:
        mask = item.rollout.sampled_mask
        log_ratio = (sampled_log_probs(policy, item.rollout, 1.0) - item.rollout.rollout_log_probs)[mask]
        ess_weights += [log_ratio.sum().exp()] if name == "response" else log_ratio.exp().clamp(max=1.2).unbind()
    weights = torch.stack(ess_weights)
    scale = (weights.sum().square() / weights.square().sum() / len(weights)).sqrt().item()

    assert scale < 0.97
    assert value(result, "policy/ess_scale") == pytest.approx(scale, rel=1e-5)
    assert rates[1] == pytest.approx(scale * rates[0], rel=1e-5)
    assert ((moves[1] - scale * moves[0]).norm() / moves[1].norm()).item() < 1e-4
    assert value(result, "rollout_model/learning_rate") == LINEAR.learning_rate


def test_a_regularizer_alone_takes_no_step_where_all_is_rejected():
    objective = replace(policy_objective("geo_mask", low=2.0, high=3.0), entropy_coeff=0.01)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, ess_scaling="token")
    result = one_step(learner, WRITTEN)

    assert value(result, "correction/accepted") == 0.0
    assert value(result, "policy/grad_norm") > 0.0
    assert value(result, "policy/ess_scale") == 0.0
    assert value(result, "policy/learning_rate") == 0.0
    assert torch.equal(parameters(learner, "policy"), flat(POLICY))


def test_a_skipped_step_leaves_momentum_and_schedule_alone():
    skipping_learner, straight_learner = (
        make_learner(POLICY, ROLLOUT_MODEL, optimizer=ADAM, is_frozen=True) for _ in range(2)
    )
    for learner in (skipping_learner, straight_learner):
        one_step(learner, WRITTEN)
        if learner is skipping_learner:
            one_step(learner, with_advantages(WRITTEN, 0.0))
        one_step(learner, WRITTEN)

    assert torch.equal(parameters(skipping_learner, "policy"), parameters(straight_learner, "policy"))


def test_a_model_that_nothing_pulls_has_no_momentum():
    objective = rollout_model_objective(distill_weight=0.0)
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_objective=objective, optimizer=ADAM)
    one_step(learner, WRITTEN)
    first_weights = parameters(learner, "rollout_model")
    result = one_step(learner, with_advantages(WRITTEN, 0.0))

    assert why(result)["rollout_model"] == "the gradient is zero"
    assert torch.equal(parameters(learner, "rollout_model"), first_weights)


@pytest.mark.parametrize("count", ["proposed", "accepted"])
@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_a_step_whose_tokens_are_all_rejected_is_skipped(count, aggregate):
    objective = policy_objective(lam=1e9, count=count, aggregate=aggregate)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective)
    result = one_step(learner, WRITTEN, budget=60)

    assert why(result) == {"policy": "all tokens with an advantage were rejected"}
    assert result.metrics["policy/loss"].total == 0.0
    assert value(result, "policy/grad_norm") == 0.0
    assert value(result, "correction/accepted") == 0.0
    assert learner.version == Version(0, 1)


def test_rejected_advantages_alone_are_nothing_to_learn():
    """A kept token of advantage 0 gives no gradient; momentum alone must not move the policy."""
    kept_items = with_advantages(WRITTEN[:6], 0.0)
    rejected_items = [
        replace(item, rollout=replace(item.rollout, rollout_log_probs=torch.full((len(item.rollout.token_ids),), 60.0)))
        for item in WRITTEN[6:]
    ]

    result = one_step(make_learner(POLICY, ROLLOUT_MODEL), [*kept_items, *rejected_items])

    assert value(result, "correction/accepted") > 0.1
    assert why(result)["policy"] == "all tokens with an advantage were rejected"


def test_empty_and_one_token_responses_are_trained_on():
    short_items = [cut(item, length) for item, length in zip(WRITTEN, [0, 1, 0, 1, 2, 1], strict=False)]
    items = [*short_items, *WRITTEN[6:]]

    whole_learner, parts_learner, learner_without_empty = (make_learner(POLICY, ROLLOUT_MODEL) for _ in range(3))
    one_step(whole_learner, items)
    one_step(parts_learner, items, budget=16)
    one_step(learner_without_empty, [item for item in items if len(item.rollout.token_ids)])

    for role, model in (("policy", POLICY), ("rollout_model", ROLLOUT_MODEL)):
        for learner in (parts_learner, learner_without_empty):
            assert_same_move(parameters(learner, role), parameters(whole_learner, role), flat(model))


def test_a_step_without_any_token_moves_nothing_and_says_so():
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    result = one_step(learner, [cut(item, 0) for item in WRITTEN[:3]])

    assert why(result) == {"policy": "no token", "rollout_model": "no token"}
    assert learner.version == Version(0, 0)
    assert [len(trace["z"]) for trace in result.traces.values()] == [0, 0, 0]


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_non_finite_gradient_skips_both_models(advantage):
    hurt_learner, straight_learner = (make_learner(POLICY, ROLLOUT_MODEL, optimizer=ADAM) for _ in range(2))
    spoiled_items = [*with_advantages(WRITTEN[:1], advantage), *WRITTEN[1:]]

    for learner in (hurt_learner, straight_learner):
        one_step(learner, WRITTEN)
        if learner is hurt_learner:
            last_weights = {role: parameters(learner, role) for role in ("policy", "rollout_model")}
            result = one_step(learner, spoiled_items)
            assert why(result) == {"policy": "non-finite gradient", "rollout_model": "non-finite gradient"}
            assert all(torch.equal(parameters(learner, role), last_weights[role]) for role in last_weights)
            assert learner.version == Version(1, 1)
        one_step(learner, WRITTEN)

    for role in ("policy", "rollout_model"):
        assert torch.equal(parameters(hurt_learner, role), parameters(straight_learner, role))


def test_a_non_finite_gradient_of_one_model_skips_the_other_too():
    """Z from the top k of the engine alone, so that a broken rollout model leaves the policy's gradient finite."""
    broken_model = copy.deepcopy(ROLLOUT_MODEL)
    broken_model.model.norm.weight.data[0] = math.nan
    learner = make_learner(POLICY, broken_model, exact_engines=())
    result = one_step(learner, WRITTEN)

    assert math.isfinite(value(result, "policy/grad_norm"))
    assert math.isnan(value(result, "rollout_model/grad_norm"))
    assert why(result) == {"policy": "non-finite gradient", "rollout_model": "non-finite gradient"}
    assert torch.equal(parameters(learner, "policy"), flat(POLICY))


# Who is trained, and by what


def test_a_frozen_rollout_model_is_compared_with():
    learner = make_learner(POLICY, ROLLOUT_MODEL, is_frozen=True)
    results = train(learner, batches(WRITTEN, epochs=2))

    assert torch.equal(parameters(learner, "rollout_model"), flat(ROLLOUT_MODEL))
    assert learner.version == Version(2, 0)
    assert not any(weight.requires_grad for weight in learner.models["rollout_model"].parameters())
    assert value(results[0], "mismatch/kl_rollout_policy") > 0.01
    assert "rollout_model/loss" not in results[0].metrics


def test_distillation_pulls_the_rollout_model_alone():
    objective = rollout_model_objective(ppo_weight=0.0)
    learner = make_learner(POLICY, ROLLOUT_MODEL, rollout_objective=objective)
    divergences = [
        value(one_step(learner, with_advantages(WRITTEN, 0.0)), "rollout_model/distill_kl") for _ in range(8)
    ]

    assert value(one_step(learner, with_advantages(WRITTEN, 0.0)), "policy/grad_norm") == 0.0
    assert torch.equal(parameters(learner, "policy"), flat(POLICY))
    assert divergences[-1] < 0.7 * divergences[0]


def test_tokens_that_nobody_sampled_are_read_but_not_trained_on():
    """A tool's tokens stay in the context of what follows; what the engine says of them does not matter."""

    def with_tool(items, tool_log_prob):
        tool_items = []
        for item in items:
            sampled_mask = torch.arange(len(item.rollout.token_ids)) != 1
            log_probs = torch.where(sampled_mask, item.rollout.rollout_log_probs, tool_log_prob)
            tool_items.append(
                replace(item, rollout=replace(item.rollout, sampled_mask=sampled_mask, rollout_log_probs=log_probs))
            )
        return tool_items

    expected_log_probs = sampled_log_probs(double(POLICY), WRITTEN[0].rollout, 1.0).detach()
    expected_log_probs[1] = 0.0

    for proximal in ("old", "rollout"):
        objective = policy_objective(proximal=proximal)
        clean_learner, soiled_learner = (make_learner(POLICY, ROLLOUT_MODEL, objective=objective) for _ in range(2))
        clean_result = one_step(clean_learner, with_tool(WRITTEN, tool_log_prob=-1.0))
        soiled_result = one_step(soiled_learner, with_tool(WRITTEN, tool_log_prob=math.nan))

        assert torch.equal(parameters(clean_learner, "policy"), parameters(soiled_learner, "policy"))
        assert value(clean_result, "policy/loss") == value(soiled_result, "policy/loss")
        sampled_tokens = sum(len(item.rollout.token_ids) - (len(item.rollout.token_ids) > 1) for item in WRITTEN)
        assert clean_result.metrics["policy/loss"].count == sampled_tokens

        for result in (clean_result, soiled_result):
            log_probs = result.traces[WRITTEN[0].rollout.uid]["log_probs"].double()
            torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-5)


def test_weights_are_named_once_where_they_are_tied():
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    for role, model in (("policy", POLICY), ("rollout_model", ROLLOUT_MODEL)):
        sent_weights = dict(learner.weights(role))
        assert sent_weights.keys() == dict(model.named_parameters()).keys()
        assert "lm_head.weight" not in sent_weights
        assert all(torch.equal(tensor, sent_weights[name]) for name, tensor in model.named_parameters())
        assert not any(tensor.requires_grad for tensor in sent_weights.values())


# Precision and continuation


def test_bf16_autocast_runs_and_stays_near_fp32():
    plain_learner, cast_learner = (
        make_learner(POLICY, ROLLOUT_MODEL, autocast=dtype) for dtype in (None, torch.bfloat16)
    )

    plain_result, cast_result = (one_step(learner, WRITTEN, budget=60) for learner in (plain_learner, cast_learner))
    differences = []

    for uid, trace in plain_result.traces.items():
        differences.append((trace["log_probs"] - cast_result.traces[uid]["log_probs"]).abs().max().item())
        assert cast_result.traces[uid]["log_probs"].dtype == torch.float32
    # bfloat16 keeps 8 bits: logits of size 4 are off by some 2**-8 * 4; equal numbers would mean that nothing was cast
    assert 1e-4 < max(differences) < 0.15

    for role, model in (("policy", POLICY), ("rollout_model", ROLLOUT_MODEL)):
        moves = [parameters(learner, role) - flat(model) for learner in (plain_learner, cast_learner)]
        assert torch.cosine_similarity(*moves, dim=0) > 0.95
        assert all(tensor.dtype == torch.float32 for _, tensor in cast_learner.weights(role))


@pytest.mark.parametrize("kappa", ["prepass", "auto"])
def test_a_state_dict_round_trip_continues_bit_by_bit(tmp_path, kappa):
    objective = policy_objective(kappa=kappa)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, optimizer=ADAM)
    items = write(ROLLOUT_MODEL, num_top_log_probs=2)
    for _ in range(2):
        one_step(learner, items, budget=60)

    torch.save(learner.state_dict(), tmp_path / "state.pt")
    learner.save(tmp_path, ["policy"])

    assert torch.equal(flat(type(POLICY).from_pretrained(tmp_path / "policy")), parameters(learner, "policy"))

    models = learner.models["policy"], learner.models["rollout_model"]
    resumed_learner = make_learner(*models, objective=objective, optimizer=ADAM)
    resumed_learner.load(tmp_path, torch.load(tmp_path / "state.pt", weights_only=True))

    assert learner.version == Version(2, 2)
    assert resumed_learner.version == Version(2, 2)

    for _ in range(2):
        expected_result = one_step(learner, items, budget=60)
        resumed_result = one_step(resumed_learner, items, budget=60)
        del expected_result.metrics["seconds/prepass"], resumed_result.metrics["seconds/prepass"]
        assert_equal_sums(expected_result.metrics, resumed_result.metrics)

    for role in ("policy", "rollout_model"):
        assert torch.equal(parameters(resumed_learner, role), parameters(learner, role))


# What must not matter


@few
@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 2**32))
def test_padding_and_what_stands_in_it_change_nothing(left_padding, right_padding, seed):
    """A row without padding and wide rectangles with random numbers where nothing is: the same step."""
    generator = torch.Generator().manual_seed(seed)
    (step,) = batches(WRITTEN, budget=70)

    def pad(tensor, count_before, count_after, dim=1):
        shape = list(tensor.shape)
        sides = []
        for count in (count_before, count_after):
            shape[dim] = count
            garbage = torch.randint(0, VOCAB, shape, generator=generator).to(tensor.dtype)
            sides.append(garbage if tensor.dtype != torch.bool else torch.zeros(shape, dtype=torch.bool))
        return torch.cat([sides[0], tensor, sides[1]], dim)

    def padded(batch):
        columns = (
            "response_ids",
            "uniforms",
            "top_ids",
            "top_log_probs",
            "versions",
            "attention_mask",
            "response_mask",
        )
        changes = {name: pad(getattr(batch, name), 0, right_padding) for name in columns}
        changes |= {name: pad(getattr(batch, name), left_padding, 0) for name in ("prompt_ids", "prompt_mask")}
        zeros = torch.zeros(len(batch.uids), right_padding)
        changes |= {name: torch.cat([getattr(batch, name), zeros], 1) for name in ("rollout_log_probs", "advantages")}
        return replace(batch, **changes, response_index=changes["response_mask"].flatten().nonzero()[:, 0], packed=None)

    narrow_learner, wide_learner = make_learner(POLICY, ROLLOUT_MODEL), make_learner(POLICY, ROLLOUT_MODEL)
    narrow_result = train(narrow_learner, [step])[0]
    wide_result = train(wide_learner, [[padded(batch) for batch in step]])[0]

    assert value(wide_result, "policy/loss") == pytest.approx(value(narrow_result, "policy/loss"), rel=1e-4, abs=1e-6)
    for role, model in (("policy", POLICY), ("rollout_model", ROLLOUT_MODEL)):
        assert_same_move(parameters(wide_learner, role), parameters(narrow_learner, role), flat(model))


@few
@given(st.permutations(range(len(WRITTEN))))
def test_the_order_of_the_batch_changes_nothing(order):
    """Nor does it matter who shares a micro-batch with whom."""
    learners = [make_learner(POLICY, ROLLOUT_MODEL) for _ in range(2)]
    for learner, items in zip(learners, (WRITTEN, [WRITTEN[index] for index in order]), strict=True):
        learner.update([MicroBatch(tokens=collate(part, 0, 0), old=None) for part in (items[:5], items[5:])])
    for role, model in (("policy", POLICY), ("rollout_model", ROLLOUT_MODEL)):
        assert_same_move(*(parameters(learner, role) for learner in learners), flat(model))


# Measured on real samples


@pytest.mark.parametrize("normalizer", ["exact", "topk"])
@pytest.mark.parametrize("lam", [0.7, 1.0, 1.6])
def test_acceptance_averages_to_z_and_the_ratio_to_one(lam, normalizer):
    """A martingale difference each: within 4 standard errors of 0 and 1, unless Z or the log-probs are wrong.

    top-k with fill-ins misses what is in neither list: its Z must lie below the acceptance, and its upper bound above.
    """
    items = write(ROLLOUT_MODEL, prompts=24, group=12, num_top_log_probs=4, seed=11)
    objective = policy_objective(lam=lam, normalizer=normalizer)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, num_top_log_probs=4)
    metrics = one_step(learner, items).metrics
    ratio, gap = metrics["mismatch/ratio"], metrics["obrs/acceptance_minus_z"]

    assert ratio.count > 1000
    assert abs(ratio.value - 1.0) < 4.0 * ratio.standard_error < 0.3
    if normalizer == "exact":
        assert abs(gap.value) < 4.0 * gap.standard_error < 0.05
        assert metrics["obrs/z_bound_width"].value == 0.0
    else:
        assert gap.value > -4.0 * gap.standard_error
        assert gap.value - metrics["obrs/z_bound_width"].value < 4.0 * gap.standard_error
        assert metrics["obrs/z_bound_width"].value > 0.001


def test_sampled_coins_accept_as_the_acceptance_says():
    items = write(ROLLOUT_MODEL, prompts=24, group=12, seed=12)
    metrics = one_step(make_learner(POLICY, ROLLOUT_MODEL), items).metrics
    accepted, expected = metrics["correction/accepted"], metrics["obrs/acceptance"].value
    assert 0.3 < expected < 0.9
    assert abs(accepted.value - expected) < 4.0 * accepted.standard_error


def test_the_engine_and_the_learner_agree_on_the_written_tokens():
    """The setting itself: p_inf is the rollout model in training, in float32, at the first update."""
    result = one_step(make_learner(POLICY, ROLLOUT_MODEL), WRITTEN)
    assert value(result, "mismatch/engine_gap_max") < 1e-5
    assert all(EOS not in item.rollout.token_ids[:-1] for item in WRITTEN)
    assert max(len(item.rollout.token_ids) for item in WRITTEN) == MAX_NEW


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.7}])
def test_the_kept_mass_is_that_of_what_the_engine_may_sample(truncation):
    items = write(ROLLOUT_MODEL, seed=3, **truncation)
    kept_masses = []
    for item in items:
        probs = vocabulary_log_probs(double(ROLLOUT_MODEL), item.rollout, 1.0).exp()
        allowed = torch.zeros_like(probs).scatter(1, item.rollout.top_ids, item.rollout.top_log_probs.double().exp())
        kept_masses += (probs * (allowed > 0)).sum(-1)[item.rollout.sampled_mask].tolist()
    mean_kept_mass = sum(kept_masses) / len(kept_masses)

    assert (mean_kept_mass < 0.95) == bool(truncation)

    learner = make_learner(POLICY, ROLLOUT_MODEL, exact_engines=() if truncation else ("rollout_model",))
    result = one_step(learner, items)

    assert value(result, "mismatch/kept_mass") == pytest.approx(mean_kept_mass, rel=1e-5)


def test_a_truncated_sampler_is_compared_on_its_support():
    """The writer as the policy: on the support all ratios are 1, and Z is known. Over the vocabulary none is."""
    items = write(ROLLOUT_MODEL, seed=3, top_k=5, num_top_log_probs=6)
    policies = {"support": (ROLLOUT_MODEL, None), "pair": (ROLLOUT_MODEL, ROLLOUT_MODEL)}

    for models in policies.values():
        result = one_step(make_learner(*models, exact_engines=(), on_support=True), items)
        assert value(result, "mismatch/kept_mass") == pytest.approx(1.0, abs=1e-5)
        assert value(result, "mismatch/engine_gap_max") < 1e-5
        assert value(result, "obrs/acceptance") == pytest.approx(value(result, "obrs/z"), abs=1e-5)
        assert value(result, "obrs/z_bound_width") < 1e-5
        assert value(result, "obrs/rollout_mass") > 1.0 - 1e-5

    vocabulary_result = one_step(make_learner(ROLLOUT_MODEL, ROLLOUT_MODEL, exact_engines=()), items)
    assert value(vocabulary_result, "obrs/acceptance") < value(result, "obrs/acceptance") - 0.02


def test_kappa_repairs_the_gradient_on_the_support():
    items = write(ROLLOUT_MODEL, seed=3, top_k=5, num_top_log_probs=5)
    weights = {}

    for kappa in ("auto", "prepass"):
        objective = policy_objective(kappa=kappa, kappa_tolerance=0.0, c1=1.01)
        learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, exact_engines=(), on_support=True)
        one_step(learner, items, budget=40)
        weights[kappa] = parameters(learner, "policy")

    assert_same_move(weights["auto"], weights["prepass"], flat(POLICY))


@pytest.mark.parametrize("mini_batch_size", [None, 6])
def test_the_engine_is_compared_on_tokens_of_equal_weights(mini_batch_size):
    """In later steps on it the weights have moved on, but the anchor has not; older text is not theirs at all."""
    shift = 0.125  # of every reported probability, so that the gap is known
    fresh_items, items = HALF, []

    for item in WRITTEN:
        rollout = item.rollout
        reported_log_probs = (rollout.rollout_log_probs.exp() + shift).log()
        change = (
            {"rollout_log_probs": reported_log_probs}
            if any(item is fresh for fresh in fresh_items)
            else {"versions": torch.full_like(rollout.versions, -1)}
        )
        items.append(replace(item, rollout=replace(rollout, **change)))

    learner = make_learner(POLICY, ROLLOUT_MODEL)
    results, gaps_of_tokens = learner.train(batches(items, mini_batch_size=mini_batch_size), trace=False)
    gaps = [result.metrics["mismatch/engine_gap"] for result in results]

    fresh_uids = {item.rollout.uid for item in fresh_items}
    assert gaps_of_tokens.keys() == {item.rollout.uid for item in items}
    for uid, token_gaps in gaps_of_tokens.items():
        expected_gaps = torch.full_like(token_gaps, shift if uid in fresh_uids else math.nan)
        torch.testing.assert_close(token_gaps, expected_gaps, rtol=0.0, atol=1e-5, equal_nan=True)

    assert len(gaps) == len(items) // (mini_batch_size or len(items))
    assert sum(gap.count for gap in gaps) == sum(len(item.rollout.token_ids) for item in fresh_items)
    assert sum(gap.total for gap in gaps) / sum(gap.count for gap in gaps) == pytest.approx(shift, abs=1e-5)
    assert max(value(result, "mismatch/engine_gap_max") for result in results) == pytest.approx(shift, abs=1e-5)
