"""A run in a few numbers, against the lines of its own metrics.jsonl."""

import json
from pathlib import Path

import pytest

from helpers.runs import FinishedRuns, read_lines, small_config
from jackpot.analysis.compare.summary import points_of, summarize
from jackpot.core.errors import CheckpointError
from research.study import read_summary

COSTS = {
    "iteration": 1,
    "tokens/rollout": 100.0,
    "flops/rollout": 1e6,
    "flops/train": 5e6,
    "seconds/rollout": 1.0,
    "seconds/train": 2.0,
    "seconds/evaluate": 50.0,  # not training
    "seconds/prepass": 0.5,  # a part of train
    "cpu_seconds/rollout": 0.25,
    "cpu_seconds/sync": 0.5,
}
ACCURACY = {"eval/policy_accuracy": 0.5, "eval/rollout_model_accuracy": 0.25}


def line(iteration: int, **more: float | None) -> dict:
    """A line of metrics.jsonl, of an iteration with COSTS."""
    return COSTS | {"iteration": iteration} | more


def test_an_evaluation_knows_what_training_spent_until_then() -> None:
    config = small_config()
    lines = [{"iteration": 0} | ACCURACY, line(1), line(2, **ACCURACY), line(3, **ACCURACY)]
    start, second, third = points_of(lines, config)

    assert (start.sequences, start.flops, start.cpu_seconds, start.policy_accuracy) == (0.0, 0.0, 0.0, 0.5)
    assert (second.sequences, second.tokens, second.flops, second.training_flops) == (32.0, 200.0, 2e6, 1e7)
    assert (second.seconds, second.cpu_seconds) == (6.0, 1.5)
    assert (third.sequences, third.seconds) == (48.0, 9.0)


def test_rounds_of_dynamic_sampling_are_sequences_too() -> None:
    lines = [line(1, **{"sampling/gen_batches": 3.0}, **ACCURACY)]
    assert [point.sequences for point in points_of(lines, small_config())] == [48.0]


def test_means_are_over_the_iterations_since_an_evaluation() -> None:
    metric, kl = "obrs/acceptance", "mismatch/kl_rollout_policy"
    lines = [
        {"iteration": 0} | ACCURACY,
        line(1, **{metric: 0.9, kl: 0.1}),
        line(2, **{metric: 0.7, kl: None}, **ACCURACY),
        line(3, **{metric: 0.5, kl: 0.3}, **ACCURACY),
    ]
    points = list(points_of(lines, small_config()))

    assert [point.acceptance for point in points] == [None, pytest.approx(0.8), 0.5]
    assert [point.kl for point in points] == [None, 0.1, 0.3]


def test_a_real_run_is_summed_up_and_survives_as_text(finished_run: FinishedRuns) -> None:
    folder = finished_run("iterations=2")
    lines, summary = read_lines(folder), summarize(folder, "obrs")

    assert (summary.arm, summary.seed, summary.iterations, summary.problems) == ("obrs", 0, 2, 8)
    assert [point.iteration for point in summary.points] == [0, 2]
    assert summary.last.tokens == lines[1]["tokens/rollout"] + lines[2]["tokens/rollout"]
    assert summary.last.policy_accuracy == lines[2]["eval/policy_accuracy"]
    assert summary.is_done and summary.collapse is None
    assert summary.settings["iterations"] == 2 and summary.environment["threads"] == 1
    assert summary.last.rollout_model_accuracy == lines[2]["eval/rollout_model_accuracy"]
    assert read_summary(summary.to_json()) == summary
    assert json.loads(summary.to_json())["points"][0]["iteration"] == 0


def test_a_folder_without_an_evaluation_is_refused(finished_run: FinishedRuns, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        summarize(tmp_path, "obrs")

    finished_run.copy(tmp_path / "run", "iterations=2")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="no evaluation yet"):
        summarize(tmp_path / "run", "obrs")
