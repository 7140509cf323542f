"""A thread of the syncer: drives a core, and merges what learners contribute."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddiloco.outer.global_model import FragmentState, GlobalModel
from ddiloco.protocol import actions, events, news
from ddiloco.protocol.messages import NOTHING_MERGED, RoundId, Watermark
from ddiloco.protocol.parts import AuthorityCore, FromPart, Part, PartConnected, ToPart
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.durable import DurableState
from ddiloco.storage.tape.recorder import SyncerTape
from ddiloco.telemetry import records
from ddiloco.workers.exchange import EventDelivery, Pieces, SnapshotBegun
from ddiloco.workers.links import WHICHEVER, LearnerLink, Links
from ddiloco.workers.merging import Arrived, Gathered, Merged, Merging
from ddiloco.workers.snapshots.fragments import FragmentsRecording
from ddiloco.workers.snapshots.messages import (
    Completed,
    CutBegun,
    CutOver,
    FragmentsWritten,
    PartWritten,
    SnapshotMessage,
    StateRecorded,
    sender_of,
)
from ddiloco.workers.snapshots.taking import SnapshotTaker

MOST_JOINS = 1024  # that are answered after one write to the disk
_SNAPSHOT_SECONDS = 20.0  # for the snapshot under way to be written, once the run is to be stopped
_ANSWER_SECONDS = 10.0  # for the thread to say what is merged of a learner
_NOTED_SECONDS = 10.0  # for the authority to note a part's last merges

Decided = Sequence[actions.SyncerAction | news.Word | ToPart]
FromOthers = FromPart | PartConnected | news.News | CutBegun | CutOver | FragmentsWritten
"""What the authority and the parts of a syncer tell each other."""


@dataclasses.dataclass(frozen=True)
class FurthestAsked:
    """Asks how far a learner's work is merged, or may be."""

    learner: int
    answer: concurrent.futures.Future[Watermark]  # cancelled when it is no longer wanted


Message = (
    events.SyncerEvent
    | FromOthers
    | Arrived
    | Merged
    | Exception
    | Gathered
    | SnapshotMessage
    | Completed
    | FurthestAsked
    | records.Stop
)


