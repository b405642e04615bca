"""Has Ray place a run (`placement.launcher: ray`): the only file that imports Ray, and only where that is asked for.

    driver: train ──┬──► RankActor 0..N-1, one process each, which Ray never starts again by itself
                    └──► EngineActor 1..M, which it does, each alone
    rank 0's pool ──► RayLink ──► EngineActor ──► EngineHost

The driver owns all actors. Where a rank is lost it ends the others and starts all of them again, which continue from
the newest checkpoint; engines live on, and the new rank 0 sends them its weights. What a rank does, and how an engine
is made, the caller says: a rank works as under torchrun, with the same variables in its environment.

Status: experimental.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jackpot.config.config import Config
from jackpot.config.processes import place_engines
from jackpot.core import errors
from jackpot.core.errors import ConfigError, JackpotError, RankError
from jackpot.core.messages import pack, unpack
from jackpot.core.package import install
from jackpot.core.process_rank import process_rank
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.hosted import SIGN_SECONDS, EngineHost, Link
from jackpot.rollout.engines.pool import PeerLost
from jackpot.training.interrupt import StopSignal

_log = logging.getLogger(__name__)
_ADDRESS, _MODE = "RAY_ADDRESS", "RAY_AUTH_MODE"
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray's own ports are on loopback, as they are on those systems
_POLL = 0.5  # seconds between two looks at metrics.jsonl and at signals
MakeEngines = Callable[[dict[str, Any]], Mapping[str, Engine]]


class Spot(NamedTuple):
    """Says where Ray has placed a rank."""

    node: str
    address: str  # of the node
    port: int  # that was free there
    gpus: list[str]
    pid: int


class RankActor:
    """Is the process of one rank. Its calls come from the main thread, so that signals reach a run."""

    def spot(self) -> Spot:
        ray = _ray()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpus = list(map(str, ray.get_gpu_ids()))
        return Spot(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port, gpus, os.getpid())

    def work(
        self, environment: dict[str, str], folder: str, work: Callable[..., Any], *arguments: Any
    ) -> tuple[str, Any]:
        """Call `work` with these variables, in the driver's folder; return ("done", what it returned), or the class of
        `core.errors` that a user's error is of and its text."""
        os.environ |= environment
        _enter(folder)
        try:
            return "done", work(*arguments)
        except JackpotError as error:
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), str(error)


