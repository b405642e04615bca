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
"""What moves tensors between ranks, by the device that they compute on. Commands are on the CPU, and use gloo."""

_SETUP = "setup"  # key of the store under which rank 0 says how the group is made


@contextmanager
def leading(config: Config, run: Path) -> Iterator[BuildLearner]:
    """Join the other ranks for as long as the block runs, and yield what builds the learner that leads them.

    Without other ranks that is the learner of this process.

    Args:
        run: the run folder, on a disk that all ranks see.

    Raises:
        ConfigError: settings, or the machine's GPUs, do not fit several ranks.
        RankError: the other ranks cannot be reached.
    """
    at = process_rank()
    if at.size == 1:
        yield build_learner
        return
    check_ranks(config, at.size)
    backend = BACKENDS[_own_device(config.device, at).type]
    _end_with_torchrun()
    store = _store(at)
    timeout = config.placement.timeout
    setup = pack({"run": str(run.resolve()), "timeout": timeout, "device": config.device})
    store.set(_SETUP, setup.numpy().tobytes())  # pyright: ignore[reportArgumentType]  bytes are what it keeps
    with _joined(store, at, run, timeout, backend) as ranks:
        yield partial(_build_led, ranks)
        ranks.end()


def follow_leader(at: ProcessRank) -> None:
    """Follow rank 0 until it ends. Signals that end a run are left to rank 0, which finishes the iteration first.

    Raises:
        RankError: rank 0 or another rank was lost.
    """
    _end_with_torchrun()
    store = _store(at)
    try:
        setup = unpack(torch.frombuffer(bytearray(store.get(_SETUP)), dtype=torch.uint8))
    except dist.DistError as error:
        raise RankError(f"rank {at.rank} waits for rank 0 in vain: {first_line(error)}") from error
    backend = BACKENDS[_own_device(setup["device"], at).type]
    with _joined(store, at, Path(setup["run"]), setup["timeout"], backend) as ranks:
        for number in (signal.SIGINT, *TERMINATIONS):
            signal.signal(number, signal.SIG_IGN)
        follow(ranks, _build_followed)


def run_rank(config: str, run: str) -> tuple[int, bool] | None:
    """Train as the rank that the environment names, or follow rank 0.

    Args:
        config: settings as JSON.
        run: the run folder.

    Returns:
        Of rank 0 the iteration that the run continued after, -1 for a new one, and what `train_run` returned.

    Raises:
        JackpotError: as `leading`, `train_run` and `follow_leader`.
    """
    if (at := process_rank()).rank:
        return follow_leader(at)
    settings, begun = build_config(json.loads(config)), []
    with leading(settings, Path(run)) as build:
        is_finished = train_run(settings, Path(run), lambda line: None, begun.append, build)
    return begun[0], is_finished


def _end_with_torchrun() -> None:
    """End this rank when torchrun ends that has started it; a rank that was typed may outlive its terminal."""
    if dist.is_torchelastic_launched():
        end_with_parent()


def _own_device(device: str, at: ProcessRank) -> torch.device:
    """Return the device of this rank: a GPU of its own, where the settings and the machine have GPUs, or the CPU.

    From then on `cuda` means that GPU in this process.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if at.local_size > gpus:
        raise ConfigError(
            f"torchrun started {at.local_size} ranks on a machine with {gpus} GPUs, and each rank needs its own; use "
            f"--nproc-per-node {gpus}, or device=cpu"
        )
    torch.cuda.set_device(at.local_rank)
    return torch.device("cuda", at.local_rank)


def _store(at: ProcessRank) -> dist.Store:
    """Return what the ranks find each other by. Ranks of one machine talk over its loopback interface."""
    if at.local_size == at.size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = _rendezvous(at)
    except (KeyError, ValueError, OSError, dist.DistError) as error:
        raise RankError(
            f"rank {at.rank} of {at.size} does not reach the others at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {first_line(error)}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store when it starts ranks again
    return dist.PrefixStore(f"jackpot/{attempt}", store)


def _rendezvous(at: ProcessRank) -> dist.Store:
    """Return the store at MASTER_ADDR. Rank 0 listens there alone, where torch would on every interface.

    Under torchrun its agent listens instead.
    """
    if at.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://"))[0]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, port), family=family) as server:
        return dist.TCPStore(address, port, at.size, is_master=True, master_listen_fd=server.detach())


@contextmanager
def _joined(store: dist.Store, at: ProcessRank, run: Path, timeout: float, backend: str) -> Iterator[Ranks]:
    """Set up torch.distributed for the block."""
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=at.rank,
            world_size=at.size,
            timeout=timedelta(seconds=timeout),
        )
        ranks = Ranks(run, timeout)
    except RuntimeError as error:
        raise RankError(f"the {at.size} ranks cannot join: {first_line(error)}") from error
    yield ranks
    dist.destroy_process_group()


def _build_led(ranks: Ranks, config: Config, checkpoint: Checkpoint | None, exact: Collection[Role]) -> Learner:
    folder = str(checkpoint.folder.resolve()) if checkpoint else None
    part = {"config": config.model_dump_json(), "checkpoint": folder, "exact": list(exact)}

    def build(_: Any) -> JointLearner:
        return build_learner(config, checkpoint, exact, _mesh(config))

    learner, _ = ranks.carry_out("build", [part] * ranks.size, build)
    return LedLearner(learner, ranks)


def _build_followed(part: dict[str, Any]) -> JointLearner:
    config, folder = build_config(json.loads(part["config"])), part["checkpoint"] and Path(part["checkpoint"])
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    checkpoint = Checkpoint(folder, load_state(folder)) if folder else None
    return build_learner(config, checkpoint, part["exact"], _mesh(config))


def _mesh(config: Config) -> DeviceMesh:
    """Return all ranks, over which the models are sharded."""
    return init_device_mesh(pick_device(config.device).type, (dist.get_world_size(),))
