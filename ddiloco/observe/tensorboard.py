"""TensorBoard event files under `<workdir>/metrics/`: one run for each learner and one for the whole.

tensorboardX gives the encoding. Its SummaryWriter is not used: it starts a thread and a bounded queue
for each file, and once the disk is full that thread dies and the next scalar blocks for ever.
"""

from __future__ import annotations

import collections
import os
import socket
import struct
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from ddiloco.observe.files import GrowingFiles
from ddiloco.observe.records import Evaluated, Noted, StepDone
from ddiloco.observe.scalars import as_float, numbers

_GLOBAL = "global"  # the run whose scalars are not a learner's
_COUNTED = ("tokens", "skipped")  # metrics of a step that the summary adds up
_ROUND = ("quorum", "quorum_seconds", "grace_seconds", "sync_seconds", "merge_seconds", "disk_seconds")
_NOT_PLOTTED = ("step", "fragment", "version", "live", "tokens", "inbox", "merging")


class EventFiles:
    """Scalars against steps; all learners' have the same tags, so that their curves are in one chart."""

    def __init__(self, files: GrowingFiles, log_every: int) -> None:
        """`files` are the workdir's; learners' scalars are written every `log_every` of their steps."""
        self._files = files
        self._suffix = f"{socket.gethostname()}.{os.getpid()}"
        self._names: dict[str, str] = {}
        self._log_every = log_every
        self._counts: collections.Counter[int] = collections.Counter()
        self._since: dict[int, float] = {}  # by learner: the time of its last point
        self._tokens: collections.Counter[int] = collections.Counter()  # by learner, since that time

    def step(self, record: StepDone) -> None:
        """Loss, gradient norm, learning rate, the model's statistics and tokens a second of a learner."""
        learner = record.learner
        self._counts[learner] += 1
        self._tokens[learner] += record.tokens
        if self._counts[learner] % self._log_every and learner in self._since:
            return
        metrics = numbers(record.metrics)
        values = {f"train/{name}": value for name, value in metrics.items() if name not in _COUNTED}
        seconds = record.time - self._since.get(learner, record.time)
        if seconds > 0:
            values["train/tokens_per_second"] = self._tokens[learner] / seconds
        self._since[learner], self._tokens[learner] = record.time, 0
        self._write(f"learner_{learner}", record.step, record.time, values)

    def round(self, record: Noted) -> None:
        """Quorum, times and outer metrics of a merge, against the global step."""
        values = numbers(record.values)
        step = int(values.get("step", 0))
        tags = {
            f"{'round' if name in _ROUND else 'outer'}/{name}": value
            for name, value in values.items()
            if name not in _NOT_PLOTTED
        }
        self._write(_GLOBAL, step, record.time, tags)

    def evaluated(self, record: Evaluated) -> None:
        """The global model's score on held-out data."""
        values = {"loss": record.loss, **record.statistics}
        known = {f"eval/{name}": as_float(value) for name, value in values.items()}
        self._write(_GLOBAL, record.step, record.time, known)

    def run(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        """Figures of the whole run, such as goodput."""
        known = {f"run/{name}": value for name, value in values.items() if value is not None}
        self._write(_GLOBAL, step, time, known)

    def _write(self, run: str, step: int, time: float, values: Mapping[str, float]) -> None:
        if not values:
            return
        name = self._names.get(run)
        if name is None:
            # Readers sort a run's files by name: the time makes a resumed run's file the later one.
            name = self._names[run] = f"metrics/{run}/events.out.tfevents.{int(time):010d}.{self._suffix}"
            self._append(run, _frame(Event(wall_time=time, file_version="brain.Event:2")))
        event = Event(wall_time=time, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(run, _frame(event))

    def _append(self, run: str, frame: bytes) -> None:
        self._files.append(self._names[run], frame, bounded=run != _GLOBAL)


def _frame(event: Event) -> bytes:
    """The event as a TFRecord: length, its checksum, data, its checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
    )
