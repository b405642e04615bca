"""Hosts of engines for tests: forks of this process, which import nothing again, or threads of it."""

import asyncio
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.messages import unpack
from jackpot.core.types import Version
from jackpot.launch.engine_processes import make_hosted
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_model
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.hosted import EngineHost, EnginePool, Link
from jackpot.rollout.engines.pool import PeerLost
from jackpot.rollout.engines.process import ProcessLink, serve

NEVER = Version(-1, -1)  # of weights that no rollout may come from
Make = Callable[[Any], Mapping[str, Engine]]


class ThreadLink(Link):
    """A host in a thread of this process, which a test can make forget what it was sent, or end."""

    def __init__(self, make: Make, setup: Any) -> None:
        self._make, self._setup = make, setup
        self.is_broken = False
        self.breaks_at: str | None = None  # uid of a request
        self.opened = 0

    async def open(self) -> None:
        if self.is_broken:
            raise PeerLost("as the test wants it")
        self.opened += 1
        self.restart()

    def restart(self) -> None:
        """Replace the host by one that was sent nothing."""
        self.host = EngineHost(self._make(self._setup))

    async def ask(self, message: Tensor) -> Tensor:
        """Return the host's answer; where the link is broken, or breaks at this request, the host is lost."""
        uids = [row[0] for row in unpack(message).get("requests", ())]
        if self.is_broken or self.breaks_at in uids:
            raise PeerLost("as the test wants it")
        return await asyncio.to_thread(self.host.answer, message)

    async def close(self) -> None:
        pass


class Fork:
    """A fork of this process, as asyncio has one that it started itself."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    async def wait(self) -> int:
        if self.returncode is None:
            _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def forking(make: Make) -> Callable[[socket.socket], Any]:
    """Return what starts a fork that serves engines, in place of `process.make_starter`."""

    async def start(child_end: socket.socket) -> Fork:
        pid = os.fork()
        if pid:
            return Fork(pid)
        try:
            os.setsid()
            descriptor = child_end.fileno()
            os.closerange(3, descriptor)  # whatever else this process has open
            os.closerange(descriptor + 1, 256)
            serve(child_end, make)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(1)

    return start


def fork_engines(monkeypatch: pytest.MonkeyPatch) -> list[ProcessLink]:
    """Have the engine processes of runs be forks; return a list to which the connections to them are added."""
    links: list[ProcessLink] = []
    monkeypatch.setattr("jackpot.launch.engine_processes.make_starter", lambda *_: forking(make_hosted))
    init = ProcessLink.__init__

    def recording_init(link: ProcessLink, *arguments: object) -> None:
        init(link, *arguments)
        links.append(link)

    monkeypatch.setattr(ProcessLink, "__init__", recording_init)
    return links


def make_tiny(folder: str, **settings: Any) -> dict[str, Engine]:
    """Make the engine of a host on a model that the pool must replace before the first chunk."""
    torch.set_num_threads(1)
    config = TransformersEngineConfig(max_num_seqs=32, **settings)
    return {"engine": make_engine(config, folder, torch.device("cpu"), NEVER)}


def make_sleeper(folder: str) -> dict[str, Engine]:
    """Make an engine as `make_tiny` does, which can sleep."""
    return make_tiny(folder, enable_sleep_mode=True)


def pool_of(links: Mapping[str, Link], folder: Path, version: Version, **settings: Any) -> EnginePool:
    """Make a pool that sends the weights in `folder`."""
    weights = list(load_model(folder, torch.float32).named_parameters())
    return EnginePool(links, {"engine": (weights, torch.float32)}, version, **{"chunk": 5, "patience": 20.0} | settings)


def forks(count: int, folder: Path, silence: float = 30.0) -> dict[str, ProcessLink]:
    """Connect to as many forks, none of which is started yet."""
    return {f"fork {index}": ProcessLink(forking(make_tiny), str(folder), silence) for index in range(count)}


def kill(link: ProcessLink, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to the process at the other end of a link, where there is one."""
    if link.child is not None:
        with suppress(ProcessLookupError):  # it has ended, and its link has not noticed yet
            os.kill(link.child.pid, signal_number)


def wait_until_all_hold(pool: EnginePool) -> None:
    """Wait until every peer of a pool holds the newest weights."""

    async def wait_for_newest() -> None:
        while not all(peer.weights is pool.pool.newest for peer in pool.pool.peers):
            await pool.pool._state_changed.wait()

    pool.pool.call(asyncio.wait_for(wait_for_newest(), 60.0))


class Pace:
    """Sleeps until `period` seconds have passed since it was called last, or since `start`."""

    def __init__(self, period: float) -> None:
        self._period, self._next = period, 0.0

    def __call__(self) -> None:
        """Sleep for the rest of the period."""
        now = time.monotonic()
        self._next = max(self._next, now - self._period / 2) + self._period  # a late step makes the next one shorter
        time.sleep(max(0.0, self._next - now))


def make_paced(setup: Any, period: float) -> dict[str, Engine]:
    """Make the engines of a run's host, of which the one for rollouts takes `period` seconds for a decoding step."""
    engines = make_hosted(setup)
    engine, pace = engines["engine"], Pace(period)
    step = engine._step

    def paced_step() -> None:
        pace()
        step()

    engine._step = paced_step
    return engines
