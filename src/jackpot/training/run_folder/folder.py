"""The run folder, which holds everything that a run writes and all that a later start needs to continue the run.

Status: supported.
"""

import itertools
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

import yaml

from jackpot.config.arms import build_config
from jackpot.config.changes import Change, changes, falling_rates, fixed_changes, settings_of
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.core.files import PARTIAL, AppendedFile, checkpoint_error_in, flush_file, hold_lock, write_whole
from jackpot.core.foreign import ForeignFileError, parse_json, read_foreign
from jackpot.core.package import version
from jackpot.training.run_folder.environment import Environment
from jackpot.training.run_folder.plain_yaml import parse_yaml
from jackpot.training.run_folder.trackers import (
    WandbRun,
    event_file_name,
    event_files,
    metrics_record,
    restart_records,
    wandb_module,
)

if TYPE_CHECKING:
    from jackpot.rollout.evaluate import Evaluation

_HISTORY = "# after iteration"  # beginning of a comment in config.yaml about a setting that changed
_log = logging.getLogger(__name__)


def is_evaluation(folder: Path) -> bool:
    """Tell whether `jackpot eval` wrote a folder, whose config.yaml then has the settings of an evaluation."""
    path = folder / "config.yaml"
    return path.is_file() and b"\nasked:" in read_foreign(path)


