"""Trackers, to which the metrics of a run are sent: TensorBoard, and Weights & Biases (`tracking.wandb`).

`RunFolder` appends the records of TensorBoard, and keeps them in memory while the disk is full, where TensorBoard's own
writer would lose them.

Status of Weights & Biases: never run on its target (the service of W&B). It ran offline.
"""

import io
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

# tensorboard has no type stubs of classes that protobuf makes at import
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from jackpot.config.tracking import WandbConfig
from jackpot.core.errors import ConfigError
from jackpot.core.files import write_whole
from jackpot.core.package import install

_PREFIX = "events.out.tfevents."


def event_files(folder: Path) -> list[Path]:
    """List the event files in a folder in the order in which TensorBoard reads them."""
    return sorted(folder.glob(f"{_PREFIX}*"))


def event_file_name(folder: Path) -> str:
    """Name a new event file as TensorBoard does: by time, machine and process.

    TensorBoard reads files in the order of their names, so after the clock was set back the time in the name is that of
    the newest file plus one.
    """
    names = [path.name.removeprefix(_PREFIX) for path in event_files(folder)]
    times = [float(match[0]) for name in names if (match := re.match(r"\d{10}", name))]
    seconds = max([time.time(), *(written + 1.0 for written in times)])
    # 10 digits, a point and 6 digits, so that the order of names is that of times.
    return f"{_PREFIX}{seconds:017.6f}.{platform.node()}.{os.getpid()}"


def restart_records(iteration: int) -> bytes:
    """Make an event file's first records, which have TensorBoard drop older files' records from `iteration` on."""
    restart = SessionLog(status=SessionLog.START)
    return _record(Event(file_version="brain.Event:2")) + _record(Event(step=iteration, session_log=restart))


def metrics_record(iteration: int, now: float, values: Mapping[str, float]) -> bytes:
    """Make the record of an event file that holds the metrics of one iteration; `now` is in seconds since 1970."""
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return _record(Event(wall_time=now, step=iteration, summary=summary))


def _record(event: Event) -> bytes:
    """Serialize an event as TensorBoard stores it: length, event and checksums."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


_FINISH = 60.0  # longest wait for the network at the end of a run, seconds; `wandb sync` sends later what is left
_NOT_SENT = {  # settings that switch off what W&B would collect by itself
    "console": "off",
    "host": "",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


def wandb_module() -> ModuleType:
    """Import wandb and return the module.

    Raises:
        ConfigError: wandb is not installed.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports about errors in wandb
    try:
        import wandb

        if not hasattr(wandb, "init"):  # a folder named wandb in the current folder was imported
            raise ModuleNotFoundError(name="wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ConfigError(
            f"tracking.wandb is set, and the package wandb is not installed; {install('wandb')}, or leave "
            f"tracking.wandb out"
        ) from error
    return wandb


class WandbRun:
    """The W&B run of a run folder, begun or continued here, to which lines of metrics.jsonl are sent.

    A start that continues a run continues its W&B run too, whose id is in wandb/run_id; a start without lines in
    metrics.jsonl begins a new W&B run. A W&B history can only grow, so iterations that are computed again after a kill
    stand there twice, with equal `iteration`.

    Args:
        settings: all settings of the run, which W&B shows.
        folder: the run folder, whose name the W&B run gets.
        lines: lines of metrics.jsonl so far, which a new W&B run gets first.

    Raises:
        ConfigError: nobody is logged in, or W&B refuses the run or cannot be reached.
    """

    def __init__(
        self, tracking: WandbConfig, settings: Mapping[str, Any], folder: Path, lines: Sequence[Mapping[str, Any]]
    ) -> None:
        """Choose the id of the W&B run, begin or continue it, send a new one the lines so far, and store the id."""
        wandb = wandb_module()
        id_file = folder / "wandb" / "run_id"
        run_path = id_file.read_text().strip() if lines and id_file.exists() else ""  # ENTITY/PROJECT/ID
        project = f"{tracking.entity or ''}/{tracking.project}/"

        is_new = not run_path.startswith(project)  # also where the settings name another entity or project than before
        if is_new:
            run_path = project + secrets.token_hex(8)

        try:
            self._run = wandb.init(
                project=tracking.project,
                entity=tracking.entity,
                id=run_path.removeprefix(project),
                name=folder.resolve().name,
                dir=folder,
                config=settings,
                mode="offline" if tracking.mode == "offline" else None,  # None: WANDB_MODE, else online
                resume="allow",  # continue the run of this id, if W&B has it
                reinit="create_new",  # leave other W&B runs of this process open
                settings=wandb.Settings(quiet=True, finish_timeout=_FINISH, **_NOT_SENT),
            )
            self._run.define_metric("iteration")
            self._run.define_metric("*", step_metric="iteration")
            for line in lines if is_new else ():
                self.log(line)

            id_file.parent.mkdir(exist_ok=True)  # a disabled W&B does not make the folder
            write_whole(id_file, run_path.encode() + b"\n")
        except Exception as error:  # wandb's errors have no common class
            raise ConfigError(
                f"tracking.wandb: Weights & Biases gives no run: {str(error) or repr(error)} Run `wandb login`, or set "
                f"tracking.wandb.mode=offline, or tracking.wandb=null to send nothing"
            ) from error

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl under their names, without nulls. Does not wait for the network.

        Raises:
            OSError: W&B's process does not take the numbers.
        """
        with _as_os_error():
            self._run.log({name: value for name, value in line.items() if value is not None})

    def close(self) -> None:
        """Mark the W&B run as finished, or as failed while an error ends this process.

        Raises:
            OSError: W&B's process is lost.
        """
        try:
            with _as_os_error():
                self._run.finish(exit_code=1 if sys.exc_info()[0] else 0)
        except OSError:
            with suppress(Exception):  # finish it all the same, else this process cannot begin another W&B run
                wandb_module().teardown()
            raise


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn errors of wandb in the `with` block into OSError, which does not end a run (`RunFolder.dispensable`)."""
    wandb = wandb_module()
    try:
        yield
    except wandb.Error as error:
        raise OSError(f"Weights & Biases: {error}") from error
