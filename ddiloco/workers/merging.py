"""Merges fragments and makes them durable, beside the thread of the syncer that decides on it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.outer.encoding import InvalidContribution
from ddiloco.outer.global_model import FragmentState, GlobalModel, NextVersion, pieces_sha256
from ddiloco.outer.guards import Notice
from ddiloco.outer.offers import MeasuredOffer
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import after_merge
from ddiloco.storage.durable import DurableState
from ddiloco.storage.tape.recorder import SyncerTape
from ddiloco.telemetry import records


class SignedOffer(NamedTuple):
    """A learner's fragment in memory, and what it has signed of it."""

    offer: MeasuredOffer
    signature: bytes = b""


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A learner's fragment is here and validated."""

    event: events.FragmentArrived
    offer: SignedOffer


@dataclasses.dataclass(frozen=True)
class Merged:
    """A merge is done and, unless nothing was merged, committed."""

    event: events.MergeFinished
    version: int  # the newest of its fragment
    made: NextVersion
    metrics: Mapping[str, Any]  # for the record of the round
    sha256: bytes | None  # of the pieces of a new version; None if no tape is kept
    state: bytes = b""  # SHA-256 of the outer optimizer's state then; empty unless offers are kept


class Merging:
    """The fragments of one process of the syncer, owned by that process's thread.

    Merges run in order on a thread, the only one that changes the GlobalModel; meanwhile further threads make
    fragments durable. Results go to the owner's inbox.

    Attributes:
      under_way: rounds that are being merged; one at a time, others wait or are made durable.
    """

    def __init__(
        self,
        model: GlobalModel,
        policy: SyncPolicy,
        send: Callable[[Arrived | Merged | Exception | events.OfferFailed], None],
        record: Callable[[Any], None],
        durable: DurableState | None,
        tape: SyncerTape,
    ) -> None:
        """`send` puts something into the owner's inbox."""
        self.under_way = 0
        self._kept = tape.kept_offers
        self._model, self._send, self._record = model, send, record
        self._durable, self._tape = durable, tape
        self._merger = concurrent.futures.ThreadPoolExecutor(1, "syncer-merge")
        self._committer = concurrent.futures.ThreadPoolExecutor(max(1, policy.overlap), "syncer-commit")

    def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray]) -> None:
        """Validates a learner's fragment on the calling thread, whichever that is."""
        p, c = event.round.fragment, event.contribution
        try:
            if (unsigned := self._tape.problem(event, lambda: pieces_sha256(arrays))) is not None:
                raise InvalidContribution(unsigned)
            offer = self._model.read(p, arrays, c.learner)
        except Exception as error:
            self._note_guarded([Notice("unsound", c.learner, str(error))], event.round)
            self._send(events.OfferFailed(event.round, c.learner, c.incarnation, str(error)))
            return
        size = sum(array.nbytes for array in arrays)
        self._record(records.Transferred(c.learner, sent=size, received=0))
        self._send(Arrived(event, SignedOffer(offer, event.receipt.signature)))

    def merge(self, action: actions.Merge, given: list[tuple[Contribution, SignedOffer]]) -> None:
        """Begins a merge; answered by Merged."""
        self.under_way += 1
        self._merger.submit(self._merge, action, given)

    def done(self, merged: Merged) -> dict[str, Any]:
        """Ends a merge; returns its measurements."""
        self.under_way -= 1
        return {**merged.metrics, "merging": self.under_way}

    def end(self) -> list[int]:
        """Waits for the merge under way, and until all that was merged is durable; begins no further one.

        Gives the versions of its fragments.
        """
        self._merger.shutdown(wait=True, cancel_futures=True)
        self._committer.shutdown(wait=True)
        return [self._model.fragment(p)[0] for p in self._model.fragments]

    # The methods below run on other threads, and change nothing of this object.

    def _merge(self, action: actions.Merge, given: list[tuple[Contribution, SignedOffer]]) -> None:
        begun, p = time.monotonic(), action.round.fragment
        try:
            before = None if self._kept is None else self._model.state(p)
            made = self._model.merge(
                p,
                [signed.offer for _, signed in given],
                [(c.steps, c.tokens) for c, _ in given],
                [c.learner for c, _ in given],
                action.interval,
            )
            self._note_guarded(made.notices, action.round)
            seconds = time.monotonic() - begun
            # Only to be kept are they in memory until they are on the disk.
            kept = () if self._kept is None else tuple(signed for _, signed in given)
            self._committer.submit(self._commit, action, made, seconds, before, kept)
        except Exception as error:
            self._send(error)

    def _commit(
        self,
        action: actions.Merge,
        made: NextVersion,
        merge_seconds: float,
        before: FragmentState | None,
        kept: Sequence[SignedOffer],
    ) -> None:
        """Makes a version durable; its fragment is not merged again before the core is notified.

        `before`: the fragment's state that was merged into, and `kept` the offers, where offers are kept.
        """
        which, version = action.round, action.version - made.empty
        state = b""
        try:
            if self._kept is not None and before is not None and not made.empty:
                with self._alarmed():
                    arrays = [signed.offer.arrays for signed in kept]
                    self._kept.save(which.fragment, version, before, arrays)
                state = pieces_sha256(self._model.state(which.fragment).optimizer)
            sha256 = pieces_sha256(made.pieces) if self._tape.on and not made.empty else None
            begun = time.monotonic()
            needless = made.empty or self._durable is None
            merged = [c for c in action.contributions if c.learner not in made.left_out]
            watermarks = after_merge(action.watermarks, merged)
            committed = needless or self._durable.commit(which, self._model, watermarks, action.delays)
        except Exception as error:
            self._send(error)
            return
        if committed and self._kept is not None and not made.empty:
            with self._alarmed():
                self._kept.choose(which.fragment, version - 1, [signed.signature for signed in kept])
        if committed:  # else the run is over, without this merge
            metrics = {**made.metrics, "merge_seconds": merge_seconds}
            if not needless:
                metrics["disk_seconds"] = time.monotonic() - begun
            finished = events.MergeFinished(which, made.left_out)
            self._send(Merged(finished, version, made, metrics, sha256, state))

    @contextlib.contextmanager
    def _alarmed(self) -> Iterator[None]:
        """Turns an error of the disk into an alarm: the merge needs no kept offers."""
        try:
            yield
        except OSError as error:
            self._record(records.Alarm(f"offers are not kept: {records.reason(error)}", time.time()))

    def _note_guarded(self, notices: Sequence[Notice], round_id: RoundId) -> None:
        for record in records.guarded(notices, round_id, time.time()):
            self._record(record)
