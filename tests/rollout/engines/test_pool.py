"""Engines in other processes behind one `Engine`: what their number and their deaths change, which is nothing."""

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
    return [tiny_request(f"{one}", 2 + one % 9, seed=one, **{"max_new_tokens": 10} | sampling) for one in range(count)]


def assert_equal(some: list[Rollout], others: list[Rollout]) -> None:
    """Bit for bit, in order."""
    for one, other in zip(some, others, strict=True):
        assert (one.uid, one.prompt, one.finish) == (other.uid, other.prompt, other.finish)
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in TOKEN_COLUMNS)


@pytest.fixture(scope="module")
def chunk_by_chunk(folder: Path) -> list[Rollout]:
    """What an engine of this process makes of 40 requests, five at a time."""
    [engine] = make_tiny(str(folder)).values()
    with closing(engine), torch.no_grad():
        engine.update_weights(tiny_model(seed=0).named_parameters(), OLD)
        wanted = requests(40)
        return [one for first in range(0, 40, 5) for one in engine.generate(wanted[first : first + 5])]


def threads(number: int, folder: Path) -> dict[str, ThreadLink]:
    return {f"thread {one}": ThreadLink(make_tiny, str(folder)) for one in range(number)}


@pytest.fixture
def pool(new_folder: Path, folder: Path) -> Iterator[EnginePool]:
    """A pool of two hosts, each of which was made with other weights than those that the pool sends."""
    links = threads(2, new_folder)
    pool = pool_of(links, folder, OLD)
    pool.links = links
    yield pool
    for engine in pool.engines.values():
        engine.close()


def test_three_engines_generate_what_one_does(folder, new_folder, chunk_by_chunk) -> None:
    with closing(pool_of(forks(3, new_folder), folder, OLD).engines["engine"]) as engine:
        assert_equal(engine.generate(requests(40)), chunk_by_chunk)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "its process was killed by signal 9"),
        pytest.param(signal.SIGSTOP, "no sign of life for 1.5 seconds", marks=pytest.mark.slow),
    ],
)
def test_chunks_of_a_dead_or_hanging_engine_go_to_the_others(
    number: int, why: str, folder, new_folder, chunk_by_chunk
) -> None:
    links = forks(2, new_folder, silence=1.5)
    pool = pool_of(links, folder, OLD)
    with closing(pool.engines["engine"]) as engine:
        engine.submit(requests(40))
        kill(links["fork 1"], number)
        found = {one.uid: one for one in engine.collect(40)}
        assert_equal([found[one.uid] for one in requests(40)], chunk_by_chunk)
        wait_until_all_hold(pool)
        lost, back = engine.take_events()
        assert lost.pop("why").endswith(why)
        assert lost == {"event": "peer_lost", "peer": "fork 1", "sent_again": 1}
        assert back == {"event": "peer_restarted", "peer": "fork 1"}
        digest = engine.update_weights(tiny_model(seed=1).named_parameters(), NEW)
        assert digest == weights_digest(tiny_model(seed=1).named_parameters(), torch.float32)
        assert {tuple(one.versions[0].tolist()) for one in engine.generate(requests(40))} == {NEW}


@pytest.mark.slow
def test_fifteen_kills_lose_and_double_no_chunk(folder, new_folder) -> None:
    """Fifteen kills, of one engine after the other. A chunk is two requests."""
    links = forks(3, new_folder)
    pool = pool_of(links, folder, OLD, chunk=2)
    wanted = requests(150, max_new_tokens=8)
    with (
        closing(pool.engines["engine"]) as engine,
        closing(pool_of(threads(1, folder), folder, OLD, chunk=2).engines["engine"]) as quiet,
    ):
        found, killed = [], set()
        for number in range(15):
            engine.submit(wanted[10 * number : 10 * number + 10])
            killed.add(links[f"fork {number % 3}"].child.pid)
            kill(links[f"fork {number % 3}"])
            found += engine.collect(10)
            wait_until_all_hold(pool)
        assert len(found) == 150 and engine.collect(1) == []
        assert len(killed) == 15
        lost = [event["event"] for event in engine.take_events()].count("peer_lost")
        assert lost in (14, 15)  # the last one may have done all that it had to do
        assert_equal(sorted(found, key=lambda one: int(one.uid)), quiet.generate(wanted))


