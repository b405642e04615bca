"""Has Ray place the processes of a run (`placement.launcher: ray`); no other file imports Ray.

    driver: train ──┬──► RankActor 0..N-1, one process each; Ray does not restart them
                    └──► EngineActor 1..M, one process each; Ray restarts each of them alone
    rank 0's pool ──► RayLink ──► EngineActor ──► EngineHost

The driver owns all actors. When a rank is lost, the driver ends the other ranks and starts all ranks again from the
newest checkpoint. Engines live on, and the new rank 0 sends them its weights. A rank works as under torchrun, with the
same variables in its environment.

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
_POLL = 0.5  # seconds between two looks at metrics.jsonl and at signals
# A function that makes the engines of a host, by the key of their settings, from the setup that the pool sends.
MakeEngines = Callable[[dict[str, Any]], Mapping[str, Engine]]


class Spot(NamedTuple):
    """The place of a rank in Ray's cluster."""

    node: str
    address: str  # network address of the node
    port: int  # a port that was free on the node
    gpus: list[str]  # ids of the rank's GPUs on the node
    pid: int  # process id of the rank


class RankActor:
    """The process of one rank. Its calls run on the main thread, so that signals reach a run."""

    def spot(self) -> Spot:
        """Return where Ray has placed this process, with a port that is free there."""
        ray = _ray()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return Spot(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            port=port,
            gpus=list(map(str, ray.get_gpu_ids())),
            pid=os.getpid(),
        )

    def work(
        self, environment: dict[str, str], folder: str, function: Callable[..., Any], *arguments: Any
    ) -> tuple[str, Any]:
        """Call a function in this process, in the driver's working folder and with more environment variables.

        Args:
            environment: the variables, as `environments` returns them for this rank.
            folder: the driver's working folder.
            arguments: the arguments of `function`.

        Returns:
            "done" and what `function` returned; or, if it raised a JackpotError, the name of the error's class in
            `core.errors`, and its text.
        """
        os.environ |= environment
        _enter(folder)
        try:
            return "done", function(*arguments)
        except JackpotError as error:  # the error's own class, or its nearest base class in `core.errors`
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), str(error)


