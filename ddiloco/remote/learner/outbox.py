"""Messages from a learner to its syncer; putting one in never waits, and memory is bounded."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterator

from ddiloco.protocol import events
from ddiloco.protocol.messages import Report
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import from_learner
from ddiloco.remote.wire.record_messages import LearnerRecord, record_message
from ddiloco.remote.wire.record_queue import BATCH, MAX_RECORDS, RecordQueue

_Waiting = pb.FromLearner | events.StepReported
"""A message; reports become one as they are sent."""

MAX_EVENTS = 64
REPORT_EVERY = 0.002  # seconds between reports, at least: shorter steps are reported together
BATCH_EVERY = 0.2  # seconds that records may wait, so that they travel together


class Outbox:
    """Events and records on their way out. Any thread puts them in; one connection at a time takes them out.

    Of the reports that wait only the newest is kept: it holds all that the older ones did. Records wait for a
    connection, and are sent once: those that a broken one had not delivered are lost. Sent again are the last
    join or report, so that the syncer knows at once where the learner stands, and the learner's state, which
    a restarted syncer cannot know.
    """

    def __init__(self, learner: int, max_records: int = MAX_RECORDS) -> None:
        self._change = threading.Condition()
        self._events: collections.deque[_Waiting] = collections.deque()
        self._presence: _Waiting | None = None  # the last join or report
        self._state: pb.Record | None = None  # the last change of the learner's
        self._records = RecordQueue(max_records)
        self._waiting_since: float | None = None  # the oldest record that is not sent
        self._next_report = 0.0  # when the next report may be sent
        self._due = 0  # number of the first record that may wait longer than the messages
        self._connection = 0
        self._accepted = False  # until then the connection may fail, and lose its messages
        self._finished = False
        self._unpacked: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._pack, name=f"records-{learner}", daemon=True).start()

    def send(self, event: events.FromLearner | events.OfferFailed) -> None:
        """Puts an event in."""
        is_report = isinstance(event, events.StepReported)
        message = event if is_report else from_learner(event)
        with self._change:
            if is_report:
                self._events = collections.deque(m for m in self._events if not _is_report(m))
            self._put(message)
            if is_report or isinstance(event, events.LearnerJoined):
                self._presence = message

    def say(self, message: pb.FromLearner) -> None:
        """Puts a message in."""
        with self._change:
            self._put(message)

    def _put(self, message: _Waiting) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events.popleft()
        self._events.append(message)
        self._change.notify_all()

    def say_after_records(self, message: pb.FromLearner) -> None:
        """Puts a message in that is sent only after every earlier record."""

        def say() -> None:
            with self._change:
                self._due = self._records.end
            self.say(message)

        self._unpacked.put(say)

    def record(self, record: LearnerRecord) -> None:
        """Puts a record in; its metrics may still be on the devices."""
        self._unpacked.put(lambda: self._keep(record))

    def connected(self) -> int:
        """Starts another connection and returns its number; the earlier one gets nothing more."""
        with self._change:
            self._connection += 1
            self._accepted = False
            if self._presence is not None and self._presence not in self._events:
                self._events.append(self._presence)
            self._change.notify_all()
            return self._connection

    def accepted(self) -> None:
        """A syncer has let the learner in: sends the state again."""
        with self._change:
            self._accepted = True
            if self._state is not None:
                self._records.append(self._state)
            self._change.notify_all()

    def disconnected(self) -> None:
        """Ends the messages of the present connection."""
        with self._change:
            self._connection += 1
            self._change.notify_all()

    def finish(self, timeout: float) -> bool:
        """Waits until all records are sent; returns whether they are. Nothing may be put in later."""
        deadline = time.monotonic() + timeout
        packed = threading.Event()
        self._unpacked.put(packed.set)
        packed.wait(timeout)
        with self._change:
            self._finished = True
            self._change.notify_all()
            while self._records and (left := deadline - time.monotonic()) > 0:
                self._change.wait(left)
            return not self._records

    def messages(self, connection: int) -> Iterator[bytes]:
        """The messages of this connection; ends with it."""
        before: Report | None = None  # reports are sent as changes
        while (message := self._next(connection)) is not None:
            if isinstance(message, events.StepReported):
                report = message.report
                message, before = from_learner(message, before), report
            yield message.SerializeToString()

    def _next(self, connection: int) -> _Waiting | None:
        with self._change:
            while self._connection == connection:
                unsent = len(self._records) if self._accepted else 0
                now = time.monotonic()
                if unsent and self._waiting_since is None:
                    self._waiting_since = now
                left = self._waiting_since + BATCH_EVERY - now if unsent else None
                if unsent and self._records.first < self._due:
                    return self._batch()
                if self._events and not _is_report(self._events[0]):
                    return self._events.popleft()
                if self._events and now >= self._next_report:
                    self._next_report = now + REPORT_EVERY
                    return self._events.popleft()
                if unsent and (unsent >= BATCH or left <= 0 or self._finished):
                    return self._batch()
                self._change.wait(self._next_report - now if self._events else left)
            return None

    def _batch(self) -> pb.FromLearner:
        batch = self._records.batch()
        self._waiting_since = None
        self._change.notify_all()
        return pb.FromLearner(records=batch)

    def _pack(self) -> None:
        """Turns records into messages, so that they keep no device memory; only this waits for devices."""
        while True:
            self._unpacked.get()()

    def _keep(self, record: LearnerRecord) -> None:
        try:
            message = record_message(record)
        except Exception:  # of a device that has failed; the steps' own thread reports it
            return
        with self._change:
            self._records.append(message)
            if message.HasField("state_changed"):
                self._state = message
            if len(self._records) % BATCH == 1:  # the first of those that wait
                self._change.notify_all()


def _is_report(message: _Waiting) -> bool:
    return isinstance(message, events.StepReported)
