"""The scheduler of a comparison: it starts training runs, several at once, and follows their metrics.

A run that a rule ends early is stopped with a checkpoint; a run that fails does not stop the others.
"""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from jackpot.analysis.compare.process import ArmRun, call_in_process, start_process
from jackpot.config.config import Config
from jackpot.training.interrupt import TERMINATIONS
from jackpot.training.run_folder.folder import RunFolder, measure_of

Lines = list[dict[str, Any]]  # of metrics.jsonl or events.jsonl
POLL_SECONDS = 0.5
FAILED = "failed"
StopRule = Callable[[ArmRun, Lines, Lines], str | None]  # (run, metrics, events) -> why to stop it; None: go on
ArmListener = Callable[[ArmRun, Lines, str], None]  # (run, metrics so far, how it ended or ""), at every new line


@dataclass
class _Running:
    run: ArmRun
    process: BaseProcess
    seen: tuple[int, int] | None = None  # size and time of metrics.jsonl when it was last read
    evaluated: int = -1  # iteration of the newest evaluation that the stop rule has seen
    lines: Lines = field(default_factory=list)
    stopped: str | None = None  # why the scheduler stopped it


def runs_at_once(configs: Iterable[Config]) -> int:
    """Return how many runs the machine can take now: 1 where a GPU trains, else free cores over a run's threads.

    Raises:
        ConfigError: a run asks for a GPU and there is none.
    """
    return call_in_process("runs_at_once", list(configs))


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

    running: list[_Running] = []
    failed: dict[ArmRun, str] = {}

    with _stops_all(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.pop(0)
                running.append(_Running(run, start_process(run)))
            time.sleep(POLL_SECONDS)

            for one in list(running):
                # In this order: of a run that has ended, the last lines are read too.
                ended = not one.process.is_alive()
                _follow(one, stop_rule, listen)
                if ended:
                    running.remove(one)
                    end = one.stopped or _own_end(one)
                    if end is None:
                        failed[one.run] = _end_of_log(one.run)
                    listen(one.run, one.lines, end or FAILED)
    return failed


def _read(run: ArmRun) -> tuple[Lines, Lines]:
    """Read the lines of metrics.jsonl and of events.jsonl of a run."""
    folder = RunFolder(run.folder)
    return folder.read("metrics.jsonl"), folder.read("events.jsonl")


def _is_done(run: ArmRun, lines: Lines, events: Lines, stop_rule: StopRule) -> str | None:
    """Return why a run need not be started; None where it has to be.

    A finished run has the metrics of its last iteration, which are written after the last evaluation, and the last
    checkpoint, which is written after them.
    """
    if not lines:
        return None
    last = run.config.iterations
    finished = lines[-1]["iteration"] >= last and (run.folder / "checkpoints" / f"step-{last}").is_dir()
    return "done before" if finished else stop_rule(run, lines, events)


def _own_end(one: _Running) -> str | None:
    """Say how a run ended that was not stopped from here: done, or stopped by one of its guards; None: it failed."""
    lines, events = _read(one.run)
    if stopped := next((event for event in events if event["event"] == "stopped"), None):
        return f"stopped itself: {stopped['why']}"

    is_whole = bool(lines) and lines[-1]["iteration"] >= one.run.config.iterations
    return "done" if is_whole and not one.process.exitcode else None


def _follow(one: _Running, stop_rule: StopRule, listen: ArmListener) -> None:
    """Read the new metrics of a run, report them, and apply the stop rule after a new evaluation."""
    path = one.run.folder / "metrics.jsonl"
    state = path.stat() if path.exists() else None
    if state is None or one.seen == (state.st_size, state.st_mtime_ns):
        return

    one.seen = (state.st_size, state.st_mtime_ns)
    one.lines, events = _read(one.run)
    listen(one.run, one.lines, "")

    newest = max((line["iteration"] for line in one.lines if measure_of(line)), default=-1)
    if one.stopped is None and newest > one.evaluated:
        one.evaluated = newest
        one.stopped = stop_rule(one.run, one.lines, events)
        if one.stopped is not None:
            one.process.terminate()


def _end_of_log(run: ArmRun) -> str:
    text = run.log.read_text(errors="replace").strip() if run.log.exists() else ""
    return f"{text[-600:] or 'it ended early and printed nothing'} (full log: {run.log})"


@contextmanager
def _stops_all(running: list[_Running]) -> Iterator[None]:
    """Send SIGTERM to every run that still goes on when the body ends, and wait for the checkpoints.

    Ctrl-C during that wait kills the runs.
    """

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    heard = [number for number in TERMINATIONS if signal.getsignal(number) is not signal.SIG_IGN]  # not with nohup
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

        for one in running:
            if one.stopped is None:
                one.process.terminate()
        try:
            for one in running:
                one.process.join()
        except KeyboardInterrupt:
            for one in running:
                one.process.kill()
            raise
