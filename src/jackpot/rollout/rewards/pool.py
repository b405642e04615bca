"""Runs calls of one function in worker processes (`worker.py`), with hard limits of time and memory.

A call that exceeds its limit, or ends its process, costs only its own result: the process is killed with all its
children and another takes its place. A call that ended its process, such as by the kernel's OOM killer, is tried once
more alone as the first one of a fresh process, so that none fails because of what another left behind.

All processes belong to one thread of the pool, which runs an event loop. So calls go on while the caller does something
else, such as generating further responses. Processes are started as work comes in, each only where a call has to wait.
"""

import asyncio
import json
import math
import os
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread, current_thread
from typing import Any, NamedTuple

from jackpot.core.errors import ConfigError, JackpotError, TrainingError
from jackpot.core.types import RewardError

_ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jackpot.rollout.rewards.worker import main; main()"
)
START_TIMEOUT = 600.0  # seconds until a process must be ready; it may load a model
_MAX_LINE_BYTES = 2**20  # longest line that a worker may send
_MAX_TIMEOUT = 1e6  # seconds; the operating system takes no infinite timeout
_AWAITED = 1.0  # seconds that a worker has to report the awaited calls that took too long
_ARRIVED = 0.05  # seconds to read what a worker sent in time while this process stood still
_GIB = 2**30
Item = Mapping[str, Any]  # keyword arguments of one response, of types that JSON has


class CallLimits(NamedTuple):
    """Limits the calls of a function."""

    timeout: float  # seconds for one try; infinity becomes eleven days
    retries: int = 0  # further tries of a call that failed or took too long
    batch_size: int = 64  # most items in one call of a batched function, or awaited at the same time
    memory: float = 2.0  # GiB that a process may take beyond its size when it was ready


class RewardResult(NamedTuple):
    """Holds the number that the function returned for an item, or why it returned none."""

    value: float  # 0 where there is an error
    error: RewardError | None
    retries: int = 0  # tries after the first
    text: str | None = None  # says what the error is


class RewardWorkerPool:
    """Calls a function in worker processes.

    Args:
        function: `package.module:function`, importable from `sys.path` or the current folder.
        workers: most processes. A function that is async or takes batches has one.
    """

    def __init__(self, function: str, limits: CallLimits, *, workers: int) -> None:
        self._processes = _Processes(function, limits, workers)
        thread = Thread(target=self._processes.run, name=f"rewards {function}", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _stop, self._processes, thread)

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids of the current workers."""
        return [worker.process.pid for worker in list(self._processes.workers)]

    def wait_until_ready(self) -> None:
        """Wait until a process has imported the function.

        Raises:
            ConfigError: it cannot be imported.
            TrainingError: the process cannot be started.
        """
        self._processes.call(self._processes.start)
        self._processes.ready.result()

    def submit(self, items: Sequence[Item], limit: float = math.inf) -> "Future[list[RewardResult]]":
        """Begin to call the function for all items; the future has one result for each, in their order.

        Args:
            limit: seconds after which an item whose call has not begun is one that took too long.

        Raises:
            TrainingError: the pool is closed. The future raises as `wait_until_ready`.
        """
        if not self._close.alive:
            raise TrainingError("the reward workers were closed and can score nothing more; make another task")
        future: Future[list[RewardResult]] = Future()
        if items:
            self._processes.call(self._processes.add, list(items), limit, future)
        else:
            future.set_result([])
        return future

    def run(self, items: Sequence[Item]) -> list[RewardResult]:
        """Call the function for all items and return one result for each, in their order."""
        return self.submit(items).result()

    def close(self) -> None:
        """Kill the processes and wait until they are gone; a second call does nothing."""
        self._close()


@dataclass
class _Batch:
    """Collects the results of the items that were submitted together."""

    future: "Future[list[RewardResult]]"
    size: int  # number of items
    results: dict[int, RewardResult] = field(default_factory=dict)  # by index of the item


@dataclass(eq=False)
class _Call:
    """Tracks one item until it has its result."""

    item: Item
    batch: _Batch
    index: int  # in the batch
    deadline: float  # loop time until which it may begin
    retries: int = 0  # failed tries so far that are repeated
    ended_process: bool = False  # whether a process ended while it was called

    def finish(self, value: float, error: RewardError | None = None, text: str | None = None) -> None:
        """Record the result; the last one of a batch completes its future."""
        batch = self.batch
        batch.results[self.index] = RewardResult(value, error, self.retries, text)
        if len(batch.results) == batch.size and not batch.future.done():
            batch.future.set_result([batch.results[index] for index in range(batch.size)])


@dataclass
class _Worker:
    """Holds one worker process and the two ends of its pipes."""

    process: asyncio.subprocess.Process
    jobs: asyncio.StreamWriter
    messages: asyncio.StreamReader
    is_used: bool = False  # whether it has been given a job

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message as one line of JSON."""
        self.jobs.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """Read the next message.

        Raises:
            _Ended: there is none.
        """
        try:
            line = await self.messages.readline()
        except ValueError as error:  # a line beyond the limit
            raise _Ended from error
        if not line.endswith(b"\n"):
            raise _Ended
        return json.loads(line)


