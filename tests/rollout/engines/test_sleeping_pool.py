"""Engines that sleep, in this process and in others, and weights that reach others from a device instead of memory."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from helpers.engines.conformance import NEW, OLD
from helpers.engines.hosts import NEVER, forking, forks, kill, make_tiny, pool_of, wait_until_all_hold
from helpers.engines.reference import tiny_model, tiny_request
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.device_weights import Channel, DeviceWeights
from jackpot.rollout.engines.hosted import EnginePool
from jackpot.rollout.engines.process import ProcessLink
from jackpot.rollout.engines.shared_weights import views
from jackpot.rollout.engines.transformers.engine import TransformersEngine

CPU = torch.device("cpu")
WANTED = [tiny_request(f"{one}", 2 + one, seed=one, max_new_tokens=8) for one in range(6)]


def sleeper(folder: str, **settings: str) -> TransformersEngine:
    torch.set_num_threads(1)
    return make_engine(TransformersEngineConfig(enable_sleep_mode=True, **settings), folder, CPU, NEVER)


def make_sleepers(folder: str) -> dict[str, Engine]:
    return {"engine": sleeper(folder)}


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [one.token_ids.tolist() for one in rollouts]


def num_bytes(engine: TransformersEngine) -> int:
    return sum(
        one.untyped_storage().nbytes()
        for one in (*engine._weights.model.parameters(), *engine._weights.model.buffers())
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_sleeping_engine_wakes_with_the_weights_it_is_sent(quantization, folder) -> None:
    sent = list(tiny_model(seed=1).named_parameters())
    with closing(sleeper(str(folder), quantization=quantization)) as engine:
        held = num_bytes(engine)
        digest, expected = engine.update_weights(sent, NEW), tokens(engine.generate(WANTED))
        engine.submit(WANTED[:1])
        with pytest.raises(EngineError, match="in flight"):
            engine.sleep()
        engine.collect(1)
        engine.sleep()
        engine.sleep()
        assert num_bytes(engine) < 0.05 * held  # what is left are frequencies of positions
        for ask in (lambda: engine.submit(WANTED), lambda: engine.score([], 1.0)):
            with pytest.raises(EngineError, match="the engine sleeps and has no weights"):
                ask()
        with pytest.raises(EngineError, match="missing"):
            engine.update_weights(sent[1:], NEW)
        assert num_bytes(engine) < 0.05 * held
        assert engine.update_weights(sent, NEW) == digest and num_bytes(engine) == held
        assert tokens(engine.generate(WANTED)) == expected


@pytest.fixture
def links(new_folder: Path) -> dict[str, ProcessLink]:
    return {f"fork {one}": ProcessLink(forking(make_sleepers), str(new_folder), 20.0) for one in range(2)}


@pytest.fixture
def pool(links: dict[str, ProcessLink], folder: Path) -> Iterator[EnginePool]:
    pool = pool_of(links, folder, OLD, sleeping=["engine"])
    yield pool
    for engine in pool.engines.values():
        engine.close()


def test_an_engine_that_died_asleep_is_started_at_the_waking(pool, links) -> None:
    engine = pool.engines["engine"]
    assert engine.capabilities.sleeps
    expected, path = tokens(engine.generate(WANTED)), pool.pool.newest["engine"].memory.path
    engine.sleep()
    assert not path.exists() and all(peer._held["engine"].startswith("engine asleep") for peer in pool.pool.peers)
    with pytest.raises(EngineError, match="the engine sleeps"):
        engine.submit(WANTED)
    with pytest.raises(EngineError, match="the engine sleeps"):
        engine.score([], 1.0)
    kill(links["fork 1"])
    engine._is_asleep = False
    engine.sleep()  # asks all processes: one is found to be gone
    deadline = time.monotonic() + 20.0
    while links["fork 1"].child is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # a fork would have been started in its place by then
    assert links["fork 1"].child is None and links["fork 0"].child is not None
    assert engine.update_weights(tiny_model(seed=0).named_parameters(), OLD) == weights_digest(
        tiny_model(seed=0).named_parameters(), torch.float32
    )
    wait_until_all_hold(pool)
    assert links["fork 1"].child is not None and tokens(engine.generate(WANTED)) == expected


def test_to_sleep_waits_for_a_process_that_is_being_started(folder: Path, new_folder: Path) -> None:
    """It would take memory that others are about to use."""

    def make_slowly(setup: str) -> dict[str, Engine]:
        time.sleep(1.0)
        return make_sleepers(setup)

    links = {f"fork {one}": ProcessLink(forking(make_slowly), str(new_folder), 20.0) for one in range(2)}
    pool = pool_of(links, folder, OLD, sleeping=["engine"])
    peer = pool.pool.peers[1]
    with closing(pool.engines["engine"]) as engine:
        kill(links["fork 1"])
        engine.generate(WANTED)
        deadline = time.monotonic() + 20.0
        while not peer._is_starting and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.sleep()
        assert peer._held["engine"].startswith("engine asleep") and links["fork 1"].child is not None


@pytest.fixture
def over_device(new_folder: Path, folder: Path) -> Iterator[EnginePool]:
    """A pool of two processes, which get weights over gloo."""
    pool = pool_of(forks(2, new_folder, silence=3.0), folder, OLD, device=CPU)
    yield pool
    pool.engines["engine"].close()


def test_weights_from_a_device_are_those_from_memory(over_device, folder: Path) -> None:
    engine, model = over_device.engines["engine"], tiny_model(seed=1)
    assert isinstance(over_device.pool.newest["engine"].memory, DeviceWeights)
    with closing(make_tiny(str(folder))["engine"]) as here:
        for weights, version in ((tiny_model(seed=0), OLD), (model, NEW)):
            digest = here.update_weights(weights.named_parameters(), version)
            assert engine.update_weights(weights.named_parameters(), version) == digest
            wait_until_all_hold(over_device)
            assert tokens(engine.generate(WANTED)) == [one for item in WANTED for one in tokens(here.generate([item]))]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_process_lost_while_weights_are_sent_delays_no_other(number, over_device) -> None:
    engine, link = over_device.engines["engine"], over_device.pool.peers[1]._link
    kill(link, number)
    expected = weights_digest(tiny_model(seed=1).named_parameters(), torch.float32)
    assert engine.update_weights(tiny_model(seed=1).named_parameters(), NEW) == expected
    assert {tuple(one.versions[0].tolist()) for one in engine.generate(WANTED)} == {NEW}
    wait_until_all_hold(over_device)
    assert "peer_lost" in [event["event"] for event in engine.take_events()]


def test_weights_that_arrive_changed_end_the_run(over_device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two processes gets a byte that the other does not."""
    lock, broadcast, count = threading.Lock(), Channel.broadcast, iter(range(100))

    def changed(channel: Channel, memory: torch.Tensor) -> None:
        with lock:
            memory = memory.clone()
            memory[17] += next(count) % 2
        broadcast(channel, memory)

    monkeypatch.setattr(Channel, "broadcast", changed)
    with pytest.raises(EngineError, match="holds digest"):
        over_device.engines["engine"].update_weights(tiny_model(seed=1).named_parameters(), NEW)


def test_a_channel_that_nobody_joins_gives_up() -> None:
    channel = Channel("127.0.0.1", None, CPU, timeout=0.2)
    heard = {one.laddr.ip for one in psutil.Process().net_connections() if one.laddr[1:] == (channel.ticket["port"],)}
    assert channel.ticket["address"] == "127.0.0.1" and heard == {"127.0.0.1"}
    with pytest.raises(TimeoutError, match=r"did not take part in 0\.2 seconds"):
        channel.broadcast(torch.zeros(4, dtype=torch.uint8))


def test_codes_and_scales_share_the_memory_of_a_device() -> None:
    tensors = {"w": torch.arange(8, dtype=torch.int8).view(2, 4), "s": torch.tensor([0.5, 2.0])}
    weights = DeviceWeights(tensors.items(), None, CPU)
    for name, tensor in views(weights.memory, weights.head):
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    (half,) = dict(
        views((cast := DeviceWeights([("s", tensors["s"])], torch.bfloat16, CPU)).memory, cast.head)
    ).values()
    assert half.dtype == torch.bfloat16
