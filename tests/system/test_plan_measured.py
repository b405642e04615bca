"""The simulation of `jackpot plan` against real runs, whose engine and learner are slowed to known speeds."""

import statistics
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.engines.hosts import forking, make_paced
from helpers.runs import small_config
from jackpot.analysis.plan.events import Cluster, Response, Speed, simulate
from jackpot.launch import local
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.training.joint_learner import JointLearner

STEP, TRAINING = 0.12, 2.4  # seconds of a decoding step, and of training on a batch
ITERATIONS = 20


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "ahead"), [(1, 1), (2, 0), (2, 1)])
def test_a_run_at_known_speeds_takes_as_long_as_is_simulated(
    engines: int, ahead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines are processes of their own, each of which generates its part of a batch at once."""
    lengths: dict[str, list[int]] = defaultdict(list)
    complete, train = BackgroundEngine._complete, JointLearner.train

    def noted(engine, rollouts):
        for rollout in rollouts:
            lengths[rollout.uid.split("/")[0]].append(len(rollout.token_ids))  # by iteration, or "eval"
        complete(engine, rollouts)

    def slow_train(self, *arguments, **named):
        end = time.monotonic() + TRAINING
        result = train(self, *arguments, **named)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    starting = lambda *_: forking(partial(make_paced, period=STEP))  # noqa: E731
    monkeypatch.setattr("jackpot.launch.engine_processes.starting", starting)
    monkeypatch.setattr(BackgroundEngine, "_complete", noted)
    monkeypatch.setattr(JointLearner, "train", slow_train)
    config = small_config(
        *(f"iterations={ITERATIONS}", f"batch.ahead={ahead}", "evaluation.every=100", "checkpoint.every=100"),
        f"placement.engines={engines}",
    )
    ends: list[float] = []
    local.train_run(config, tmp_path / "run", lambda line: ends.append(time.monotonic()))
    measured = statistics.median(after - before for before, after in pairwise(ends[1:-1]))  # without evaluations

    speed = Speed(lambda steps, tokens, pairs: STEP * steps, prefill=0.0, slots=config.batch.rollouts // engines)
    cluster = Cluster(engines=engines, models=[speed], prompt=8, training=TRAINING, sending=0.0, ahead=ahead)
    batches = [[Response(length) for length in lengths[str(number)]] for number in range(1, ITERATIONS + 1)]
    assert all(len(batch) == config.batch.rollouts for batch in batches)
    seconds = [simulate(cluster, batches[:end], end - 1 - ahead).seconds for end in range(2 + ahead, ITERATIONS + 1)]
    simulated = statistics.median(seconds)
    print(f"engines {engines}, ahead {ahead}: measured {measured:.3f} s, simulated {simulated:.3f} s an iteration")
    assert measured == pytest.approx(simulated, rel=0.1)
