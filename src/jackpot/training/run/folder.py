"""The run folder: what a run writes down, and how a later start finds it.

    config.yaml        resolved settings          environment.json   versions, machine, threads
    metrics.jsonl      one line an iteration      events.jsonl       skips and other things that happened
    rollouts/  eval/  tensorboard/  checkpoints/      .lock              held by the process that trains

Line 0 of metrics.jsonl is the evaluation before training; line i is the state after iteration i. Numbers that nothing
was counted for are null. What cannot be written on the way does not end the run: lines wait until there is room, a file
of rollouts or of an evaluation is given up, counted and named in events.jsonl.
"""

import io
import json
import logging
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import transformers
import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from jackpot.config.build import build_config, differences
from jackpot.config.run import Config
from jackpot.core.errors import CheckpointError
from jackpot.core.files import PARTIAL, AppendedFile, checkpoint_error_in, hold_lock, write_whole
from jackpot.rollout.evaluate import Evaluation

_log = logging.getLogger(__name__)


def run_config(run: Path) -> Config:
    """The settings of the run in a folder; settings that came later have their defaults.

    Raises:
        CheckpointError: no run there.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no config.yaml; give the folder that train printed")
    return build_config(yaml.safe_load(path.read_text()))


class RunFolder:
    """Opens or continues a run. One process at a time.

    `failed` counts, over the whole run, the checkpoints and the files that could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = {"checkpoint/failed": 0, "files/failed": 0}
        self._lock: IO[str] | None = None
        self._appended: dict[str, AppendedFile] = {}
        self._tensorboard = f"tensorboard/events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def lock(self) -> None:
        """Keep other processes out until `close`, or until this one dies.

        Raises:
            CheckpointError: another process is in.
        """
        with checkpoint_error_in(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path / ".lock")

    def check(self, config: Config) -> None:
        """Refuse to continue a run that has trained with other settings; one that has not yet may begin anew.

        Raises:
            CheckpointError: the difference, setting by setting.
        """
        if not self._has_trained():
            return
        if difference := list(differences(_settings(run_config(self.path)), _settings(config))):
            listed = "\n  ".join(difference)
            raise CheckpointError(
                f"{self.path} holds a run with other settings:\n  {listed}\n"
                f"Use the same settings to continue it, or --run with another folder"
            )

    def start(self, config: Config, threads: int) -> int:
        """Write down settings and environment of a run that `check` let pass; returns the number of threads to use.

        A continued run keeps the threads it began with: sums in another order would not be bit-equal.
        """
        with checkpoint_error_in(self.path):
            if self._has_trained():
                return json.loads((self.path / "environment.json").read_text())["threads"]
            write_whole(self.path / "environment.json", json.dumps(_environment(threads), indent=2).encode() + b"\n")
            write_whole(self.path / "config.yaml", yaml.safe_dump(_settings(config), sort_keys=False).encode())
        return threads

    def rewind(self, iteration: int) -> None:
        """Forget what was written after `iteration`, where the run continues; -1 forgets all."""
        with checkpoint_error_in(self.path):
            for name in ("metrics.jsonl", "events.jsonl"):
                _cut(self.path / name, iteration)
            for folder in (self.rollouts, self.path / "eval"):
                for path in folder.glob("iteration-*"):
                    number = int(re.match(r"iteration-(\d+)", path.name)[1])
                    if number > iteration or path.suffix == PARTIAL:
                        path.unlink()
            folder = self.path / "tensorboard"
            if iteration < 0:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
        restart = SessionLog(status=SessionLog.START)  # TensorBoard drops what other files have from this step on
        self._append(self._tensorboard, _record(Event(file_version="brain.Event:2")))
        self._append(self._tensorboard, _record(Event(step=max(iteration + 1, 0), session_log=restart)))

    def report(self, iteration: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Append one line to metrics.jsonl and TensorBoard; returns it."""
        now, values = time.time(), dict(sorted({**values, **self.failed}.items()))
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"iteration": iteration, "time": now} | dict.fromkeys(values) | finite
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in finite.items()])
        self._append("metrics.jsonl", _json_line(line))
        self._append(self._tensorboard, _record(Event(wall_time=now, step=iteration, summary=summary)))
        return line

    def event(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl."""
        self._append("events.jsonl", _json_line({"iteration": iteration, "time": time.time()} | dict(event)))

    def warn(self, iteration: int, event: Mapping[str, Any]) -> None:
        """An event that somebody should know of now: standard error shows it as well."""
        self.event(iteration, event)
        _log.warning("iteration %d: %s", iteration, ": ".join(map(str, event.values())))

    def failure(self, iteration: int, metric: str, event: Mapping[str, Any]) -> None:
        """Count something that could not be written, and warn."""
        self.failed[metric] += 1
        self.warn(iteration, event)

    @contextmanager
    def dispensable(self, iteration: int, file: str) -> Iterator[None]:
        """For what the run can do without, such as a file of rollouts: a failure is counted, and the run goes on."""
        try:
            yield
        except OSError as error:
            self.failure(iteration, "files/failed", {"event": "write_failed", "file": file, "why": str(error)})

    def save_evaluation(self, iteration: int, of: str, evaluation: Evaluation) -> None:
        """Every problem, response and verdict of one evaluation, as JSON lines; `of` a role or a benchmark."""
        name = f"eval/iteration-{iteration:06d}-{of}.jsonl"
        rows = zip(evaluation.rollouts, evaluation.responses, evaluation.scores, strict=True)
        lines = (
            {
                "prompt_uid": rollout.prompt.uid,
                "sample": number % evaluation.k,
                "prompt": rollout.prompt.text,
                "response": response,
                "answer": rollout.prompt.answer,
                "correct": score.correct,
                "finish": rollout.finish,
                "reward_error": score.reward_error,
            }
            for number, (rollout, response, score) in enumerate(rows)
        )
        with self.dispensable(iteration, name):
            (self.path / "eval").mkdir(exist_ok=True)
            write_whole(self.path / name, b"".join(map(_json_line, lines)))

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl or events.jsonl; one cut short by a kill is left out."""
        return [line for text in _lines(self.path / name) if (line := _parsed(text))]

    def close(self) -> None:
        """Write what waits for room and let other processes in."""
        for name, file in self._appended.items():
            if file.waiting:
                self._append(name, b"")
            if file.waiting:
                _log.warning("%s: %d bytes did not fit on the disk and are lost", file.path, len(file.waiting))
        if self._lock is not None:
            self._lock.close()

    def _has_trained(self) -> bool:
        return self.checkpoints.exists() or any(line["iteration"] for line in self.read("metrics.jsonl"))

    def _append(self, name: str, record: bytes) -> None:
        file = self._appended.setdefault(name, AppendedFile(self.path / name))
        waited = bool(file.waiting)
        try:
            file.append(record)
        except OSError as error:
            if not waited:
                _log.warning("%s: %s; what belongs there waits in memory until there is room", file.path, error)


def _settings(config: Config) -> dict[str, Any]:
    return json.loads(config.model_dump_json())


def _json_line(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _parsed(text: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl or events.jsonl; None where it was cut short."""
    try:
        return json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None


def _cut(path: Path, iteration: int) -> None:
    """Keep the whole lines up to `iteration`. A full disk lets a file be cut short, not rewritten."""
    if not path.exists():
        return
    texts = _lines(path)
    kept = [text for text in texts if (line := _parsed(text)) and line["iteration"] <= iteration]
    if torn := [number for number, text in enumerate(texts[:-1], start=1) if _parsed(text) is None]:
        _log.warning("%s: lines %s cannot be read and are removed", path, ", ".join(map(str, torn)))
    if kept == texts[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
    else:
        write_whole(path, b"".join(kept))


def _record(event: Event) -> bytes:
    """What TensorBoard calls a record: the event between its length and its checksum."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _environment(threads: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
