"""The hours of research/placements.py against real runs, whose engine and learner are slowed to known speeds."""

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

    def noted(engine, rollouts, drafts=None):
        for rollout in rollouts:
            lengths[rollout.uid.split("/")[0]].append(len(rollout.token_ids))  # by iteration, or "eval"
        complete(engine, rollouts, drafts)

    def slow_train(self, *arguments, **named):
        end = time.monotonic() + TRAINING
        result = train(self, *arguments, **named)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    starter = lambda *_: forking(partial(make_paced, period=STEP))  # noqa: E731
    monkeypatch.setattr("jackpot.launch.engine_processes.make_starter", starter)
    monkeypatch.setattr(BackgroundEngine, "_complete", noted)
    monkeypatch.setattr(JointLearner, "train", slow_train)
    config = small_config(
        *(f"iterations={ITERATIONS}", f"batch.ahead={ahead}", "evaluation.every=100", "checkpoint.every=100"),
        f"placement.engines={engines}",
    )
    ends: list[float] = []
    start.train_run(config, tmp_path / "run", lambda line: ends.append(time.monotonic()))
    measured = statistics.median(after - before for before, after in pairwise(ends[1:-1]))  # without evaluations

    longest = [STEP * max(lengths[str(number)]) for number in range(2, ITERATIONS)]
    assert all(len(lengths[str(number)]) == config.batch.rollouts for number in range(2, ITERATIONS))
    in_turn = [Hours(generation, TRAINING, sending=0.0) for generation in longest]  # seconds
    counted = statistics.median(
        (overlapped(seconds, batches_at_once(ahead)) if ahead else seconds).all for seconds in in_turn
    )
    print(f"engines {engines}, ahead {ahead}: measured {measured:.3f} s, counted {counted:.3f} s an iteration")
    assert measured == pytest.approx(counted, rel=0.1)
