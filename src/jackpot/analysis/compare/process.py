"""Runs one training run of a comparison in a process of its own, which ends with its parent."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

from jackpot.config.run import Config
from jackpot.core.errors import JackpotError
from jackpot.launch.local import launch
from jackpot.training.interrupt import TERMINATIONS

# Elsewhere than on Linux a process cannot be forked safely once torch is imported, so each run imports it anew.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


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

    On Linux the process is forked from a server, so that torch and transformers are imported once and not once a run.
    The server does nothing but import: it runs no tensor operation and opens no GPU, either of which would break a
    process forked after it.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        context.set_forkserver_preload([__name__])
        with _ignored_signals():
            forkserver.ensure_running()
    child = context.Process(target=_train, args=(run,), name=run.name)
    with _empty_main_module():
        child.start()
    return child


def _train(run: ArmRun) -> None:
    """Train in the new process, with all that is printed in the log."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C in the terminal reaches the parent alone, which then sends one SIGTERM
    with run.log.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in TERMINATIONS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    transformers.utils.logging.disable_progress_bar()

    def show(line: dict[str, Any]) -> None:
        print(f"iteration {line['iteration']}/{run.config.iterations}", flush=True)

    try:
        with closing(launch(run.config, run.folder, show)) as trainer:
            trainer.train()
    except JackpotError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _end_with_parent() -> None:
    """Wait for the end of the parent process, then send SIGTERM to this one."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


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
