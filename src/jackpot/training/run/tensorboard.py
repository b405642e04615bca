"""Make the records of TensorBoard files.

Records are made here and appended by `RunFolder`, whose files wait in memory while the disk is full; TensorBoard's own
writer would lose them.
"""

import io
import os
import platform
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def event_file_name() -> str:
    """Name a new event file as TensorBoard does: by time, machine and process."""
    return f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"


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
