"""Engines in other processes behind one `Engine`: what their number and their deaths change, which is nothing."""

import asyncio
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.engines.conformance import NEW, OLD, NumberConformance, QueueConformance
from helpers.engines.hosts import ThreadLink, forks, kill, make_tiny, pool_of, wait_until_all_hold
from helpers.engines.reference import tiny_model, tiny_request
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.messages import pack, unpack
from jackpot.core.types import TOKEN_COLUMNS, Rollout, Version
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.hosted import EnginePool, PooledEngine
from jackpot.rollout.engines.pool import Peer, PeerLost, Pool, PoolLimits
from jackpot.rollout.engines.shared_weights import SharedWeights, read_weights


@pytest.mark.slow
class TestPooledEngine(QueueConformance, NumberConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> PooledEngine:
        return pool_of(forks(3, folder), folder, version, chunk=40).engines["engine"]


def requests(count: int, **sampling: int) -> list[Request]:
    """Return requests with prompts of 2 to 10 tokens, for 10 new ones unless changed."""
    return [
        tiny_request(f"{index}", 2 + index % 9, seed=index, **{"max_new_tokens": 10} | sampling)
        for index in range(count)
    ]


def assert_equal(rollouts: list[Rollout], expected_rollouts: list[Rollout]) -> None:
    """Check rollouts bit for bit, in order."""
    for rollout, expected_rollout in zip(rollouts, expected_rollouts, strict=True):
        assert (rollout.uid, rollout.prompt, rollout.finish) == (
            expected_rollout.uid,
            expected_rollout.prompt,
            expected_rollout.finish,
        )
        assert all(torch.equal(getattr(rollout, name), getattr(expected_rollout, name)) for name in TOKEN_COLUMNS)


@pytest.fixture(scope="module")
def chunk_by_chunk(folder: Path) -> list[Rollout]:
    """What an engine of this process makes of 40 requests, five at a time."""
    [engine] = make_tiny(str(folder)).values()
    with closing(engine), torch.no_grad():
        engine.update_weights(tiny_model(seed=0).named_parameters(), OLD)
        all_requests = requests(40)
        return [rollout for start in range(0, 40, 5) for rollout in engine.generate(all_requests[start : start + 5])]


def thread_links(count: int, folder: Path) -> dict[str, ThreadLink]:
    """Return engines of the model in this folder, each on a thread of this process."""
    return {f"thread {index}": ThreadLink(make_tiny, str(folder)) for index in range(count)}


@pytest.fixture
def pool(new_folder: Path, folder: Path) -> Iterator[EnginePool]:
    """A pool of two hosts, each of which was made with other weights than those that the pool sends."""
    links = thread_links(2, new_folder)
    pool = pool_of(links, folder, OLD)
    pool.links = links
    yield pool
    for engine in pool.engines.values():
        engine.close()


def test_three_engines_generate_what_one_does(folder, new_folder, chunk_by_chunk) -> None:
    with closing(pool_of(forks(3, new_folder), folder, OLD).engines["engine"]) as engine:
        assert_equal(engine.generate(requests(40)), chunk_by_chunk)


@pytest.mark.parametrize(
    ("signal_number", "reason"),
    [
        (signal.SIGKILL, "its process was killed by signal 9"),
        pytest.param(signal.SIGSTOP, "no sign of life for 1.5 seconds", marks=pytest.mark.slow),
    ],
)
def test_chunks_of_a_dead_or_hanging_engine_go_to_the_others(
    signal_number: int, reason: str, folder, new_folder, chunk_by_chunk
) -> None:
    links = forks(2, new_folder, silence=1.5)
    pool = pool_of(links, folder, OLD)
    with closing(pool.engines["engine"]) as engine:
        engine.submit(requests(40))
        kill(links["fork 1"], signal_number)
        rollouts_by_uid = {rollout.uid: rollout for rollout in engine.collect(40)}

        assert_equal([rollouts_by_uid[request.uid] for request in requests(40)], chunk_by_chunk)

        wait_until_all_hold(pool)

        loss_event, restart_event = engine.take_events()
        assert loss_event.pop("why").endswith(reason)
        assert loss_event == {"event": "peer_lost", "peer": "fork 1", "sent_again": 1}
        assert restart_event == {"event": "peer_restarted", "peer": "fork 1"}

        digest = engine.update_weights(tiny_model(seed=1).named_parameters(), NEW)
        assert digest == weights_digest(tiny_model(seed=1).named_parameters(), torch.float32)
        assert {tuple(rollout.versions[0].tolist()) for rollout in engine.generate(requests(40))} == {NEW}


@pytest.mark.slow
def test_fifteen_kills_lose_and_double_no_chunk(folder, new_folder) -> None:
    """Fifteen kills, of one engine after the other. A chunk is two requests."""
    links = forks(3, new_folder)
    pool = pool_of(links, folder, OLD, chunk=2)
    all_requests = requests(150, max_new_tokens=8)

    with (
        closing(pool.engines["engine"]) as engine,
        closing(pool_of(thread_links(1, folder), folder, OLD, chunk=2).engines["engine"]) as quiet_engine,
    ):
        rollouts, killed_ids = [], set()
        for kill_index in range(15):
            engine.submit(all_requests[10 * kill_index : 10 * kill_index + 10])
            killed_ids.add(links[f"fork {kill_index % 3}"].child.pid)
            kill(links[f"fork {kill_index % 3}"])
            rollouts += engine.collect(10)
            wait_until_all_hold(pool)

        assert len(rollouts) == 150
        assert engine.collect(1) == []
        assert len(killed_ids) == 15
        lost_count = [event["event"] for event in engine.take_events()].count("peer_lost")
        assert lost_count in (14, 15)  # the last one may have done all that it had to do
        assert_equal(sorted(rollouts, key=lambda rollout: int(rollout.uid)), quiet_engine.generate(all_requests))


def test_an_engine_that_lost_its_weights_waits_for_them(pool: EnginePool) -> None:
    """It says so, whoever asks it, and the chunk waits until it has the newest weights."""
    link = pool.links["thread 0"]
    old_host = link.host
    link.restart()

    rollouts = pool.engines["engine"].generate(requests(20))

    assert {tuple(rollout.versions[0].tolist()) for rollout in rollouts} == {OLD}
    assert link.opened == 1
    assert link.host is not old_host
    assert link.host._weight_names
    assert [event["event"] for event in pool.engines["engine"].take_events()] == ["peer_lost", "peer_restarted"]

    late_request = pack(
        {"do": "generate", "engine": "engine", "held": {"engine": "others"}, "samplings": [], "requests": []}
    )

    assert unpack(link.host.answer(late_request)) == {"stale": link.host._weight_names}


def test_without_any_engine_the_pool_waits_and_gives_up(new_folder, folder) -> None:
    links = thread_links(2, new_folder)
    with closing(pool_of(links, folder, OLD, patience=0.3).engines["engine"]) as engine:
        engine.submit(requests(10))
        for link in links.values():
            link.is_broken = True
        with pytest.raises(EngineError, match=r"no peer could be used for placement.timeout = 0.3 seconds \(thread"):
            engine.generate([tiny_request("late")])


def test_an_engine_that_ends_at_each_attempt_ends_the_run(new_folder, folder, monkeypatch) -> None:
    monkeypatch.setattr("jackpot.rollout.engines.pool._FIRST_WAIT", 0.01)
    links = thread_links(1, new_folder)
    with closing(pool_of(links, folder, OLD).engines["engine"]) as engine:
        links["thread 0"].breaks_at = "3"
        with pytest.raises(EngineError, match=r"0 failed the most attempts = 5 times \(thread 0: as the test wants it"):
            engine.generate(requests(5))


def test_an_engine_that_holds_other_weights_is_refused(new_folder, folder) -> None:
    """Other than those of the engine that answered first."""
    has_answered = asyncio.Event()

    class Right(ThreadLink):
        async def ask(self, message: torch.Tensor) -> torch.Tensor:
            answer = await super().ask(message)
            if unpack(message)["do"] == "take":
                has_answered.set()
            return answer

    class Wrong(ThreadLink):
        async def ask(self, message: torch.Tensor) -> torch.Tensor:
            if unpack(message)["do"] == "take":
                await has_answered.wait()
            return await super().ask(message)

        def restart(self) -> None:
            super().restart()
            engine = self.host._engines["engine"]
            update = engine.update_weights
            engine.update_weights = lambda named_tensors, version: update(
                ((name, tensor + 1) for name, tensor in named_tensors), version
            )

    links = {"right": Right(make_tiny, str(new_folder)), "wrong": Wrong(make_tiny, str(new_folder))}

    with pytest.raises(EngineError, match=r"^wrong read the weights engine 0 and holds digest \w{12}, another"):
        pool_of(links, folder, OLD)


def test_reading_weights_leaves_nothing_behind(tmp_path) -> None:
    """Neither from memory nor from a file of safetensors, which are read bit for bit."""
    tensors = {
        f"{kind} {index}": torch.arange(64.0).to(kind) for kind in (torch.float32, torch.int8) for index in range(20)
    }
    memory, file = SharedWeights(tensors.items()), tmp_path / "model.safetensors"
    save_file(tensors, file)

    for path in (memory.path, file):
        weights = dict(read_weights(path))
        assert weights.keys() == tensors.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
        assert all(weights[name].dtype == tensor.dtype for name, tensor in tensors.items())

        old_count = sys.getallocatedblocks()
        for _ in range(20):
            dict(read_weights(path))
        assert sys.getallocatedblocks() - old_count < 200  # objects, of 800 tensors


def test_an_engine_that_cannot_be_made_says_why(folder, tmp_path) -> None:
    with pytest.raises(EngineError, match="there is no model folder"):
        pool_of(forks(1, tmp_path / "nothing"), folder, OLD)


class Counting(Peer):
    """Answers a request with its number, and fails at those that it is told."""

    def __init__(self, *failures: int) -> None:
        super().__init__("counting", capacity=1)
        self.failures, self.failed_so_far = list(failures), []

    async def sync(self, newest: object) -> None:
        assert self.weights is None or self.weights is not newest

    async def run(self, request: int) -> int:
        if request in self.failures:
            self.failures.remove(request)
            raise PeerLost("as the test wants it")
        self.failed_so_far.append(self.num_failures)
        return request


@pytest.fixture
def requests_as_answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Counting, int], list[int]]]:
    """A function that gives a peer so many requests at once and returns them in the order of their answers."""
    monkeypatch.setattr("jackpot.rollout.engines.pool._FIRST_WAIT", 0.01)
    limits = PoolLimits(
        patience=60.0,
        patience_setting="",
        unreachable_advice="",
        attempts=9,
        attempts_setting="",
        failing_advice="no luck",
    )
    pool: Pool[Counting] = Pool(limits, object(), "counting")
    finished_requests: list[int] = []

    def order_of(peer: Counting, count: int) -> list[int]:
        pool.call(pool.join(peer))
        all_finished = threading.Event()
        callbacks = [finished_requests.append] * (count - 1) + [
            lambda last_request: (finished_requests.append(last_request), all_finished.set())
        ]
        pool.begin([(str(request), request, callbacks[request]) for request in range(count)])
        assert all_finished.wait(60.0)
        return finished_requests

    yield order_of
    pool.close()


