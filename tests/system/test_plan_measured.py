"""research/placements.py counts the time of an iteration that real runs take, at known speeds of engine and learner."""

import statistics
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.engines.hosts import forking, make_paced
from helpers.runs import small_config
from jackpot.analysis.plan.cost_model import Hours
from jackpot.launch import start
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.training.joint_learner import JointLearner
from research.placements import batches_at_once, overlapped

STEP, TRAINING = 0.12, 2.4  # seconds of a decoding step, and of training on a batch
ITERATIONS = 8


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "ahead"), [(2, 0), (2, 1)])
def test_a_run_at_known_speeds_takes_as_long_as_is_counted(
    engines: int, ahead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines are processes of their own, each of which generates its part of a batch at once."""
    lengths: dict[str, list[int]] = defaultdict(list)
    complete, train = BackgroundEngine._complete, JointLearner.train

    def complete_and_note(engine, rollouts, drafts=None):
        for rollout in rollouts:
            lengths[rollout.uid.split("/")[0]].append(len(rollout.token_ids))  # by iteration, or "eval"
        complete(engine, rollouts, drafts)

    def train_slowly(self, *arguments, **keywords):
        end = time.monotonic() + TRAINING
        result = train(self, *arguments, **keywords)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    starter = lambda *_: forking(partial(make_paced, period=STEP))  # noqa: E731
    monkeypatch.setattr("jackpot.launch.engine_processes.make_starter", starter)
    monkeypatch.setattr(BackgroundEngine, "_complete", complete_and_note)
    monkeypatch.setattr(JointLearner, "train", train_slowly)

    config = small_config(
        *(f"iterations={ITERATIONS}", f"batch.ahead={ahead}", "evaluation.every=100", "checkpoint.every=100"),
        f"placement.engines={engines}",
    )
    line_times: list[float] = []
    start.train_run(config, tmp_path / "run", lambda line: line_times.append(time.monotonic()))
    times_without_evaluations = line_times[1:-1]
    measured_seconds = statistics.median(end - begin for begin, end in pairwise(times_without_evaluations))

    generation_seconds = [STEP * max(lengths[str(iteration)]) for iteration in range(2, ITERATIONS)]
    assert all(len(lengths[str(iteration)]) == config.batch.rollouts for iteration in range(2, ITERATIONS))
    durations = [Hours(generation, TRAINING, sending=0.0) for generation in generation_seconds]  # seconds
    counted_seconds = statistics.median(
        (overlapped(seconds, batches_at_once(ahead)) if ahead else seconds).all for seconds in durations
    )
    print(
        f"engines {engines}, ahead {ahead}: "
        f"measured {measured_seconds:.3f} s, counted {counted_seconds:.3f} s an iteration"
    )

    assert measured_seconds == pytest.approx(counted_seconds, rel=0.1)
