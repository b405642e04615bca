"""A pool of worker processes (`worker.py`) that call one function, with hard limits of time and memory."""

import json
import math
import os
import re
import secrets
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from jackpot.core.errors import ConfigError, TrainingError
from jackpot.rollout.rewards.worker import MAX_REWARD

if TYPE_CHECKING:  # not at run time, because the module imports torch
    from jackpot.core.types import RewardError

_ENTRY = (  # program of a worker process, whose argument is the list of import paths
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jackpot.rollout.rewards.worker import main; main()"
)
START_TIMEOUT = 600.0  # seconds until a process must be ready; it may load a model
_MAX_LINE_BYTES = 2**20  # longest line that a worker may send
_MAX_TIMEOUT = 1e6  # longest timeout, seconds: the operating system takes no infinite one
_AWAITED = 1.0  # seconds after a job's limit in which an async worker may report which of its calls took too long
_ARRIVED = 0.05  # shortest wait for a message, seconds; so one that came in time is read even if this process was slow
_GIB = 2**30
_SAFE_VARIABLES = re.compile(  # environment variables that a process gets: none with keys, tokens or passwords
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|VIRTUAL_ENV|CONDA_PREFIX"
    r"|PYTHON(PATH|HOME|HASHSEED|WARNINGS|UNBUFFERED|UTF8|IOENCODING|DONTWRITEBYTECODE|FAULTHANDLER|NOUSERSITE)"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_\w+|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|PATH)|(HIP|ROCR)_VISIBLE_DEVICES"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|(OMP|MKL|OPENBLAS)_NUM_THREADS|TORCH_HOME|TOKENIZERS_PARALLELISM"
    r"|HF_(HOME|ENDPOINT|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE|NLTK_DATA|XDG_\w+"
    r"|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|(https?|all|no|HTTPS?|ALL|NO)_(proxy|PROXY)|JACKPOT_DATA"
)
_MARK = "JACKPOT_REWARD_WORKER"  # environment variable by which processes that a worker started are found and killed
Item = Mapping[str, Any]  # keyword arguments of the function for one response, of types that JSON has


class CallLimits(NamedTuple):
    """The limits of time, memory and tries of a worker's function."""

    timeout: float  # seconds for one try, at most eleven days (`_MAX_TIMEOUT`)
    retries: int = 0  # number of further tries of a call that failed or took too long
    batch_size: int = 64  # most items in a call that takes a batch, or most calls of an async function awaited at once
    memory: float = 2.0  # GiB that a process may take beyond its size when it was ready
    environment: tuple[str, ...] = ()  # names of environment variables that a process gets beside `_SAFE_VARIABLES`


class RewardResult(NamedTuple):
    """The number that the function returned for an item, or the reason why there is none."""

    value: float  # 0 where there is an error
    error: "RewardError | None"
    retries: int = 0  # number of tries after the first
    text: str | None = None  # description of the error


