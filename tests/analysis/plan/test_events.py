"""The simulation of engines and learner by discrete events. Expectations: timelines by hand, the cost model."""

import math
import random
from dataclasses import replace

import pytest

from jackpot.analysis.plan.cost_model import GPUS, EngineSpeed, Lengths, ModelCost
from jackpot.analysis.plan.events import Cluster, Response, Simulated, Speed, simulate


def steady(steps: float, tokens: float, pairs: float) -> float:
    """Decode one token a second, however many sequences there are."""
    return steps


CLUSTER = Cluster(
    engines=1, models=[Speed(steady, prefill=0.0, slots=4)], prompt=5, training=10.0, sending=1.0, ahead=0
)
BATCH = [Response(6), Response(8)]


def run(batches: int = 9, first: int = 4, batch: list[Response] | None = None, **changes: object) -> Simulated:
    return simulate(replace(CLUSTER, **changes), [batch or BATCH] * batches, first)


@pytest.mark.parametrize(
    ("changes", "seconds", "lag"),
    [
        ({}, 8 + 10 + 1, 0),  # the longest response, training, sending
        ({"ahead": 1}, 10 + 1, 1),  # generation is hidden
        ({"ahead": 1, "training": 3.0}, 8 + 1, 1),  # training is hidden
        ({"engines": 2}, 8 + 10 + 1, 0),  # one response each
        ({"models": [Speed(steady, 0.0, slots=1)]}, 14 + 10 + 1, 0),  # one after the other
        ({"models": [Speed(steady, 0.0, slots=1)], "engines": 2}, 8 + 10 + 1, 0),
        ({"models": [Speed(steady, 2.0, slots=4)]}, 2 * 2 + 8 + 10 + 1, 0),  # two prompts
    ],
)
def test_an_iteration_takes_what_its_timeline_takes(changes: dict[str, object], seconds: float, lag: float) -> None:
    found = run(**changes)
    assert (found.seconds, found.lag, found.lost_tokens) == (pytest.approx(seconds), lag, 0)


@pytest.mark.parametrize(
    ("changes", "learner", "engines"),
    [({}, 10 / 19, 8 / 19), ({"ahead": 1}, 10 / 11, 8 / 11), ({"ahead": 1, "training": 3.0}, 3 / 9, 8 / 9)],
)
def test_shares_are_those_of_the_iterations_that_are_counted(
    changes: dict[str, object], learner: float, engines: float
) -> None:
    found = run(**changes)
    assert found.learner_busy == pytest.approx(learner) and found.engines_busy == pytest.approx(engines)


def test_three_batches_ahead_are_two_that_are_generated_while_two_are_trained_on() -> None:
    slots = {"models": [Speed(steady, 0.0, slots=2)]}  # a second batch fills slots as they get free: 16 s for two
    for training, seconds in ((10.0, (20 + 1) / 2), (3.0, (16 + 1) / 2)):
        found = run(batches=15, ahead=3, training=training, **slots)
        assert found.seconds == pytest.approx(seconds) and found.lag == 2.5
    assert run(ahead=2).seconds == run(ahead=1).seconds and run(ahead=2).lag == 2  # as one, a batch earlier


@pytest.mark.parametrize("ahead", range(9))
def test_no_batch_is_older_than_ahead_allows(ahead: int) -> None:
    """From ahead // 2 + 1 to ahead, as docs/regimes.md says, once the first batches are trained on."""
    lags = [
        run(batches=number + 1 + ahead, first=number, ahead=ahead).lag for number in range(2 + ahead, 3 * ahead + 5)
    ]
    assert (min(lags), max(lags)) == (ahead // 2 + 1 if ahead else 0, ahead)


def test_weights_in_flight_stop_generation_for_their_transfer_only() -> None:
    """A batch is begun when the one two before it is trained on: generation, stop, training, transfer."""
    found = run(in_flight=True, ahead=1, training=3.0)
    assert (found.seconds, found.lag) == (pytest.approx((8 + 1 + 3 + 1) / 2), 1)


def test_models_of_an_engine_take_turns() -> None:
    models = [Speed(steady, 0.0, 4), Speed(lambda steps, *_: 3 * steps, 0.0, 4)]
    found = run(models=models, batch=[Response(6, 0), Response(4, 0), Response(5, 1)])
    assert found.seconds == pytest.approx(6 + 3 * 5 + 10 + 1)


def test_responses_of_an_engine_that_dies_are_generated_again() -> None:
    never = run(batches=60)
    assert run(batches=60, between_deaths=1e9, restart=100.0) == never
    one, two = (run(batches=60, between_deaths=200.0, restart=30.0, engines=engines) for engines in (1, 2))
    assert never.seconds < two.seconds < one.seconds  # the other engine goes on
    assert one.lost_tokens > 0 and one == run(batches=60, between_deaths=200.0, restart=30.0)
    assert one != run(batches=60, between_deaths=200.0, restart=30.0, seed=1)
    slots = {"models": [Speed(steady, 0.0, slots=1)]}  # a second for each token, those that are lost too
    found = run(batches=300, first=1, between_deaths=50.0, **slots)
    assert found.seconds == pytest.approx(6 + 8 + found.lost_tokens + 10 + 1, rel=0.01) and found.lost_tokens > 0.5


MODEL = ModelCost(parameters=1_720_000_000, trained=0, body=2_800_000_000, head=622_000_000, pair=229_376, cache=57_344)
LENGTHS = Lengths(prompt=120, mean=2048.0, limit=8192)


@pytest.mark.parametrize(
    ("slots", "sequences", "error"), [(64, 64, 0.01), (512, 512, 0.01), (256, 512, 0.03), (32, 64, 0.1)]
)
def test_one_engine_takes_as_long_as_the_cost_model_says(slots: int, sequences: int, error: float) -> None:
    """With responses at the middles of equal parts of their distribution, so that the longest is the expected one.

    Where responses wait for a slot the cost model has the longest begin last, which is too long for few of them.
    """
    gpu = GPUS["H100"]
    engine = EngineSpeed(
        model=MODEL, weight_bytes=2, number_bytes=2, max_num_seqs=slots, cache_bytes=math.inf, gpus=1, peak=gpu.bf16
    )
    scale = LENGTHS.scale
    lengths = [min(8192, math.ceil(-scale * math.log(1 - (place + 0.5) / sequences))) for place in range(sequences)]
    draws = random.Random(0)
    batches = [[Response(length) for length in draws.sample(lengths, sequences)] for _ in range(9)]
    cluster = replace(
        CLUSTER,
        models=[Speed(engine.decoding(gpu).seconds, engine.prefill(LENGTHS.prompt), slots)],
        prompt=LENGTHS.prompt,
    )
    seconds = simulate(cluster, batches, 1).seconds - 11
    assert seconds == pytest.approx(engine.seconds(sequences, LENGTHS, gpu), rel=error)
