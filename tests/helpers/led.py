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
    """Do `work` with its number in each rank until all have ended.

    Args:
        output: folder for what the ranks print.
        patience: seconds that the others have to end after the first one, before they are killed.
        meanwhile: called with the processes once all have been started.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output.mkdir(parents=True, exist_ok=True)
    files = [output / f"rank{rank}.txt" for rank in range(size)]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, size, port, work, files[rank])) for rank in range(size)]
    for one, file in zip(ranks, files, strict=True):
        file.touch()  # a rank may be killed before it begins
        one.start()
    meanwhile(ranks)
    wait([one.sentinel for one in ranks])
    deadline = time.monotonic() + patience
    for one in ranks:
        one.join(max(0.0, deadline - time.monotonic()))
        if one.exitcode is None:
            one.kill()  # as torchrun does
            one.join()
    return Ended([one.exitcode for one in ranks], [path.read_text() for path in files])


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


def assert_close_runs(one: Path, other: Path) -> None:
    """Weights are bit-equal, and metrics but for the last bits of sums over shards."""
    for role in ("policy", "rollout_model"):
        ours, theirs = weights(one, role), weights(other, role)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for line, same in zip(metrics(one), metrics(other), strict=True):
        assert line.keys() == same.keys()
        for name, value in line.items():
            assert same[name] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), name


def sending(number: int, rank: int, folder: Path, after: int) -> OnLine:
    """Send a rank a signal once the line of iteration `after` is written."""

    def listen(line: dict) -> None:
        if line["iteration"] == after:
            os.kill(json.loads((folder / "ranks" / f"{rank}.json").read_text())["pid"], number)

    return listen


def _rank(rank: int, size: int, port: int, work: Callable[[int], None], output: Path) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
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
