"""TensorBoard event files under `<workdir>/metrics/`: one run for each curve's owner.

tensorboardX gives the encoding. Its SummaryWriter is not used: it starts a thread and a bounded queue
for each file, and once the disk is full that thread dies and the next scalar blocks for ever.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from ddiloco.observe.files import GrowingFiles
from ddiloco.observe.writers import RUN


class EventFiles:
    """A Writer: a folder for each owner of curves; those with the same tags share a chart."""

    def __init__(self, files: GrowingFiles) -> None:
        """`files` are the workdir's, and are flushed and closed with these."""
        self._files = files
        self._suffix = f"{socket.gethostname()}.{os.getpid()}"
        self._names: dict[str, str] = {}

    def write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds an event of these scalars to the owner's file."""
        name = self._names.get(owner)
        if name is None:
            # Readers sort a run's files by name: the time makes a resumed run's file the later one.
            name = f"metrics/{owner}/events.out.tfevents.{int(time):010d}.{self._suffix}"
            self._names[owner] = name
            self._append(owner, _frame(Event(wall_time=time, file_version="brain.Event:2")))
        event = Event(wall_time=time, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(owner, _frame(event))

    def close(self) -> None:
        """The files are their owner's to close."""

    def _append(self, owner: str, frame: bytes) -> None:
        self._files.append(self._names[owner], frame, bounded=owner != RUN)


def _frame(event: Event) -> bytes:
    """The event as a TFRecord: length, its checksum, data, its checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
    )
