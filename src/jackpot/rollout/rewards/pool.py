"""Runs reward jobs in a pool of worker processes (`worker.py`), with a hard time limit for every job.

A job that exceeds its limit, or ends its process, costs only its own result: the pool kills the process with all its
children and starts another. A job that ended its process is tried once more as the first job of a fresh process, so
that no job fails because of what an earlier one left behind.
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
from jackpot.core.types import RewardError

_ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jackpot.rollout.rewards.worker import main; main()"
)
START_TIMEOUT = 120.0  # seconds until a process must be ready
_MAX_RESULT_BYTES = 2**20  # longest line that a worker may send
_CHUNK = 2**16  # bytes of one read or write
_MAX_TIMEOUT = 1e6  # seconds; the operating system takes no infinite timeout


class RewardJob(NamedTuple):
    """Describes one call in a worker."""

    function: str  # `VERIFY` of `verifier/compare.py`, or `package.module:function`
    arguments: dict[str, Any]  # keyword arguments, of types that JSON has


class RewardResult(NamedTuple):
    """Holds the number that a job returned, or why it returned none."""

    value: float  # 0 where there is an error
    error: RewardError | None


@dataclass
class _Worker:
    """Tracks one worker process and the state of its current job."""

    process: subprocess.Popen[bytes]
    deadline: float  # time.monotonic() by which it must be ready, or its job done
    outgoing: memoryview  # bytes still to be sent
    incoming: bytearray = field(default_factory=bytearray)  # bytes received of an unfinished line
    is_ready: bool = False
    job: int | None = None  # index of the current job
    retry: int | None = None  # index of the job that this fresh process begins with
    is_second_try: bool = False  # whether the current job already ended another process


class RewardWorkerPool:
    """Runs jobs in worker processes.

    The processes start at once. With reward functions, the constructor waits until every process has imported them.

    Args:
        functions: `package.module:function`, importable from `sys.path` or the current folder.
        workers: number of processes.
        timeout: seconds for one job; infinity becomes eleven days.

    Raises:
        ConfigError: a function cannot be imported.
        TrainingError: a process cannot be started.
    """

    def __init__(self, functions: Sequence[str], *, workers: int, timeout: float) -> None:
        self._timeout = min(timeout, _MAX_TIMEOUT)
        setup = {"functions": list(functions), "timeout": self._timeout, "start_timeout": START_TIMEOUT}
        self._setup = json.dumps(setup).encode() + b"\n"
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        for _ in range(workers):
            self._workers.append(self._start())
        try:
            while functions and not all(worker.is_ready for worker in self._workers):
                self._poll([], {}, deque())
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids of the current workers."""
        return [worker.process.pid for worker in self._workers]

    def run(self, jobs: Sequence[RewardJob]) -> list[RewardResult]:
        """Run all jobs and return one result for each, in the order of the jobs.

        Raises:
            TrainingError: the pool is closed, or a process cannot be started again.
        """
        if not self._workers:
            raise TrainingError("the reward workers were closed and can score nothing more; make another task")
        results: dict[int, RewardResult] = {}
        waiting = deque(range(len(jobs)))
        try:
            while len(results) < len(jobs):
                self._poll(jobs, results, waiting)
        except BaseException:
            self.close()  # the state of the processes is unknown
            raise
        return [results[index] for index in range(len(jobs))]

    def close(self) -> None:
        """Kill the processes and wait until they are gone; a second call does nothing."""
        _kill_all(self._workers)

    def _start(self, retry: int | None = None) -> _Worker:
        """Start a process whose first job is `retry`, if there is one."""
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
        deadline = time.monotonic() + START_TIMEOUT
        return _Worker(process, deadline, memoryview(self._setup), retry=retry)

    def _poll(self, jobs: Sequence[RewardJob], results: dict[int, RewardResult], waiting: deque[int]) -> None:
        """Give jobs to idle workers, wait for the next message, exit or timeout, and handle it."""
        for worker in self._workers:
            if worker.is_ready and worker.job is None:
                self._assign(worker, jobs, waiting)
        with selectors.DefaultSelector() as selector:
            busy = [worker for worker in self._workers if worker.job is not None or not worker.is_ready]
            for worker in busy:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(worker.process.stdin, selectors.EVENT_WRITE, worker)
            ready = selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        for key, mask in ready:
            if mask & selectors.EVENT_WRITE:
                _send(key.data)
        for key, mask in ready:
            if mask & selectors.EVENT_READ:
                self._receive(key.data, results)
        active = {id(key.data) for key, _ in ready}
        for worker in busy:
            if id(worker) not in active and time.monotonic() >= worker.deadline:
                self._handle_timeout(worker, results)

    def _assign(self, worker: _Worker, jobs: Sequence[RewardJob], waiting: deque[int]) -> None:
        """Give an idle worker its retry or the next waiting job, and set the deadline."""
        worker.is_second_try = worker.retry is not None
        if worker.is_second_try:
            worker.job, worker.retry = worker.retry, None
        elif waiting:
            worker.job = waiting.popleft()
        else:
            return
        worker.outgoing = memoryview(json.dumps(jobs[worker.job]._asdict()).encode() + b"\n")
        worker.deadline = time.monotonic() + self._timeout

    def _receive(self, worker: _Worker, results: dict[int, RewardResult]) -> None:
        """Read from a worker; handle a complete message, or its exit."""
        data = os.read(worker.process.stdout.fileno(), _CHUNK)
        worker.incoming += data
        if not data or len(worker.incoming) > _MAX_RESULT_BYTES:
            self._handle_exit(worker, results)
        elif b"\n" in worker.incoming:
            message = json.loads(bytes(worker.incoming))
            worker.incoming.clear()
            self._handle_message(worker, message, results)

    def _handle_message(self, worker: _Worker, message: dict[str, Any], results: dict[int, RewardResult]) -> None:
        """Record that a worker is ready, or the result of its job; raise where it cannot import a function."""
        if "refused" in message:
            raise ConfigError(message["refused"])
        if "ready" in message:
            worker.is_ready = True
            return
        results[worker.job] = RewardResult(message.get("value", 0.0), message.get("error"))
        worker.job = None
        if message["worn"]:
            self._replace(worker)

    def _handle_exit(self, worker: _Worker, results: dict[int, RewardResult]) -> None:
        """Replace a process that ended by itself; its job is tried again once and is then a crash."""
        if not worker.is_ready:
            status = worker.process.wait()
            raise TrainingError(
                f"a reward worker ended with status {status} before it was ready; its own error stands above. It needs "
                f"math-verify: pip install 'jackpot-rl[train]'"
            )
        if not worker.is_second_try:
            self._replace(worker, retry=worker.job)
        else:
            results[worker.job] = RewardResult(0.0, "crash")
            self._replace(worker)

    def _handle_timeout(self, worker: _Worker, results: dict[int, RewardResult]) -> None:
        """Replace a process whose time is up; its job is a timeout."""
        if not worker.is_ready:
            raise TrainingError(f"a reward worker was not ready after {START_TIMEOUT:.0f} s; is the machine busy?")
        results[worker.job] = RewardResult(0.0, "timeout")
        self._replace(worker)

    def _replace(self, worker: _Worker, retry: int | None = None) -> None:
        """Kill a worker and start another in its place."""
        _kill(worker)
        self._workers[self._workers.index(worker)] = self._start(retry)


def _send(worker: _Worker) -> None:
    """Write as much of a worker's outgoing bytes as its pipe takes now."""
    try:
        sent = os.write(worker.process.stdin.fileno(), worker.outgoing[:_CHUNK])
        worker.outgoing = worker.outgoing[sent:]
    except BrokenPipeError:
        worker.outgoing = memoryview(b"")  # `_receive` sees the end of the process


def _kill(worker: _Worker) -> None:
    """Kill a process and all that it started, and close its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        pipe.close()


def _kill_all(workers: list[_Worker]) -> None:
    """Kill all workers and empty the list."""
    while workers:
        _kill(workers.pop())
