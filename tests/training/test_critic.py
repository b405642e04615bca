"""The critic's values, advantages, loss and steps are those of plain forward passes, GAE's recursion and PPO's loss."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.learners import LINEAR, batches, make_learner, smallest_model, write
from helpers.runs import SHORT, run, small_config
from jackpot.config.config import CriticConfig, OptimizerConfig
from jackpot.core.types import Score
from jackpot.launch.build import load_trained, make_critic
from jackpot.models.load import load_value_model
from jackpot.objectives.losses import clipped_value_error
from jackpot.training.advantages import Critic
from jackpot.training.optimizer import ModelOptimizer
from objectives.test_advantages import gae_by_recursion

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
TURN_ENDS = (7, 8, 9)  # a tool writes after these: its tokens are in the text and not in the loss
# of critics, where a test says nothing else
GAMMA, LAM = 0.9, 0.8
CLIP = 0.3


def rewarded(items, rewards=None):
    """Return samples with rewards, random ones where none are given."""
    draw = np.random.default_rng(5)
    rewards = rewards or [float(draw.normal()) for _ in items]
    return [
        replace(item, score=Score(reward=reward, correct=False)) for item, reward in zip(items, rewards, strict=True)
    ]


WRITTEN = rewarded(write(ROLLOUT_MODEL, seed=9, turn_end_token_ids=TURN_ENDS))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A value model made of a language model."""
    folder = tmp_path_factory.mktemp("model")
    smallest_model(3).save_pretrained(folder)
    return load_value_model(folder, torch.float32)


@pytest.fixture
def model(fresh):
    """The same with a value head that is not zero."""
    model = copy.deepcopy(fresh)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def critic_of(model, optimizer=LINEAR, **numbers):
    """Return a critic with a value model; numbers by keyword replace those of this file."""
    micro_batch_tokens = numbers.pop("micro_batch_tokens", 60)
    config = CriticConfig(**dict(optimizer=optimizer, gamma=GAMMA, lam=LAM, clip=CLIP) | numbers)
    return Critic(model, ModelOptimizer(model.parameters(), optimizer, 100), config, micro_batch_tokens)


def raw_values(model, rollout):
    """Return V of the state before each response token, of the whole text at once in float64: [T], tool tokens too."""
    prompt = rollout.prompt.token_ids
    ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits[0, :, 0]
    return logits[len(prompt) - 1 : -1].numpy()


def credited_by_hand(model, items):
    """Return {uid: (values, advantages, returns)} of every rollout, before whitening."""
    credit_by_uid = {}
    for item in items:
        mask = item.rollout.sampled_mask.tolist()
        values = raw_values(model, item.rollout)
        rewards = np.zeros(len(mask))
        rewards[max(position for position, is_sampled in enumerate(mask) if is_sampled)] = item.score.reward
        advantages = np.array(gae_by_recursion(rewards, values, mask, GAMMA, LAM))
        credit_by_uid[item.rollout.uid] = values, advantages, np.where(mask, advantages + values, 0.0)
    return credit_by_uid


def test_there_are_tool_tokens_and_responses_that_end_with_one():
    masks = [item.rollout.sampled_mask for item in WRITTEN]
    assert any((~mask).any() for mask in masks)
    assert all(mask.any() for mask in masks)


def test_values_are_those_of_the_states_before_the_tokens(model):
    critic = critic_of(model)
    (step,) = batches(WRITTEN, budget=60)
    assert len(step) > 2  # micro-batches
    rollouts = {item.rollout.uid: item.rollout for item in WRITTEN}

    for batch in step:
        values = critic.values(batch).detach()
        for row, uid in enumerate(batch.uids):
            rollout = rollouts[uid]
            expected_values = np.zeros(values.shape[1])
            expected_values[: len(rollout.token_ids)] = np.where(rollout.sampled_mask, raw_values(model, rollout), 0.0)
            assert values[row].numpy() == pytest.approx(expected_values, rel=1e-4, abs=1e-5)