def test_an_engine_that_lost_its_weights_waits_for_them(pool: EnginePool) -> None:
    """It says so, whoever asks it, and the chunk waits until it has the newest weights."""
    first = pool.links["thread 0"]
    before = first.host
    first.restart()
    generated = pool.engines["engine"].generate(requests(20))
    assert {tuple(one.versions[0].tolist()) for one in generated} == {OLD}
    assert first.opened == 1 and first.host is not before and first.host._weight_names
    assert [event["event"] for event in pool.engines["engine"].take_events()] == ["peer_lost", "peer_restarted"]
    late = pack({"do": "generate", "engine": "engine", "held": {"engine": "others"}, "samplings": [], "requests": []})
    assert unpack(first.host.answer(late)) == {"stale": first.host._weight_names}


def test_without_any_engine_the_pool_waits_and_gives_up(new_folder, folder) -> None:
    links = threads(2, new_folder)
    with closing(pool_of(links, folder, OLD, patience=0.3).engines["engine"]) as engine:
        engine.submit(requests(10))
        for link in links.values():
            link.is_broken = True
        with pytest.raises(EngineError, match=r"no peer could be used for placement.timeout = 0.3 seconds \(thread"):
            engine.generate([tiny_request("late")])


def test_an_engine_that_ends_at_each_attempt_ends_the_run(new_folder, folder, monkeypatch) -> None:
    monkeypatch.setattr("jackpot.rollout.engines.pool._FIRST_WAIT", 0.01)
    links = threads(1, new_folder)
    with closing(pool_of(links, folder, OLD).engines["engine"]) as engine:
        links["thread 0"].breaks_at = "3"
        with pytest.raises(EngineError, match=r"0 failed the most attempts = 5 times \(thread 0: as the test wants it"):
            engine.generate(requests(5))


def test_an_engine_that_holds_other_weights_is_named(new_folder, folder) -> None:
    class Wrong(ThreadLink):
        def restart(self) -> None:
            super().restart()
            engine = self.host._engines["engine"]
            update = engine.update_weights
            engine.update_weights = lambda sent, version: update(((name, one + 1) for name, one in sent), version)

    links = {"right": ThreadLink(make_tiny, str(new_folder)), "wrong": Wrong(make_tiny, str(new_folder))}
    with pytest.raises(EngineError, match=r"(wrong|right) read the weights engine 0 and holds digest \w{12}, another"):
        pool_of(links, folder, OLD)


def test_reading_weights_leaves_nothing_behind(tmp_path) -> None:
    """Neither from memory nor from a file of safetensors, which are read bit for bit."""
    tensors = {
        f"{kind} {one}": torch.arange(64.0).to(kind) for kind in (torch.float32, torch.int8) for one in range(20)
    }
    memory, file = SharedWeights(tensors.items()), tmp_path / "model.safetensors"
    save_file(tensors, file)
    for path in (memory.path, file):
        read = dict(read_weights(path))
        assert read.keys() == tensors.keys() and all(torch.equal(read[name], one) for name, one in tensors.items())
        assert all(read[name].dtype == one.dtype for name, one in tensors.items())
        before = sys.getallocatedblocks()
        for _ in range(20):
            dict(read_weights(path))
        assert sys.getallocatedblocks() - before < 200  # objects, of 800 tensors


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
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Counting, int], list[int]]]:
    """Gives a peer so many requests at once, and returns them in the order in which they were done."""
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
    done: list[int] = []

    def give(peer: Counting, count: int) -> list[int]:
        pool.call(pool.join(peer))
        is_done = threading.Event()
        finish = [done.append] * (count - 1) + [lambda last: (done.append(last), is_done.set())]
        pool.begin([(str(number), number, finish[number]) for number in range(count)])
        assert is_done.wait(60.0)
        return done

    yield give
    pool.close()


def test_a_request_that_failed_comes_before_the_others(one_by_one) -> None:
    assert one_by_one(Counting(0, 2), 4) == [0, 1, 2, 3]


def test_the_failures_of_a_peer_end_with_a_success(one_by_one) -> None:
    """So it is tried again soon, however often it failed before."""
    peer = Counting(0, 0, 2)
    one_by_one(peer, 4)
    assert peer.failed_so_far == [2, 0, 1, 0]


def test_weights_are_forgotten_with_what_held_them(pool: EnginePool) -> None:
    """A host whose update fails holds none under the old name, and a closed pool keeps none in memory."""
    host = pool.links["thread 0"].host
    take = {"do": "take", "engine": "engine", "name": "new", "version": [1, 1], "path": "/nowhere"}
    assert "cannot read the weights" in unpack(host.answer(pack(take)))["lost"]
    old = {"engine": pool.pool.newest["engine"].name}
    late = {"do": "generate", "engine": "engine", "held": old, "samplings": [], "requests": []}
    assert unpack(host.answer(pack(late))) == {"stale": {}}

    memory = weakref.ref(pool.pool.newest["engine"].memory)
    pool.engines["engine"].close()
    gc.collect()
    assert memory() is None
