"""Many runs at once, each `jackpot train` in a process of its own, watched as they go. Layer 6."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackpot.config import Config
from jackpot.errors import ConfigError
from jackpot.launch.local import free_cores, pick_device, threads
from jackpot.telemetry import RunFolder

Lines = list[dict[str, Any]]
POLL_SECONDS = 0.5
_ENTRY = "from jackpot.cli import main; main()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run."""

    arm: str
    seed: int
    folder: Path  # of the run
    log: Path  # what the command prints
    iterations: int
    arguments: tuple[str, ...]  # after `jackpot`

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"


Judge = Callable[[Job, Lines], str | None]  # why a run is to be stopped, asked at every evaluation; None: it is not
Listener = Callable[[Job, Lines, str], None]  # a run, its lines so far, and what is new: a line, an end, a stop


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    seen: tuple[int, int] | None = None  # size and time of metrics.jsonl when it was last read
    evaluated: int = -1  # the newest evaluation that the judge saw
    lines: Lines = field(default_factory=list)
    stopped: str | None = None  # why we stopped it


def make_jobs(
    recipe: str, configs: Mapping[tuple[str, int], Config], overrides: Sequence[str], folder: Path
) -> list[Job]:
    """One job for each (arm, seed), seed by seed: after the first seed there is something to compare.

    Args:
        recipe: as `jackpot train` takes it.
        configs: what the command resolves to, with seed, threads and iterations already in it.
        overrides: that the user gave.
        folder: of all runs.

    Raises:
        ConfigError: arms that cannot be compared: they answer other problems.
        CheckpointError: the folder holds a run with other settings.
    """
    _check_comparable(configs)
    jobs = []
    for (arm, seed), config in sorted(configs.items(), key=lambda item: item[0][1]):
        name = f"{arm}-seed{seed}"
        RunFolder(folder / name).check(config)
        own = (f"seed={seed}", f"threads={config.threads}", f"iterations={config.iterations}")
        arguments = ("train", recipe, "--arm", arm, "--run", str(folder / name), *overrides, *own)
        log = folder / "logs" / f"{name}.log"
        jobs.append(
            Job(arm=arm, seed=seed, folder=folder / name, log=log, iterations=config.iterations, arguments=arguments)
        )
    return jobs


def with_budget(configs: Mapping[tuple[str, int], Config], sequences: float) -> dict[tuple[str, int], Config]:
    """The same runs, each with as many iterations as it takes to write so many sequences."""
    return {
        key: config.model_copy(update={"iterations": math.ceil(sequences / config.batch.rollouts)})
        for key, config in configs.items()
    }


def jobs_at_once(configs: Iterable[Config]) -> int:
    """How many runs the machine can take now: one where a GPU trains, else the free cores over the threads of a run."""
    configs = list(configs)
    if any(pick_device(config).type == "cuda" for config in configs):
        return 1
    return max(1, free_cores() // max(threads(config) for config in configs))


def _check_comparable(configs: Mapping[tuple[str, int], Config]) -> None:
    """The same problems, answered in the same way, in every arm."""
    (first, _), reference = next(iter(configs.items()))
    wanted = _examined(reference)
    for (arm, _), config in configs.items():
        for setting, value in _examined(config).items():
            if value != wanted[setting]:
                raise ConfigError(
                    f"arm {arm!r} has {setting} {value}, arm {first!r} has {wanted[setting]}; accuracies compare only "
                    f"where both answer the same problems in the same way: leave one out, or set {setting} for all"
                )


def _examined(config: Config) -> dict[str, Any]:
    return {
        "task": config.task,
        "evaluation.problems": config.evaluation.problems,
        "sampling.temperature": config.sampling.temperature,
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
    }


def run_jobs(jobs: Sequence[Job], at_once: int, judge: Judge, listen: Listener) -> dict[Job, str]:
    """Run or continue those that are not done, at most so many at once, in their order.

    A run that the judge wants stopped gets SIGTERM and ends with a checkpoint. Ctrl-C and SIGTERM do so to all.

    Returns:
        The runs that ended with an error, and the end of what each said. The others went on.
    """
    waiting: list[Job] = []
    for job in jobs:
        lines = RunFolder(job.folder).read("metrics.jsonl")
        if why := _is_done(job, lines, judge):
            listen(job, lines, why)
        else:
            waiting.append(job)
    running: list[_Running] = []
    failed: dict[Job, str] = {}
    with _stops_all(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.pop(0)))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                ended = one.process.poll() is not None
                _look(one, judge, listen)
                if ended:
                    running.remove(one)
                    if one.process.returncode and not one.stopped:
                        failed[one.job] = _last_words(one.job)
                    listen(one.job, one.lines, one.stopped or ("failed" if one.process.returncode else "done"))
    return failed


def _is_done(job: Job, lines: Lines, judge: Judge) -> str | None:
    """Why a run need not go on."""
    if not lines:
        return None
    finished = lines[-1]["iteration"] >= job.iterations and (job.folder / "checkpoints" / "last").exists()
    return "done before" if finished else judge(job, lines)


def _start(job: Job) -> _Running:
    """In a session of its own: a Ctrl-C in the terminal reaches only us, and the run gets one signal, from us."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, *job.arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"NO_COLOR": "1"},
        )
    return _Running(job, process)


def _look(one: _Running, judge: Judge, listen: Listener) -> None:
    """Read what is new, and ask the judge at evaluations."""
    path = one.job.folder / "metrics.jsonl"
    state = path.stat() if path.exists() else None
    if state is None or one.seen == (state.st_size, state.st_mtime_ns):
        return
    one.seen = (state.st_size, state.st_mtime_ns)
    one.lines = RunFolder(one.job.folder).read("metrics.jsonl")
    listen(one.job, one.lines, "")
    newest = max((line["iteration"] for line in one.lines if line.get("eval/policy_accuracy") is not None), default=-1)
    if one.stopped is None and newest > one.evaluated:
        one.evaluated = newest
        one.stopped = judge(one.job, one.lines)
        if one.stopped is not None and one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)


def _last_words(job: Job) -> str:
    text = job.log.read_text(errors="replace").strip()
    return f"{text[-600:] or 'it said nothing'} (all of it in {job.log})"


@contextmanager
def _stops_all(running: list[_Running]) -> Iterator[None]:
    """However the body ends, no run goes on: each gets SIGTERM once and has time for its checkpoint."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for one in running:
            if one.process.poll() is None and one.stopped is None:
                one.process.send_signal(signal.SIGTERM)
        try:
            for one in running:
                one.process.wait()
        except KeyboardInterrupt:
            for one in running:
                one.process.kill()
            raise
