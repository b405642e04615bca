"""The part of a comparison that runs in child processes, one for each run: it trains.

Only the processes that `process.py` starts import this file, so that no other process has to import torch.
"""

import os
import signal
import sys
from collections.abc import Sequence

import transformers

from jackpot.analysis.compare.process import ArmRun
from jackpot.config.config import Config
from jackpot.core.cores import free_cores, pick_threads
from jackpot.core.errors import JackpotError
from jackpot.core.parent import end_with_parent
from jackpot.launch.start import train_run
from jackpot.models.device import pick_device
from jackpot.training.interrupt import TERMINATIONS


def train(run: ArmRun) -> None:
    """Train or continue one run, with all output of the process in the run's log.

    The exit code is 2 after a `JackpotError`, whose text ends the log.
    """
    os.setsid()  # Ctrl-C in the terminal reaches the parent alone, which then sends one SIGTERM
    with run.log.open("wb") as log:
        os.dup2(log.fileno(), 1)  # standard output
        os.dup2(log.fileno(), 2)  # standard error

    # This process has inherited from the fork server that these signals are ignored; here they must act again.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in TERMINATIONS:
        signal.signal(signum, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)

    transformers.utils.logging.disable_progress_bar()

    try:
        train_run(
            run.config,
            run.folder,
            on_metrics=lambda line: print(f"iteration {line['iteration']}/{run.config.iterations}", flush=True),
        )
    except JackpotError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def runs_at_once(configs: Sequence[Config]) -> int:
    """Return how many runs the machine can take now, 1 where a GPU trains; called in a child process only.

    Else it is the number of free cores over the most threads of a run, at least 1.
    """
    if any(pick_device(config.device).type == "cuda" for config in configs):
        return 1
    return max(1, free_cores() // max(pick_threads(config.threads) for config in configs))
