"""Joins the processes that torchrun started into one run: rank 0 leads it, the others follow (`training.ranks`).

Status: experimental.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.config.processes import check_ranks
from jackpot.core.errors import ConfigError, RankError, first_line
from jackpot.core.messages import pack, unpack
from jackpot.core.parent import end_with_parent
from jackpot.core.process_rank import ProcessRank, process_rank
from jackpot.core.roles import Role
from jackpot.launch.build import BuildLearner, build_learner
from jackpot.launch.start import train_run
from jackpot.models.device import pick_device
from jackpot.training.interrupt import TERMINATIONS
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import Learner
from jackpot.training.ranks import LedLearner, Ranks, follow
from jackpot.training.run_folder.checkpoint import Checkpoint, load_state

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed, by the device that ranks compute on. Rank 0's commands go from CPU to CPU, by gloo."""

_SETUP = "setup"  # key of the store where rank 0 puts the run folder, timeout and device for the others


@contextmanager
def leading(config: Config, run: Path) -> Iterator[BuildLearner]:
    """Join the other ranks for as long as the block runs, and yield a function that builds the learner leading them.

    Without other ranks the function builds the learner of this process.

    Args:
        run: the run folder, on a disk that all ranks see.

    Raises:
        ConfigError: the settings or the machine's GPUs do not fit several ranks.
        RankError: the other ranks cannot be reached.
    """
    process = process_rank()
    if process.size == 1:
        yield build_learner
        return

    check_ranks(config, process.size)
    backend = BACKENDS[_own_device(config.device, process).type]
    _end_with_torchrun()

    store = _store(process)
    timeout = config.placement.timeout
    setup = pack({"run": str(run.resolve()), "timeout": timeout, "device": config.device})
    store.set(_SETUP, setup.numpy().tobytes())  # pyright: ignore[reportArgumentType]  the store keeps bytes

    with _joined(store, process, run, timeout, backend) as ranks:
        yield partial(_build_leader, ranks)
        ranks.end()  # the block is done: the other ranks leave too


def follow_leader(process: ProcessRank) -> None:
    """Follow rank 0 until it ends.

    This process ignores the signals that end a run: rank 0 gets them too, and finishes the iteration first.

    Raises:
        RankError: rank 0 or another rank was lost.
    """
    _end_with_torchrun()
    store = _store(process)

    try:
        setup = unpack(torch.frombuffer(bytearray(store.get(_SETUP)), dtype=torch.uint8))
    except dist.DistError as error:
        raise RankError(f"rank {process.rank} waits for rank 0 in vain: {first_line(error)}") from error

    backend = BACKENDS[_own_device(setup["device"], process).type]
    with _joined(store, process, Path(setup["run"]), setup["timeout"], backend) as ranks:
        for termination in (signal.SIGINT, *TERMINATIONS):
            signal.signal(termination, signal.SIG_IGN)
        follow(ranks, _build_follower)


def run_rank(config: str, run: str) -> tuple[int, bool] | None:
    """Train as rank 0 or follow rank 0, by the rank that the environment gives this process.

    Args:
        config: settings as JSON.
        run: the run folder.

    Returns:
        In rank 0 the iteration that the run continued after, -1 for a new run, and what `train_run` returned; None in
        all other ranks.

    Raises:
        JackpotError: as `leading`, `train_run` and `follow_leader`.
    """
    if (process := process_rank()).rank > 0:
        return follow_leader(process)

    settings = build_config(json.loads(config))
    starts: list[int] = []
    with leading(settings, Path(run)) as build:
        # Lines of metrics are not passed on: the driver reads them from metrics.jsonl.
        is_finished = train_run(settings, Path(run), on_metrics=lambda line: None, on_start=starts.append, build=build)
    return starts[0], is_finished


def _end_with_torchrun() -> None:
    """End this process when the torchrun that started it ends; a rank started by hand may outlive its terminal."""
    if dist.is_torchelastic_launched():
        end_with_parent()


def _own_device(device: str, process: ProcessRank) -> torch.device:
    """Return the device of this rank: the GPU of its local rank if settings and machine have GPUs, else the CPU.

    In this process `cuda` means that GPU from then on. Raise ConfigError if this machine has fewer GPUs than ranks.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if process.local_size > gpus:
        raise ConfigError(
            f"torchrun started {process.local_size} ranks on a machine with {gpus} GPUs, and each rank needs its own; "
            f"use --nproc-per-node {gpus}, or device=cpu"
        )
    torch.cuda.set_device(process.local_rank)
    return torch.device("cuda", process.local_rank)


def _store(process: ProcessRank) -> dist.Store:
    """Return the store by which the ranks find each other; raise RankError if it is not reached. If all ranks
    are on one Linux machine, they talk over its loopback."""
    if process.local_size == process.size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = _rendezvous(process)
    except (KeyError, ValueError, OSError, dist.DistError) as error:
        raise RankError(
            f"rank {process.rank} of {process.size} does not reach the others at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {first_line(error)}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store when it starts ranks again
    return dist.PrefixStore(f"jackpot/{attempt}", store)


def _rendezvous(process: ProcessRank) -> dist.Store:
    """Return the store at MASTER_ADDR, which torchrun's agent serves if the environment says so, and else rank 0.

    Rank 0 listens at that address alone; torch would listen on every interface.
    """
    if process.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://"))[0]  # the first of (store, rank, number of ranks)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]  # IPv4 or IPv6
    with socket.create_server((address, port), family=family) as server:
        return dist.TCPStore(address, port, process.size, is_master=True, master_listen_fd=server.detach())


@contextmanager
def _joined(store: dist.Store, process: ProcessRank, run: Path, timeout: float, backend: str) -> Iterator[Ranks]:
    """Join the ranks by torch.distributed, yield them, and leave them if the block ends without an error.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank,
            world_size=process.size,
            timeout=timedelta(seconds=timeout),
        )
        ranks = Ranks(run, timeout)
    except RuntimeError as error:
        raise RankError(f"the {process.size} ranks cannot join: {first_line(error)}") from error
    yield ranks
    dist.destroy_process_group()


def _build_leader(ranks: Ranks, config: Config, checkpoint: Checkpoint | None, exact: Collection[Role]) -> Learner:
    """Have every rank build its learner, and return that of rank 0, which leads the others.
    `exact` is the argument `exact_engines` of `build_learner`."""
    folder = str(checkpoint.folder.resolve()) if checkpoint else None
    # What every other rank builds its learner from (`_build_follower`).
    command = {"config": config.model_dump_json(), "checkpoint": folder, "exact": list(exact)}

    commands = [command] * ranks.size  # one for each rank; rank 0 does not read its own
    learner, _ = ranks.carry_out("build", commands, lambda _: build_learner(config, checkpoint, exact, _mesh(config)))
    return LedLearner(learner, ranks)


def _build_follower(command: dict[str, Any]) -> JointLearner:
    """Build the learner of a rank above 0 from rank 0's command (`_build_leader`)."""
    config = build_config(json.loads(command["config"]))
    torch.backends.cuda.matmul.allow_tf32 = config.tf32

    folder = command["checkpoint"] and Path(command["checkpoint"])  # None for a new run
    checkpoint = Checkpoint(folder, load_state(folder)) if folder else None
    return build_learner(config, checkpoint, command["exact"], _mesh(config))


def _mesh(config: Config) -> DeviceMesh:
    """Return the mesh of all ranks, over which the models are sharded."""
    return init_device_mesh(pick_device(config.device).type, (dist.get_world_size(),))
