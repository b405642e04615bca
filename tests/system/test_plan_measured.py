"""The simulation of `jackpot plan` against real runs, whose engine and learner are slowed to known speeds."""

import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.engines.threaded import ThreadedEngine
from helpers.runs import small_config
from jackpot.analysis.plan.events import Cluster, Response, Speed, simulate
from jackpot.launch import local
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.training.joint_learner import JointLearner

STEP, TRAINING = 0.08, 1.6  # seconds of a decoding step, and of training on a batch
ITERATIONS = 20


class Pace:
    """Sleeps until `period` seconds have passed since it was called last, or since `start`."""

    def __init__(self, period: float) -> None:
        self._period, self._next = period, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        self._next = max(self._next, now - self._period / 2) + self._period  # a late step makes the next one shorter
        time.sleep(max(0.0, self._next - now))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_at_known_speeds_takes_as_long_as_is_simulated(
    ahead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One engine: a run has no more of them yet."""
    lengths: dict[str, list[int]] = defaultdict(list)

    class SlowEngine(ThreadedEngine):
        def _complete(self, rollouts) -> None:
            for rollout in rollouts:
                lengths[rollout.uid.split("/")[0]].append(len(rollout.token_ids))  # by iteration, or "eval"
            super()._complete(rollouts)

    make_engine, train = local.make_engine, JointLearner.train

    def make(settings, path, *arguments):
        engine = make_engine(settings, path, *arguments)
        assert isinstance(engine, TransformersEngine)
        return SlowEngine(engine, Pace(STEP)) if "rollout_model" in str(path) else engine

    def slow_train(self, *arguments, **named):
        end = time.monotonic() + TRAINING
        result = train(self, *arguments, **named)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    monkeypatch.setattr(local, "make_engine", make)
    monkeypatch.setattr(JointLearner, "train", slow_train)
    config = small_config(
        f"iterations={ITERATIONS}", f"batch.ahead={ahead}", "evaluation.every=100", "checkpoint.every=100"
    )
    ends: list[float] = []
    local.train_run(config, tmp_path / "run", lambda line: ends.append(time.monotonic()))
    measured = statistics.median(after - before for before, after in pairwise(ends[1:-1]))  # without evaluations

    speed = Speed(lambda steps, tokens, pairs: STEP * steps, prefill=0.0, slots=64)
    cluster = Cluster(engines=1, models=[speed], prompt=8, training=TRAINING, sending=0.0, ahead=ahead)
    batches = [[Response(length) for length in lengths[str(number)]] for number in range(1, ITERATIONS + 1)]
    assert all(len(batch) == config.batch.rollouts for batch in batches)
    seconds = [simulate(cluster, batches[:end], end - 1 - ahead).seconds for end in range(2 + ahead, ITERATIONS + 1)]
    simulated = statistics.median(seconds)
    print(f"ahead {ahead}: measured {measured:.3f} s, simulated {simulated:.3f} s an iteration (median)")
    assert measured == pytest.approx(simulated, rel=0.1)
