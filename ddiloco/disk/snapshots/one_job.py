"""Snapshots of a baseline, which is one job without a syncer: its state between two steps, in one part."""

from __future__ import annotations

import concurrent.futures
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.disk.snapshots.parts import write_part
from ddiloco.disk.snapshots.store import FOLDER, Part, SnapshotError, SnapshotStore
from ddiloco.observe import records
from ddiloco.settings.experiment import Experiment, to_json

JOB_PART = "job"


class JobSnapshots:
    """Writes the snapshots of one job, one at a time, in its own thread."""

    def __init__(
        self, workdir: pathlib.Path | None, experiment: Experiment, record: Callable[[Any], None]
    ) -> None:
        """Without a workdir, none are taken."""
        self._every = experiment.snapshot.every if workdir is not None else 0
        self._folder = (workdir or pathlib.Path()) / FOLDER
        self._store = SnapshotStore(self._folder, experiment.snapshot.keep)
        self._experiment = to_json(experiment)
        self._record = record
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "snapshot")
        self._writing: concurrent.futures.Future[None] | None = None

    def due(self, step: int) -> bool:
        """Whether one is due after this step."""
        return bool(self._every) and step % self._every == 0

    def take(self, part: Part, header: Mapping[str, Any]) -> None:
        """Begins to write a snapshot, unless the previous one is still being written.

        Args:
          part: the job's state; must not change from now on.
          header: `step` and `time` of the state, and anything else to store with it.
        """
        number = self._store.next_number()
        if self._writing is not None and not self._writing.done():
            self._given_up(number, header, "the previous one is still being written")
            return
        self._writing = self._pool.submit(self._write, number, part, header)

    def close(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the one that is being written."""
        self._pool.shutdown(wait=False)
        if self._writing is not None:
            concurrent.futures.wait([self._writing], timeout)

    def _write(self, number: int, part: Part, header: Mapping[str, Any]) -> None:
        begun = time.monotonic()
        try:
            files = write_part(self._folder / f"{number:06d}", JOB_PART, part)
            self._store.complete(number, {**header, "experiment": self._experiment}, {JOB_PART: files})
        except SnapshotError as error:
            self._store.discard(number)
            self._given_up(number, header, str(error))
            problem = f"{error}: a snapshot is given up; training goes on"
            self._record(records.Alarm(problem, header["time"]))
            return
        values = {
            "number": number,
            "step": header["step"],
            "bytes": sum(size for size, _ in files.files.values()),
            "seconds": time.monotonic() - begun,
        }
        self._record(records.Noted("snapshot", values, header["time"]))

    def _given_up(self, number: int, header: Mapping[str, Any], reason: str) -> None:
        values = {"number": number, "step": header["step"], "reason": reason}
        self._record(records.Noted("snapshot_given_up", values, header["time"]))
