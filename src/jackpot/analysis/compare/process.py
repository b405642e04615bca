"""The processes of a comparison: one for each training run, so that torch is never imported in this process.

On Linux the processes are forked from a server that imports torch once for all of them.
"""

import multiprocessing
import signal
import sys
from collections.abc import Iterable, Iterator
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

CHILD = "jackpot.analysis.compare.child"  # given by name, since this process must not import the module


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRun:
    """One training run of a comparison: its arm, seed, settings and files."""

    arm: str
    seed: int
    folder: Path  # run folder
    log: Path  # file with standard output and standard error of the run's process
    config: Config = field(compare=False)  # resolved settings, with seed, threads and iterations in them

    @property
    def name(self) -> str:
        """Return the run's name in messages: arm and seed."""
        return f"{self.arm}, seed {self.seed}"


def start_process(run: ArmRun) -> BaseProcess:
    """Start or continue a training run in a new process.

    SIGTERM stops the run after the current iteration, with a checkpoint; so does the end of this process, however this
    process ends. The exit code is 0, or 2 after an error whose text stands at the end of the log.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    child = _context().Process(target=_call, args=("train", run), name=run.name)
    with _empty_main_module():  # else the child would import the command line's module
        child.start()
    return child


def runs_at_once(configs: Iterable[Config]) -> int:
    """Return how many runs the machine can take now: 1 where a GPU trains, else free cores / threads of a run.

    Raises:
        ConfigError: a run asks for a GPU and there is none.
    """
    with _empty_main_module(), ProcessPoolExecutor(1, _context()) as pool:
        return pool.submit(_call, "runs_at_once", list(configs)).result()


def _call(function: str, *arguments: Any) -> Any:
    """Call a function of `child.py` by its name, in a child process only, since that file imports torch."""
    return getattr(import_module(CHILD), function)(*arguments)


def _context() -> ForkServerContext | SpawnContext:
    """Return the context of multiprocessing that starts processes: a fork server on Linux, else spawn.

    The fork server imports torch and transformers once for all runs. It does nothing but import: after a tensor
    operation or the opening of a GPU, processes forked from it would break. On other systems no process can be forked
    safely once torch is imported, so each run imports torch anew.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, CHILD])
    # The server goes on ignoring the signals that are ignored when it starts. Ctrl-C and termination, which reach the
    # server through the shared terminal, must not end it, since only the server learns how runs end.
    with handled((signal.SIGINT, *TERMINATIONS), signal.SIG_IGN):
        forkserver.ensure_running()
    return context


@contextmanager
def handled(signals: Iterable[int], handler: Any) -> Iterator[None]:
    """Set a handler for signals while the body runs; a process started in the body inherits ignored signals."""
    handlers_before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, handler_before in handlers_before.items():
            signal.signal(signum, handler_before)


@contextmanager
def _empty_main_module() -> Iterator[None]:
    """Hide the main module, often the command line, from multiprocessing, which would import it in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
