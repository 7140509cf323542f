"""Receives learners' records, counts lost ones, and records how each process ended."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from ddiloco.goodput.accounting import State
from ddiloco.remote.syncer.admission import MAX_REPLACED
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.record_messages import learner_record
from ddiloco.remote.wire.record_queue import Received
from ddiloco.remote.wire.validation import WireError
from ddiloco.telemetry import records

OVER = (State.FINISHED, State.FAILED)


class _Learner:
    def __init__(self, process: int, began: bool, hosts: int | None) -> None:
        self.process, self.hosts = process, hosts
        self.received = Received(0 if began else None)
        self.lost_at: float | None = None
        self.left = False  # in order, before it was lost
        self.state: State | None = None


class RecordIntake:
    """Tracks each learner process's records, and its end.

    A disconnected process may step on, and sends its records when it reconnects. It counts as dead since the
    disconnect only when another process has replaced it, or the run is over.

    Of two processes the newer is the one that connects later, whatever their clocks show. After a restart of
    the syncer the newer one may connect first: it gets its place back once the other is gone.
    """

    def __init__(self, record: Callable[[object], None]) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._learners: dict[int, _Learner] = {}
        self._replaced: dict[int, dict[int, _Learner]] = {}  # by learner and process

    def joined(
        self, learner: int, process: int, newer: bool = False, began: bool = True, hosts: int | None = None
    ) -> None:
        """A process has connected, for the first time or again.

        `newer`: than any an earlier syncer knew. `began`: it has not been connected before, to any syncer.
        `hosts`: of the learner's, those that are there; None: all.
        """
        now = time.time()
        with self._lock:
            known = self._learners.get(learner)
            replaced = self._replaced.setdefault(learner, {})
            if known is not None and known.process == process:
                known.lost_at = None
                return
            if process in replaced and (known.lost_at is None or process < known.process):
                return  # it lingers, and does not know yet that it was replaced
            if known is not None:
                self._died(learner, known, now)
                replaced[known.process] = known
            elif newer:
                self._record(records.StateChanged(learner, State.FAILED, now))
            came = replaced.pop(process, None) or _Learner(process, began, hosts)
            came.lost_at = came.state = None
            self._learners[learner] = came
            if len(replaced) > MAX_REPLACED:
                del replaced[next(iter(replaced))]
            self._record(records.StateChanged(learner, State.STARTING, now, hosts))

    def lost(self, learner: int, process: int, left: bool = False) -> None:
        """The process's connection has ended; `left`: in order."""
        with self._lock:
            known = self._learners.get(learner)
            if known is not None and known.process == process:
                known.lost_at, known.left = time.time(), left

    def take(self, learner: int, process: int, batch: pb.Records) -> None:
        """Passes on the records, and how many were lost before them.

        Raises:
          WireError: a record cannot be read; those before it are taken.
        """
        with self._lock:
            known = self._learners.get(learner)
            if known is None or known.process != process:
                raise WireError("records of another process")
            if lost := known.received.lost(batch):
                values = {"learner": learner, "count": lost}
                self._record(records.Noted("records_lost", values, time.time()))
            for entry in known.received.new(batch):
                record = learner_record(entry, learner)
                if isinstance(record, records.StateChanged):
                    known.state = record.state
                    record = dataclasses.replace(record, chips=known.hosts)
                self._record(record)

    def end(self) -> None:
        """The run is over: a process that is not connected and has not finished has died."""
        now = time.time()
        with self._lock:
            for learner, known in self._learners.items():
                if known.lost_at is not None:
                    self._died(learner, known, now)

    def _died(self, learner: int, known: _Learner, now: float) -> None:
        if known.state not in OVER and not known.left:
            known.state = State.FAILED
            at = now if known.lost_at is None else known.lost_at
            self._record(records.StateChanged(learner, State.FAILED, at))
