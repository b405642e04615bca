"""Starts processes of a comparison. Only these import what trains (`child.py`), and on Linux once for all of them."""

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from jackpot.config.config import Config
from jackpot.training.interrupt import TERMINATIONS

CHILD = "jackpot.analysis.compare.child"  # by name: this process does not import it


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRun:
    """Describes one training run of a comparison: its arm, seed, settings and files."""

    arm: str
    seed: int
    folder: Path  # run folder
    log: Path  # standard output and standard error of the run's process
    config: Config = field(compare=False)  # resolved settings, with seed, threads and iterations in them

    @property
    def name(self) -> str:
        """Return the name of the run in messages: arm and seed."""
        return f"{self.arm}, seed {self.seed}"


def start_process(run: ArmRun) -> BaseProcess:
    """Start or continue a training run in a process of its own.

    SIGTERM stops the run after its iteration, with a checkpoint; so does the end of this process, however it ends.
    The exit code is 0, or 2 after an error whose text stands at the end of the log.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    child = _context().Process(target=_call, args=("train", run), name=run.name)
    with _empty_main_module():
        child.start()
    return child


def call_in_process(function: str, *arguments: Any) -> Any:
    """Call a function of `child.py` in a process of its own, and return or raise what it returns or raises."""
    with _empty_main_module(), ProcessPoolExecutor(1, _context()) as pool:
        return pool.submit(_call, function, *arguments).result()


def _call(function: str, *arguments: Any) -> Any:
    return getattr(import_module(CHILD), function)(*arguments)


def _context() -> ForkServerContext | SpawnContext:
    """Return what starts processes.

    Elsewhere than on Linux a process cannot be forked safely once torch is imported, so each run imports it anew.
    On Linux they are forked from a server, so that torch and transformers are imported once: neither in this process
    nor once a run. The server does nothing but import: it runs no tensor operation and opens no GPU, either of which
    would break a process forked after it.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, CHILD])
    with _ignored_signals():
        forkserver.ensure_running()
    return context


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore Ctrl-C and terminations in the body; a process started there inherits this.

    The fork server shares the terminal with its parent. A signal sent to both would end the server, and with it the
    parent's knowledge of how runs end.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *TERMINATIONS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _empty_main_module() -> Iterator[None]:
    """Hide the main module from multiprocessing, which would import it, often the command line, in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
