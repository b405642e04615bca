"""Engines that sleep, in this process and in others, free their weights and wake with those they are sent."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from helpers.engines.conformance import NEW, OLD
from helpers.engines.hosts import NEVER, forking, kill, pool_of, wait_until_all_hold
from helpers.engines.reference import tiny_model, tiny_request
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.hosted import EnginePool
from jackpot.rollout.engines.process import ProcessLink
from jackpot.rollout.engines.transformers.engine import TransformersEngine

CPU = torch.device("cpu")
REQUESTS = [tiny_request(f"{i}", 2 + i, seed=i, max_new_tokens=8) for i in range(6)]


def sleeper(folder: str, **settings: str) -> TransformersEngine:
    """Make an engine that can sleep and has no weights of the run yet."""
    torch.set_num_threads(1)
    return make_engine(TransformersEngineConfig(enable_sleep_mode=True, **settings), folder, CPU, NEVER)


def make_sleepers(folder: str) -> dict[str, Engine]:
    return {"engine": sleeper(folder)}


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    """Return the tokens of the responses."""
    return [rollout.token_ids.tolist() for rollout in rollouts]


def num_bytes(engine: TransformersEngine) -> int:
    """The memory of the engine's weights and buffers."""
    return sum(
        tensor.untyped_storage().nbytes()
        for tensor in (*engine._weights.model.parameters(), *engine._weights.model.buffers())
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_sleeping_engine_wakes_with_the_weights_it_is_sent(quantization, folder) -> None:
    new_weights = list(tiny_model(seed=1).named_parameters())
    with closing(sleeper(str(folder), quantization=quantization)) as engine:
        awake_bytes = num_bytes(engine)
        digest, expected_tokens = engine.update_weights(new_weights, NEW), tokens(engine.generate(REQUESTS))

        engine.submit(REQUESTS[:1])
        with pytest.raises(EngineError, match="in flight"):
            engine.sleep()

        engine.collect(1)
        engine.sleep()
        engine.sleep()

        assert num_bytes(engine) < 0.05 * awake_bytes  # what is left are frequencies of positions
        for call in (lambda: engine.submit(REQUESTS), lambda: engine.score([], 1.0)):
            with pytest.raises(EngineError, match="the engine sleeps and has no weights"):
                call()

        with pytest.raises(EngineError, match="missing"):
            engine.update_weights(new_weights[1:], NEW)
        assert num_bytes(engine) < 0.05 * awake_bytes

        assert engine.update_weights(new_weights, NEW) == digest
        assert num_bytes(engine) == awake_bytes
        assert tokens(engine.generate(REQUESTS)) == expected_tokens


@pytest.fixture
def links(new_folder: Path) -> dict[str, ProcessLink]:
    return {f"fork {index}": ProcessLink(forking(make_sleepers), str(new_folder), 20.0) for index in range(2)}


@pytest.fixture
def pool(links: dict[str, ProcessLink], folder: Path) -> Iterator[EnginePool]:
    pool = pool_of(links, folder, OLD)
    yield pool
    for engine in pool.engines.values():
        engine.close()


def test_an_engine_that_died_asleep_is_started_at_the_waking(pool, links) -> None:
    engine = pool.engines["engine"]

    assert engine.capabilities.sleeps

    expected_tokens, path = tokens(engine.generate(REQUESTS)), pool.pool.newest["engine"].memory.path
    engine.sleep()

    assert not path.exists()
    assert all(peer._weight_names["engine"].startswith("engine asleep") for peer in pool.pool.peers)
    with pytest.raises(EngineError, match="the engine sleeps"):
        engine.submit(REQUESTS)
    with pytest.raises(EngineError, match="the engine sleeps"):
        engine.score([], 1.0)

    kill(links["fork 1"])
    engine._is_asleep = False
    engine.sleep()  # asks all processes: one is found to be gone

    deadline = time.monotonic() + 20.0
    while links["fork 1"].child is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # a fork would have been started in its place by then

    assert links["fork 1"].child is None
    assert links["fork 0"].child is not None

    assert engine.update_weights(tiny_model(seed=0).named_parameters(), OLD) == weights_digest(
        tiny_model(seed=0).named_parameters(), torch.float32
    )

    wait_until_all_hold(pool)
    assert links["fork 1"].child is not None
    assert tokens(engine.generate(REQUESTS)) == expected_tokens


@pytest.mark.slow
def test_to_sleep_waits_for_a_process_that_is_being_started(folder: Path, new_folder: Path) -> None:
    """It would take memory that others are about to use."""

    def make_slowly(setup: str) -> dict[str, Engine]:
        time.sleep(1.0)
        return make_sleepers(setup)

    links = {f"fork {index}": ProcessLink(forking(make_slowly), str(new_folder), 20.0) for index in range(2)}
    pool = pool_of(links, folder, OLD)
    peer = pool.pool.peers[1]
    with closing(pool.engines["engine"]) as engine:
        kill(links["fork 1"])
        engine.generate(REQUESTS)

        deadline = time.monotonic() + 20.0
        while not peer._is_starting and time.monotonic() < deadline:
            time.sleep(0.01)

        engine.sleep()

        assert peer._weight_names["engine"].startswith("engine asleep")
        assert links["fork 1"].child is not None
