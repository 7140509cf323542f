"""A run's curves, and where they go: TensorBoard's files, and if wanted Weights & Biases and MLflow.

The last two are optional packages that may talk to a server: each has a thread of its own, is configured by
its own environment (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and so on), and may fail without the run.
"""

from __future__ import annotations

import collections
import importlib.util
import math
import os
import pathlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ddiloco.config import ConfigError
from ddiloco.telemetry.files import GrowingFiles
from ddiloco.telemetry.records import Evaluated, Noted, StepDone
from ddiloco.telemetry.scalars import as_float, numbers

RUN = "global"  # the owner of curves that are not a learner's
PROJECT = "ddiloco"
NEEDS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""By name of a writer, the package that it needs."""

MAX_WAITING = 10_000  # points that a service has not taken yet
_TIMEOUT = 20.0  # seconds for a service to end

_COUNTED = ("tokens", "skipped")  # metrics of a step that the summary adds up
_ROUND = ("quorum", "quorum_seconds", "grace_seconds", "sync_seconds", "merge_seconds", "disk_seconds")
_NOT_PLOTTED = ("step", "fragment", "version", "live", "tokens", "inbox", "merging")


class Writer(Protocol):
    """Takes a run's curves; used by one thread."""

    def write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to curves of the owner, `learner_N` or RUN: values by tag, at a step and a time."""

    def close(self) -> None:
        """No more points follow."""


def check_writers(names: Sequence[str]) -> None:
    """Raises ConfigError where a writer's package is not installed."""
    for name in names:
        if importlib.util.find_spec(NEEDS[name]) is None:
            raise ConfigError(f"config.log.writers: {name} needs the package {NEEDS[name]} (ddiloco[{name}])")


class Metrics:
    """Scalars against steps; all learners' have the same tags, so that their curves are in one chart."""

    def __init__(self, writers: Sequence[Writer], log_every: int) -> None:
        """Learners' scalars are written every `log_every` of their steps."""
        self._writers = writers
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
        self._write(RUN, step, record.time, tags)

    def evaluated(self, record: Evaluated) -> None:
        """The global model's score on held-out data."""
        values = {"loss": record.loss, **record.statistics}
        known = {f"eval/{name}": as_float(value) for name, value in values.items()}
        self._write(RUN, record.step, record.time, known)

    def run(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        """Figures of the whole run, such as goodput."""
        known = {f"run/{name}": value for name, value in values.items() if value is not None}
        self._write(RUN, step, time, known)

    def close(self) -> None:
        """Lets the writers end; each may raise what its service does."""
        for writer in self._writers:
            writer.close()

    def _write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        if values:
            for writer in self._writers:
                writer.write(owner, step, time, values)


class EventFiles:
    """TensorBoard's files under `<workdir>/metrics/`: a folder for each owner; equal tags share a chart.

    tensorboardX gives the encoding. Its SummaryWriter is not used: it starts a thread and a bounded queue
    for each file, and once the disk is full that thread dies and the next scalar blocks for ever.
    """

    def __init__(self, files: GrowingFiles) -> None:
        """`files` are the workdir's, and are flushed and closed with these."""
        from tensorboardX.proto.event_pb2 import Event

        self._event = Event
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
            self._append(owner, self._event(wall_time=time, file_version="brain.Event:2"))
        event = self._event(wall_time=time, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(owner, event)

    def close(self) -> None:
        """Does nothing: their owner closes the files."""

    def _append(self, owner: str, event: Any) -> None:
        """The event as a TFRecord: length, its checksum, data, its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = (length, struct.pack("<I", masked_crc32c(length)), data)
        frame = b"".join((*parts, struct.pack("<I", masked_crc32c(data))))
        self._files.append(self._names[owner], frame, bounded=owner != RUN)


class Aside:
    """A Writer that never waits: another one's thread makes it, writes with it and closes it.

    Points are given up where too many wait. What the other raises is reported once, and ends it.
    """

    def __init__(self, make: Callable[[], Writer], warn: Callable[[str], None], name: str) -> None:
        """`warn` takes a sentence, on any thread."""
        self._make, self._warn, self._name = make, warn, name
        self._waiting: queue.Queue[tuple[str, int, float, Mapping[str, float]] | None]
        self._waiting = queue.Queue(MAX_WAITING)
        self._lost = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        """Puts the point in a queue."""
        try:
            self._waiting.put_nowait((owner, step, time, values))
        except queue.Full:
            if self._thread.is_alive() and not self._lost:
                self._lost = True
                self._warn(f"{self._name} is too slow: points of its curves are given up")

    def close(self) -> None:
        """Waits a while for what is in the queue."""
        try:
            self._waiting.put(None, timeout=_TIMEOUT if self._thread.is_alive() else 0.0)
        except queue.Full:
            return
        self._thread.join(_TIMEOUT)

    def _run(self) -> None:
        try:
            writer = self._make()
            while (point := self._waiting.get()) is not None:
                writer.write(*point)
            writer.close()
        except Exception as error:
            self._warn(f"{self._name}: {type(error).__name__}: {error}; nothing more is written to it")


class WeightsAndBiases:
    """A run of Weights & Biases; curves are named `OWNER/TAG`."""

    def __init__(self, workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
        import wandb

        # Output is not captured, and no signal handled: both are the run's own.
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(name=workdir.name, dir=workdir, config=dict(config), settings=settings)
        self._owners: set[str] = set()

    def write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        """Logs the point; every owner has a step of its own."""
        at = f"{owner}/step"
        if owner not in self._owners:
            self._owners.add(owner)
            self._run.define_metric(f"{owner}/*", step_metric=at)
        self._run.log({at: step, f"{owner}/time": time, **_named(owner, values)})

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()


class Mlflow:
    """A run of MLflow; curves are named as for Weights & Biases."""

    def __init__(self, workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
        run = self._client.create_run(experiment, run_name=workdir.name)
        self._id = run.info.run_id
        self._client.log_dict(self._id, dict(config), "config.json")

    def write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        """Logs the point."""
        from mlflow.entities import Metric

        at = round(1000 * time)
        named = _named(owner, values)
        self._client.log_batch(self._id, [Metric(tag, value, at, step) for tag, value in named.items()])

    def close(self) -> None:
        """Ends the run there."""
        self._client.set_terminated(self._id)


SERVICES: Mapping[str, Callable[[pathlib.Path, Mapping[str, Any]], Writer]]
SERVICES = {"wandb": WeightsAndBiases, "mlflow": Mlflow}


def _named(owner: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values that are numbers: neither service draws NaN."""
    return {f"{owner}/{tag}": value for tag, value in values.items() if math.isfinite(value)}