class _Ended(Exception):
    """Reports that a worker process ended by itself, or sends what is no message."""


@dataclass
class _Processes:
    """Lives in the thread of the pool, which alone touches it but for `call`."""

    function: str
    limits: CallLimits
    most: int  # processes
    ready: "Future[None]" = field(default_factory=Future)  # of the first process
    workers: list[_Worker] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self._timeout = min(self.limits.timeout, _MAX_TIMEOUT)  # seconds of one try
        self._job_timeout, self._batch_size = self._timeout, 1  # of a job; known when the first process is ready
        self._queue: asyncio.Queue[list[_Call]] = asyncio.Queue()
        self._outstanding: dict[int, _Batch] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._free = 0  # tasks that will take a job before they are given another
        self._error: JackpotError | None = None

    def run(self) -> None:
        """Serve until `stop`."""
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._fail(TrainingError("the reward workers were closed while they scored"))
        self.loop.close()

    def call(self, function: Any, *arguments: Any) -> None:
        """Have the thread call a method of this object; any thread may ask for it."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def start(self) -> None:
        """Start the first process, whose answer says how the function is called."""
        if not self._tasks:
            self._start_worker()

    def add(self, items: list[Item], limit: float, future: "Future[list[RewardResult]]") -> None:
        """Queue the calls of a batch, once it is known how many go together."""
        batch = _Batch(future, len(items))
        self._outstanding[id(batch)] = batch
        future.add_done_callback(lambda _: self._outstanding.pop(id(batch), None))
        if self._error is not None:
            future.set_exception(self._error)
            return
        self.start()
        deadline = self.loop.time() + min(limit, _MAX_TIMEOUT)
        self._enqueue([_Call(item, batch, index, deadline) for index, item in enumerate(items)])

    def _enqueue(self, calls: list[_Call]) -> None:
        if not self.ready.done():
            self.ready.add_done_callback(lambda _: self.call(self._enqueue, calls))
            return
        for first in range(0, len(calls), self._batch_size):
            self._queue.put_nowait(calls[first : first + self._batch_size])
        while self._free < self._queue.qsize() and len(self._tasks) < self.most and self._error is None:
            self._start_worker()

    def _start_worker(self) -> None:
        self._free += 1
        self._tasks.append(self.loop.create_task(self._serve()))

    def _fail(self, error: JackpotError) -> None:
        """Let everything that was or will be asked raise an error."""
        self._error = self._error or error
        for batch in list(self._outstanding.values()):
            if not batch.future.done():
                batch.future.set_exception(self._error)
        if not self.ready.done():
            self.ready.set_exception(self._error)

    async def _serve(self) -> None:
        """Do jobs in one process after the other, until this is cancelled."""
        worker: _Worker | None = None
        try:
            while True:
                worker = worker or await self._started()
                calls = await self._queue.get()
                self._free -= 1
                if any(call.ended_process for call in calls) and worker.is_used:
                    await self._end(worker)
                    worker = await self._started()
                if not await self._do(worker, calls):
                    await self._end(worker)
                    worker = None
                self._free += 1
        except JackpotError as error:
            self._fail(error)
        except Exception as error:  # else the batches of this task would wait for ever
            self._fail(TrainingError(f"the reward workers of {self.function} failed: {error!r}"))
        finally:
            if worker is not None:
                await self._end(worker)

    async def _do(self, worker: _Worker, calls: Sequence[_Call]) -> bool:
        """Have a worker do the calls of a job; return whether it can do another."""
        now, worker.is_used = self.loop.time(), True
        late = [call for call in calls if call.deadline < now]
        for call in late:
            call.finish(0.0, "timeout", "its call had not begun when the time of its batch was up")
        left = dict(enumerate(call for call in calls if call.deadline >= now))
        if not left:
            return True
        repeated: list[_Call] = []
        keep = False
        try:
            try:
                async with asyncio.timeout(self._job_timeout):
                    worker.send({"items": [call.item for call in left.values()]})
                    await worker.jobs.drain()
                    keep = await self._receive(worker, left, repeated)
            except TimeoutError:
                async with asyncio.timeout(_ARRIVED):
                    keep = await self._receive(worker, left, repeated)
        except TimeoutError:
            for call in left.values():
                self._settle(call, "timeout", f"took longer than {self._timeout:g} s", repeated)
        except (_Ended, ConnectionError):
            for call in left.values():
                if call.ended_process:
                    call.finish(0.0, "crash", "its process ended twice, the second time while it was called alone")
                else:
                    call.ended_process = True
                    self._enqueue([call])
        if repeated:
            pause = 2.0 ** (max(call.retries for call in repeated) - 1)
            self.loop.call_later(pause, self._enqueue, repeated)
        return keep

    async def _receive(self, worker: _Worker, left: dict[int, _Call], repeated: list[_Call]) -> bool:
        """Take the results of a job, whose calls leave `left`; return whether the worker can do another."""
        while "worn" not in (message := await worker.receive()):
            call = left.pop(message["item"])
            if "value" in message:
                call.finish(message["value"])
            else:
                self._settle(call, message["error"], message["text"], repeated)
        return not message["worn"]

    def _settle(self, call: _Call, error: RewardError, text: str, repeated: list[_Call]) -> None:
        """Put a failed call among the repeated ones, or end it where it was repeated often enough."""
        if call.retries < self.limits.retries:
            call.retries += 1
            repeated.append(call)
        else:
            call.finish(0.0, error, text)

    async def _started(self) -> _Worker:
        """Start a process and wait until it is ready.

        Raises:
            ConfigError: the function cannot be imported.
            TrainingError: the process ended or took too long.
        """
        paths = [path for path in sys.path if path]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _ENTRY, json.dumps([*paths, os.getcwd()])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C does not reach it, and it is killed with all that it starts
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdin and process.stdout  # both are pipes
        worker = _Worker(process, process.stdin, process.stdout)
        self.workers.append(worker)
        memory = self.limits.memory * _GIB
        setup = {
            "function": self.function,
            "timeout": self._timeout,
            "start_timeout": START_TIMEOUT,
            "memory": int(memory) if math.isfinite(memory) else None,
        }
        try:
            async with asyncio.timeout(START_TIMEOUT):
                worker.send(setup)
                message = await worker.receive()
            if "refused" in message:
                raise ConfigError(message["refused"])
        except TimeoutError:
            await self._end(worker)
            raise TrainingError(
                f"a reward worker was not ready after {START_TIMEOUT:.0f} s; is the machine busy?"
            ) from None
        except (_Ended, ConnectionError):
            await self._end(worker)
            raise TrainingError(
                f"a reward worker ended with status {process.returncode} before it was ready; its own error stands "
                f"above"
            ) from None
        except BaseException:
            await self._end(worker)
            raise
        if not self.ready.done():
            if message["takes_batches"] or message["is_async"]:
                self._batch_size, self.most = self.limits.batch_size, 1
            self._job_timeout = self._timeout + (_AWAITED if message["is_async"] else 0.0)
            self.ready.set_result(None)
        return worker

    async def _end(self, worker: _Worker) -> None:
        """Kill a process and all that it started."""
        if worker in self.workers:
            self.workers.remove(worker)
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.jobs.close()
        await worker.process.wait()
        with suppress(TimeoutError, ValueError):
            async with asyncio.timeout(_ARRIVED):
                await worker.messages.read()  # to its end, which frees the pipe


def _stop(processes: _Processes, thread: Thread) -> None:
    """Kill all workers and end the thread of a pool."""
    processes.call(processes.loop.stop)
    if thread is not current_thread():  # which may be the one that collects a forgotten pool
        thread.join()