class RewardWorkerPool:
    """A pool of worker processes that call one function.

    A call that exceeds its limit, or ends its process, loses only its own result: the process is killed with all that
    it started, in whatever session, and another process takes its place. A call that ended its process, such as by the
    kernel's OOM killer, is tried once more, alone and as the first call of a fresh process, so that no call fails
    because of what another call left behind.

    Threads of the pool wait for the processes, so calls go on while the caller does something else, such as generating
    further responses. A process is started only when a call would have to wait for one.

    Args:
        function: `package.module:function`, importable from `sys.path` or the current folder.
        limits: limits of time and memory for each call.
        workers: largest number of processes. A function that is async or takes batches gets one process.
    """

    def __init__(self, function: str, limits: CallLimits, *, workers: int) -> None:
        """Describe the pool, without a process yet; `workers` is the largest number of processes."""
        self._function, self._limits = function, limits
        self._timeout = min(limits.timeout, _MAX_TIMEOUT)
        self._most_workers, self._batch_size = workers, 1  # changed by `wait_until_ready` if calls share a process
        self._executor: ThreadPoolExecutor | None = None  # None until a worker has imported the function
        self._workers: set[_Worker] = set()  # workers whose process runs
        self._idle: list[_Worker] = []  # workers that have no job
        self._lock = RLock()  # held while a process is started, and while all are ended
        # Ends the processes: when `close` calls it, or once nothing refers to the pool.
        self._close = weakref.finalize(self, _stop, self._workers, self._lock)

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids of the current workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def wait_until_ready(self) -> ThreadPoolExecutor:
        """Wait until a process has imported the function; return the executor whose threads wait for processes.

        Raises:
            ConfigError: the function cannot be imported.
            TrainingError: the process cannot be started, or the pool is closed.
        """
        if self._executor is None:
            worker = self._started()
            self._idle.append(worker)

            # Only the imported function shows whether calls share one process, and so how many threads are needed.
            if worker.is_shared:
                self._batch_size, self._most_workers = self._limits.batch_size, 1
            self._executor = ThreadPoolExecutor(self._most_workers, f"rewards {self._function}")
        return self._executor

    def submit(self, items: Sequence[Item], limit: float = math.inf) -> Callable[[], list[RewardResult]]:
        """Begin to call the function for all items; the returned function waits for the results, in their order.

        Args:
            limit: seconds after which an item whose call has not begun gets the error `timeout`.

        Raises:
            ConfigError, TrainingError: as `wait_until_ready`, which this call waits for. The returned function raises
                TrainingError if the pool was closed.
        """
        if not items:
            return list  # which returns an empty list, as there are no results
        executor = self.wait_until_ready()
        deadline, size = time.monotonic() + min(limit, _MAX_TIMEOUT), self._batch_size
        jobs = [
            executor.submit(self._do, items[first : first + size], deadline) for first in range(0, len(items), size)
        ]

        def wait() -> list[RewardResult]:
            """Wait for the results; if the wait is interrupted, no further job begins."""
            try:
                return [result for job in jobs for result in job.result()]
            finally:
                for job in jobs:
                    job.cancel()

        return wait

    def close(self) -> None:
        """Kill the processes and wait until they have ended; a second call does nothing."""
        self._close()

    def _do(self, items: Sequence[Item], deadline: float) -> list[RewardResult]:
        """Call the function for the items of one job, which one worker does; retry failed calls as the limits say.

        If `deadline`, a time of `time.monotonic()`, has passed, each item gets the error `timeout` without a call.
        """
        if time.monotonic() > deadline:
            not_begun = RewardResult(0.0, "timeout", text="its call had not begun when the time of its batch was up")
            return [not_begun] * len(items)

        results = self._settled(items)
        for retry in range(self._limits.retries):
            failed_indices = [index for index, result in enumerate(results) if result.error]
            if failed_indices:
                time.sleep(2.0**retry)  # 1 s before the first retry, then 2 s, 4 s, ...
                retried = self._settled([items[index] for index in failed_indices])
                for index, result in zip(failed_indices, retried, strict=True):
                    results[index] = result._replace(retries=retry + 1)
        return results

    def _settled(self, items: Sequence[Item]) -> list[RewardResult]:
        """Call the function once for all items; repeat calls that ended their process, each alone in a new process."""
        ended_twice = RewardResult(
            0.0, "crash", text="its process ended twice, the second time while it was called alone"
        )
        # Where a call ended its process, the result is None. The item is tried again, and gets the error `crash` if the
        # second call ends its process too.
        return [
            result or self._tried([item], is_fresh=True)[0] or ended_twice
            for item, result in zip(items, self._tried(items, is_fresh=False), strict=True)
        ]

    def _tried(self, items: Sequence[Item], is_fresh: bool) -> list[RewardResult | None]:
        """Call the function for items in one process, a new one if `is_fresh`.

        Return None for items whose result the process did not give.
        """
        # Take an idle worker, or start one where none is idle.
        try:
            worker = self._started() if is_fresh else self._idle.pop()
        except IndexError:
            worker = self._started()

        # An async worker limits each call itself, and has a little longer to report which of its calls took too long.
        until = time.monotonic() + self._timeout + (_AWAITED if worker.is_async else 0.0)
        results: list[RewardResult | None] = [None] * len(items)
        is_worn = True  # True: the process ends now, and is not used for another job

        job = secrets.token_hex(8)
        try:
            # The worker answers with a message for each item, and then with one that says whether it is worn: whether
            # it has used too much memory for another job.
            worker.send({"items": items, "job": job}, until)
            while "worn" not in (message := worker.receive(until, job)):
                index, result = _result(message)
                results[index] = result
            is_worn = bool(message["worn"])
        except TimeoutError:
            too_late = RewardResult(0.0, "timeout", text=f"took longer than {self._timeout:g} s")
            results = [result or too_late for result in results]
        except (EOFError, OSError, IndexError):  # the process ended, or sent what is no message of this job
            pass  # the missing results stay None
        finally:
            if is_worn:
                self._workers.discard(worker)
                worker.end()
            else:
                self._idle.append(worker)
        return results

    def _started(self) -> "_Worker":
        """Start a process, and wait until it has imported the function; raise as `wait_until_ready` does."""
        with self._lock:
            if not self._close.alive:  # `close` was called
                raise TrainingError("the reward workers were closed and can score nothing more; make another task")
            worker = _Worker(self._limits.environment)
            self._workers.add(worker)

        try:
            worker.begin(self._function, self._timeout, self._limits.memory)
        except BaseException:
            self._workers.discard(worker)
            worker.end()
            raise
        return worker


