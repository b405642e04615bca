"""Make the records of TensorBoard files.

Records are made here and appended by `RunFolder`, whose files wait in memory while the disk is full; TensorBoard's own
writer would lose them.
"""

import io
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."


def event_files(folder: Path) -> list[Path]:
    """List the event files in a folder in the order in which TensorBoard reads them."""
    return sorted(folder.glob(f"{_PREFIX}*"))


def event_file_name(folder: Path) -> str:
    """Name a new event file as TensorBoard does: by time, machine and process.

    TensorBoard reads files in the order of their names, so a clock that was set back counts on from the newest file.
    """
    names = [path.name.removeprefix(_PREFIX) for path in event_files(folder)]
    times = [match[0] for name in names if (match := re.match(r"\d{10}", name))]
    seconds = max([time.time(), *(float(one) + 1.0 for one in times)])
    return f"{_PREFIX}{seconds:017.6f}.{platform.node()}.{os.getpid()}"


def restart_records(iteration: int) -> bytes:
    """Make the first records of an event file; TensorBoard drops what older files have from `iteration` on."""
    restart = SessionLog(status=SessionLog.START)
    return _record(Event(file_version="brain.Event:2")) + _record(Event(step=iteration, session_log=restart))


def metrics_record(iteration: int, now: float, values: Mapping[str, float]) -> bytes:
    """Make the record of the metrics of one iteration; `now` in seconds since 1970."""
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return _record(Event(wall_time=now, step=iteration, summary=summary))


def _record(event: Event) -> bytes:
    """Serialize an event between its length and its checksum."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
