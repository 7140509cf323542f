"""Keeps a learner's whole state on disk: at an interval, and as it leaves."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

from ddiloco.storage.learner_state import LearnerState
from ddiloco.telemetry import records

_LAST_SECONDS = 60.0  # for the checkpoint under way, before the last one


class Checkpointing:
    """Used by the learner's thread, between steps; checkpoints are written on another, one at a time."""

    def __init__(
        self,
        keep: Callable[[LearnerState], None],
        every: float,
        what: str,
        record: Callable[[Any], None],
    ) -> None:
        """`keep` makes a state durable. `every`: seconds between two. `what`: whose, for alarms."""
        self._keep, self._every, self._what, self._record = keep, every, what, record
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None
        self._due = time.monotonic() + every

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint, and none is being written."""
        return time.monotonic() >= self._due and (self._writing is None or self._writing.done())

    def take(self, state: Callable[[], LearnerState]) -> None:
        """Begins to write the state now, whose copies later steps do not change; does not wait."""
        self._due = time.monotonic() + self._every
        made = self._made(state)
        if made is not None:
            self._writing = self._writer.submit(self._write, made)

    def last(self, state: Callable[[], LearnerState] | None) -> None:
        """Writes the state with which the learner leaves, if there is one; returns once that is durable."""
        made = None if state is None else self._made(state)
        if self._writing is not None:
            concurrent.futures.wait([self._writing], _LAST_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)
        if made is not None:
            self._write(made)

    def _made(self, state: Callable[[], LearnerState]) -> LearnerState | None:
        try:
            return state()
        except Exception as error:  # such as no memory for the copy: that costs the checkpoint alone
            self._alarm(error)
            return None

    def _write(self, state: LearnerState) -> None:
        try:
            self._keep(state)
        except Exception as error:  # of the disk, of a bucket's library, or no memory for the bytes
            self._alarm(error)

    def _alarm(self, error: Exception) -> None:
        problem = f"{self._what}: {records.reason(error)}: a checkpoint is not kept"
        self._record(records.Alarm(problem, time.time()))
