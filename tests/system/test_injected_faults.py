"""A run of two ranks and two engine processes, in which faults hit a random process again and again, ends as one
without faults: SIGKILL, SIGSTOP for longer than the time-out, a closed connection.

`make soak-distributed` trains 1,000 iterations with a fault every 25 on average, and looks at what the processes hold:
memory of their own (not the files that are mapped, whose pages come as they are first read), descriptors and files in
/dev/shm. `make test-all` trains a few iterations.
"""

import ctypes
import gc
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from helpers.engines.hosts import fork_engines
from helpers.led import run_ranks
from helpers.runs import assert_equal, metrics, read_lines, saved
from helpers.soak import SMALL
from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.rollout.engines.process import ProcessLink
from jackpot.training.run_folder.folder import RunFolder

pytestmark = pytest.mark.slow
ITERATIONS = int(os.environ.get("JACKPOT_FAULT_ITERATIONS", "7"))
EVERY = int(os.environ.get("JACKPOT_FAULT_EVERY", "3"))  # iterations between two faults, on average
SEED = int(os.environ.get("JACKPOT_SOAK_SEED", random.randrange(2**32)))
TIMEOUT = float(os.environ.get("JACKPOT_FAULT_TIMEOUT", "20"))  # seconds, placement.timeout
VICTIMS = ("rank 0", "rank 1", "engine 0", "engine 1")
KINDS = ("SIGKILL", "SIGSTOP", "closed connection")
WARM_UP = 200  # iterations of a process that the slope of its memory leaves out
LIFE = 600  # iterations of a process from which its memory has a slope
MOST_GROWTH = 2.0  # kB an iteration


class Fault(NamedTuple):
    """What happens once the line of an iteration is written for the first time."""

    kind: str
    victim: str
    delay: float  # seconds after the line


def planned_faults(victims: Sequence[str]) -> dict[int, Fault]:
    """Return the faults of these processes, by the iteration after which each one comes; at least one."""
    random_state = random.Random(SEED)
    faults = {
        iteration: Fault(random_state.choice(KINDS), random_state.choice(victims), random_state.uniform(0.0, 1.0))
        for iteration in range(1, ITERATIONS)
        if random_state.random() < 1.0 / EVERY
    }
    return faults or {1: Fault(random_state.choice(KINDS), random_state.choice(victims), delay=0.0)}


def make_config() -> Config:
    """Return the config of a run of two ranks and two engine processes."""
    settings = ("batch.micro_batch_tokens=64", "placement.engines=2", f"placement.timeout={TIMEOUT}")
    return resolve("regimes", "ahead", [*SMALL, f"iterations={ITERATIONS}", *settings])