def test_a_new_critic_has_the_models_body_and_values_of_zero(fresh):
    critic = critic_of(copy.deepcopy(fresh))

    assert not any(critic.values(batch).any() for batch in batches(WRITTEN)[0])

    body = dict(smallest_model(3).model.named_parameters())
    assert all(torch.equal(body[name], parameter) for name, parameter in fresh.model.named_parameters())


def test_a_value_model_is_saved_with_its_head(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded_model = load_value_model(tmp_path, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), loaded_model.parameters(), strict=True))
    assert loaded_model.score.weight.abs().max() > 0.0


def test_advantages_are_gae_whitened_over_the_batch(model):
    raw_credits = credited_by_hand(model, WRITTEN)
    raw_advantages = np.concatenate(
        [raw_credits[item.rollout.uid][1][item.rollout.sampled_mask.numpy()] for item in WRITTEN]
    )
    mean, std = raw_advantages.mean(), raw_advantages.std(ddof=1)

    credited_items = make_learner(POLICY, ROLLOUT_MODEL, critic=critic_of(model)).compute_advantages(WRITTEN)

    for item, credited_item in zip(WRITTEN, credited_items, strict=True):
        assert credited_item.rollout is item.rollout
        assert credited_item.score == item.score
        expected_advantages = np.where(item.rollout.sampled_mask, (raw_credits[item.rollout.uid][1] - mean) / std, 0.0)
        assert credited_item.advantages.numpy() == pytest.approx(expected_advantages, rel=1e-3, abs=1e-4)
        assert credited_item.advantages.dtype == torch.float32


def test_the_value_loss_is_ppos_clipped_loss(model):
    critic = critic_of(model)
    samples = make_learner(POLICY, ROLLOUT_MODEL, critic=critic).compute_advantages(WRITTEN)
    raw_credits = credited_by_hand(model, WRITTEN)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    items = {item.rollout.uid: item for item in WRITTEN}
    clipped_tokens, tokens = 0, 0
    reported_tokens = 0  # as clipped, by the metrics

    for batch in batches(samples, budget=60)[0]:
        numerator, metrics = critic.loss(batch)
        expected_loss = 0.0
        for uid in batch.uids:
            old_values, _, returns = raw_credits[uid]
            new_values = raw_values(model, items[uid].rollout)
            for position in np.flatnonzero(items[uid].rollout.sampled_mask.numpy()):
                clipped_value = min(max(new_values[position], old_values[position] - CLIP), old_values[position] + CLIP)
                expected_loss += (
                    max((new_values[position] - returns[position]) ** 2, (clipped_value - returns[position]) ** 2) / 2
                )
                tokens += 1
                clipped_tokens += (clipped_value - returns[position]) ** 2 > (
                    new_values[position] - returns[position]
                ) ** 2

        assert numerator.item() == pytest.approx(expected_loss, rel=1e-3, abs=1e-5)
        assert metrics["critic/loss"].count.item() == batch.response_mask.sum().item()
        reported_tokens += metrics["critic/clip_frac"].total.item()

    assert 0 < clipped_tokens < tokens
    assert reported_tokens == clipped_tokens


@pytest.mark.parametrize("clip", [0.3, 2.0, float("inf")])
def test_the_clipped_error_and_its_gradient_are_those_of_numpy(clip):
    draw = np.random.default_rng(0)
    new_values, old_values = draw.normal(size=(6, 9)), draw.normal(size=(6, 9))
    returns = draw.normal(size=(6, 9))
    values = torch.tensor(new_values, requires_grad=True)
    clipped_values = np.clip(new_values, old_values - clip, old_values + clip)
    plain, bounded = (new_values - returns) ** 2 / 2, (clipped_values - returns) ** 2 / 2
    is_bounded = (bounded > plain) & (clipped_values != new_values)

    error, is_clipped = clipped_value_error(values, torch.tensor(old_values), torch.tensor(returns), clip)
    error.sum().backward()

    assert error.detach().numpy() == pytest.approx(np.maximum(plain, bounded), rel=1e-12)
    assert (is_clipped.numpy() == is_bounded).all()
    assert values.grad.numpy() == pytest.approx(np.where(is_bounded, 0.0, new_values - returns), rel=1e-12)
    assert is_bounded.any() or clip > 1.0  # a small clip binds somewhere