class EngineActor:
    """Is the process of one host of engines, which Ray starts again when it dies."""

    def __init__(self, folder: str, make: MakeEngines) -> None:
        _enter(folder)
        self._make = make
        self._setup = b""
        self._engines: Mapping[str, Engine] = {}
        self._host: EngineHost | None = None
        self._refusal: Tensor | None = None
        self._thread = ThreadPoolExecutor(1)  # the one that engines are called from
        self._signs = 0

    def node(self) -> str:
        return _ray().get_runtime_context().get_node_id()

    def begin(self, setup: np.ndarray) -> None:
        """Make the engines, or keep those of an equal setup, which then hold no weights that count."""
        if self._setup != setup.tobytes():
            self._engines, self._setup, self._refusal = {}, setup.tobytes(), None
            try:
                self._engines = self._thread.submit(self._make, unpack(_tensor(setup))).result()
            except JackpotError as error:
                self._refusal = pack({"refused": str(error)})
        self._host = None if self._refusal is not None else EngineHost(self._engines, self._sign)

    def _sign(self) -> None:
        self._signs += 1

    def answer(self, message: np.ndarray, weights: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield an empty array for every sign of life, and at the end the answer of the host; nothing without `begin`.

        Args:
            weights: the file of weights that the message names, where that is on another machine.
        """
        if self._refusal is not None:
            yield self._refusal.numpy()
        if self._host is None:
            return

        asked = _tensor(message)
        with contextlib.ExitStack() as kept:
            if weights is not None:
                file = kept.enter_context(open(os.memfd_create("jackpot-weights"), "wb", buffering=0))
                file.write(weights.data)
                asked = pack(unpack(asked) | {"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"})

            seen = self._signs  # before the host can give one
            done: Future[Tensor] = self._thread.submit(self._host.answer, asked)
            while not done.done():
                wait([done], timeout=SIGN_SECONDS)
                if self._signs > seen:
                    seen = self._signs
                    yield np.empty(0, np.uint8)
            yield done.result().numpy()


class RayLink(Link):
    """Connects a peer of the pool with an actor that the driver has placed.

    Args:
        actor: the handle of an `EngineActor`.
        setup: from which it makes its engines.
        silence: seconds without any sign of life after which it counts as lost.
    """

    def __init__(self, actor: Any, setup: Any, silence: float) -> None:
        self._actor, self._setup, self.silence = actor, pack(setup).numpy(), silence
        self._node = ""
        self._hangs = False

    async def open(self) -> None:
        await self.close()
        with self._lost_named():
            async with asyncio.timeout(self.silence):
                await self._actor.begin.remote(self._setup)
                self._node = await self._actor.node.remote()

    async def ask(self, message: Tensor) -> Tensor:
        with self._lost_named():
            ask = self._actor.answer.options(num_returns="streaming")
            answers = ask.remote(message.numpy(), self._weights(message))
            while True:
                async with asyncio.timeout(self.silence):
                    answer = await (await anext(answers))
                    if len(answer):
                        return _tensor(answer)

    async def close(self) -> None:
        if self._hangs:
            _ray().kill(self._actor, no_restart=False)
            self._hangs = False
        # else the driver ends its actors

    def _weights(self, message: Tensor) -> Any:
        """Return the weights that a message names, where the actor cannot read them from this machine's memory."""
        ray = _ray()
        if self._node == ray.get_runtime_context().get_node_id():
            return None
        asked = unpack(message)
        return ray.put(np.fromfile(asked["path"], np.uint8)) if "path" in asked else None

    @contextlib.contextmanager
    def _lost_named(self) -> Iterator[None]:
        ray = _ray()
        try:
            yield
        except StopAsyncIteration:
            raise PeerLost("its actor was started again") from None
        except TimeoutError:
            self._hangs = True
            raise PeerLost(f"its actor gave no sign of life for {self.silence:g} seconds") from None
        except ray.exceptions.RayTaskError:
            raise  # an error of the program
        except ray.exceptions.RayError as error:
            raise PeerLost(f"its actor was lost: {type(error).__name__}") from error


def check_started_by_ray(config: Config) -> None:
    """Refuse launcher ray in a process that Ray has not placed.

    Raises:
        ConfigError: the settings have it, and this is none.
    """
    if config.placement.launcher == "ray" and not _ray().is_initialized():
        raise ConfigError("placement.launcher is 'ray', and only jackpot train has Ray place a run; leave it out here")


def ray_links(config: Config, setup: dict[str, Any]) -> dict[str, Link]:
    """Return connections to the engines that the driver of this process has placed, by name."""
    ray = _ray()
    names = [_engine_name(number) for number in range(1, config.placement.engine_processes + 1)]
    return {name: RayLink(ray.get_actor(name), setup, config.placement.timeout) for name in names}


def _engine_name(number: int) -> str:
    return f"engine actor {number}"


def train_on_ray(
    config: Config,
    run: Path,
    on_metrics: Callable[[dict[str, Any]], None],
    work: Callable[[str, str], Any],
    make: MakeEngines,
) -> Any:
    """Place the ranks and engines of a run, and start all ranks again after one is lost; return what rank 0 returned.

    Args:
        run: the run folder, on a disk that the driver and all nodes see.
        on_metrics: called with every line of metrics.jsonl.
        work: what every rank does, given the settings as JSON and the run folder.
        make: makes the engines of a host from its setup.

    Raises:
        ConfigError: Ray is not installed, its cluster asks for no token, or has no room, or torchrun started this.
        RankError: ranks were lost more often than `placement.restarts`.
        JackpotError: rank 0's own, or its nearest class in `core.errors`.
    """
    if (ranks := process_rank().size) > 1:
        raise ConfigError(
            f"placement.launcher is 'ray', and torchrun started {ranks} processes; start the command without torchrun"
        )
    lines = _Lines(run / "metrics.jsonl", on_metrics)

    with _cluster(config) as ray, StopSignal() as stop:
        config = place_engines(config, config.placement.ranks, _has_gpus(ray, config))
        group = _placement_group(ray, config)
        engines = _engines(ray, config, group, make)  # alive for as long as this refers to them
        task = [os.getcwd(), work, config.model_dump_json(), str(run.resolve())]
        left = config.placement.restarts
        name, result = _Group(ray, config, group).run(task, lines, stop)

        while name == RankError.__name__ and left and not stop.requested:
            left -= 1
            _log.warning("%s; all ranks start again, and may %d more times", result, left)
            name, result = _Group(ray, config, group).run(task, lines, stop)
        del engines

    if name == "done":
        return result
    raise getattr(errors, name)(result)


def _ray() -> Any:
    """Return the module ray.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"placement.launcher is 'ray', and the package ray is not installed; {install('ray')}, or start ranks with "
            f"torchrun (docs/distributed.md)"
        ) from error
    return ray


@contextlib.contextmanager
def _cluster(config: Config) -> Iterator[Any]:
    """Join the cluster of RAY_ADDRESS, or start Ray on this machine, for the block.

    Raises:
        ConfigError: the cluster asks for no token.
    """
    address = os.environ.get(_ADDRESS)
    if address and os.environ.get(_MODE) != "token":
        raise ConfigError(
            f"{_ADDRESS} is {address} and {_MODE} is {os.environ.get(_MODE) or 'not set'}: whoever reaches a Ray "
            f"cluster without a token runs programs on it. Start it, and this command, with {_MODE}=token "
            f"(docs/distributed.md), or unset {_ADDRESS} to start Ray on this machine alone"
        )

    if not address:
        os.environ[_LOOPBACK] = "0"
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: any other process goes first
        os.environ.setdefault(_MODE, "token")

    ray = _ray()
    options = {"log_to_driver": True, "logging_level": logging.WARNING}
    if address:
        ray.init(**options)
    else:
        count = config.placement.ranks + (config.placement.engine_processes or config.placement.ranks)
        ray.init("local", num_cpus=count, include_dashboard=False, **options)

    try:
        yield ray
    finally:
        ray.shutdown()


def _placement_group(ray: Any, config: Config) -> Any:
    """Reserve a bundle for every rank, and every engine that shares none of these, on as few nodes as there is room."""
    gpu = {"GPU": 1} if _has_gpus(ray, config) else {}
    placement, tenants = config.placement, Counter(bundles(config))
    bundle = {"CPU": max(tenants.values())} | gpu
    group = ray.util.placement_group([{"CPU": count} | gpu for count in tenants.values()], strategy="PACK")
    if not group.wait(placement.timeout):
        raise ConfigError(
            f"Ray has no room for {placement.ranks} ranks and {placement.engine_processes} engines after "
            f"placement.timeout = {placement.timeout:g} seconds: {len(tenants)} bundles need {bundle}, and the cluster "
            f"has {ray.cluster_resources()}; lower placement.ranks or placement.engines"
        )
    return group


def _has_gpus(ray: Any, config: Config) -> bool:
    return config.device == "cuda" or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def bundles(config: Config) -> list[int]:
    """Return the index of the bundle of every rank, then of every engine: one GPU, where there are GPUs.

    Engines that share GPUs are in the bundles of the ranks, in turn, all others in bundles of their own.
    """
    ranks, engines = range(config.placement.ranks), range(config.placement.engine_processes)
    return [*ranks, *(engine % len(ranks) if config.shares_gpus else engine + len(ranks) for engine in engines)]


def _options(ray: Any, group: Any, config: Config, actor: int) -> dict[str, Any]:
    """Return the options of an actor: a CPU, and as much of the GPU of its bundle as each other one there has."""
    indices = bundles(config)
    index = indices[actor]
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
    gpus = group.bundle_specs[index].get("GPU", 0) / indices.count(index)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def _engines(ray: Any, config: Config, group: Any, make: MakeEngines) -> list[Any]:
    """Start the engine actors, which live as long as this process and the list."""
    actor, first = ray.remote(EngineActor), config.placement.ranks
    return [
        actor.options(
            name=_engine_name(number + 1), max_restarts=-1, **_options(ray, group, config, first + number)
        ).remote(os.getcwd(), make)
        for number in range(config.placement.engine_processes)
    ]


class _Group:
    """Holds the actors of all ranks, which live and end together."""

    def __init__(self, ray: Any, config: Config, group: Any) -> None:
        self._ray = ray
        actor = ray.remote(RankActor)
        self._actors = [
            actor.options(max_restarts=0, **_options(ray, group, config, rank)).remote()
            for rank in range(config.placement.ranks)
        ]

    def run(self, task: Sequence[Any], lines: "_Lines", stop: StopSignal) -> tuple[str, Any]:
        """Have every rank work until rank 0 ends or one is lost; return what rank 0 returned, or a RankError's text."""
        ray = self._ray
        try:
            spots = [Spot(*spot) for spot in ray.get([actor.spot.remote() for actor in self._actors])]
            calls = {
                actor.work.remote(environment, *task): rank
                for rank, (actor, environment) in enumerate(zip(self._actors, environments(spots), strict=True))
            }

            has_signal = False
            while True:
                ended, _ = ray.wait(list(calls), timeout=_POLL)
                lines.show()
                if stop.requested and not has_signal:
                    self._terminate(spots[0])
                    has_signal = True

                for call in sorted(ended, key=calls.__getitem__):
                    rank = calls.pop(call)
                    name, result = ray.get(call)
                    if rank == 0 or name != "done":
                        return name, result
        except ray.exceptions.RayActorError as error:
            return RankError.__name__, f"a rank was lost: {str(error).strip().splitlines()[0]}"
        finally:
            for actor in self._actors:
                ray.kill(actor)

    def _terminate(self, spot: Spot) -> None:
        """Send rank 0 SIGTERM, on its node."""
        at = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(spot.node, soft=False)
        self._ray.remote(_terminate).options(num_cpus=0, scheduling_strategy=at).remote(spot.pid)


def _terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def environments(spots: Sequence[Spot]) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for every rank. Ranks of one machine meet on its loopback."""
    nodes: dict[str, list[int]] = {}
    for rank, spot in enumerate(spots):
        nodes.setdefault(spot.node, []).append(rank)

    variables = []
    for rank, spot in enumerate(spots):
        here = nodes[spot.node]

        numbers = {"RANK": rank, "WORLD_SIZE": len(spots)}
        numbers |= {"LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here)}
        of_rank = {name: str(number) for name, number in numbers.items()}
        of_rank["MASTER_ADDR"] = "127.0.0.1" if len(nodes) == 1 else spots[0].address
        of_rank["MASTER_PORT"] = str(spots[0].port)

        if gpus := [gpu for neighbour in here for gpu in spots[neighbour].gpus]:
            of_rank["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        variables.append(of_rank)

    return variables


class _Lines:
    """Shows every new line of metrics.jsonl once, also where ranks that started again write it a second time."""

    def __init__(self, path: Path, show: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._show, self._offset, self._newest = path, show, 0, -1
        for line in self._read():
            self._newest = line["iteration"]

    def show(self) -> None:
        for line in self._read():
            if line["iteration"] > self._newest:
                self._newest = line["iteration"]
                self._show(line)

    def _read(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:  # a start has moved lines to superseded/
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    yield json.loads(line)


def _enter(folder: str) -> None:
    """Make relative paths of the settings mean what they mean to the driver, where this machine has its folder."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())