def _result(message: Mapping[str, Any]) -> tuple[int, RewardResult]:
    """Return the index of an item in its job and the item's result, from a message of a worker.

    Raises:
        EOFError: the message is not one of `worker.py`: the function itself has written to the socket of results.
    """
    try:
        index, result = message["item"], RewardResult(**message["result"])
    except (KeyError, TypeError) as error:
        raise EOFError from error

    is_index = type(index) is int and index >= 0
    is_reward = type(result.value) is float and abs(result.value) <= MAX_REWARD
    is_text = result.text is None or isinstance(result.text, str)
    # A worker knows nothing of retries, which the pool counts.
    is_known = result.retries == 0 and result.error in (None, "crash", "invalid", "timeout")
    if not (is_index and is_reward and is_text and is_known):
        raise EOFError
    return index, result


def _stop(workers: set["_Worker"], lock: RLock) -> None:
    """End all processes of a pool."""
    with lock:
        for worker in [*workers]:  # a copy, since the workers' threads remove them from the set
            worker.end()


class _Worker:
    """A worker process, and the exchange of messages with it, each one line of JSON."""

    def __init__(self, environment: Sequence[str]) -> None:
        """Start the process; `environment` as in `CallLimits`."""
        self._socket, worker_end = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        path = json.dumps([*filter(None, sys.path), os.getcwd()])  # folders from which the process imports

        # In a session of its own Ctrl-C does not reach the process, and it can be killed with all that it started.
        with worker_end:  # closed here once the process has it
            # Processes that the function starts inherit this variable, by which `end` finds and kills them.
            self._mark = secrets.token_hex(8)
            passed = {
                name: value
                for name, value in os.environ.items()
                if _SAFE_VARIABLES.fullmatch(name) or name in environment
            }
            self.process = Popen(
                [sys.executable, "-c", _ENTRY, path],
                stdin=worker_end.fileno(),
                start_new_session=True,
                env={**passed, _MARK: self._mark},
            )
        self.is_async = self.is_shared = False  # set by `begin`; is_shared: all calls go to one process

    def begin(self, function: str, timeout: float, memory: float) -> None:
        """Wait until the process has imported the function; raise as `RewardWorkerPool.wait_until_ready` does.

        `timeout` and `memory` are as in `CallLimits`.
        """
        until = time.monotonic() + START_TIMEOUT
        size = int(memory * _GIB) if math.isfinite(memory) else None  # bytes; None: no limit
        setup = {"function": function, "timeout": timeout, "start_timeout": START_TIMEOUT, "memory": size}

        try:
            self.send(setup, until)
            message = self.receive(until)
        except TimeoutError:
            raise TrainingError(
                f"a reward worker was not ready after {START_TIMEOUT:.0f} s; is the machine busy?"
            ) from None
        except (EOFError, OSError):
            raise TrainingError(
                f"a reward worker ended with status {self.end()} before it was ready; its own error stands above"
            ) from None

        if "refused" in message:
            raise ConfigError(message["refused"])
        self.is_async, self.is_shared = message["is_async"], message["is_async"] or message["takes_batches"]

    def send(self, message: Mapping[str, Any], until: float) -> None:
        """Send a message, or raise TimeoutError at the time `until` of `time.monotonic()`."""
        self._socket.settimeout(max(_ARRIVED, until - time.monotonic()))
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, until: float, job: str | None = None) -> dict[str, Any]:
        """Wait for the next message, until a time of `time.monotonic()`.

        Args:
            job: name of the job that the message must belong to; None for messages before the first job.

        Raises:
            TimeoutError: no message came in time.
            EOFError: the process ended, or sent a line that is no message of the job.
        """
        # Wait a moment even after `until`, so that a message that came in time is read.
        self._socket.settimeout(max(_ARRIVED, until - time.monotonic()))
        line = self._lines.readline(_MAX_LINE_BYTES)
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or message.get("job") != job:
            raise EOFError
        return message

    def end(self) -> int:
        """Kill the process and all that it started; return the process's exit status."""
        if self.process.returncode is None:  # else its process id may belong to another process
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            _kill_marked(f"{_MARK}={self._mark}".encode())
        self._socket.close()
        return self.process.wait()


def _kill_marked(mark: bytes) -> None:
    """Kill every process with `mark` in its environment: processes that a worker started in sessions of their own.

    A process that has emptied its environment is not found, and on a system without /proc none is.
    """
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process belongs to another user, or has ended
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
