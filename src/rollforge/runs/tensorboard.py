"""TensorBoard event files, without torch and without a background thread.

Knows: the event format through the tensorboard package. Does not know: runs.

The package's own EventFileWriter queues events for a thread, so that a full disk would show late, in a thread nobody
waits for, and a killed run would lose the queue. Scalars of one step are one small record: they are written at once.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rollforge.runs.files import AppendFile


class EventFile:
    """One event file in a folder."""

    def __init__(self, folder: Path) -> None:
        now = time.time()
        # Nanoseconds: two writers of one process within a second must not share a file.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns() % 10**9}"
        self._file = AppendFile(folder / name)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one point per name. Raises UserError if the disk is full."""
        points = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        self._file.close()

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
