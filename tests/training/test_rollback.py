"""`guard.rollback`: a run that collapses goes back to an earlier checkpoint and goes on with smaller steps."""

import json
import signal
from pathlib import Path

import pytest

from helpers.runs import assert_same_run, metrics, run, run_and_copy, small_config
from jackpot.core.errors import CheckpointError, TrainingError
from jackpot.launch.start import train_run
from jackpot.training.limits import fall_of
from jackpot.training.rollback import Rollback, RollbackGuard, Rollbacks
from jackpot.training.run_folder.folder import RunFolder, run_config
from jackpot.training.trainer import MetricsLine

# A hundred times the quickstart's learning rate: nothing is right after one iteration.
COLLAPSES = (
    *("policy.optimizer.learning_rate=1e-2", "evaluation.every=1", "evaluation.problems=16", "checkpoint.every=1"),
)
GUARD = "guard.rollback={factor: 0.01}"


def events(folder: Path, name: str) -> list[dict]:
    return [event for event in RunFolder(folder).read("events.jsonl") if event["event"] == name]


def accuracies(folder: Path) -> list[float]:
    return [line["eval/policy_accuracy"] for line in metrics(folder)]


def test_a_run_that_collapses_goes_back_and_ends_good(tmp_path: Path) -> None:
    config = small_config(*COLLAPSES, GUARD, "iterations=2")
    seen = [line["iteration"] for line in run(config, tmp_path)]
    assert seen == [0, 1, 2, 1, 2]
    assert min(accuracies(tmp_path)) > 0.7 * accuracies(tmp_path)[0] > 0.2
    lines = metrics(tmp_path)
    assert [line["health/rollbacks"] for line in lines] == [0.0, 1.0, 1.0]
    assert {line["policy/learning_rate"] for line in lines[1:]} == {1e-2 * 0.01}
    assert {line["rollout_model/learning_rate"] for line in lines[1:]} == {4e-4 * 0.01}
    (event,) = events(tmp_path, "rollback")
    assert (event["iteration"], event["number"], event["back_from"], event["back_to"]) == (0, 1, 2, 0)
    assert "0.0% right at iteration 1, after" in event["why"] and event["rate_factor"] == 0.01
    assert Rollbacks(tmp_path).pending is None
    left = tmp_path / "superseded" / "1"
    assert accuracies(left) == [0.0, 0.0]
    assert sorted(path.name for path in (left / "checkpoints").iterdir()) == ["step-1", "step-2"]
    rollouts = [f"iteration-{number:06d}.parquet" for number in (1, 2)]
    assert sorted(path.name for path in (left / "rollouts").iterdir()) == rollouts
    assert run_config(tmp_path) == config  # the settings are what they were


@pytest.mark.slow
def test_a_kill_around_a_rollback_leaves_the_run_bit_equal(tmp_path: Path) -> None:
    config = small_config(*COLLAPSES, GUARD, "batch.ahead=3")
    run_and_copy(config, tmp_path / "whole", tmp_path / "after", after=3)

    def interrupt(line: MetricsLine) -> None:
        if line["iteration"] == 2:  # where the collapse is found
            signal.raise_signal(signal.SIGINT)

    assert not train_run(config, tmp_path / "before", interrupt)
    assert Rollbacks(tmp_path / "before").pending and not events(tmp_path / "before", "rollback")
    moved = tmp_path / "before" / "checkpoints" / "step-2"  # as if a kill came between the checkpoints that are moved
    (tmp_path / "before" / "superseded" / "1" / "checkpoints").mkdir(parents=True)
    moved.rename(tmp_path / "before" / "superseded" / "1" / "checkpoints" / "step-2")
    for name in ("before", "after"):
        run(config, tmp_path / name)
        assert_same_run(tmp_path / "whole", tmp_path / name, ["policy", "rollout_model"])
        assert len(events(tmp_path / name, "rollback")) == len(Rollbacks(tmp_path / name).all) == 1


def collapsed_folder(path: Path, *checkpoints: int) -> RunFolder:
    """A folder whose policy is right half of the time up to iteration 3, then not at all, at iterations 4 and 5."""
    folder = RunFolder(path)
    for number in checkpoints:
        (path / "checkpoints" / f"step-{number}").mkdir(parents=True)
        (path / "checkpoints" / f"step-{number}" / "checksums.json").write_text("{}")
    folder.rewind(-1)
    for iteration in range(5):
        folder.report(iteration, {"eval/policy_accuracy": 0.5 if iteration < 4 else 0.0})
    return folder


LOW = {"iteration": 5, "eval/policy_accuracy": 0.0}


@pytest.mark.parametrize(("checkpoints", "back_to"), [((1, 2, 4, 5), 2), ((1, 2, 3, 4, 5), 3), ((0, 5), 0), ((1,), 1)])
def test_it_goes_back_to_the_newest_good_checkpoint(tmp_path, checkpoints, back_to) -> None:
    guard = RollbackGuard(small_config("guard.rollback={}"), collapsed_folder(tmp_path, *checkpoints))
    assert guard.check({"iteration": 5, "reward/mean": 0.0}) is False  # no evaluation
    assert guard.check(LOW)
    assert Rollbacks(tmp_path).pending.back_to == back_to


def test_without_a_checkpoint_from_before_a_collapsed_run_stops(tmp_path: Path) -> None:
    """The guard may be set later; the checkpoint of iteration 0 is only written where it is set from the start."""
    guard = RollbackGuard(small_config("guard.rollback={}"), collapsed_folder(tmp_path, 4, 5))
    with pytest.raises(TrainingError, match="there is no checkpoint up to iteration 3, where it was still good"):
        guard.check(LOW)
    assert events(tmp_path, "stopped")[0]["iteration"] == 5


def test_rates_multiply_and_rollbacks_come_to_an_end(tmp_path: Path) -> None:
    config = small_config("guard.rollback={times: 2, factor: 0.5}")
    folder = collapsed_folder(tmp_path, 2)
    for factor in (0.5, 0.25):
        assert RollbackGuard(config, folder).check(LOW)
        rollbacks = Rollbacks(tmp_path)
        assert rollbacks.rate_factor == factor
        rollbacks.complete()
    with pytest.raises(TrainingError, match=r"0\.0% right at iteration 4, after 50\.0%, after 2 rollbacks"):
        RollbackGuard(config, folder).check(LOW)
    assert len(events(tmp_path, "stopped")) == 1 and len(Rollbacks(tmp_path).all) == 2


def test_a_damaged_record_of_rollbacks_is_refused(tmp_path: Path) -> None:
    rollbacks = Rollbacks(tmp_path)
    rollbacks.order(Rollback(back_from=2, back_to=1, rate_factor=0.5, why="test"))
    (entry,) = json.loads(rollbacks.path.read_text())
    rollbacks.path.write_text(json.dumps([entry | {"more": 1}]))
    with pytest.raises(CheckpointError, match=r"rollbacks\.json cannot be read"):
        Rollbacks(tmp_path)


@pytest.mark.parametrize(
    ("accuracies", "last_good"),
    [
        ((0.5, 0.6, 0.1, 0.1), 1),
        ((0.5, 0.6, 0.58, 0.1, 0.1), 2),
        ((0.5, 0.6, 0.45, 0.1, 0.1), 1),  # it has begun to fall, and is not below half yet
        ((0.6, 0.1, 0.59, 0.1, 0.1), 2),  # a single low one may be chance
    ],
)
def test_the_last_good_evaluation_is_the_best_but_for_chance(accuracies, last_good) -> None:
    assert fall_of(list(enumerate(accuracies)), 512).last_good == last_good