def test_a_request_that_failed_comes_before_the_others(requests_as_answered) -> None:
    assert requests_as_answered(Counting(0, 2), 4) == [0, 1, 2, 3]


def test_the_failures_of_a_peer_end_with_a_success(requests_as_answered) -> None:
    """So it is tried again soon, however often it failed before."""
    peer = Counting(0, 0, 2)
    requests_as_answered(peer, 4)
    assert peer.failed_so_far == [2, 0, 1, 0]


def test_weights_are_forgotten_with_what_held_them(pool: EnginePool) -> None:
    """A host whose update fails holds none under the old name, and a closed pool keeps none in memory."""
    host = pool.links["thread 0"].host
    take_call = {"do": "take", "engine": "engine", "name": "new", "version": [1, 1], "path": "/nowhere"}

    assert "cannot read the weights" in unpack(host.answer(pack(take_call)))["lost"]

    old_weights = {"engine": pool.pool.newest["engine"].name}
    late_call = {"do": "generate", "engine": "engine", "held": old_weights, "samplings": [], "requests": []}
    assert unpack(host.answer(pack(late_call))) == {"stale": {}}

    memory = weakref.ref(pool.pool.newest["engine"].memory)
    pool.engines["engine"].close()
    gc.collect()

    assert memory() is None
