"""The run folder: what a run writes down, and how a later start finds it. Layer 5.

    config.yaml        resolved settings          environment.json   versions, machine, threads
    metrics.jsonl      one line an iteration      events.jsonl       skips and other things that happened
    rollouts/  eval/  tensorboard/  checkpoints/

Line 0 of metrics.jsonl is the evaluation before training; line i is the state after iteration i. Numbers that nothing
was counted for are null.
"""

import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from jackpot.config import Config
from jackpot.config_build import build_config
from jackpot.errors import CheckpointError
from jackpot.evaluate import Evaluation
from jackpot.ops.reduce import Sums

WITH_STANDARD_ERROR = ("obrs/acceptance_minus_z", "mismatch/ratio")  # uncorrelated between tokens
_DERIVED: dict[str, dict[str, Callable[[Any], Tensor]]] = {  # further numbers from the sums of a metric
    **{name: {f"{name}_stderr": lambda entry: entry.standard_error} for name in WITH_STANDARD_ERROR},
    "mismatch/log_ratio": {
        f"mismatch/ratio_p{percent:g}": lambda entry, percent=percent: entry.quantile(percent / 100.0).exp()
        for percent in (0.1, 1, 50, 99, 99.9)
    },
    "mismatch/sequence_log_ratio": {"mismatch/sequence_log_ratio_variance": lambda entry: entry.variance},
    "correction/weight": {"correction/ess": lambda entry: entry.effective_share},
}
_DERIVED["mismatch/ratio"] |= {"mismatch/ess": lambda entry: entry.effective_share}
_NOT_SHOWN = ("policy/largest_kept_advantage", "policy/largest_advantage", "mismatch/log_ratio", "critic/error")


def run_config(run: Path) -> Config:
    """The settings of the run in a folder; settings that came later have their defaults.

    Raises:
        CheckpointError: no run there.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no config.yaml; give the folder that train printed")
    return build_config(yaml.safe_load(path.read_text()))


def numbers(sums: Sums) -> dict[str, float]:
    """Metric names and values of accumulated sums, with what is derived from them; one wait for the device."""
    values: dict[str, Tensor] = {name: entry.value for name, entry in sums.items() if name not in _NOT_SHOWN}
    for name, derived in _DERIVED.items():
        if name in sums:
            values |= {other: value(sums[name]) for other, value in derived.items()}
    if "critic/error" in sums:
        values["critic/explained_variance"] = 1.0 - sums["critic/error"].variance / sums["critic/return"].variance
    if not values:
        return {}
    device = next(iter(values.values())).device
    packed = torch.stack([value.detach().double().to(device) for value in values.values()])
    return dict(zip(values, packed.tolist(), strict=True))


class Clock:
    """Adds up the seconds of the phases of an iteration: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds by phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class RunFolder:
    """Opens or continues a run. One process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensorboard: SummaryWriter | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def check(self, config: Config) -> None:
        """Refuse to continue a run that has trained with other settings; one that has not yet may begin anew.

        Raises:
            CheckpointError: the difference, setting by setting.
        """
        if not self._has_trained():
            return
        if difference := list(_difference(_settings(run_config(self.path)), _settings(config))):
            listed = "\n  ".join(difference)
            raise CheckpointError(
                f"{self.path} holds a run with other settings:\n  {listed}\n"
                f"Use the same settings to continue it, or --run with another folder"
            )

    def start(self, config: Config, threads: int) -> int:
        """Write down settings and environment of a run that `check` let pass; returns the number of threads to use.

        A continued run keeps the threads it began with: sums in another order would not be bit-equal.
        """
        if self._has_trained():
            return json.loads((self.path / "environment.json").read_text())["threads"]
        self.path.mkdir(parents=True, exist_ok=True)
        _write_atomically(self.path / "environment.json", json.dumps(_environment(threads), indent=2) + "\n")
        _write_atomically(self.path / "config.yaml", yaml.safe_dump(_settings(config), sort_keys=False))
        return threads

    def rewind(self, iteration: int) -> None:
        """Forget what was written after `iteration`, where the run continues; -1 forgets all."""
        for name in ("metrics.jsonl", "events.jsonl"):
            kept = [line for line in self.read(name) if line["iteration"] <= iteration]
            if (self.path / name).exists():
                _write_atomically(self.path / name, "".join(_json_line(line) for line in kept))
        for folder in (self.rollouts, self.path / "eval"):
            for path in folder.glob("iteration-*"):
                number = int(re.match(r"iteration-(\d+)", path.name)[1])
                if number > iteration or path.suffix == ".partial":
                    path.unlink()
        if iteration < 0:
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"), purge_step=max(iteration + 1, 0))

    def report(self, iteration: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Append one line to metrics.jsonl and TensorBoard; returns it."""
        line = {"iteration": iteration, "time": time.time()} | {
            name: value if math.isfinite(value) else None for name, value in sorted(values.items())
        }
        self._append("metrics.jsonl", line)
        for name, value in values.items():
            if math.isfinite(value) and self._tensorboard is not None:
                self._tensorboard.add_scalar(name, value, iteration)
        return line

    def event(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl."""
        self._append("events.jsonl", {"iteration": iteration, "time": time.time()} | dict(event))

    def save_evaluation(self, iteration: int, role: str, evaluation: Evaluation) -> None:
        """Every problem, response and verdict of one evaluation, as JSON lines."""
        folder = self.path / "eval"
        folder.mkdir(exist_ok=True)
        rows = zip(evaluation.rollouts, evaluation.responses, evaluation.scores, strict=True)
        lines = (
            {
                "prompt_uid": rollout.prompt.uid,
                "prompt": rollout.prompt.text,
                "response": response,
                "answer": rollout.prompt.answer,
                "correct": score.correct,
                "finish": rollout.finish,
            }
            for rollout, response, score in rows
        )
        _write_atomically(folder / f"iteration-{iteration:06d}-{role}.jsonl", "".join(map(_json_line, lines)))

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl or events.jsonl; a last line cut short by a kill is left out."""
        path = self.path / name
        lines = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in lines[:-1]]

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _has_trained(self) -> bool:
        return any(line["iteration"] for line in self.read("metrics.jsonl"))

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(_json_line(line))


def _settings(config: Config) -> dict[str, Any]:
    return json.loads(config.model_dump_json())


def _json_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


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


def _difference(old: Any, new: Any, key: str = "") -> Iterable[str]:
    """`key: old -> new` for every setting that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            yield from _difference(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key}: {json.dumps(old)} in the folder, {json.dumps(new)} now"
