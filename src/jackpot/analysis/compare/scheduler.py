"""The scheduler of a comparison: it starts training runs, several at once, and follows their metrics.

A run that a rule ends early is stopped with a checkpoint; a run that fails does not stop the others.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from jackpot.analysis.compare.process import ArmRun, handled, start_process
from jackpot.training.interrupt import TERMINATIONS
from jackpot.training.run_folder.folder import RunFolder, measure_of

Lines = list[dict[str, Any]]  # records of metrics.jsonl or events.jsonl
POLL_SECONDS = 0.5  # time between two looks at the runs
FAILED = "failed"
StopRule = Callable[[ArmRun, Lines, Lines], str | None]  # (run, metrics, events) -> why to stop the run; None: go on
ArmListener = Callable[[ArmRun, Lines, str], None]  # called with (run, metrics so far, how the run ended, or "")


@dataclass
class _Child:
    """A training run with its process, and what the scheduler knows about it."""

    run: ArmRun
    process: BaseProcess
    file_state: tuple[int, int] | None = None  # size and modification time of metrics.jsonl when the file was last read
    evaluation: int = -1  # iteration of the newest evaluation that the stop rule has judged
    lines: Lines = field(default_factory=list)  # records of metrics.jsonl
    stop_reason: str | None = None  # why the scheduler stopped the run; None: the scheduler did not stop it


def run_all(runs: Sequence[ArmRun], at_once: int, stop_rule: StopRule, listen: ArmListener) -> dict[ArmRun, str]:
    """Run or continue all unfinished runs in their order, at most `at_once` of them at the same time.

    A run that the stop rule ends gets SIGTERM and stops with a checkpoint; Ctrl-C and SIGTERM to this process stop all
    runs that way.

    Args:
        runs: all runs of the comparison; finished ones are reported to `listen` and not started.
        at_once: number of runs at the same time.
        stop_rule: function that says why a run should stop; it is asked after every evaluation.
        listen: function that is called at every new line of a run's metrics, and at the end of the run.

    Returns:
        The runs that failed, each with the end of its log. A failed run does not stop the others.
    """
    # Runs that are done already are only reported.
    waiting: list[ArmRun] = []
    for run in runs:
        lines, events = _read(run)
        if why := _is_done(run, lines, events, stop_rule):
            listen(run, lines, why)
        else:
            waiting.append(run)

    children: list[_Child] = []
    failed: dict[ArmRun, str] = {}

    with _stops_all(children):
        while waiting or children:
            while waiting and len(children) < at_once:
                run = waiting.pop(0)
                children.append(_Child(run, start_process(run)))
            time.sleep(POLL_SECONDS)

            for child in list(children):
                # Ask first whether the run has ended and read its lines after that, so that none of them is missed.
                has_ended = not child.process.is_alive()
                _follow(child, stop_rule, listen)
                if not has_ended:
                    continue

                children.remove(child)
                # How the run ended: stopped by us, or by itself; None: it failed.
                end = child.stop_reason or _how_ended(child)
                if end is None:
                    failed[child.run] = _end_of_log(child.run)
                listen(child.run, child.lines, end or FAILED)
    return failed


def _read(run: ArmRun) -> tuple[Lines, Lines]:
    """Read the lines of metrics.jsonl and of events.jsonl of a run."""
    folder = RunFolder(run.folder)
    return folder.read("metrics.jsonl"), folder.read("events.jsonl")


def _is_done(run: ArmRun, lines: Lines, events: Lines, stop_rule: StopRule) -> str | None:
    """Return why a run need not be started; None: the run has to be started.

    A finished run has the metrics of its last iteration, which are written after the last evaluation, and the last
    checkpoint, which is written after them. An unfinished run need not be started if the stop rule would stop it.
    """
    if not lines:
        return None
    last = run.config.iterations
    finished = lines[-1]["iteration"] >= last and (run.folder / "checkpoints" / f"step-{last}").is_dir()
    return "done before" if finished else stop_rule(run, lines, events)


def _how_ended(child: _Child) -> str | None:
    """Return text on how a run ended by itself: done, or stopped by one of its guards; None: the run failed."""
    lines, events = _read(child.run)
    if stop := next((event for event in events if event["event"] == "stopped"), None):
        return f"stopped itself: {stop['why']}"

    is_whole = bool(lines) and lines[-1]["iteration"] >= child.run.config.iterations
    return "done" if is_whole and not child.process.exitcode else None


def _follow(child: _Child, stop_rule: StopRule, listen: ArmListener) -> None:
    """Read the new metrics of a run, report them, and apply the stop rule after a new evaluation."""
    path = child.run.folder / "metrics.jsonl"
    if not path.exists():
        return
    state = path.stat()
    if child.file_state == (state.st_size, state.st_mtime_ns):
        return

    child.file_state = (state.st_size, state.st_mtime_ns)
    child.lines, events = _read(child.run)
    listen(child.run, child.lines, "")  # "": the run has not ended

    # The iteration of the newest evaluation, at which lines have an accuracy or reward; -1: none yet.
    newest = max((line["iteration"] for line in child.lines if measure_of(line)), default=-1)
    if child.stop_reason is None and newest > child.evaluation:
        child.evaluation = newest
        child.stop_reason = stop_rule(child.run, child.lines, events)
        if child.stop_reason is not None:
            child.process.terminate()


def _end_of_log(run: ArmRun) -> str:
    """Return the last 600 characters of a run's log, and where the log is."""
    text = run.log.read_text(errors="replace").strip() if run.log.exists() else ""
    return f"{text[-600:] or 'it ended early and printed nothing'} (full log: {run.log})"


@contextmanager
def _stops_all(children: list[_Child]) -> Iterator[None]:
    """Send SIGTERM to every run that still goes on when the body ends, and wait for the checkpoints.

    Ctrl-C during that wait kills the runs.
    """
    # A signal that is ignored, such as the hangup under nohup, stays ignored.
    heeded = [signum for signum in TERMINATIONS if signal.getsignal(signum) is not signal.SIG_IGN]
    try:
        with handled(heeded, signal.default_int_handler):  # they end the body as Ctrl-C does
            yield
    finally:
        for child in children:
            if child.stop_reason is None:
                child.process.terminate()
        try:
            for child in children:
                child.process.join()
        except KeyboardInterrupt:
            for child in children:
                child.process.kill()
            raise
