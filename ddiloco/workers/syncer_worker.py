"""A thread of the syncer: gives its actor what arrives, and the time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, RoundId, Watermark
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.durable import DurableState
from ddiloco.storage.tape.recorder import SyncerTape
from ddiloco.telemetry import records
from ddiloco.workers.exchange import CheckpointAsked, CheckpointWritten, EventDelivery, Pieces
from ddiloco.workers.learner_arrays import STEPS_IN_FLIGHT
from ddiloco.workers.links import LearnerLink, Links
from ddiloco.workers.merging import Arrived, Merged, Merging, SignedOffer
from ddiloco.workers.snapshots import Completed, SnapshotAsked, SnapshotTaker
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor

MAX_WAITING = 20_000  # messages that the thread has yet to take, as when the disk hangs
MAX_JOINS = 1024  # that are answered after one write to the disk
_SNAPSHOT_SECONDS = 20.0  # for the snapshot under way to be written, once the run is to be stopped
_ANSWER_SECONDS = 10.0  # for the thread to say what is merged of a learner


@dataclasses.dataclass(frozen=True)
class FurthestAsked:
    """Asks how far a learner's work is merged, or may be."""

    learner: int
    answer: concurrent.futures.Future[Watermark]  # cancelled when it is no longer wanted


OfSnapshot = SnapshotAsked | CheckpointWritten | Completed

Message = events.SyncerEvent | Arrived | Merged | Exception | OfSnapshot | FurthestAsked | records.Stop