class SyncerWorker:
    """A syncer's thread; sole owner of its core and of the committed fragments that it hands out.

    The core says which syncer it is: with a `SyncerCore` the only process of one, with an `AuthorityCore` the
    process that learners join, which merges nothing, with a `Part` one that merges some of the fragments.

    Offers are decoded on the threads that bring them, merges made on others (`Merging`). All report to this
    thread through its inbox.
    """

    def __init__(
        self,
        core: SyncerCore | AuthorityCore | Part,
        model: GlobalModel | None,
        record: Callable[[Any], None],
        on_commit: Callable[[int, list[Pieces]], None] = lambda step, fragments: None,
        durable: DurableState | None = None,
        tape: SyncerTape | None = None,
        pass_on: Callable[[ToPart | PartConnected | CutBegun | news.Word], None] = lambda one: None,
    ) -> None:
        """`on_commit` gets step and fragments. `durable` is None if no state needs to outlive the process.

        `model` is None for an authority. `tape` is None if none is kept. `pass_on`: to the other processes of
        the syncer, without waiting; a PartConnected says that the part is told all from now on.
        """
        self._snapshots: SnapshotTaker | None = None
        self._recording: FragmentsRecording | None = None
        self.core: Any = core
        self.ended = threading.Event()  # finished, stopped or failed
        self.failure: str | None = None
        self._record, self._on_commit, self._pass_on = record, on_commit, pass_on
        self._durable = durable
        self._tape = tape or SyncerTape()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._held: Message | None = None  # taken out of the inbox, and next
        self._known: Sequence[tuple[int, int]] = ()  # incarnations that are durable
        self._links = Links()
        self._early: dict[tuple[int, int], Arrived] = {}  # by learner and fragment
        self._merging: Merging | None = None
        if model is not None:
            self._merging = Merging(model, core.policy, self._inbox.put, record, durable, self._tape)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take_snapshots(self, taker: SnapshotTaker) -> None:
        """Has snapshots taken; call it before `start`."""
        self._snapshots = taker

    def take_part_in_snapshots(self, recording: FragmentsRecording) -> None:
        """Has a part's fragments recorded when the authority takes a snapshot; call it before `start`."""
        self._recording = recording

    def connect(self, learner: int, incarnation: int, link: LearnerLink) -> None:
        """Sets how to reach a learner; call it before the learner's first event."""
        self._links.set(learner, incarnation, link)

    def send(self, event: events.SyncerEvent | SnapshotMessage | Completed | FromOthers) -> None:
        """Puts an event, or a message about a snapshot, into the inbox; never waits."""
        self._inbox.put(event)

    def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray], epoch: int = 0) -> None:
        """Takes a learner's fragment, encoded, in host memory; decodes it on the calling thread.

        `epoch`: of the last snapshot that the learner had recorded its state for when it made it.
        """
        self._merging.take_offer(event, arrays, epoch)

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
    def waiting(self) -> int:
        """How many messages the thread has yet to take."""
        return self._inbox.qsize()

    def last_snapshot_seconds(self) -> float:
        """How long a snapshot that is under way after the last step may still take; 0: none is."""
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
            self._tape.end([] if self._merging is None else self._merging.end())
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
                if not self._comes_early(message):
                    decided = self._decide(message.event)
                    self._merging.arrivals.keep(message.event, decided, message.pieces)
                    self._carry_out(decided)
            case Merged():
                self._carry_out(self._note_merge(message))
                if not message.made.empty:
                    self._on_commit(self.core.step, self._merging.newest())
                if self._snapshot_is_due():
                    self._merging.gather()
            case Exception():  # a merge failed, and the syncer fails with it
                raise message
            case Gathered(fragments):
                self._record_state(fragments)
            case StateRecorded() | PartWritten() | Completed():
                self._take_of_snapshot(message)
            case FurthestAsked(learner, answer):
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self.core.furthest(learner))
            case records.Stop():
                pass
            case events.LearnerJoined():
                self._take_joins(message)
            case CutBegun() | CutOver() | FragmentsWritten() | PartConnected() | FromPart():
                self._take_of_another(message)
            case event:
                self._carry_out(self._decide(event))
                if isinstance(event, events.LearnerLost):
                    self._links.lost(event.learner, event.incarnation)
                self._take_early(sender_of(event)[0])  # what waited for it, or waits in vain

    def _take_joins(self, first: events.LearnerJoined) -> None:
        """Answers this join and those that wait right behind it, after one write to the disk."""
        joins: list[events.LearnerJoined] = [first]
        while self._held is None and len(joins) < MOST_JOINS and not self._inbox.empty():
            following = self._inbox.get()
            if isinstance(following, events.LearnerJoined):
                joins.append(following)
            else:
                self._held = following
        decided = [action for join in joins for action in self._decide(join)]
        known = self.core.state().incarnations
        if known != self._known and (self._durable is None or self._durable.remember(known)):
            self._known = known
        self._carry_out(decided)
        for join in joins:
            self._links.joined(join)

    def _comes_early(self, arrived: Arrived) -> bool:
        """Whether an offer overtook a snapshot, or its learner's reports; it waits, or the next one does."""
        learner, recording = arrived.event.contribution.learner, self._recording
        key = learner, arrived.event.round.fragment
        self._early.pop(key, None)
        waits = recording is not None and recording.awaits(learner, arrived.epoch, time.monotonic())
        if waits or self.core.is_early(arrived.event):
            self._early[key] = arrived
        return key in self._early

    def _take_early(self, learner: int | None = None) -> None:
        """Takes the offers of the learner that waited, None: of all, but for those that wait on."""
        for key in [key for key in self._early if learner in (None, key[0])]:
            self._take(self._early.pop(key))

    def _take_of_another(self, message: FromOthers) -> None:
        """Takes what another process of the syncer says; it is trusted."""
        match message:
            case CutOver(number):
                self._recording.missed(number)
                self._take_early()
            case CutBegun(number, learners):
                begun = SnapshotBegun(number, self.core.versions)
                for learner in learners:
                    self._links.deliver((learner, WHICHEVER), begun)
                self._recording.begun(number)
                self._merging.gather()
            case FragmentsWritten():
                if self._snapshots is not None:
                    self._snapshots.take_fragments(message)
            case PartConnected(part):
                if self._snapshots is not None:
                    self._snapshots.part_lost(part)
                self._pass_on(message)
                self._carry_out(self._decide(message))
            case FromPart():
                self._carry_out(self._decide(message))
                if self._snapshot_is_due():
                    self._record_state([])

    def _take_of_snapshot(self, message: SnapshotMessage | Completed) -> None:
        try:
            if self._snapshots is not None:
                self._snapshots.take(message)
            elif not isinstance(message, Completed):
                self._perform(actions.Drop(message.learner, "about a snapshot, but none are taken"))
        except Exception as error:
            if isinstance(message, Completed):
                raise
            self._perform(self._refused(message.learner, error))

    def _refused(self, learner: int, error: Exception, round_id: RoundId | None = None) -> actions.Drop:
        """Counts something from a learner that nothing here handles; that is no reason to end."""
        sentence = f"learner {learner}: what it sent made the syncer fail: {type(error).__name__}: {error}"
        self._record(records.Alarm(sentence, time.time()))
        return actions.Drop(learner, f"it made the syncer fail: {type(error).__name__}", round_id)

    def _decide(self, event: events.SyncerEvent | FromOthers) -> Decided:
        """Has the core handle an event; a snapshot under way sees it before, the tape after.

        No event of a learner raises: what the core has no case for is dropped.
        """
        now = time.monotonic()
        try:
            if self._snapshots is not None:
                self._snapshots.heard(event)
            decided = self.core.handle(event, now)
        except Exception as error:
            learner = sender_of(event)[0] if isinstance(event, events.SyncerEvent) else None
            if learner is None:
                raise
            return [self._refused(learner, error, getattr(event, "round", None))]
        self._tape.heard(event, decided, now)
        return decided

    def _note_merge(self, merged: Merged) -> Decided:
        self._merging.take(merged)
        decided = self._decide(merged.event)
        if merged.sha256 is not None:
            self._tape.committed(merged.event.round.fragment, merged.version, merged.sha256)
        return decided

    def _snapshot_is_due(self) -> bool:
        may_take = self._snapshots is not None and not self.core.finished
        return may_take and self._snapshots.wanted(self.core.step)

    def _record_state(self, fragments: list[FragmentState]) -> None:
        """Records this process's state for a snapshot, and has the others record theirs."""
        if self._recording is not None:
            self._recording.record(self.core.durable, fragments)
            self._take_early()
            return
        cut = self._snapshots.begin(self.core, fragments, time.monotonic())
        if cut is None:
            return
        newest = dict(self.core.state().incarnations)
        for learner in cut.learners:
            self._links.deliver((learner, newest[learner]), SnapshotBegun(cut.number, self.core.versions))
        if self._merging is None:
            self._pass_on(cut)

    def _finish_merges(self) -> None:
        """Notes the merges that were under way when the thread was stopped, since they are durable."""
        if self._merging is None:
            return
        self._merging.end()
        deadline = time.monotonic() + _NOTED_SECONDS
        while self._held is not None or not self._inbox.empty() or self._waits_for_note(deadline):
            try:
                message = self._held or self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._held = None
            if isinstance(message, Merged | news.News):
                decided = self._note_merge(message) if isinstance(message, Merged) else self._decide(message)
                self._carry_out([x for x in decided if isinstance(x, actions.Record | news.Word)])
            elif isinstance(message, StateRecorded | PartWritten | Completed):
                self._take_of_snapshot(message)

    def _waits_for_note(self, deadline: float) -> bool:
        return isinstance(self.core, Part) and self.core.unnoted and time.monotonic() < deadline

    def _finish_snapshot(self) -> None:
        """Lets a snapshot that only has to be written become complete, though the run is over."""
        if self._snapshots is None:
            return
        deadline = time.monotonic() + (self.last_snapshot_seconds() or _SNAPSHOT_SECONDS)
        while self._snapshots.nearly_complete and (left := deadline - time.monotonic()) > 0:
            try:
                message = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(message, StateRecorded | PartWritten | Completed):
                self._snapshots.take(message)
        self._snapshots.close(_SNAPSHOT_SECONDS)

    def _carry_out(self, decided: Decided) -> None:
        for one in decided:
            if isinstance(one, actions.SyncerAction):
                self._perform(one)
            else:
                self._pass_on(one)

    def _perform(self, action: actions.SyncerAction) -> None:
        match action:
            case actions.Tell(receivers, event):
                delivery = (
                    EventDelivery(event) if self._merging is None else self._merging.with_pieces(action)
                )
                for receiver in receivers:
                    own = dataclasses.replace(delivery, event=action.to(receiver[0]))
                    self._links.deliver(receiver, own)
            case actions.Merge():
                self._merging.merge(action)
            case actions.Drop():
                values = {"learner": action.learner, "reason": action.reason}
                self._record(records.Noted("drop", values, time.time()))
            case actions.Record():
                self._note(action)
            case actions.Finish():
                self.ended.set()

    def _note(self, action: actions.Record) -> None:
        values: dict[str, Any] = {**action.values}
        if self._merging is not None:
            self._merging.arrivals.forget(action)
            if action.name == "round":
                values |= self._merging.told(values["fragment"])
                values |= {"inbox": self.waiting, "merging": self._merging.under_way}
        if action.name == "learner_ready":
            self._links.begun(values["learner"], values["incarnation"])
        if action.name == "learner_silent" and self._snapshots is not None:
            self._snapshots.silent(values["learner"])
        self._record(records.Noted(action.name, values, time.time()))
