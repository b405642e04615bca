"""Runs of several ranks, each a fork of this process in torchrun's place, so that nothing is imported again."""

import json
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from helpers.runs import metrics, weights
from jackpot.config.config import Config
from jackpot.core.errors import JackpotError
from jackpot.core.process_rank import process_rank
from jackpot.launch.ranks import follow_leader, leading
from jackpot.launch.start import train_run

OnLine = Callable[[dict], None]
Meanwhile = Callable[[list[BaseProcess]], None]


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: exit codes, 2 for an error that a user can cause, and what each printed."""

    codes: list[int]
    printed: list[str]


def fork_ranks(
    size: int,
    work: Callable[[int], None],
    output: Path,
    patience: float = 30.0,
    meanwhile: Meanwhile = lambda ranks: None,
) -> Ended:
    """Do `work` in each rank, which is its argument, until all have ended.

    Args:
        output: folder for what the ranks print.
        patience: seconds that the others have to end after the first one, before they are killed.
        meanwhile: called with the processes once all have been started.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    output.mkdir(parents=True, exist_ok=True)
    files = [output / f"rank{rank}.txt" for rank in range(size)]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, size, port, work, files[rank])) for rank in range(size)]
    for process, file in zip(ranks, files, strict=True):
        file.touch()  # a rank may be killed before it begins
        process.start()
    meanwhile(ranks)

    wait([process.sentinel for process in ranks])
    deadline = time.monotonic() + patience
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()  # as torchrun does
            process.join()
    return Ended([process.exitcode for process in ranks], [path.read_text() for path in files])


def _nothing(line: dict) -> None:
    pass


def run_ranks(
    size: int,
    config: Config,
    folder: Path,
    on_line: OnLine = _nothing,
    patience: float = 30.0,
    meanwhile: Meanwhile = lambda ranks: None,
) -> Ended:
    """Train a run with `size` ranks; `on_line` is called in rank 0 with every line of metrics.jsonl."""

    def work(rank: int) -> None:
        if rank:
            follow_leader(process_rank())
            return
        with leading(config, folder) as build:
            train_run(config, folder, on_line, build=build)

    return fork_ranks(size, work, folder.with_name(f"{folder.name}-output"), patience, meanwhile)


def assert_close_runs(run: Path, other_run: Path) -> None:
    """Weights are bit-equal, and metrics but for the last bits of sums over shards."""
    for role in ("policy", "rollout_model"):
        run_weights, other_weights = weights(run, role), weights(other_run, role)
        assert run_weights.keys() == other_weights.keys()
        for name, tensor in run_weights.items():
            assert torch.equal(tensor, other_weights[name]), name

    for line, other_line in zip(metrics(run), metrics(other_run), strict=True):
        assert line.keys() == other_line.keys()
        for name, value in line.items():
            assert other_line[name] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), name


def sending(signal_number: int, rank: int, folder: Path, after: int) -> OnLine:
    """Return a listener that sends a rank a signal once the line of iteration `after` is written."""

    def listen(line: dict) -> None:
        if line["iteration"] == after:
            os.kill(json.loads((folder / "ranks" / f"{rank}.json").read_text())["pid"], signal_number)

    return listen


def _rank(rank: int, size: int, port: int, work: Callable[[int], None], output: Path) -> None:
    """Do the work of a rank in this process, with torchrun's variables, and end it with an exit code."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    code = 0
    try:
        work(rank)
    except JackpotError as error:
        os.write(1, f"error: {error}\n".encode())
        code = 2
    except BaseException:
        os.write(1, traceback.format_exc().encode())
        code = 1
    os._exit(code)