class Watch:
    """Listens in rank 0: notes the memory of all processes, and causes the planned faults."""

    def __init__(self, folder: Path, links: list[ProcessLink], faults: dict[int, Fault]) -> None:
        self.folder = folder
        self.links = links
        self.faults = faults
        self.fault_log = folder.with_name(f"{folder.name}-faults.jsonl")
        self.points = folder.with_name(f"{folder.name}-memory.jsonl")

    def __call__(self, line: dict) -> None:
        iteration = line["iteration"]
        shared_file_count = len(list(Path("/dev/shm").glob("*jackpot*"))) if Path("/dev/shm").exists() else 0
        _append(self.points, {"iteration": iteration, "processes": self._held(), "shared": shared_file_count})
        if iteration in self.faults and iteration not in {entry["iteration"] for entry in _read(self.fault_log)}:
            fault = self.faults[iteration]
            _append(self.fault_log, {"iteration": iteration, **fault._asdict()})
            threading.Timer(fault.delay, self._cause, [fault]).start()

    def _held(self) -> list[tuple[int, int, int]]:
        """Return the id, the memory of its own in kB, and the number of descriptors of each process that there is.

        This one gives back before what it does not use, which is 10 MB just before the collector of Python runs.
        """
        gc.collect()
        with suppress(OSError, AttributeError):  # of glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        process_values = []
        for pid in filter(None, map(self._pid, VICTIMS)):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                memory = process.memory_info()
                process_values.append((pid, (memory.rss - memory.shared) // 1024, process.num_fds()))
        return process_values

    def _pid(self, victim: str) -> int | None:
        """Return the id of a process, None while an engine is being replaced."""
        kind, index = victim.split()
        if kind == "rank":
            return json.loads((self.folder / "ranks" / f"{index}.json").read_text())["pid"]
        child = self.links[int(index)].child
        return child and child.pid

    def _cause(self, fault: Fault) -> None:
        kind, index = fault.victim.split()
        while not (pid := self._pid(fault.victim)):
            time.sleep(0.01)
        if fault.kind == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == "SIGSTOP":  # from outside: rank 0 could not wake itself
            script = f"kill -STOP {pid}; sleep {1.5 * TIMEOUT}; kill -CONT {pid}"
            subprocess.Popen(["sh", "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)
        elif kind == "engine":
            self.links[int(index)]._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        else:
            _close_all_connections()


def _close_all_connections() -> None:
    """Shut down every TCP connection of this rank, of which the other rank has the other end."""
    for tcp_connection in psutil.Process().net_connections("tcp"):
        if tcp_connection.status == psutil.CONN_ESTABLISHED:
            with socket.socket(fileno=os.dup(tcp_connection.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _append(path: Path, value: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lives(points: Iterable[dict]) -> list[np.ndarray]:
    """Return iteration, memory and descriptors of each long-lived process after its warm-up, [iterations, 3]."""
    points_by_process: dict[int, list[tuple[int, int, int]]] = {}
    for point in points:
        for pid, *values in point["processes"]:
            points_by_process.setdefault(pid, []).append((point["iteration"], *values))
    return [np.array(life[WARM_UP:], float) for life in points_by_process.values() if len(life) >= LIFE]


@pytest.fixture(scope="module")
def links() -> Iterator[list[ProcessLink]]:
    """Return the links to the engine processes, as they are forked."""
    with pytest.MonkeyPatch.context() as patch:
        yield fork_engines(patch)


@pytest.fixture(scope="module")
def undisturbed_folder(links: list[ProcessLink], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without faults."""
    print(f"JACKPOT_SOAK_SEED={SEED}")
    folder = tmp_path_factory.mktemp("faults") / "whole"
    watch = Watch(folder, links, {})
    assert run_ranks(2, make_config(), folder, watch).codes == [0, 0]
    check_memory(watch)
    return folder


def slope(iterations: np.ndarray, memory: np.ndarray) -> float:
    """Return the slope of memory without its largest step: that of Python's table of interned strings is 3.8 MB."""
    steps = np.diff(memory, prepend=memory[0])
    steps[steps.argmax()] = 0.0
    return float(np.polyfit(iterations, steps.cumsum(), deg=1)[0])


def check_memory(watch: Watch) -> None:
    """Check that no process holds more and more memory, descriptors or shared files."""
    points = _read(watch.points)
    long_lives = lives(points)
    largest_memory = max(memory for point in points for _, memory, _ in point["processes"])
    slopes = [slope(life[:, 0], life[:, 1]) for life in long_lives]
    print("kB an iteration:", [round(slope, 2) for slope in slopes], f"most: {largest_memory / 1024:.0f} MiB")

    assert all(slope <= MOST_GROWTH for slope in slopes)
    assert all(life[-100:, 2].max() <= life[:100, 2].max() for life in long_lives), "descriptors"
    assert max(point["shared"] for point in points[-100:]) <= max(point["shared"] for point in points[:100])


@pytest.mark.parametrize("leak", ["nothing", "memory", "descriptors", "shared files"])
def test_a_leak_of_a_long_run_is_noticed(leak: str, tmp_path: Path) -> None:
    """A run of a few iterations is too short for these checks."""
    watch = Watch(tmp_path / "run", [], {})
    for iteration in range(WARM_UP + LIFE):
        memory = 100_000 + (int(1.5 * MOST_GROWTH * iteration) if leak == "memory" else 0)
        descriptor_count = 20 + (iteration // 300 if leak == "descriptors" else 0)
        shared_file_count = 2 + (iteration // 300 if leak == "shared files" else 0)
        processes = [(1, memory, descriptor_count), (2, 100_000, 20)]
        _append(watch.points, {"iteration": iteration, "processes": processes, "shared": shared_file_count})

    with nullcontext() if leak == "nothing" else pytest.raises(AssertionError):
        check_memory(watch)


@pytest.mark.parametrize("victims", [VICTIMS[2:], VICTIMS], ids=["engines", "ranks and engines"])
def test_faults_of_random_processes_change_nothing(
    victims: Sequence[str], links, undisturbed_folder: Path, tmp_path: Path
) -> None:
    """Where only engines are hit, the ranks live through all of it."""
    faults, folder = planned_faults(victims), tmp_path / "disturbed"
    watch = Watch(folder, links, faults)

    starts = 0
    while True:
        starts += 1
        group_result = run_ranks(2, make_config(), folder, watch, patience=3 * TIMEOUT)
        if group_result.codes == [0, 0]:
            break
        assert starts <= 2 * len(faults) + 1, f"a group ended by itself: {group_result}"
        for code, printed in zip(group_result.codes, group_result.printed, strict=True):
            if code not in (-signal.SIGKILL, 0):  # an error says where it was
                assert code == 2, group_result
                assert "lost another rank in" in printed, group_result

    caused_faults = _read(watch.fault_log)
    events = Counter(line["event"] for line in RunFolder(folder).read("events.jsonl"))
    assert len(caused_faults) == len(faults)
    assert starts > 1 or events["peer_lost"] or len(faults) < 3  # the last ones may come when all is done

    kinds = Counter(f"{fault['kind']} of {fault['victim'].split()[0]}s" for fault in caused_faults)
    print(f"{len(faults)} faults: {dict(kinds)}; {starts} starts, {events['peer_lost']} times an engine was lost")

    check_memory(watch)

    assert [line["iteration"] for line in read_lines(folder)] == list(range(ITERATIONS + 1))
    assert metrics(folder) == metrics(undisturbed_folder)
    (undisturbed_files, undisturbed_state), (files, state) = map(saved, (undisturbed_folder, folder))
    assert files == undisturbed_files
    assert_equal(undisturbed_state, state)