def test_the_critic_steps_on_the_mean_over_sampled_tokens(model):
    """AdamW's first step with a large eps, from the gradient of the unclipped float64 loss."""
    critic = critic_of(model, clip=100.0)
    learner = make_learner(POLICY, ROLLOUT_MODEL, critic=critic)
    exact_model = copy.deepcopy(model).double()
    raw_credits = credited_by_hand(model, WRITTEN)
    loss, count = 0.0, 0
    for item in WRITTEN:
        ids = torch.tensor([[*item.rollout.prompt.token_ids, *item.rollout.token_ids.tolist()]])
        values = exact_model(input_ids=ids, use_cache=False).logits[0, len(item.rollout.prompt.token_ids) - 1 : -1, 0]
        mask = item.rollout.sampled_mask
        loss = loss + ((values - torch.from_numpy(raw_credits[item.rollout.uid][2]))[mask] ** 2).sum() / 2
        count += int(mask.sum())
    slopes = torch.autograd.grad(loss / count, list(exact_model.parameters()))

    (result,) = learner.train(batches(learner.compute_advantages(WRITTEN), budget=60), trace=False).steps

    norm = torch.cat([slope.flatten() for slope in slopes]).norm().item()
    assert result.metrics["critic/grad_norm"].value.item() == pytest.approx(norm, rel=1e-3)
    assert result.metrics["critic/loss"].value.item() == pytest.approx((loss / count).item(), rel=1e-3)
    assert critic.optimizer.steps == 1

    for parameter, start, slope in zip(model.parameters(), exact_model.parameters(), slopes, strict=True):
        expected_parameter = start - LINEAR.learning_rate * slope / (slope.abs() + LINEAR.eps)
        torch.testing.assert_close(parameter.double(), expected_parameter, rtol=1e-3, atol=1e-4)


def test_the_critic_learns_what_a_prompt_is_worth(fresh):
    """Rewards that the prompt decides: the explained variance rises from 0 towards 1."""
    items = write(ROLLOUT_MODEL, prompts=6, group=4, seed=2)
    rewards = [float(item.rollout.prompt.token_ids[0] % 2) for item in items]
    critic = critic_of(
        copy.deepcopy(fresh),
        OptimizerConfig(learning_rate=3e-3),
        gamma=1.0,
        lam=1.0,
        clip=100.0,
        micro_batch_tokens=999,
    )
    learner = make_learner(POLICY, ROLLOUT_MODEL, critic=critic)
    assert 0.0 < np.mean(rewards) < 1.0  # both kinds of prompts are there

    explained_variances = []
    for _ in range(15):
        (result,) = learner.train(batches(learner.compute_advantages(rewarded(items, rewards))), trace=False).steps
        error, returns = (result.metrics[f"critic/{name}"] for name in ("error", "return"))
        explained_variances.append(1.0 - (error.variance / returns.variance).item())

    assert abs(explained_variances[0]) < 1e-6  # a head of zeros explains nothing
    assert explained_variances[-1] > 0.8
    assert explained_variances[-1] > explained_variances[5]
    assert explained_variances[5] > explained_variances[1]
    assert explained_variances[1] > 0.0


def test_a_run_with_a_critic_reports_it_and_saves_it(tmp_path):
    overrides = (
        SHORT,
        "iterations=1",
        "evaluation.problems=2",
        "objective.advantage=gae",
        "critic.optimizer.learning_rate=1e-3",
    )

    lines = run(small_config(*overrides), tmp_path)

    assert {"critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/clip_frac"} <= lines[1].keys()

    saved_model = load_value_model(tmp_path / "checkpoints" / "last" / "critic", torch.float32)
    assert saved_model.score.weight.abs().max() > 0.0


def test_a_batch_without_a_usable_rollout_gets_no_advantages():
    config = small_config("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")
    model = load_trained(config, "critic", config.policy.path, torch.device("cpu"), resumes=False)
    critic = make_critic(config, {"critic": model})

    assert critic.batches([]) == []
    assert critic.compute_advantages([], {}) == []
