"""Keeps a learner's whole state on disk: at an interval, for a snapshot, and as it leaves."""

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
        keep: Callable[[LearnerState, int], None] | None,
        every: float,
        what: str,
        record: Callable[[Any], None],
        written: Callable[[int, LearnerState | str], None] = lambda number, result: None,
    ) -> None:
        """`keep` makes a state durable, under this snapshot's number or, with 0, as the newest.

        `keep` is None for a learner without a place for checkpoints. `every`: seconds between two; 0: only
        for snapshots. `what`: the learner's name, for alarms. `written` is called with each snapshot's state,
        or the problem.
        """
        self._keep, self._every, self._what, self._record = keep, every, what, record
        self._written = written
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None
        self._due = time.monotonic() + every
        self._asked = 0  # number of the snapshot for which one is to be taken; 0: none

    def ask(self, number: int) -> None:
        """Asks for a checkpoint for the snapshot with this number."""
        if self._keep is None:
            self._written(number, "it has no folder for checkpoints")
        else:
            self._asked = number

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint, and none is being written."""
        wanted = self._asked or (self._keep and self._every and time.monotonic() >= self._due)
        return bool(wanted) and (self._writing is None or self._writing.done())

    def take(self, state: Callable[[], LearnerState]) -> None:
        """Starts to write the present state, copied before later steps change it; does not wait."""
        number, self._asked = self._asked, 0
        if not number:
            self._due = time.monotonic() + self._every
        made = self._made(state, number)
        if made is not None:
            self._writing = self._writer.submit(self._write, made, number)

    def last(self, state: Callable[[], LearnerState] | None) -> None:
        """Writes the state with which the learner leaves, if any; returns once that is durable."""
        wanted = [
            number for number in dict.fromkeys((self._asked, 0)) if number or (self._keep and self._every)
        ]
        made = self._made(state, self._asked) if state is not None and wanted else None
        if self._writing is not None:
            concurrent.futures.wait([self._writing], _LAST_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)
        for number in wanted if made is not None else ():
            self._write(made, number)

    def _made(self, state: Callable[[], LearnerState], number: int) -> LearnerState | None:
        try:
            return state()
        except Exception as error:  # such as no memory for the copy: that costs the checkpoint alone
            self._lost(error, number)
            return None

    def _write(self, state: LearnerState, number: int) -> None:
        assert self._keep is not None
        try:
            self._keep(state, number)
        except Exception as error:  # of the disk, of a bucket's library, or no memory for the bytes
            self._lost(error, number)
            return
        if number:
            self._written(number, state)

    def _lost(self, error: Exception, number: int) -> None:
        self._alarm(error)
        if number:
            self._written(number, records.reason(error))

    def _alarm(self, error: Exception) -> None:
        problem = f"{self._what}: {records.reason(error)}: a checkpoint is not kept"
        self._record(records.Alarm(problem, time.time()))