def run_config(run: Path) -> Config:
    """Read the settings of the run in a folder.

    Raises:
        CheckpointError: the folder holds no run, or its config.yaml is damaged.
        ConfigError: its config.yaml does not fit the settings of this version.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no config.yaml; give the folder that train printed")

    try:
        if is_evaluation(run):
            raise CheckpointError(
                f"{run} is not a run folder: it is of `jackpot eval`; give the folder that train printed"
            )
        settings = parse_yaml(read_foreign(path, inside=run))
    except (OSError, ValueError, yaml.YAMLError) as error:
        # An error of YAML's syntax has the problem and its line, counted from 0; any other error has its text alone.
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or error
        raise CheckpointError(
            f"{path}{line} cannot be read: {why}. Bring the file back from a copy, or give another folder"
        ) from error

    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{path} holds no settings: it is {'empty' if settings is None else 'not a mapping'}. Bring the file back "
            f"from a copy, or give another folder"
        )

    try:
        return build_config(settings)
    except ConfigError as error:
        raise ConfigError(
            f"{path} does not fit this version ({version()}):\n{error}\nUse the version that began the run, which "
            f"environment.json names, or give another folder"
        ) from None


Measure = Literal["accuracy", "reward"]


def measure_of(values: Mapping[str, Any]) -> Measure | None:
    """Return the measure by which an evaluation ranks models: the accuracy or, for a task without verdicts, the reward.

    Args:
        values: metrics of an iteration by name; None is returned if the iteration was not evaluated.
    """
    return next((name for name in get_args(Measure) if values.get(f"eval/policy_{name}") is not None), None)


class RunFolder:
    """The folder of a run, which one process at a time opens, continues and writes.

        config.yaml        resolved settings          environment.json   versions and machine of every start, threads
        metrics.jsonl      one line an iteration      events.jsonl       skipped steps and other events
        rollouts/  eval/  tensorboard/  checkpoints/      .lock              held by the process that trains
        wandb/             what Weights & Biases gets, with `tracking.wandb`
        ranks/             the newest command of each rank, where a run has several
        superseded/        lines and files of iterations that were run again, one folder for each start that found any

    Line 0 of metrics.jsonl is the evaluation before training; line i is the state after iteration i. A metric for which
    nothing was counted is null. A start removes nothing but half-written files; files that it replaces go to
    superseded/. A full disk does not end the run: lines wait in memory until there is room; a file of rollouts or of an
    evaluation is given up, counted, and named in events.jsonl.

    `failed` counts, over the whole run, the checkpoints and other files that could not be written.
    """

    def __init__(self, path: Path) -> None:
        """Name the folder's parts; nothing on the disk is read or changed."""
        self.path = path
        self.checkpoints, self.rollouts = path / "checkpoints", path / "rollouts"
        self.failed = {"checkpoint/failed": 0, "files/failed": 0}  # what could not be written, counted over the run
        self._lock: IO[str] | None = None  # the open file .lock, while this process holds the folder
        self._made: list[Path] = []  # folders that `lock` has made, the innermost first; `give_up` removes them
        self._appended: dict[str, AppendedFile] = {}  # the files that `_append` has written to, by name
        self._tensorboard = ""  # name of this start's event file
        self._wandb: WandbRun | None = None

    def lock(self) -> None:
        """Create the folder and keep other processes out of it until `close`, or until this process ends.

        Raises:
            CheckpointError: another process holds the folder.
        """
        with checkpoint_error_in(self.path):
            # The folders that are made here, for `give_up`.
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path / ".lock")

    def give_up(self) -> None:
        """Remove the lock, and the folders that `lock` made, after a start that failed before there was a run."""
        if (self.path / "config.yaml").exists():
            return
        with suppress(OSError):
            (self.path / ".lock").unlink()
            for folder in self._made:
                folder.rmdir()

    def check(self, config: Config) -> None:
        """Refuse to continue a run with settings that would change its numbers, or without its checkpoints.

        A run that has not trained may begin anew with any settings.

        Raises:
            CheckpointError: settings differ that may not change, which are listed; the checkpoints of a run that has
                trained are gone; a file of the folder is damaged, or of a later version.
            ConfigError: config.yaml does not fit the settings of this version; `tracking` names a package that is not
                installed.
        """
        if config.tracking.wandb:
            wandb_module()  # raises if wandb is not installed
        Environment(self.path)  # raises if environment.json is damaged or of a later version
        finished = self._finished()
        # Whether there is a checkpoint, intact or corrupt, even if its lines in metrics.jsonl are lost.
        has_checkpoint = any(path.suffix != PARTIAL for path in self.checkpoints.glob("step-*"))
        if not (finished or has_checkpoint or (self.path / "config.yaml").exists()):
            return
        before = run_config(self.path)
        if finished or has_checkpoint:
            self._check_settings(before, config, finished)
        if not has_checkpoint:
            self._check_checkpoints(before, finished)

    def _check_settings(self, before: Config, config: Config, finished: int) -> None:
        """Refuse settings that differ from the run's (`before`) where they may not change, and list them.

        Args:
            finished: number of finished iterations, below which `iterations` may not go.

        Raises:
            CheckpointError: a setting differs that may not change.
        """
        refused = [str(change) for change in fixed_changes(Config, settings_of(before), settings_of(config))]
        if before.iterations != config.iterations:
            change = str(Change("iterations", before.iterations, config.iterations))
            if schedules := falling_rates(before):  # schedules that end with the last iteration
                refused.append(f"{change}; the rates used so far fell towards the last one ({', '.join(schedules)})")
            elif config.iterations < finished:
                refused.append(f"{change}; {finished} are finished")
        if refused:
            listed = "\n  ".join(refused)
            raise CheckpointError(
                f"{self.path} holds a run with other settings:\n  {listed}\nUse the same settings to continue it, or "
                f"--run with another folder (`jackpot config KEY` says whether a setting may change)"
            )

    def _check_checkpoints(self, before: Config, finished: int) -> None:
        """Refuse a run with finished iterations and no checkpoint, unless no checkpoint was ever written.

        It is called where none was found. None was ever written if a kill came before the first one was due, or if
        every attempt failed. A failed checkpoint is tried again an iteration later, so in the second case every
        iteration from the first due one on counts a failure. A folder of checkpoints that is missing was removed by
        someone, since `start` makes it.

        Raises:
            CheckpointError: checkpoints were written and are gone.
        """
        lines = self.read("metrics.jsonl")
        # A checkpoint is due at the first evaluation in training too, because its policy is the best so far.
        evaluated = [line["iteration"] for line in lines if line["iteration"] and measure_of(line)]
        first_due = min(before.checkpoint.every, before.iterations, *evaluated)
        # A running total, whose newest value is the largest. A line stands before the checkpoint of its iteration.
        failed = max((line.get("checkpoint/failed") or 0 for line in lines), default=0)

        is_folder = self.checkpoints.is_dir()
        if self.checkpoints.is_symlink() and not is_folder:
            why = f"is a link to {self.checkpoints.readlink()}, which is not there"
        elif finished and not is_folder:
            why = "is not there"
        elif finished > first_due + failed:
            # `finished` - `first_due` attempts came before the newest line; fewer failed, so a checkpoint was written.
            why = "holds none"
        else:
            return
        raise CheckpointError(
            f"{self.path} has {finished} finished iterations and no checkpoint to continue from: {self.checkpoints} "
            f"{why}. Bring the checkpoints back (mount the disk, or copy them there), or give --run another folder to "
            f"begin anew; nothing was changed"
        )

    def start(self, config: Config, threads: int, iteration: int) -> int:
        """Prepare the folder for a run that continues after `iteration` (-1: a new run). Call `check` before.

        Lines and files of later iterations move to superseded/. Changed settings and another environment are recorded
        in config.yaml, environment.json and events.jsonl.

        Returns:
            The number of threads to use. A continued run keeps its number of threads, unless the settings give another,
            because other threads sum in another order and results would not be bit-equal.

        Raises:
            ConfigError: Weights & Biases refuses a new run, or cannot be reached. A continued run goes on without it.
        """
        with checkpoint_error_in(self.path):
            before = run_config(self.path) if iteration >= 0 else None
            if not before and (finished := self._finished()):
                _log.warning(
                    "%s: %d finished iterations without a checkpoint move to superseded/; the run begins anew",
                    self.path,
                    finished,
                )
            self.rewind(iteration)

            # A continued run keeps its threads, unless this start asks for another number than the run began with.
            environment = Environment(self.path)
            if before and before.threads == config.threads:
                threads = environment.threads or threads
            differences = environment.add_start(iteration, threads)

            changed = list(changes(settings_of(before), settings_of(config))) if before else []
            if changed or not before:
                self._write_config(config, iteration, changed)
            self.checkpoints.mkdir(exist_ok=True)

        if changed:
            values = {change.key: (change.old, change.new) for change in changed}
            self.event(iteration, {"event": "settings_changed", "changes": values})
        if before and differences:
            texts = {name: f"{name} {old} -> {new}" for name, (old, new) in differences.items()}
            self.warn(iteration, {"event": "environment_changed"} | texts)

        # A new run fails without its tracker; a continued run goes on and counts the failure.
        if config.tracking.wandb:
            try:
                lines = self.read("metrics.jsonl")
                self._wandb = WandbRun(config.tracking.wandb, settings_of(config), self.path, lines)
            except ConfigError as error:
                if not before:
                    raise
                self.failure(iteration, "files/failed", {"event": "write_failed", "file": "wandb", "why": str(error)})
        return threads

    @cached_property
    def _superseded(self) -> Path:
        """Return the folder of this start in superseded/, made when a file first goes there. Nothing reads it."""
        folders = (self.path / "superseded" / str(count) for count in itertools.count(1))
        folder = next(folder for folder in folders if not folder.exists())
        folder.mkdir(parents=True)
        return folder

    def supersede(self, paths: Iterable[Path]) -> None:
        """Move files and folders of the run folder to superseded/, under their old names."""
        for path in paths:
            target = self._superseded / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)

    def rewind(self, iteration: int) -> None:
        """Move lines and files of iterations after `iteration`, where the run continues, to superseded/ (-1: all)."""
        for name in ("metrics.jsonl", "events.jsonl"):
            self._cut(name, iteration)

        # Files of later iterations move away; half-written files are removed.
        later = []
        for path in [*self.rollouts.glob("iteration-*"), *(self.path / "eval").glob("iteration-*")]:
            pattern = rf"iteration-(?P<number>\d+)(\.parquet|-.+\.jsonl)(?P<partial>{re.escape(PARTIAL)})?"
            written = re.fullmatch(pattern, path.name)
            if written and written["partial"]:
                path.unlink()
            elif written and int(written["number"]) > iteration:
                later.append(path)
        if iteration < 0:
            later += [*self.path.glob("config.yaml"), *event_files(self.path / "tensorboard")]
        self.supersede(later)
        (self.path / "tensorboard").mkdir(exist_ok=True)

        self._tensorboard = f"tensorboard/{event_file_name(self.path / 'tensorboard')}"
        # TensorBoard shall show no iterations from older files that this start runs again.
        self._append(self._tensorboard, restart_records(max(iteration + 1, 0)))

    def _cut(self, name: str, iteration: int) -> None:
        """Keep the complete lines of a file up to `iteration`; the others go to superseded/ first."""

        def stays(text: bytes) -> bool:
            """Tell whether a line is complete and of an iteration up to `iteration`."""
            return (line := _parsed(text)) is not None and line["iteration"] <= iteration

        path = self.path / name
        texts = _lines(path)
        staying = list(filter(stays, texts))
        if len(staying) == len(texts):
            return

        # Only the last line can have been cut short by a kill; an earlier line that cannot be read deserves a warning.
        if damaged := [line_number for line_number, text in enumerate(texts[:-1], start=1) if _parsed(text) is None]:
            _log.warning("%s: lines %s cannot be read and are removed", path, ", ".join(map(str, damaged)))

        write_whole(self._superseded / name, b"".join(text for text in texts if not stays(text)))
        # Where only the end of the file goes, it is cut off in place; else the file is written anew.
        if staying == texts[: len(staying)]:
            os.truncate(path, sum(map(len, staying)))
        else:
            write_whole(path, b"".join(staying))

    def check_in_place(self) -> None:
        """Refuse to go on if the folder of this process was removed or replaced, since another run may be there now.

        Raises:
            CheckpointError: the folder's lock is not the one that this process holds.
        """
        if not self._is_in_place():
            raise CheckpointError(
                f"{self.path} was removed or replaced while this process trained in it; it stops here, and what it has "
                f"not written yet is lost. Remove a run folder only after its process has ended"
            )

    def flush(self, iteration: int) -> None:
        """Wait until all metrics and events are on the disk; no power failure then leaves a checkpoint without them."""
        for name in self._appended:
            with self.dispensable(iteration, name):
                flush_file(self.path / name)

    def report(self, iteration: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Append the metrics of an iteration, and the counts `failed`, to metrics.jsonl; return the line.

        The trackers get the line too; a failure of W&B is counted, and the run goes on.
        """
        now, values = time.time(), dict(sorted({**values, **self.failed}.items()))
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"iteration": iteration, "time": now} | dict.fromkeys(values) | finite  # null for what is not finite
        self._append("metrics.jsonl", _json_line(line))
        self._append(self._tensorboard, metrics_record(iteration, now, finite))
        if self._wandb:
            with self.dispensable(iteration, "wandb"):
                self._wandb.log(line)
        return line

    def event(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl."""
        self._append("events.jsonl", _json_line({"iteration": iteration, "time": time.time()} | dict(event)))

    def warn(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl, and print the event on standard error."""
        self.event(iteration, event)
        _log.warning("iteration %d: %s", iteration, ": ".join(map(str, event.values())))

    def failure(self, iteration: int, metric: str, event: Mapping[str, Any]) -> None:
        """Add 1 to `failed[metric]` for a file that could not be written; record and print `event`, which says why."""
        self.failed[metric] += 1
        self.warn(iteration, event)

    @contextmanager
    def dispensable(self, iteration: int, file: str) -> Iterator[None]:
        """Let the run go on if the `with` block cannot write a `file` that is not needed; count the failure."""
        try:
            yield
        except OSError as error:
            self.failure(iteration, "files/failed", {"event": "write_failed", "file": file, "why": str(error)})

    def save_evaluation(self, iteration: int, subject: str, evaluation: "Evaluation") -> None:
        """Write every problem, response and score of an evaluation of `subject`, a model or a benchmark."""
        name = f"eval/iteration-{iteration:06d}-{subject}.jsonl"
        rows = zip(evaluation.rollouts, evaluation.responses, evaluation.scores, strict=True)
        lines = (
            {
                "prompt_uid": rollout.prompt.uid,
                "sample": index % evaluation.k,  # which of the k responses to its problem it is
                "prompt": rollout.prompt.text,
                "response": response,
                "answer": rollout.prompt.answers,
                "correct": score.correct,
                "reward": score.reward,
                "finish": rollout.finish,
                "reward_error": score.reward_error,
            }
            for index, (rollout, response, score) in enumerate(rows)
        )

        with self.dispensable(iteration, name):
            (self.path / "eval").mkdir(exist_ok=True)
            write_whole(self.path / name, b"".join(map(_json_line, lines)))

    def read(self, name: str) -> list[dict[str, Any]]:
        """Read the lines of metrics.jsonl or events.jsonl; a line that a kill cut short is left out."""
        return [line for text in _lines(self.path / name) if (line := _parsed(text))]

    def close(self) -> None:
        """Write lines that waited for room on the disk, end tracking, and release the lock of the folder."""
        for name, file in self._appended.items():
            if file.waiting:
                self._append(name, b"")  # writes the lines that wait
            if file.waiting:
                _log.warning("%s: %d bytes did not fit on the disk and are lost", file.path, len(file.waiting))

        if self._wandb:
            with self.dispensable(self._finished(), "wandb"):
                self._wandb.close()

        if self._lock is not None:
            self._lock.close()

    def _finished(self) -> int:
        """Return the newest finished iteration in metrics.jsonl; 0 where there is none."""
        return max((line["iteration"] for line in self.read("metrics.jsonl")), default=0)

    def _write_config(self, config: Config, iteration: int, changed: Sequence[Change]) -> None:
        """Write config.yaml, with one comment for every change of a setting since the run began."""
        path = self.path / "config.yaml"
        lines = path.read_text().splitlines() if changed else []  # without a change the run is new and has no file
        history = [line for line in lines if line.startswith(_HISTORY)]
        when = f"{_HISTORY} {iteration}, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        history += [f"{when}: {change.key}: {json.dumps(change.old)} -> {json.dumps(change.new)}" for change in changed]
        text = yaml.safe_dump(settings_of(config), sort_keys=False) + "".join(f"{line}\n" for line in history)
        write_whole(path, text.encode())

    def _is_in_place(self) -> bool:
        """Tell whether the folder's .lock is still the file that this process has locked."""
        try:
            path = (self.path / ".lock").stat()
            return self._lock is None or os.path.samestat(os.fstat(self._lock.fileno()), path)
        except FileNotFoundError:
            return self._lock is None

    def _append(self, name: str, record: bytes) -> None:
        """Append a record to a file of the folder; on a full disk keep it in memory, and warn the first time.

        If the folder was removed or replaced, the record is dropped without a warning.
        """
        if not self._is_in_place():
            return  # the folder may belong to another run; `check_in_place` ends this one
        file = self._appended.setdefault(name, AppendedFile(self.path / name))
        waited = bool(file.waiting)  # whether earlier records wait, of which the user was warned
        try:
            file.append(record)
        except OSError as error:
            if not waited:
                _log.warning("%s: %s; new lines wait in memory until there is room", file.path, error)


def _json_line(line: Mapping[str, Any]) -> bytes:
    """Return a line of a .jsonl file as bytes."""
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _lines(path: Path) -> list[bytes]:
    """Read the lines of a file, with their line ends; none where there is no file."""
    if not path.exists():
        return []
    try:
        return read_foreign(path, largest=math.inf, inside=path.parent).splitlines(keepends=True)
    except ForeignFileError as error:
        raise CheckpointError(f"{error}. Bring the file back from a copy, or give another folder") from error


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl or events.jsonl; None if the line was cut short."""
    try:
        line = parse_json(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("iteration"), int) else None
