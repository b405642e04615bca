"""Processes that judge, each with a hard limit of time for every job. What they run is `verifier/worker.py`.

A job that takes too long, or ends its process, costs its own result: the process is killed with all that it started,
and another takes its place. A job that ended its process is tried once more, as the first in a fresh one, so that
nobody pays for what another job left behind.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jackpot.core.errors import ConfigError, TrainingError
from jackpot.core.types import JudgeProblem

_ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jackpot.rollout.rewards.verifier.worker import main; main()"
)
START_SECONDS = 120.0  # until a process must be ready
_LONGEST_LINE = 2**20  # bytes of a result
_CHUNK = 2**16
_LONGEST_WAIT = 1e6  # seconds; the operating system takes no endless ones


class Job(NamedTuple):
    """A call: `worker.VERDICT` or a reward function, with arguments that JSON can carry."""

    function: str
    arguments: dict[str, Any]


class Outcome(NamedTuple):
    value: float  # 0 where there is a problem
    problem: JudgeProblem | None


@dataclass
class _Place:
    """One process at a time, and what it is doing."""

    process: subprocess.Popen[bytes]
    deadline: float  # of the start or of the job
    outgoing: memoryview
    incoming: bytearray = field(default_factory=bytearray)
    is_ready: bool = False
    job: int | None = None  # its number
    again: int | None = None  # the job that this fresh process begins with
    is_second_try: bool = False


class JudgePool:
    """Starts its processes at once, and waits for them where there are functions to import or jobs to do.

    Args:
        functions: `package.module:function`, importable from `sys.path` or the current folder.
        seconds: for one job; infinity is eleven days.

    Raises:
        ConfigError: a function that cannot be imported.
        TrainingError: a process that cannot be started.
    """

    def __init__(self, functions: Sequence[str], *, workers: int, seconds: float) -> None:
        self._seconds = min(seconds, _LONGEST_WAIT)
        orders = {"functions": list(functions), "seconds": self._seconds, "start_seconds": START_SECONDS}
        self._orders = json.dumps(orders).encode() + b"\n"
        self._places: list[_Place] = []
        self._end = weakref.finalize(self, _end_all, self._places)
        for _ in range(workers):
            self._places.append(self._start())
        try:
            while functions and not all(place.is_ready for place in self._places):
                self._turn([], {}, deque())
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        return [place.process.pid for place in self._places]

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One outcome for each job, in their order.

        Raises:
            TrainingError: the pool is closed, or a process cannot be started again.
        """
        if not self._places:
            raise TrainingError("the judge was closed and cannot judge any more; make another one")
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(jobs)))
        try:
            while len(outcomes) < len(jobs):
                self._turn(jobs, outcomes, waiting)
        except BaseException:
            self.close()  # nobody knows what the processes are doing
            raise
        return [outcomes[number] for number in range(len(jobs))]

    def close(self) -> None:
        """Kill the processes and wait until they are gone; a second time does nothing."""
        _end_all(self._places)

    def _start(self, again: int | None = None) -> _Place:
        paths = [path for path in sys.path if path]
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, json.dumps([*paths, os.getcwd()])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C does not reach it, and it is killed with all that it starts
            bufsize=0,
        )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        deadline = time.monotonic() + START_SECONDS
        return _Place(process, deadline, memoryview(self._orders), again=again)

    def _turn(self, jobs: Sequence[Job], outcomes: dict[int, Outcome], waiting: deque[int]) -> None:
        """Give work to those without, wait for the next thing to happen, and see to it."""
        for place in self._places:
            if place.is_ready and place.job is None:
                self._give(place, jobs, waiting)
        with selectors.DefaultSelector() as selector:
            busy = [place for place in self._places if place.job is not None or not place.is_ready]
            for place in busy:
                selector.register(place.process.stdout, selectors.EVENT_READ, place)
                if place.outgoing:
                    selector.register(place.process.stdin, selectors.EVENT_WRITE, place)
            ready = selector.select(max(0.0, min(place.deadline for place in busy) - time.monotonic()))
        for key, mask in ready:
            if mask & selectors.EVENT_WRITE:
                _send(key.data)
        for key, mask in ready:
            if mask & selectors.EVENT_READ:
                self._receive(key.data, outcomes)
        answered = {id(key.data) for key, _ in ready}
        for place in busy:
            if id(place) not in answered and time.monotonic() >= place.deadline:
                self._out_of_time(place, outcomes)

    def _give(self, place: _Place, jobs: Sequence[Job], waiting: deque[int]) -> None:
        place.is_second_try = place.again is not None
        if place.is_second_try:
            place.job, place.again = place.again, None
        elif waiting:
            place.job = waiting.popleft()
        else:
            return
        place.outgoing = memoryview(json.dumps(jobs[place.job]._asdict()).encode() + b"\n")
        place.deadline = time.monotonic() + self._seconds

    def _receive(self, place: _Place, outcomes: dict[int, Outcome]) -> None:
        data = os.read(place.process.stdout.fileno(), _CHUNK)
        place.incoming += data
        if not data or len(place.incoming) > _LONGEST_LINE:
            self._lost(place, outcomes)
        elif b"\n" in place.incoming:
            message = json.loads(bytes(place.incoming))
            place.incoming.clear()
            self._see(place, message, outcomes)

    def _see(self, place: _Place, message: dict[str, Any], outcomes: dict[int, Outcome]) -> None:
        if "refused" in message:
            raise ConfigError(
                f"the reward {message['refused']!r} cannot be imported: {message['why']}. A reward function is named "
                f"package.module:function and must be importable from the folder {os.getcwd()} or an installed package"
            )
        if "ready" in message:
            place.is_ready = True
            return
        outcomes[place.job] = Outcome(message.get("value", 0.0), message.get("problem"))
        place.job = None
        if message["worn"]:
            self._replace(place)

    def _lost(self, place: _Place, outcomes: dict[int, Outcome]) -> None:
        """A process ended by itself."""
        if not place.is_ready:
            status = place.process.wait()
            raise TrainingError(
                f"a judge process ended with status {status} before it was ready; what it said stands above. It needs "
                f"math-verify: pip install 'jackpot-rl[train]'"
            )
        if not place.is_second_try:
            self._replace(place, again=place.job)
        else:
            outcomes[place.job] = Outcome(0.0, "crash")
            self._replace(place)

    def _out_of_time(self, place: _Place, outcomes: dict[int, Outcome]) -> None:
        if not place.is_ready:
            raise TrainingError(f"a judge process was not ready after {START_SECONDS:.0f} s; is the machine busy?")
        outcomes[place.job] = Outcome(0.0, "timeout")
        self._replace(place)

    def _replace(self, place: _Place, again: int | None = None) -> None:
        _end(place)
        self._places[self._places.index(place)] = self._start(again)


def _send(place: _Place) -> None:
    try:
        sent = os.write(place.process.stdin.fileno(), place.outgoing[:_CHUNK])
        place.outgoing = place.outgoing[sent:]
    except BrokenPipeError:
        place.outgoing = memoryview(b"")  # its end is seen where it is read from


def _end(place: _Place) -> None:
    """Kill a process, with those that it started, and forget it."""
    with suppress(ProcessLookupError):
        os.killpg(place.process.pid, signal.SIGKILL)
    place.process.wait()
    for pipe in (place.process.stdin, place.process.stdout):
        pipe.close()


def _end_all(places: list[_Place]) -> None:
    while places:
        _end(places.pop())
