"""Runs in which both models generate rollouts: each its own p_inf, Z, kappa, baseline and engine check."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from helpers.learners import batches, make_learner, parameters, policy_objective, smallest_model, train, write
from helpers.runs import BRIEF, SHORT, assert_same_run, metrics, read_lines, run, run_and_copy, small_config, weights
from jackpot.config.config import OptimizerConfig
from jackpot.core.types import Score, ScoredRollout
from jackpot.training.advantages import response_advantages
from jackpot.training.run_folder.folder import RunFolder

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
LINEAR = OptimizerConfig(learning_rate=5e3, eps=1e4, max_grad_norm=1e6)  # steps of AdamW that are 0.5 times gradients
SHORT_RUN = (SHORT, "iterations=2", "evaluation.problems=2")
ANNEALED = "rollout_model.share={schedule: linear, hold: 1, until: 4}"


def assert_equal_weights(first_folder, second_folder, role):
    first_weights, second_weights = weights(first_folder, role), weights(second_folder, role)
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)


@pytest.mark.slow
def test_a_run_with_a_share_of_0_is_an_on_policy_run(tmp_path):
    on_policy = small_config(*SHORT_RUN, "policy.optimizer.learning_rate=2e-4", arm="on_policy")
    share_of_0 = small_config(*SHORT_RUN, "rollout_model.share=0.0", "objective.correction=none")

    on_policy_lines = run(on_policy, tmp_path / "on_policy")
    share_lines = run(share_of_0, tmp_path / "share 0")

    assert_equal_weights(tmp_path / "on_policy", tmp_path / "share 0", "policy")
    for name in (
        "policy/loss",
        "flops/train",
        "flops/rollout",
        "obrs/z",
        "mismatch/engine_gap",
        "eval/policy_accuracy",
    ):
        assert [line.get(name) for line in on_policy_lines] == [line.get(name) for line in share_lines], name


@pytest.mark.slow
def test_a_run_with_a_share_of_1_is_a_run_without_a_share(tmp_path, finished_run):
    share_of_1 = small_config(
        *SHORT_RUN, "rollout_model.share={schedule: step, hold: 9}"
    )  # 9 iterations, of which 2 run
    run(share_of_1, tmp_path)
    plain_folder = finished_run(*SHORT_RUN)

    for role in ("policy", "rollout_model"):
        assert_equal_weights(tmp_path, plain_folder, role)
    for share_line, plain_line in zip(metrics(tmp_path), metrics(plain_folder), strict=True):
        numbers = {name: value for name, value in plain_line.items() if isinstance(value, float)}
        assert {name: share_line[name] for name in numbers} == pytest.approx(
            numbers, rel=1e-12
        )  # sums of another order


def test_a_killed_annealed_run_ends_as_the_whole_run(tmp_path):
    config = small_config(*BRIEF, ANNEALED, "batch.mini_batch_size=8", "rollout_model.split=group")
    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=2)
    run(config, tmp_path / "killed")

    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy", "rollout_model"])

    first_line, *_, last_line = read_lines(tmp_path / "whole")[1:]
    assert (first_line["sampling/rollout_model_share"], last_line["sampling/rollout_model_share"]) == (1.0, 0.0)
    assert "rollout_model/loss" in first_line
    assert "rollout_model/loss" not in last_line  # nothing is left for it to do

    first_flops, last_flops = (line["flops/train"] / line["tokens/train"] for line in (first_line, last_line))
    assert last_flops < 0.95 * first_flops


def test_every_part_of_a_mixed_run_tells_the_models_apart(tmp_path):
    config = small_config("rollout_model.share=0.5", "batch.ahead=1", "iterations=1", "evaluation.problems=2")
    run(config, tmp_path)
    events = RunFolder(tmp_path).read("events.jsonl")

    assert {event["model"] for event in events if event["event"] == "engine_check"} == {"policy", "rollout_model"}

    line = read_lines(tmp_path)[1]
    assert line["obrs/acceptance_by_policy"] > 0.999
    assert line["obrs/acceptance_by_rollout_model"] < 0.99
    assert line["mismatch/ratio_above_10_by_policy"] == 0.0
    assert line["rollout_model/weight"] == pytest.approx(1.0, abs=1e-5)  # of what its own weights generated
    assert line["flops/rollout_by_policy"] + line["flops/rollout_by_rollout_model"] == line["flops/rollout"]
    assert line["flops/rollout_by_policy"] > 2 * line["flops/rollout_by_rollout_model"]

    rows = pq.read_table(tmp_path / "rollouts" / "iteration-000001.parquet").to_pylist()
    writers_by_prompt = {row["prompt_uid"]: set() for row in rows}
    for row in rows:
        writers_by_prompt[row["prompt_uid"]].add(row["sampled_by"])

    assert sorted(writers_by_prompt.values(), key=min) == [{"policy"}] * 2 + [{"rollout_model"}] * 2
    for row in rows:
        assert row["sampled_by"] == "rollout_model" or min(row["z"]) > 0.999


def written_by(role, model, seed):
    """Rollouts whose uids no other model's rollouts have."""
    items = write(model, prompts=3, seed=seed, num_top_log_probs=5)
    return [replace(item, rollout=replace(item.rollout, sampled_by=role)) for item in items]