class SyncerWorker:
    """A syncer's thread; sole owner of its actor, which decides and hands out the committed fragments.

    Offers are validated on the threads that bring them, merges made on others (`Merging`). All report to this
    thread through its inbox.
    """

    def __init__(
        self,
        core: SyncerCore,
        model: GlobalModel,
        record: Callable[[Any], None],
        on_commit: Callable[[int, list[Pieces]], None] = lambda step, fragments: None,
        durable: DurableState | None = None,
        tape: SyncerTape | None = None,
    ) -> None:
        """`model` has the core's fragments. `on_commit` gets step and fragments.

        `durable` is None if no state needs to outlive the process, `tape` if none is kept.
        """
        self._snapshots: SnapshotTaker | None = None
        self.ended = threading.Event()  # finished, stopped or failed
        self.failure: str | None = None
        self._record, self._on_commit = record, on_commit
        self._durable = durable
        self._tape = tape or SyncerTape()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._held: Message | None = None  # taken out of the inbox, and next
        self._links = Links()
        statements = self._tape.statements
        fragments = {
            p: FragmentVersion(*model.fragment(p), statement=statements.get(p, b"")) for p in model.fragments
        }
        self._actor = SyncerActor(core, self, fragments)
        self._merging = Merging(model, core.policy, self._inbox.put, record, durable, self._tape)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer", daemon=True)

    @property
    def core(self) -> SyncerCore:
        """The core; only the thread may change it."""
        core: SyncerCore = self._actor.core
        return core

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take_snapshots(self, taker: SnapshotTaker) -> None:
        """Enables snapshots; call it before `start`."""
        self._snapshots = taker

    def connect(self, learner: int, incarnation: int, link: LearnerLink) -> None:
        """Sets how to reach a learner; call it before the learner's first event."""
        self._links.set(learner, incarnation, link)

    def send(self, event: events.SyncerEvent | OfSnapshot) -> None:
        """Puts an event, or a message about a snapshot, into the inbox; never waits."""
        self._inbox.put(event)

    def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray]) -> None:
        """Takes a learner's fragment, encoded, in host memory; validates it on the calling thread."""
        self._merging.take_offer(event, arrays)

    def furthest(self, learner: int) -> Watermark:
        """The furthest of a learner's work that is merged, or may be yet; for other threads.

        Nothing where the syncer's thread does not answer in time.
        """
        if not self._thread.is_alive():
            return self.core.furthest(learner)
        asked = FurthestAsked(learner, concurrent.futures.Future())
        self._inbox.put(asked)
        concurrent.futures.wait([asked.answer], _ANSWER_SECONDS)
        return NOTHING_MERGED if asked.answer.cancel() else asked.answer.result()

    @property
    def versions(self) -> tuple[int, ...]:
        """By fragment, the newest; for other threads."""
        return self.core.versions

    @property
    def crowded(self) -> bool:
        """Whether so many messages wait that no more are to be read."""
        return self._inbox.qsize() > MAX_WAITING

    def boundary_seconds(self, learner: int) -> float:
        """Seconds that a learner takes for the steps that its devices have at a time; 0.0: not known."""
        return (STEPS_IN_FLIGHT + 1) * self.core.longest_step([learner])

    def last_snapshot_seconds(self) -> float:
        """Remaining seconds of a snapshot in progress after the last step; 0: none."""
        if self._snapshots is None or not self.core.finished:
            return 0.0
        return self._snapshots.seconds_left()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the merges under way; whether it ended within `timeout` seconds.

        After the last step the snapshot under way has its time beside.
        """
        left = self.last_snapshot_seconds()
        self._stopping.set()
        self._inbox.put(records.Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout + left)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take(self._next())
            self._finish_merges()
            self._finish_snapshot()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            self.ended.set()  # before the wait for merges that a full disk may hold
        finally:
            self._tape.end(self._merging.end())
            self.ended.set()

    def _next(self) -> Message:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        deadlines = [self.core.next_deadline(), self._snapshots.next_deadline() if self._snapshots else None]
        deadline = min((at for at in deadlines if at is not None), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return events.Timeout()

    def _take(self, message: Message) -> None:
        if self._snapshots is not None:
            self._snapshots.timeout(time.monotonic())
        match message:
            case Arrived():
                self._actor.take_offer(message.event, message.offer, time.monotonic())
            case Merged():
                self._take_merged(message)
                if not message.made.empty:
                    self._on_commit(self.core.step, self._actor.newest())
                if self._snapshots is not None and self._snapshots.due(self.core.step):
                    self._take_snapshot()
            case Exception():  # a merge failed, and the syncer fails with it
                raise message
            case SnapshotAsked():
                self._take_snapshot()
            case CheckpointWritten() | Completed():
                if self._snapshots is not None:
                    self._snapshots.take(message)
            case FurthestAsked(learner, answer):
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self.core.furthest(learner))
            case records.Stop():
                pass
            case events.LearnerJoined():
                self._take_joins(message)
            case event:
                self._handle(event)
                if isinstance(event, events.LearnerLost):
                    self._links.lost(event.learner, event.incarnation)

    def _take_joins(self, first: events.LearnerJoined) -> None:
        """Answers this join and those that wait right behind it, after one write to the disk."""
        joins: list[events.LearnerJoined] = [first]
        while self._held is None and len(joins) < MAX_JOINS and not self._inbox.empty():
            following = self._inbox.get()
            if isinstance(following, events.LearnerJoined):
                joins.append(following)
            else:
                self._held = following
        self._handle(*joins)
        for join in joins:
            self._links.joined(join)

    def _refused(self, learner: int, error: Exception, round_id: RoundId | None = None) -> actions.Drop:
        """Counts something from a learner that nothing here handles; that is no reason to end."""
        sentence = f"learner {learner}: what it sent made the syncer fail: {type(error).__name__}: {error}"
        self._record(records.Alarm(sentence, time.time()))
        return actions.Drop(learner, f"it made the syncer fail: {type(error).__name__}", round_id)

    def _handle(self, *taken: events.SyncerEvent) -> None:
        if self._snapshots is not None:
            for event in taken:
                self._snapshots.heard(event)
        self._actor.handle(*taken, now=time.monotonic())

    def _take_merged(self, merged: Merged) -> None:
        measured = {**self._merging.done(merged), "inbox": self._inbox.qsize()}
        now = time.monotonic()
        decided = self._actor.merged(merged.event, merged.version, merged.made, measured, now)
        if merged.sha256 is not None:
            p = merged.event.round.fragment
            self._tape.committed(p, merged.version, merged.sha256, merged.state)
            self._actor.certify(p, self._tape.statements.get(p, b""))
        self._actor.perform(decided)

    def _take_snapshot(self) -> None:
        """Begins a snapshot, unless the run is over or one is under way."""
        if self._snapshots is None or self.core.finished:
            return
        number, learners = self._snapshots.begin(self.core, time.monotonic())
        for receiver in learners:
            self._links.deliver(receiver, CheckpointAsked(number))

    def _finish_merges(self) -> None:
        """Notes the merges that were under way when the thread was stopped, since they are durable."""
        self._actor.end()
        self._merging.end()
        while self._held is not None or not self._inbox.empty():
            message, self._held = self._held or self._inbox.get(), None
            if isinstance(message, Merged):
                self._take_merged(message)
            elif isinstance(message, CheckpointWritten | Completed) and self._snapshots is not None:
                self._snapshots.take(message)

    def _finish_snapshot(self) -> None:
        """Waits for the snapshot in progress, though the run is over."""
        if self._snapshots is None:
            return
        deadline = time.monotonic() + (self.last_snapshot_seconds() or _SNAPSHOT_SECONDS)
        while self._snapshots.under_way and (left := deadline - time.monotonic()) > 0:
            try:
                message = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(message, CheckpointWritten | Completed):
                self._snapshots.take(message)
            elif not isinstance(message, Arrived | Merged | Exception):
                self._snapshots.heard(message)
        self._snapshots.close()

    # As the driver of its actor.

    def handled(self, event: events.SyncerEvent, decided: Sequence[actions.SyncerAction], now: float) -> None:
        self._tape.heard(event, decided, now)

    def refuse(self, event: events.SyncerEvent, error: Exception) -> actions.Drop:
        made = getattr(event, "report", None) or getattr(event, "contribution", event)
        learner = getattr(made, "learner", None)
        if learner is None:
            raise error
        return self._refused(learner, error, getattr(event, "round", None))

    def remember(self, incarnations: Sequence[tuple[int, int]]) -> bool:
        return self._durable is None or self._durable.remember(incarnations)

    def deliver(self, receiver: tuple[int, int], delivery: EventDelivery) -> None:
        self._links.deliver(receiver, delivery)

    def began(self, learner: int, incarnation: int) -> None:
        self._links.begun(learner, incarnation)

    def merge(self, merge: actions.Merge, given: list[tuple[Contribution, SignedOffer]]) -> None:
        self._merging.merge(merge, given)

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "learner_silent" and self._snapshots is not None:
            self._snapshots.silent(values["learner"])
        self._record(records.Noted(name, dict(values), time.time()))

    def finish(self) -> None:
        self.ended.set()
