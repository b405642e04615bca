"""How often one update waits for the device, counted on the CPU by what would wait on a GPU (`helpers.waits`)."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from helpers.learners import LINEAR, batches, make_learner, policy_objective, smallest_model, write
from helpers.waits import waits
from jackpot.config.config import CriticConfig
from jackpot.config.sampling import Sampling
from jackpot.core.types import ScoredRollout
from jackpot.models.load import load_value_model
from jackpot.objectives.kernels import autograd
from jackpot.training import batching, joint_forward, kappa
from jackpot.training.advantages import Critic
from jackpot.training.old_policy import holds_target
from jackpot.training.optimizer import ModelOptimizer
from jackpot.training.reference import Reference

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
WRITTEN = write(ROLLOUT_MODEL, prompts=8, group=1, seed=4, max_new=4, turn_end_token_ids=(7, 8, 9))
BUDGETS = {1: 10_000, 3: 20}  # by the number of micro-batches that they give


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    smallest_model(3).save_pretrained(folder)
    return load_value_model(folder, torch.float32)


@pytest.fixture(autouse=True)
def a_device(monkeypatch):
    """Batches are copied, as they are to a GPU, and a tile holds half of the vocabulary."""
    for module in (joint_forward, kappa):
        monkeypatch.setattr(module, "batch_to", batching._to)
    monkeypatch.setattr(autograd, "MAX_TILE_LOGITS", dict.fromkeys(autograd.MAX_TILE_LOGITS, 80))
    monkeypatch.setattr(autograd, "MAX_TILE_POSITIONS", 8)


def host_tensors(batch):
    """All tensors of a batch, those of the packed row among them."""
    columns = [getattr(part, field.name) for part in (batch, batch.packed) if part for field in fields(part)]
    return [column for column in columns if isinstance(column, Tensor)]


def critic_of(model):
    return Critic(model, ModelOptimizer(model.parameters(), LINEAR, 10), CriticConfig(optimizer=LINEAR), 10_000)


def waits_and_metrics(learner, micro_batches, trace, **options):
    """The waits of one update, each as "operator at file:line", and its metrics."""
    with waits(tensor for micro in micro_batches for tensor in host_tensors(micro.tokens)) as wait_lines:
        result, _ = learner.update(micro_batches, trace, **options)
    return wait_lines, result.metrics


@pytest.mark.parametrize(
    ("kappa", "target", "parts", "trace"),
    [("auto", "new", 1, True), ("auto", "new", 3, True), ("auto", "old", 3, False)],
)
def test_an_update_waits_at_most_three_times(kappa, target, parts, trace):
    """Once to decide, once for the columns of saved rollouts, and once where kappa is known after the backward passes.

    The first update on a batch computes the old log-probs itself, the second one has them.
    """
    objective = policy_objective(kappa=kappa, target=target, kappa_tolerance=0.0)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective)
    batch_steps = batches(WRITTEN, budget=BUDGETS[parts])
    steps = [*learner.compute_old_log_probs(batch_steps), learner.compute_old_log_probs(2 * batch_steps)[1]]
    repaired_steps = []

    for step in steps:
        assert len(step) == parts
        repairs_kappa = kappa == "auto" and parts > 1 and not holds_target(step[0].old, objective)
        expected_places = ["kappa"] * repairs_kappa + ["joint_optimizer"] + ["old_policy"] * trace

        wait_lines, metrics = waits_and_metrics(learner, step, trace)
        repaired_steps.append(repairs_kappa and bool(metrics["obrs/repaired_sequences"].value > 0.0))

        assert len(expected_places) <= 3
        assert len(wait_lines) == len(expected_places), wait_lines
        assert all(name in line for name, line in zip(expected_places, wait_lines, strict=True)), wait_lines

    assert any(repaired_steps) == (kappa == "auto" and parts > 1)  # sequences were read again, too


def test_a_score_waits_once_a_micro_batch_and_for_the_result():
    learner = make_learner(POLICY, ROLLOUT_MODEL)
    parts = batching.plain_batches([item.rollout for item in WRITTEN], BUDGETS[3], seed=0)

    with waits(tensor for part in parts for tensor in host_tensors(part)) as wait_lines:
        scores = learner.score("policy", parts, Sampling(max_new_tokens=4, num_top_log_probs=2))

    assert len(scores) == len(WRITTEN), wait_lines
    assert len(parts) > 1
    assert len(wait_lines) == len(parts) + 1, wait_lines


@pytest.mark.slow
@pytest.mark.parametrize("case", ["everything", "exact", "on_policy", "frozen", "once"])
def test_no_other_regime_waits_more_often(case, value_model):
    objective = policy_objective(normalizer="exact" if case == "exact" else "topk")
    options = {"is_frozen": True} if case == "frozen" else {"rollout_model_each_step": case != "once"}
    if case == "everything":
        objective = replace(objective, kl_loss_coef=0.1, entropy_coeff=0.1)
        options |= {"critic": critic_of(value_model)}
        options |= {"reference": Reference(smallest_model(2), POLICY, estimate="exact", temperature=1.0)}

    learner = make_learner(POLICY, None if case == "on_policy" else ROLLOUT_MODEL, objective=objective, **options)

    items = WRITTEN
    if case == "everything":
        scores = [ScoredRollout(rollout=item.rollout, score=item.score) for item in WRITTEN]
        items = learner.compute_advantages(scores)

    [step] = learner.compute_old_log_probs(batches(items, budget=BUDGETS[3]))

    wait_lines, _ = waits_and_metrics(learner, step, trace=True, steps_rollout_model=case != "once")

    assert len(wait_lines) <= 3, wait_lines