class EngineActor:
    """The process that holds one `EngineHost` with its engines; Ray starts the process again when it dies."""

    def __init__(self, folder: str, make: MakeEngines) -> None:
        """Go to the driver's working folder, `folder`; keep `make`, which makes the engines from `begin`'s setup."""
        _enter(folder)
        self._make = make
        self._setup = b""  # what the engines were made from; empty before `begin`
        self._engines: Mapping[str, Engine] = {}  # by the key of their settings; {} before `begin`
        self._host: EngineHost | None = None  # answers the messages of the engine pool
        self._refusal: Tensor | None = None  # the answer to every message where the engines refuse the setup
        self._thread = ThreadPoolExecutor(1)  # one thread makes all calls of engines
        self._signs = 0  # number of signs of life that the host has given, by calls of `_sign`

    def node(self) -> str:
        """Return the id of this process's node."""
        return _ray().get_runtime_context().get_node_id()

    def begin(self, setup: np.ndarray) -> None:
        """Make the engines that the packed `setup` describes, unless they were made from an equal one before.

        Then make a new `EngineHost` for them, which asks for weights anew. If the engines refuse the setup, that
        refusal answers every message.
        """
        if self._setup != setup.tobytes():
            self._engines, self._refusal = {}, None
            self._setup = setup.tobytes()
            try:
                self._engines = self._thread.submit(self._make, unpack(_tensor(setup))).result()
            except JackpotError as error:
                self._refusal = pack({"refused": str(error)})
        self._host = None if self._refusal is not None else EngineHost(self._engines, self._sign)

    def _sign(self) -> None:
        """Count a sign of life of the `EngineHost`."""
        self._signs += 1

    def answer(self, message: np.ndarray, weights: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Have the `EngineHost` answer a message; before `begin` there is none, and nothing is yielded.

        Args:
            weights: content of the file of weights that the message names, if that file is on another machine.

        Yields:
            An empty array for every sign of life, and at the end the answer.
        """
        if self._refusal is not None:  # `begin` could not make the engines
            yield self._refusal.numpy()
        if self._host is None:
            return

        here: dict[str, Any] = {}  # fields of the message that differ on this machine: the path of the weights
        with contextlib.ExitStack() as undo:
            if weights is not None:  # the host reads weights from a file, so these bytes become one in memory
                file = undo.enter_context(open(os.memfd_create("jackpot-weights"), "wb", buffering=0))
                file.write(weights.data)
                here = {"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"}

            signs = self._signs  # number of signs reported so far; read before the host can give another
            answer: Future[Tensor] = self._thread.submit(self._host.answer, _tensor(message), **here)
            while not answer.done():
                wait([answer], timeout=SIGN_SECONDS)
                if self._signs > signs:
                    signs = self._signs
                    yield np.empty(0, np.uint8)
            yield answer.result().numpy()


class RayLink(Link):
    """A connection by which the engine pool reaches an engine actor that the driver has placed.

    Args:
        actor: handle of an `EngineActor`.
        setup: what the actor makes its engines from.
        silence: seconds without a sign of life after which the actor counts as lost.
    """

    def __init__(self, actor: Any, setup: Any, silence: float) -> None:
        """Keep the arguments, which the class explains; nothing is sent to the actor before `open`."""
        self._actor, self._setup = actor, pack(setup).numpy()
        self.silence = silence
        self._node = ""  # id of the actor's node, known after `open`
        self._hangs = False  # whether the actor gave no sign of life in time, so that `close` kills it

    async def open(self) -> None:
        """Have the actor make its engines and a new host, after a restart if it hung; raise PeerLost if it is lost."""
        await self.close()
        with self._lost_named():
            async with asyncio.timeout(self.silence):
                await self._actor.begin.remote(self._setup)
                self._node = await self._actor.node.remote()

    async def ask(self, message: Tensor) -> Tensor:
        """Send a message to the actor, and wait for its answer; raise PeerLost if the actor is lost meanwhile."""
        with self._lost_named():  # raises PeerLost, if an error below means that the actor is lost
            ask = self._actor.answer.options(num_returns="streaming")
            answers = ask.remote(message.numpy(), self._weights(message))
            while True:
                async with asyncio.timeout(self.silence):
                    # `anext` gives a Ray reference to the next array: empty for a sign of life, else the answer.
                    answer = await (await anext(answers))
                    if len(answer):
                        return _tensor(answer)

    async def close(self) -> None:
        """Kill the actor if it hangs, so that Ray starts it again; leave any other actor running."""
        if self._hangs:
            _ray().kill(self._actor, no_restart=False)
            self._hangs = False
        # An actor that does not hang is left running: it ends with the driver, which owns it.

    def _weights(self, message: Tensor) -> Any:
        """Return a Ray reference to the content of the file of weights that a message names.

        It is None if the message names no file, or if the actor is on this node and can read the file itself.
        """
        ray = _ray()
        if self._node == ray.get_runtime_context().get_node_id():
            return None
        request = unpack(message)
        return ray.put(np.fromfile(request["path"], np.uint8)) if "path" in request else None

    @contextlib.contextmanager
    def _lost_named(self) -> Iterator[None]:
        """Turn an error of the block into PeerLost if it means that the engine actor is lost; pass others on."""
        ray = _ray()
        try:
            yield
        except StopAsyncIteration:  # no answer: a new process of the actor, without the host that `begin` makes
            raise PeerLost("its actor was started again") from None
        except TimeoutError:
            self._hangs = True  # so that `close` kills it
            raise PeerLost(f"its actor gave no sign of life for {self.silence:g} seconds") from None
        except ray.exceptions.RayTaskError:
            raise  # an error in the actor's code, which does not lose the actor
        except ray.exceptions.RayError as error:
            raise PeerLost(f"its actor was lost: {type(error).__name__}") from error


def check_started_by_ray(config: Config) -> None:
    """Refuse the launcher ray in a process that Ray has not started.

    Raises:
        ConfigError: placement.launcher is ray, and Ray has not started this process.
    """
    if config.placement.launcher == "ray" and not _ray().is_initialized():
        raise ConfigError("placement.launcher is 'ray', and only jackpot train has Ray place a run; leave it out here")


def ray_links(config: Config, setup: dict[str, Any]) -> dict[str, Link]:
    """Return connections to the engine actors that the driver of this process has placed, by name."""
    ray = _ray()
    return {name: RayLink(ray.get_actor(name), setup, config.placement.timeout) for name in _engine_names(config)}


def _engine_names(config: Config) -> list[str]:
    """Return the names by which Ray knows the engine actors of a run."""
    return [f"engine actor {index + 1}" for index in range(config.placement.engine_processes)]


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
        work: called in every rank with the settings as JSON and the path of the run folder.
        make: makes the engines of an engine actor from the setup that the actor is sent.

    Raises:
        ConfigError: Ray is not installed, its cluster asks for no token or has no room, or torchrun started this
            process.
        RankError: ranks were lost more often than `placement.restarts`.
        JackpotError: the error of a rank, as its nearest class in `core.errors`.
    """
    if (ranks := process_rank().size) > 1:
        raise ConfigError(
            f"placement.launcher is 'ray', and torchrun started {ranks} processes; start the command without torchrun"
        )
    lines = _Lines(run / "metrics.jsonl", on_metrics)

    with _cluster(config) as ray, StopSignal() as stop:
        config = place_engines(config, config.placement.ranks, on_gpu=_has_gpus(ray, config))
        group = _placement_group(ray, config)
        engines = _start_engines(ray, config, group, make)  # the actors live as long as this variable
        # For `RankActor.work`: the driver's folder, the function to call there, and the function's two arguments.
        task = [os.getcwd(), work, config.model_dump_json(), str(run.resolve())]

        restarts = config.placement.restarts
        outcome, result = _run_ranks(ray, config, group, task, lines, stop)
        while outcome == RankError.__name__ and restarts and not stop.requested:
            restarts -= 1
            _log.warning("%s; all ranks start again, and may %d more times", result, restarts)
            outcome, result = _run_ranks(ray, config, group, task, lines, stop)
        del engines

    if outcome == "done":
        return result
    raise getattr(errors, outcome)(result)


def _ray() -> Any:
    """Return the module ray.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":  # Ray is there, and something that it imports is missing
            raise
        raise ConfigError(
            f"placement.launcher is 'ray', and the package ray is not installed; {install('ray')}, or leave "
            f"placement.launcher out, and start ranks with torchrun (docs/distributed.md)"
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

    if not address:  # settings of the Ray that starts below, which its processes inherit
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray listens on loopback alone, as on Windows and macOS
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15, behind all other processes
        os.environ.setdefault(_MODE, "token")

    ray = _ray()
    options = {"log_to_driver": True, "logging_level": logging.WARNING}
    if address:
        ray.init(**options)
    else:
        # A CPU for each actor; engine processes whose number is not decided yet are at most as many as the ranks.
        count = config.placement.ranks + (config.placement.engine_processes or config.placement.ranks)
        ray.init("local", num_cpus=count, include_dashboard=False, **options)

    try:
        yield ray
    finally:
        ray.shutdown()


def _placement_group(ray: Any, config: Config) -> Any:
    """Reserve the bundles of all ranks and engines, on as few nodes as have room, and return their placement group.

    Raises:
        ConfigError: the cluster has no room.
    """
    placement = config.placement
    gpu = {"GPU": 1} if _has_gpus(ray, config) else {}
    tenants = Counter(bundles(config))  # number of actors in each bundle, in the order of the bundles' indices

    bundle = {"CPU": max(tenants.values())} | gpu  # the largest bundle, for the message
    group = ray.util.placement_group([{"CPU": count} | gpu for count in tenants.values()], strategy="PACK")
    if not group.wait(placement.timeout):
        raise ConfigError(
            f"Ray has no room for {placement.ranks} ranks and {placement.engine_processes} engines after "
            f"placement.timeout = {placement.timeout:g} seconds: {len(tenants)} bundles need {bundle}, and the cluster "
            f"has {ray.cluster_resources()}; lower placement.ranks or placement.engines"
        )
    return group


def _has_gpus(ray: Any, config: Config) -> bool:
    """Return whether the run uses GPUs: its settings name them, or leave the device open and the cluster has GPUs."""
    return config.device == "cuda" or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def bundles(config: Config) -> list[int]:
    """Return for every rank, then every engine, the index of its bundle in Ray's placement group. A bundle has one GPU,
    if there are GPUs.

    Engines that share GPUs are in the bundles of the ranks, in turn; all others are in bundles of their own.
    """
    ranks, engines = config.placement.ranks, range(config.placement.engine_processes)
    of_engines = [engine % ranks if config.shares_gpus else engine + ranks for engine in engines]
    return [*range(ranks), *of_engines]


def _options(ray: Any, group: Any, config: Config, actor: int) -> dict[str, Any]:
    """Return the options of an actor: a CPU, and an equal share of the GPU of its bundle.

    Args:
        actor: index of the actor among all ranks, then all engines.
    """
    indices = bundles(config)
    index = indices[actor]
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
    gpus = group.bundle_specs[index].get("GPU", 0) / indices.count(index)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def _start_engines(ray: Any, config: Config, group: Any, make: MakeEngines) -> list[Any]:
    """Start an actor for each engine, and return the actors. They end with this process, or when the list is freed."""
    actor = ray.remote(EngineActor)
    return [
        actor.options(name=name, max_restarts=-1, **_options(ray, group, config, index)).remote(os.getcwd(), make)
        for index, name in enumerate(_engine_names(config), config.placement.ranks)  # counted on from the last rank
    ]


def _run_ranks(
    ray: Any, config: Config, group: Any, task: Sequence[Any], lines: "_Lines", stop: StopSignal
) -> tuple[str, Any]:
    """Start an actor for each rank; have all work until rank 0 ends, another fails, or one is lost; then end them all.

    Args:
        group: the placement group, in whose bundles the ranks are.
        task: the arguments of `RankActor.work` after the environment, the same for every rank.
        lines: the lines of metrics.jsonl, shown while the ranks work.
        stop: the signal that asks the run to end, passed on to rank 0 once.

    Returns:
        "done" and the result of rank 0; or the class name and the text of the error of the rank that failed first,
        RankError where a rank was lost.
    """
    kind = ray.remote(RankActor)
    actors = [
        kind.options(max_restarts=0, **_options(ray, group, config, rank)).remote()
        for rank in range(config.placement.ranks)
    ]

    try:
        spots = [Spot(*spot) for spot in ray.get([actor.spot.remote() for actor in actors])]
        calls = {  # the rank of each call, by Ray's reference to the call
            actor.work.remote(environment, *task): rank
            for rank, (actor, environment) in enumerate(zip(actors, environments(spots), strict=True))
        }

        has_signal = False
        while True:
            ended, _ = ray.wait(list(calls), timeout=_POLL)
            lines.show()
            if stop.requested and not has_signal:
                _terminate_on_node(ray, spots[0])  # only rank 0 acts on signals
                has_signal = True

            for call in sorted(ended, key=calls.__getitem__):  # by rank
                rank = calls.pop(call)
                outcome, result = ray.get(call)
                if rank == 0 or outcome != "done":
                    return outcome, result
    except ray.exceptions.RayActorError as error:
        return RankError.__name__, f"a rank was lost: {errors.first_line(error)}"
    finally:
        for actor in actors:
            ray.kill(actor)


def _terminate_on_node(ray: Any, spot: Spot) -> None:
    """Send a rank SIGTERM, on its node."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(spot.node, soft=False)
    ray.remote(_terminate).options(num_cpus=0, scheduling_strategy=strategy).remote(spot.pid)


def _terminate(pid: int) -> None:
    """Send a process of this machine SIGTERM."""
    os.kill(pid, signal.SIGTERM)


def environments(spots: Sequence[Spot]) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for every rank. Ranks of one machine meet on its loopback."""
    nodes: dict[str, list[int]] = {}
    for rank, spot in enumerate(spots):
        nodes.setdefault(spot.node, []).append(rank)

    environments = []
    for rank, spot in enumerate(spots):
        neighbours = nodes[spot.node]  # ranks of this rank's node, in order
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(spots)),
            "LOCAL_RANK": str(neighbours.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "MASTER_ADDR": "127.0.0.1" if len(nodes) == 1 else spots[0].address,
            "MASTER_PORT": str(spots[0].port),
        }
        if gpus := [gpu for neighbour in neighbours for gpu in spots[neighbour].gpus]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        environments.append(environment)
    return environments


class _Lines:
    """The lines of metrics.jsonl, each shown once, even if ranks that started again write it a second time."""

    def __init__(self, path: Path, show: Callable[[dict[str, Any]], None]) -> None:
        """Read past the lines that the file `path` has already; `show` is called with each later line."""
        self._path, self._show = path, show
        self._offset = 0  # number of bytes of the file that were read
        self._newest = -1  # iteration of the newest line
        for line in self._read():  # lines of an earlier command, which are not shown again
            self._newest = line["iteration"]

    def show(self) -> None:
        """Show each line written to metrics.jsonl since the last call, unless its iteration was shown before."""
        for line in self._read():
            if line["iteration"] > self._newest:
                self._newest = line["iteration"]
                self._show(line)

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield the content of each complete line that was written to metrics.jsonl since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:  # a start has moved lines to superseded/: read the file anew
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    yield json.loads(line)


def _enter(folder: str) -> None:
    """Go to the driver's working folder, if this machine has it, so that relative paths mean the same here."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _tensor(array: np.ndarray) -> Tensor:
    """Return a copy of an array as a tensor; Ray's arrays are read-only."""
    return torch.from_numpy(array.copy())
