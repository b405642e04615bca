"""The floating-point operations that a run writes down, against its saved rollouts."""

import pyarrow.parquet as pq
import pytest

from helpers.runs import FinishedRuns, read_lines
from jackpot.models.cost import forward_cost
from jackpot.models.load import load_meta_model

pytestmark = pytest.mark.seconds  # runs, and whole models

COST = {role: forward_cost(load_meta_model(f"starter:{role}")) for role in ("policy", "rollout_model")}
CASES = [  # overrides, who writes, how often each model is gone through in training, epochs
    ((), None, "rollout_model", {"policy": 3, "rollout_model": 3}, 1),
    (
        ("iterations=1", "rollout_model.optimizer=null", "batch.ppo_epochs=2"),
        None,
        "rollout_model",
        {"policy": 3, "rollout_model": 1},
        2,
    ),
    (("iterations=1",), "on_policy", "policy", {"policy": 3}, 1),
]


@pytest.mark.parametrize(("overrides", "arm", "writer", "passes", "epochs"), CASES)
def test_flops_are_those_of_what_was_written_and_trained_on(overrides, arm, writer, passes, epochs, finished_run):
    folder = finished_run(*overrides, arm=arm)
    line = read_lines(folder)[1]
    rows = pq.read_table(folder / "rollouts" / "iteration-000001.parquet").to_pylist()
    lengths = [len(row["prompt_ids"]) + len(row["token_ids"]) - 1 for row in rows]  # nothing reads the last token

    # a token attends to itself and to those before it: n (n + 1) / 2 pairs
    cost = {
        role: sum(forward.per_token * n + forward.per_pair * n * (n + 1) / 2 for n in lengths)
        for role, forward in COST.items()
    }

    assert line["flops/rollout"] == pytest.approx(cost[writer], rel=1e-12)

    expected = epochs * sum(pass_count * cost[role] for role, pass_count in passes.items())
    assert line["flops/train"] == pytest.approx(expected, rel=1e-12)


def test_processor_seconds_stand_beside_those_of_the_clock(finished_run: FinishedRuns) -> None:
    line = read_lines(finished_run())[2]
    phases = {name.split("/")[1] for name in line if name.startswith("cpu_seconds/")}

    assert phases == {"rollout", "score", "check", "train", "sync", "save", "evaluate", "other"}
    for phase in phases:
        assert line[f"cpu_seconds/{phase}"] >= -1e-9  # "other" is a difference, so it may round below zero
        assert line[f"seconds/{phase}"] >= -1e-9
    assert line["cpu_seconds/train"] > 0.0
