"""The syncer's thread: drives a SyncerCore and merges what learners contribute."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ddiloco.disk.tape.recorder import SyncerTape
from ddiloco.observe import records
from ddiloco.outer.global_model import FragmentState, GlobalModel, NextVersion, pieces_sha256
from ddiloco.outer.guards import Notice
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.roles.exchange import Arrivals, Pieces, SnapshotBegun, Told, fragments_with
from ddiloco.roles.links import LearnerLink, Links
from ddiloco.roles.snapshots.messages import PartWritten, SnapshotMessage, StateRecorded
from ddiloco.roles.snapshots.taking import Completed, SnapshotTaker

MOST_JOINS = 1024  # that are answered after one write to the disk
_SNAPSHOT_SECONDS = 20.0  # for the last snapshot to be written once the run is over


class Durability(Protocol):
    """Where committed state is kept, to outlive the process."""

    def commit(self, merged: RoundId, model: GlobalModel) -> bool:
        """Makes a merged fragment durable, beside others; may wait. False: the run ended first."""

    def remember(self, incarnations: Sequence[tuple[int, int]]) -> None:
        """Makes the newest incarnation of each learner durable."""


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A learner's fragment is here, decoded and validated."""

    event: events.FragmentArrived
    pieces: Pieces


@dataclasses.dataclass(frozen=True)
class Merged:
    """A merge is done and, unless nothing was merged, committed."""

    event: events.MergeFinished
    pieces: Pieces  # of the newest version
    difference: Pieces  # from the version before, in the update codec; (): the pieces are sent
    metrics: Mapping[str, Any]  # for the record of the round
    sha256: bytes | None  # of the pieces of a new version; None if no tape is kept
    empty: bool = False


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Copies of all fragments for a snapshot, after the merges so far; empty if they could not be copied."""

    fragments: list[FragmentState]


@dataclasses.dataclass(frozen=True)
class Stop:
    """Wakes the thread up, to end."""


Message = events.SyncerEvent | Arrived | Merged | Exception | Gathered | SnapshotMessage | Completed | Stop


class SyncerWorker:
    """The syncer's thread; sole owner of its core and of the committed fragments that it hands out.

    Offers are decoded on the threads that bring them. Merges run one after the other on another thread, the
    only one that changes the GlobalModel; meanwhile further threads make fragments durable, each by itself.
    All report to this thread through its inbox.
    """

    def __init__(
        self,
        core: SyncerCore,
        model: GlobalModel,
        record: Callable[[Any], None],
        on_commit: Callable[[int, list[Pieces]], None],
        durable: Durability | None = None,
        tape: SyncerTape | None = None,
    ) -> None:
        """`on_commit` gets step and fragments. `durable` is None if no state needs to outlive the process.

        `tape` is None if none is kept.
        """
        self._snapshots: SnapshotTaker | None = None
        self.core = core
        self.ended = threading.Event()  # finished, stopped or failed
        self.failure: str | None = None
        self._model = model
        self._record = record
        self._on_commit = on_commit
        self._durable = durable
        self._tape = tape or SyncerTape()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._held: Message | None = None  # taken out of the inbox, and next
        self._known: Sequence[tuple[int, int]] = ()  # incarnations that are durable
        self._links = Links()
        self._committed: list[Pieces] = [model.fragment(p)[1] for p in range(core.policy.num_fragments)]
        self._differences: dict[int, Pieces] = {}  # by fragment, the newest
        self._arrivals: Arrivals[Pieces] = Arrivals()
        self._merging = 0  # merges under way, of which one is made and the others wait
        self._merger = concurrent.futures.ThreadPoolExecutor(1, "syncer-merge")
        at_once = max(1, core.policy.overlap)  # rounds that may merge, each of another fragment
        self._committer = concurrent.futures.ThreadPoolExecutor(at_once, "syncer-commit")
        self._commits: dict[int, concurrent.futures.Future[None]] = {}  # by fragment, the merging thread's
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take_snapshots(self, taker: SnapshotTaker) -> None:
        """Has snapshots taken; call it before `start`."""
        self._snapshots = taker

    def connect(self, learner: int, incarnation: int, link: LearnerLink) -> None:
        """Sets how to reach a learner; call it before the learner's first event."""
        self._links.set(learner, incarnation, link)

    def send(self, event: events.SyncerEvent | SnapshotMessage | Completed) -> None:
        """Puts an event, or a message about a snapshot, into the inbox; never waits."""
        self._inbox.put(event)

    def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray]) -> None:
        """Takes a learner's fragment, encoded, in host memory; decodes it on the calling thread.

        It is decoded against the committed version: the core drops contributions that were made on another.
        """
        p, c = event.round.fragment, event.contribution
        try:
            pieces = self._model.decode(p, arrays, self._committed[p])
            self._model.validate(p, pieces)
        except Exception as error:
            self._note_guarded([Notice("unsound", c.learner, str(error))], event.round)
            self._inbox.put(events.OfferFailed(event.round, c.learner, c.incarnation, str(error)))
            return
        size = sum(array.nbytes for array in arrays)
        self._record(records.Transferred(c.learner, sent=size, received=0))
        self._inbox.put(Arrived(event, pieces))

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the merges under way; whether it ended within `timeout` seconds."""
        self._stopping.set()
        self._inbox.put(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take(self._next())
            self._finish_merges()
            self._finish_snapshot()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            self._end_merges()
            self._tape.end([self._model.fragment(p)[0] for p in range(len(self._committed))])
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
            case Arrived(event, pieces):
                decided = self._decide(event, pieces)
                self._arrivals.keep(event, decided, pieces)
                self._carry_out(decided)
            case Merged():
                self._merging -= 1
                self._carry_out(self._note_merge(message), message.metrics)
                if not message.empty:
                    self._on_commit(self.core.step, list(self._committed))
                may_take = self._snapshots is not None and not self.core.finished
                if may_take and self._snapshots.wanted(self.core.step):
                    self._merger.submit(self._gather)
            case Exception():  # a merge failed, and the syncer fails with it
                raise message
            case Gathered(fragments):
                self._begin_snapshot(fragments)
            case StateRecorded() | PartWritten() | Completed():
                self._take_of_snapshot(message)
            case Stop():
                pass
            case events.LearnerJoined():
                self._take_joins(message)
            case event:
                self._carry_out(self._decide(event))
                if isinstance(event, events.LearnerLost):
                    self._links.lost(event.learner, event.incarnation)

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
        if self._durable is not None and known != self._known:
            self._durable.remember(known)
        self._known = known
        self._carry_out(decided)
        for join in joins:
            self._links.joined(join)

    def _take_of_snapshot(self, message: SnapshotMessage | Completed) -> None:
        try:
            if self._snapshots is not None:
                self._snapshots.take(message)
            elif not isinstance(message, Completed):
                self._perform(actions.Drop(message.learner, "about a snapshot, but none are taken"), {})
        except Exception as error:
            if isinstance(message, Completed):
                raise
            self._perform(self._refused(message.learner, error), {})

    def _refused(self, learner: int, error: Exception, round_id: RoundId | None = None) -> actions.Drop:
        """For what a learner sent and nothing here has a case for: counted, and no reason to end."""
        sentence = f"learner {learner}: what it sent made the syncer fail: {type(error).__name__}: {error}"
        self._record(records.Alarm(sentence, time.time()))
        return actions.Drop(learner, f"it made the syncer fail: {type(error).__name__}", round_id)

    def _decide(self, event: events.SyncerEvent, pieces: Pieces = ()) -> list[actions.SyncerAction]:
        """Has the core handle an event; a snapshot under way sees it before, the tape after.

        No event of a learner raises: what the core has no case for is dropped.
        """
        now = time.monotonic()
        try:
            if self._snapshots is not None:
                self._snapshots.heard(event, pieces)
            decided = self.core.handle(event, now)
        except Exception as error:
            learner = _learner(event)
            if learner is None:
                raise
            return [self._refused(learner, error, getattr(event, "round", None))]
        self._tape.heard(event, decided, now)
        return decided

    def _note_merge(self, merged: Merged) -> list[actions.SyncerAction]:
        p = merged.event.round.fragment
        if not merged.empty:
            self._committed[p], self._differences[p] = merged.pieces, merged.difference
        decided = self._decide(merged.event)
        if merged.sha256 is not None:
            self._tape.committed(p, self.core.versions[p], merged.sha256)
        return decided

    def _begin_snapshot(self, fragments: list[FragmentState]) -> None:
        newest = dict(self.core.state().incarnations)
        for mark in self._snapshots.begin(self.core, fragments, time.monotonic()):
            begun = SnapshotBegun(mark.number, self.core.versions)
            self._links.deliver((mark.learner, newest[mark.learner]), begun)

    def _finish_merges(self) -> None:
        """Notes the merges that were under way when the thread was stopped, since they are durable."""
        self._end_merges()
        while self._held is not None or not self._inbox.empty():
            message = self._next()
            if isinstance(message, Merged):
                decided = self._note_merge(message)
                records_only = [action for action in decided if isinstance(action, actions.Record)]
                self._carry_out(records_only, message.metrics)

    def _end_merges(self) -> None:
        """Waits for the merge under way, and until all that was merged is durable."""
        self._merger.shutdown(wait=True, cancel_futures=True)
        self._committer.shutdown(wait=True)

    def _finish_snapshot(self) -> None:
        """Lets a snapshot that only has to be written become complete, though the run is over."""
        if self._snapshots is None:
            return
        deadline = time.monotonic() + _SNAPSHOT_SECONDS
        while self._snapshots.nearly_complete and (left := deadline - time.monotonic()) > 0:
            try:
                message = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(message, StateRecorded | PartWritten | Completed):
                self._snapshots.take(message)
        self._snapshots.close(_SNAPSHOT_SECONDS)

    def _carry_out(
        self, decided: Sequence[actions.SyncerAction], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """`metrics`: of the merge that these actions follow from."""
        for action in decided:
            self._perform(action, metrics or {})

    def _perform(self, action: actions.SyncerAction, metrics: Mapping[str, Any]) -> None:
        match action:
            case actions.Tell(receivers, event):
                delivery = Told(event, [self._committed[p] for p in fragments_with(event)])
                if isinstance(event, events.UpdateArrived):
                    difference = self._differences.get(event.fragment, ())
                    delivery = dataclasses.replace(delivery, difference=difference)
                for receiver in receivers:
                    self._links.deliver(receiver, delivery)
            case actions.Merge():
                self._merging += 1
                self._merger.submit(self._merge, action, self._arrivals.take(action))
            case actions.Drop():
                values = {"learner": action.learner, "reason": action.reason}
                self._record(records.Noted("drop", values, time.time()))
            case actions.Record():
                self._note(action, metrics)
            case actions.Finish():
                self.ended.set()

    def _note(self, action: actions.Record, metrics: Mapping[str, Any]) -> None:
        values = action.values
        if action.name == "round":
            values = {**values, **metrics, "inbox": self._inbox.qsize(), "merging": self._merging}
        if action.name == "learner_silent" and self._snapshots is not None:
            self._snapshots.silent(values["learner"])
        self._arrivals.forget(action)
        self._record(records.Noted(action.name, values, time.time()))

    # The methods below run on other threads, and change nothing of this object but the inbox.

    def _merge(self, action: actions.Merge, given: list[tuple[Contribution, Pieces]]) -> None:
        begun = time.monotonic()
        try:
            made = self._model.merge(
                action.round.fragment,
                [pieces for _, pieces in given],
                [(c.steps, c.tokens) for c, _ in given],
                [c.learner for c, _ in given],
            )
        except Exception as error:
            self._inbox.put(error)
            return
        self._note_guarded(made.notices, action.round)
        seconds = time.monotonic() - begun
        committing = self._committer.submit(self._commit, action.round, made, seconds)
        self._commits[action.round.fragment] = committing

    def _commit(self, which: RoundId, made: NextVersion, merge_seconds: float) -> None:
        """Makes a version durable. Its fragment is not merged again before the core has heard of this."""
        begun = time.monotonic()
        try:
            sha256 = pieces_sha256(made.pieces) if self._tape.on and not made.empty else None
            needless = made.empty or self._durable is None
            committed = needless or self._durable.commit(which, self._model)
        except Exception as error:
            self._inbox.put(error)
            return
        if committed:  # else the run is over, without this merge
            finished = events.MergeFinished(which, made.left_out)
            metrics = {**made.metrics, "merge_seconds": merge_seconds}
            if not needless:
                metrics["disk_seconds"] = time.monotonic() - begun
            self._inbox.put(Merged(finished, made.pieces, made.difference, metrics, sha256, made.empty))

    def _note_guarded(self, notices: Sequence[Notice], round_id: RoundId) -> None:
        for record in records.guarded(notices, round_id, time.time()):
            self._record(record)

    def _gather(self) -> None:
        """Copies the fragments for a snapshot, between two merges and once all before are committed."""
        concurrent.futures.wait(self._commits.values())
        try:
            states = [self._model.state(p) for p in range(self._model.layout.num_fragments)]
        except Exception as error:  # such as no memory for the copies
            self._record(
                records.Alarm(f"a snapshot is not begun: {type(error).__name__}: {error}", time.time())
            )
            states = []
        self._inbox.put(Gathered(states))


def _learner(event: events.SyncerEvent) -> int | None:
    """The learner that an event comes from; None: it is the syncer's own."""
    said = getattr(event, "report", None) or getattr(event, "contribution", event)
    return getattr(said, "learner", None)
