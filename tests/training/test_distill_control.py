"""`rollout_model.distill_control` moves the weight of the distillation so that a metric stays at its target."""

import math
from pathlib import Path

import pytest

from helpers.learners import batches, make_learner, rollout_model_objective, smallest_model, train, write
from helpers.runs import metrics, run, small_config
from jackpot.config.config import OptimizerConfig
from jackpot.config.schedules import DistillControlConfig
from jackpot.training.joint_optimizer import next_distill_weight

KL, ACCEPTANCE = "mismatch/kl_policy_rollout", "obrs/acceptance"
POLICY = smallest_model(0)
WRITTEN = write(POLICY)


def learner_of(control: DistillControlConfig | None, **changes):
    """Return a learner whose policy stays; its own PPO loss drives the rollout model, a copy at first, away."""
    objective = rollout_model_objective(distill_weight=0.05, clip_low=9.0, clip_high=9.0)
    optimizer = OptimizerConfig(learning_rate=3e-3)
    learner = make_learner(
        POLICY, POLICY, optimizer=optimizer, rollout_objective=objective, distill_control=control, **changes
    )
    learner._optimizer._optimizers["policy"]._config = OptimizerConfig(learning_rate=1e-30)
    return learner


@pytest.mark.parametrize(
    ("control", "measurements", "expected_weight"),
    [  # of a weight of 1
        (dict(target=0.1, horizon=2.0), dict(kl=0.11), 1.05),
        (dict(target=0.1, horizon=2.0), dict(kl=0.09), 0.95),
        (dict(target=0.1, horizon=2.0), dict(kl=5.0), 1.1),
        (dict(target=0.1, horizon=2.0), dict(kl=0.0), 0.9),
        (dict(target=0.1), dict(kl=5.0), 1.02),
        (dict(target=0.1, horizon=1.0, high=1.1), dict(kl=5.0), 1.1),
        (dict(target=0.1, horizon=1.0, low=0.9), dict(kl=0.0), 0.9),
        (dict(target=0.1), dict(kl=math.nan), 1.0),
        (dict(target=0.1), dict(kl=math.inf), 1.0),
        (dict(metric="acceptance", target=0.9, horizon=2.0), dict(acceptance=0.89, kl=0.0), 1.05),
        (dict(metric="acceptance", target=0.9, horizon=2.0), dict(acceptance=0.91, kl=5.0), 0.95),
        (dict(metric="acceptance", target=0.9, horizon=2.0), dict(acceptance=0.2, kl=0.0), 1.1),
        (dict(metric="acceptance", target=0.9), dict(acceptance=math.nan), 1.0),
    ],
)
def test_the_weight_changes_by_the_error_over_the_horizon(control, measurements, expected_weight) -> None:
    metric_values = {"kl": math.nan, "acceptance": math.nan} | measurements
    assert next_distill_weight(DistillControlConfig(**control), 1.0, **metric_values) == pytest.approx(
        expected_weight, rel=1e-12
    )


def test_models_stay_at_the_target_where_they_would_part() -> None:
    controlled_learner, free_learner = learner_of(DistillControlConfig(target=0.05, horizon=1.0)), learner_of(None)

    controlled_steps = [train(controlled_learner, batches(WRITTEN))[0].metrics for _ in range(45)]
    free_steps = [train(free_learner, batches(WRITTEN))[0].metrics for _ in range(20)]

    assert sum(step[KL].value.item() for step in controlled_steps[-8:]) / 8 == pytest.approx(0.05, rel=0.3)
    assert min(step[KL].value.item() for step in free_steps[-8:]) > 10 * 0.05

    weights = [step["rollout_model/distill_weight"].value.item() for step in controlled_steps]
    assert weights[0] == 0.05
    assert weights[1] == pytest.approx(0.05 * 0.8)  # the first step saw equal models
    assert {step["rollout_model/distill_weight"].value.item() for step in free_steps} == {0.05}


def test_the_weight_waits_for_a_step_of_the_rollout_model() -> None:
    learner = learner_of(DistillControlConfig(target=0.05), rollout_model_each_step=False)

    results = [step for _ in range(2) for step in learner.train(batches(WRITTEN, mini_batch_size=4), trace=False).steps]

    weights = [result.metrics["rollout_model/distill_weight"].value.item() for result in results]
    assert weights[:3] == [0.05] * 3
    assert weights[3] != 0.05
    assert weights[3:] == [weights[3]] * 3


@pytest.mark.slow
def test_a_run_keeps_its_acceptance_where_it_would_collapse(tmp_path: Path) -> None:
    overrides = (
        *("iterations=16", "batch.prompts=8", "batch.mini_batch_size=8", "evaluation.every=100"),
        *("rollout_model.distill_weight=0.02", "rollout_model.clip_low=null", "rollout_model.clip_high=null"),
        *("rollout_model.optimizer.learning_rate=1e-3", "policy.optimizer.learning_rate=5e-5"),
    )
    control = "rollout_model.distill_control={metric: acceptance, target: 0.92, horizon: 1}"

    run(small_config(*overrides), tmp_path / "free")
    run(small_config(*overrides, control), tmp_path / "controlled")

    def mean(name: str, metric: str) -> float:
        """Return the mean of a metric over the last six iterations of a run."""
        return sum(line[metric] for line in metrics(tmp_path / name)[-6:]) / 6

    assert mean("free", KL) > 0.5
    assert mean("controlled", KL) < 0.5 * mean("free", KL)
    assert mean("controlled", ACCEPTANCE) > mean("free", ACCEPTANCE) + 0.05
