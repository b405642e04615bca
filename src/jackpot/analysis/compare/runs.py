"""Many runs at once, each `jackpot train` in a process of its own, watched as they go."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackpot.analysis.compare.summary import check_counted
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError
from jackpot.launch.local import free_cores, pick_device, threads
from jackpot.training.run.folder import RunFolder

Lines = list[dict[str, Any]]
POLL_SECONDS = 0.5
FAILED = "failed"
_ANSWERS = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids")  # settings that change answers
_ENDS = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
_ENTRY = (
    "from jackpot.analysis.compare.runs import end_with_parent; end_with_parent(); "
    "from jackpot.ui.cli import main; main()"
)


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


Judge = Callable[[Job, Lines, Lines], str | None]  # of a run's lines and events: why it is to stop; None: it is not
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
    if different := differing_arms(configs):
        listed = "; ".join(f"{arm!r}: {why}" for arm, why in different.items())
        raise ConfigError(
            f"accuracies compare only where all arms answer the same problems in the same way. {listed}. Leave "
            f"those out, or set it for all"
        )
    jobs = []
    for (arm, seed), config in sorted(configs.items(), key=lambda item: item[0][1]):
        name = f"{arm}-seed{seed}"
        run = RunFolder(folder / name)
        run.check(config)
        check_counted(run.path, run.read("metrics.jsonl"))
        own = (f"seed={seed}", f"threads={config.threads}", f"iterations={config.iterations}")
        arguments = ("train", recipe, "--arm", arm, "--run", str(folder / name), *overrides, *own)
        log = folder / "logs" / f"{name}.log"
        jobs.append(
            Job(arm=arm, seed=seed, folder=folder / name, log=log, iterations=config.iterations, arguments=arguments)
        )
    return jobs


def with_budget(configs: Mapping[tuple[str, int], Config], sequences: float) -> dict[tuple[str, int], Config]:
    """The same runs, each with as many iterations as so many sequences allow.

    Raises:
        ConfigError: fewer than one iteration of some arm.
    """
    most, arm = max((config.batch.rollouts, arm) for (arm, _), config in configs.items())
    if sequences < most:
        raise ConfigError(
            f"a budget of {sequences:g} sequences is less than one rollout batch of arm {arm!r}, {most}; raise it"
        )
    return {
        key: config.model_copy(update={"iterations": int(sequences // config.batch.rollouts)})
        for key, config in configs.items()
    }


def jobs_at_once(configs: Iterable[Config]) -> int:
    """How many runs the machine can take now: one where a GPU trains, else the free cores over the threads of a run."""
    configs = list(configs)
    if any(pick_device(config).type == "cuda" for config in configs):
        return 1
    return max(1, free_cores() // max(threads(config) for config in configs))


def differing_arms(configs: Mapping[tuple[str, int], Config]) -> dict[str, str]:
    """The arms that answer other problems than the first one, or in another way, and how they differ."""
    (first, _), reference = next(iter(configs.items()))
    wanted = _examined(reference)
    return {
        arm: f"{setting} is {value}, and {wanted[setting]} in {first!r}"
        for (arm, _), config in configs.items()
        for setting, value in _examined(config).items()
        if value != wanted[setting]
    }


def _examined(config: Config) -> dict[str, Any]:
    sampling = {f"sampling.{name}": getattr(config.sampling, name) for name in _ANSWERS}
    evaluation = {f"evaluation.{name}": getattr(config.evaluation, name) for name in ("problems", "k")}
    return {"task": config.task} | evaluation | sampling


def run_jobs(jobs: Sequence[Job], at_once: int, judge: Judge, listen: Listener) -> dict[Job, str]:
    """Run or continue those that are not done, at most so many at once, in their order.

    A run that the judge wants stopped gets SIGTERM and ends with a checkpoint. Ctrl-C and SIGTERM do so to all.

    Returns:
        The runs that ended with an error, and the end of what each said. The others went on.
    """
    waiting: list[Job] = []
    for job in jobs:
        lines, events = _read(job)
        if why := _is_done(job, lines, events, judge):
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
                    end = one.stopped or _own_end(one)
                    if end is None:
                        failed[one.job] = _last_words(one.job)
                    listen(one.job, one.lines, end or FAILED)
    return failed


def _read(job: Job) -> tuple[Lines, Lines]:
    """The lines and the events of a run."""
    folder = RunFolder(job.folder)
    return folder.read("metrics.jsonl"), folder.read("events.jsonl")


def _is_done(job: Job, lines: Lines, events: Lines, judge: Judge) -> str | None:
    """Why a run need not go on."""
    if not lines:
        return None
    finished = lines[-1]["iteration"] >= job.iterations and (job.folder / "checkpoints" / "last").exists()
    return "done before" if finished else judge(job, lines, events)


def _own_end(one: _Running) -> str | None:
    """How a run ended that nobody here stopped: by its last iteration or by a guard of its own; None: it failed."""
    lines, events = _read(one.job)
    if stopped := next((event for event in events if event["event"] == "stopped"), None):
        return f"stopped itself: {stopped['why']}"
    is_whole = bool(lines) and lines[-1]["iteration"] >= one.job.iterations
    return "done" if is_whole and not one.process.returncode else None


def _start(job: Job) -> _Running:
    """In a session of its own: a Ctrl-C in the terminal reaches only us, and the run gets one signal, from us."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, *job.arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
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
    one.lines, events = _read(one.job)
    listen(one.job, one.lines, "")
    newest = max((line["iteration"] for line in one.lines if line.get("eval/policy_accuracy") is not None), default=-1)
    if one.stopped is None and newest > one.evaluated:
        one.evaluated = newest
        one.stopped = judge(one.job, one.lines, events)
        if one.stopped is not None and one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)


def end_with_parent() -> None:
    """Get SIGTERM once when the process that began this run ends, however it does, so that no run goes on alone.

    Standard input is a pipe from it on which nothing ever comes but the end.
    """

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be held when the interpreter ends
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _last_words(job: Job) -> str:
    text = job.log.read_text(errors="replace").strip()
    return f"{text[-600:] or 'it ended before its time and said nothing'} (all of it in {job.log})"


@contextmanager
def _stops_all(running: list[_Running]) -> Iterator[None]:
    """However the body ends, no run goes on: each gets SIGTERM once and has time for its checkpoint."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
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
