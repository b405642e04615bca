"""The run folder holds everything that a run writes, and what a later start needs to continue it.

    config.yaml        resolved settings          environment.json   versions, machine, threads
    metrics.jsonl      one line an iteration      events.jsonl       skipped steps and other events
    rollouts/  eval/  tensorboard/  checkpoints/      .lock              held by the process that trains

Line 0 of metrics.jsonl is the evaluation before training; line i is the state after iteration i. A metric without any
counted entry is null. A full disk does not end the run: lines wait in memory until there is room; a file of rollouts or
of an evaluation is given up, counted and named in events.jsonl.
"""

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

from jackpot.config.build import build_config, differences
from jackpot.config.run import Config
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.core.files import PARTIAL, AppendedFile, checkpoint_error_in, hold_lock, write_whole
from jackpot.rollout.evaluate import Evaluation
from jackpot.training.run.tensorboard import event_file_name, metrics_record, restart_records

_log = logging.getLogger(__name__)


def run_config(run: Path) -> Config:
    """Read the settings of the run in a folder.

    Raises:
        CheckpointError: the folder holds no run.
        ConfigError: its config.yaml does not fit the settings of this version.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no config.yaml; give the folder that train printed")
    try:
        return build_config(yaml.safe_load(path.read_text()))
    except ConfigError as error:
        raise ConfigError(f"{path} does not fit this version:\n{error}") from None


class RunFolder:
    """Opens, continues and writes the folder of a run; one process at a time.

    `failed` counts, over the whole run, the checkpoints and other files that could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = {"checkpoint/failed": 0, "files/failed": 0}
        self._lock: IO[str] | None = None
        self._appended: dict[str, AppendedFile] = {}
        self._tensorboard = f"tensorboard/{event_file_name()}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def lock(self) -> None:
        """Create the folder and keep other processes out of it until `close`, or until this process ends.

        Raises:
            CheckpointError: another process holds the folder.
        """
        with checkpoint_error_in(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path / ".lock")

    def check(self, config: Config) -> None:
        """Refuse to continue a run that has trained with other settings; one that has not may begin anew.

        Raises:
            CheckpointError: the settings differ; lists them.
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
        """Write settings and environment of a new run, and return the number of threads to use.

        A continued run keeps the threads it began with: sums in another order would not be bit-equal. `check` comes
        first.
        """
        with checkpoint_error_in(self.path):
            if self._has_trained():
                return json.loads((self.path / "environment.json").read_text())["threads"]
            write_whole(self.path / "environment.json", json.dumps(_environment(threads), indent=2).encode() + b"\n")
            write_whole(self.path / "config.yaml", yaml.safe_dump(_settings(config), sort_keys=False).encode())
        return threads

    def rewind(self, iteration: int) -> None:
        """Remove lines and files of iterations after `iteration`, where the run continues; -1 removes all."""
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
        self._append(self._tensorboard, restart_records(max(iteration + 1, 0)))

    def report(self, iteration: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Append the metrics of an iteration to metrics.jsonl and TensorBoard, and return the line."""
        now, values = time.time(), dict(sorted({**values, **self.failed}.items()))
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"iteration": iteration, "time": now} | dict.fromkeys(values) | finite
        self._append("metrics.jsonl", _json_line(line))
        self._append(self._tensorboard, metrics_record(iteration, now, finite))
        return line

    def event(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl."""
        self._append("events.jsonl", _json_line({"iteration": iteration, "time": time.time()} | dict(event)))

    def warn(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl and show it on standard error."""
        self.event(iteration, event)
        _log.warning("iteration %d: %s", iteration, ": ".join(map(str, event.values())))

    def failure(self, iteration: int, metric: str, event: Mapping[str, Any]) -> None:
        """Count a file that could not be written under `metric` of `failed`, and warn."""
        self.failed[metric] += 1
        self.warn(iteration, event)

    @contextmanager
    def dispensable(self, iteration: int, file: str) -> Iterator[None]:
        """Let the run go on if the body cannot write a `file` that it can do without; the failure is counted."""
        try:
            yield
        except OSError as error:
            self.failure(iteration, "files/failed", {"event": "write_failed", "file": file, "why": str(error)})

    def save_evaluation(self, iteration: int, of: str, evaluation: Evaluation) -> None:
        """Write every problem, response and score of one evaluation as JSON lines; `of` is a role or a benchmark."""
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
        """Read the lines of metrics.jsonl or events.jsonl; a line that a kill cut short is left out."""
        return [line for text in _lines(self.path / name) if (line := _parsed(text))]

    def close(self) -> None:
        """Flush lines buffered while the disk was full, then release the lock of the folder."""
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
                _log.warning("%s: %s; new lines wait in memory until there is room", file.path, error)


def _settings(config: Config) -> dict[str, Any]:
    return json.loads(config.model_dump_json())


def _json_line(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl or events.jsonl; None for one that was cut short."""
    try:
        return json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None


def _cut(path: Path, iteration: int) -> None:
    """Keep the complete lines up to `iteration`. A full disk lets a file be truncated, not rewritten."""
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
