"""Merges fragments and makes them durable, beside the thread of the syncer that decides on it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.data import shards
from ddiloco.data.errors import DataError
from ddiloco.outer.global_model import FragmentState, GlobalModel, NextVersion, pieces_sha256
from ddiloco.outer.guards import Notice
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import after_merge
from ddiloco.storage.durable import DurableState
from ddiloco.storage.tape.recorder import SyncerTape
from ddiloco.telemetry import records
from ddiloco.workers.exchange import Arrivals, EventDelivery, Pieces, fragments_with


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A learner's fragment is here, decoded and validated; `epoch`: of the last snapshot that it is after."""

    event: events.FragmentArrived
    pieces: Pieces
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Merged:
    """A merge is done and, unless nothing was merged, committed."""

    event: events.MergeFinished
    version: int  # the newest of its fragment
    made: NextVersion
    metrics: Mapping[str, Any]  # for the record of the round
    sha256: bytes | None  # of the pieces of a new version; None if no tape is kept


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Copies of all fragments for a snapshot, after the merges so far; empty if they could not be copied."""

    fragments: list[FragmentState]


class _Committed(NamedTuple):
    """A version of a fragment."""

    version: int
    pieces: Pieces
    difference: Pieces = ()  # from the version before, in the update codec


class Merging:
    """The fragments of one process of the syncer, owned by that process's thread.

    Merges run one after the other on a thread, the only one that changes the GlobalModel; meanwhile further
    threads make fragments durable, each by itself. What comes of it goes to the owner's inbox.

    Attributes:
      under_way: rounds that are being merged; one at a time, others wait or are made durable.
      arrivals: the offers that rounds wait with.
    """

    def __init__(
        self,
        model: GlobalModel,
        policy: SyncPolicy,
        send: Callable[[Arrived | Merged | Gathered | Exception | events.OfferFailed], None],
        record: Callable[[Any], None],
        durable: DurableState | None,
        tape: SyncerTape,
    ) -> None:
        """`send` puts something into the owner's inbox."""
        self._policy = policy
        self.under_way = 0
        self.arrivals: Arrivals[Pieces] = Arrivals()
        self._metrics: dict[int, Mapping[str, Any]] = {}  # by fragment, of its newest merge
        self._model, self._send, self._record = model, send, record
        self._durable, self._tape = durable, tape
        # By fragment, the newest, and the one before: a part's core tells of that until the authority has
        # heard of the newest.
        self._committed = {p: [_Committed(*model.fragment(p))] for p in model.fragments}
        self._merger = concurrent.futures.ThreadPoolExecutor(1, "syncer-merge")
        self._committer = concurrent.futures.ThreadPoolExecutor(max(1, policy.overlap), "syncer-commit")
        self._commits: dict[int, concurrent.futures.Future[None]] = {}  # by fragment, the merging thread's

    def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray], epoch: int = 0) -> None:
        """Decodes a learner's fragment on the calling thread, whichever that is.

        It is decoded against the committed version: the core drops contributions that were made on another.
        """
        p, c = event.round.fragment, event.contribution
        try:
            pieces = self._model.decode(p, arrays, self._of(p, c.version).pieces)
            self._model.validate(p, pieces)
        except Exception as error:
            self._note_guarded([Notice("unsound", c.learner, str(error))], event.round)
            self._send(events.OfferFailed(event.round, c.learner, c.incarnation, str(error)))
            return
        size = sum(array.nbytes for array in arrays)
        self._record(records.Transferred(c.learner, sent=size, received=0))
        self._send(Arrived(event, pieces, epoch))

    def with_pieces(self, told: actions.Tell) -> EventDelivery:
        """What is told, with the fragments that go with it."""
        event, known = told.event, {"watermarks": told.watermarks}
        if isinstance(event, events.Welcomed):
            event = self._with_data(event, told)
        match event:
            case events.UpdateArrived(p, version):
                committed = self._of(p, version)
                return EventDelivery(event, [committed.pieces], difference=committed.difference, **known)
            case events.Welcomed(versions=versions):
                held = zip(fragments_with(event), versions, strict=True)
                return EventDelivery(event, [self._of(p, version).pieces for p, version in held], **known)
        return EventDelivery(event)

    def _with_data(self, event: events.Welcomed, told: actions.Tell) -> events.Welcomed:
        """The welcome; a learner beyond the first ones begins beside the one whose shard it reads too."""
        [(learner, _)] = told.receivers
        first = learner - self._policy.num_learners
        if first < 0 or event.data.position:
            return event
        marks = [known[first] for known in told.watermarks.values() if first in known]
        data = dataclasses.replace(event.data, position=_beside(max(marks).position if marks else ""))
        return dataclasses.replace(event, data=data)

    def merge(self, action: actions.Merge) -> None:
        """Begins a merge; answered by Merged."""
        self.under_way += 1
        self._merger.submit(self._merge, action, self.arrivals.take(action))

    def take(self, merged: Merged) -> None:
        """Takes a merge that is done; call it before the core handles its event."""
        self.under_way -= 1
        p = merged.event.round.fragment
        self._metrics[p] = merged.metrics
        if not merged.made.empty:
            newest = _Committed(merged.version, merged.made.pieces, merged.made.difference)
            self._committed[p] = [newest, self._committed[p][0]]

    def told(self, fragment: int) -> Mapping[str, Any]:
        """What was measured of the newest merge, now that the core has told of it.

        It tells of the version before no more, whose memory the next merge writes into.
        """
        self._committed[fragment] = self._committed[fragment][:1]
        return self._metrics.pop(fragment, {})

    def newest(self) -> list[Pieces]:
        """The committed fragments."""
        return [self._committed[p][0].pieces for p in sorted(self._committed)]

    def _of(self, fragment: int, version: int) -> _Committed:
        """This version, or the newest if it is not known."""
        known = self._committed[fragment]
        return next((one for one in known if one.version == version), known[0])

    def gather(self) -> None:
        """Has the fragments copied for a snapshot; answered by Gathered."""
        self._merger.submit(self._gather)

    def end(self) -> list[int]:
        """Waits for the merge under way, and until all that was merged is durable; begins no further one.

        Gives the versions of its fragments.
        """
        self._merger.shutdown(wait=True, cancel_futures=True)
        self._committer.shutdown(wait=True)
        return [self._model.fragment(p)[0] for p in self._model.fragments]

    # The methods below run on other threads, and change nothing of this object but the last commits.

    def _merge(self, action: actions.Merge, given: list[tuple[Contribution, Pieces]]) -> None:
        begun = time.monotonic()
        try:
            made = self._model.merge(
                action.round.fragment,
                [pieces for _, pieces in given],
                [(c.steps, c.tokens) for c, _ in given],
                [c.learner for c, _ in given],
            )
            self._note_guarded(made.notices, action.round)
            seconds = time.monotonic() - begun
            commit = self._committer.submit(self._commit, action, made, seconds)
        except Exception as error:
            self._send(error)
            return
        self._commits[action.round.fragment] = commit

    def _commit(self, action: actions.Merge, made: NextVersion, merge_seconds: float) -> None:
        """Makes a version durable. Its fragment is not merged again before the core has heard of this."""
        which, version = action.round, action.version - made.empty
        try:
            sha256 = pieces_sha256(made.pieces) if self._tape.on and not made.empty else None
            begun = time.monotonic()
            needless = made.empty or self._durable is None
            merged = [c for c in action.contributions if c.learner not in made.left_out]
            watermarks = after_merge(action.watermarks, merged)
            committed = needless or self._durable.commit(which, self._model, watermarks, action.delays)
        except Exception as error:
            self._send(error)
            return
        if committed:  # else the run is over, without this merge
            metrics = {**made.metrics, "merge_seconds": merge_seconds}
            if not needless:
                metrics["disk_seconds"] = time.monotonic() - begun
            finished = events.MergeFinished(which, made.left_out)
            self._send(Merged(finished, version, made, metrics, sha256))

    def _note_guarded(self, notices: Sequence[Notice], round_id: RoundId) -> None:
        for record in records.guarded(notices, round_id, time.time()):
            self._record(record)

    def _gather(self) -> None:
        """Copies the fragments between two merges, and once all before are committed."""
        concurrent.futures.wait(self._commits.values())
        try:
            states = [self._model.state(p) for p in self._model.fragments]
        except Exception as error:  # such as no memory for the copies
            self._record(
                records.Alarm(f"a snapshot is not begun: {type(error).__name__}: {error}", time.time())
            )
            states = []
        self._send(Gathered(states))


def _beside(position: str) -> str:
    """Where a second reader of a learner's shards begins, JSON; empty: at their start."""
    try:
        return json.dumps(shards.beside(json.loads(position))) if position else ""
    except (DataError, ValueError, RecursionError):  # a learner may say what it likes
        return ""