POLICY_ITEMS, ROLLOUT_MODEL_ITEMS = written_by("policy", POLICY, 1), written_by("rollout_model", ROLLOUT_MODEL, 2)
SETTINGS = {  # of the objective, and the tokens of a micro-batch
    "kappa of another pass": (dict(kappa="prepass"), 60),
    "kappa repaired": (dict(kappa="auto", kappa_tolerance=0.0), 60),
    "one micro-batch": (dict(kappa="auto"), 10_000),
    "no kappa": (dict(kappa="none", mask="expected"), 60),
    "exact": (dict(normalizer="exact", kappa="auto"), 60),
}


def policy_move(items, rollout_model, budget, **settings):
    """By what the policy moves in one step, times its tokens: a sum over tokens, as the rate is linear."""
    objective = policy_objective(**settings)
    is_mixed = len({item.rollout.sampled_by for item in items}) > 1
    changes = dict(optimizer=LINEAR, is_frozen=True, is_mixed=is_mixed, num_top_log_probs=5)
    learner = make_learner(POLICY, rollout_model, objective=objective, **changes)

    start = parameters(learner, "policy").double()
    train(learner, batches(items, budget=budget))

    tokens = sum(int(item.rollout.sampled_mask.sum()) for item in items)
    return (parameters(learner, "policy").double() - start) * tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mixed_step_is_the_sum_of_each_models_rollouts(name):
    """The policy's own as in a run without a rollout model, the others as in one with nothing else, kappa included."""
    settings, budget = SETTINGS[name]
    policy_part = policy_move(POLICY_ITEMS, None, budget, **settings)
    rollout_model_part = policy_move(ROLLOUT_MODEL_ITEMS, ROLLOUT_MODEL, budget, **settings)
    mixed_move = policy_move([*POLICY_ITEMS, *ROLLOUT_MODEL_ITEMS], ROLLOUT_MODEL, budget, **settings)

    assert (mixed_move - policy_part - rollout_model_part).norm() < 1e-4 * mixed_move.norm()
    assert min(policy_part.norm(), rollout_model_part.norm()) > 0.1 * mixed_move.norm()


def test_kappa_is_each_models_own():
    objective = policy_objective(kappa="prepass")
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, is_mixed=True, num_top_log_probs=2)
    (mixed_result,) = train(learner, batches([*POLICY_ITEMS, *ROLLOUT_MODEL_ITEMS]))

    lone_learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, num_top_log_probs=2)
    (rollout_model_result,) = train(lone_learner, batches(ROLLOUT_MODEL_ITEMS))

    kappas = {name: entry.value.item() for name, entry in mixed_result.metrics.items() if name.startswith("obrs/kappa")}

    lone_kappa = rollout_model_result.metrics["obrs/kappa"].value.item()
    assert kappas["obrs/kappa_by_rollout_model"] == pytest.approx(lone_kappa, rel=1e-6)
    assert kappas["obrs/kappa_by_policy"] != pytest.approx(kappas["obrs/kappa_by_rollout_model"], rel=1e-4)


@pytest.mark.parametrize("exact", ["policy", "rollout_model"])
def test_each_engine_is_compared_with_its_own_model(exact):
    changes = dict(objective=policy_objective(), is_mixed=True, num_top_log_probs=5)
    learner = make_learner(POLICY, ROLLOUT_MODEL, exact_engines=(exact,), **changes)
    steps = batches([*POLICY_ITEMS, *ROLLOUT_MODEL_ITEMS], budget=10_000)

    for batch in steps[0]:
        is_current = learner._forward.weights_are_current(batch)
        assert torch.equal(is_current.all(-1), batch.by_policy == (exact == "policy"))

    (result,) = train(learner, steps)
    assert result.metrics["mismatch/engine_gap_max"].value < 1e-5
    assert result.metrics["mismatch/kept_mass"].value == pytest.approx(1.0, abs=1e-5)


def test_rewards_are_compared_within_group_or_model():
    rewards = {("policy", 0): 1.0, ("policy", 1): 0.0, ("rollout_model", 0): 1.0, ("rollout_model", 1): 1.0}
    first_item, items = POLICY_ITEMS[0], []
    for (role, index), reward in rewards.items():
        rollout = replace(first_item.rollout, uid=f"{role}{index}", sampled_by=role)
        items.append(ScoredRollout(rollout=rollout, score=Score(reward=reward)))

    def advantages(name, baseline):
        return [
            float(sample.advantages[0]) for sample in response_advantages(name, items, within_model=baseline == "model")
        ]

    assert advantages("dr_grpo", "group") == pytest.approx([0.25, -0.75, 0.25, 0.25])
    assert advantages("dr_grpo", "model") == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert advantages("rloo", "group") == pytest.approx([1 / 3, -1.0, 1 / 3, 1 / 3])
