"""The syncer as an actor: carries out its core's actions, the same in every driver.

It has no thread, clock or channel: a driver passes events with the time, sends deliveries, and makes and
commits merges, each of which returns as an event.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ddiloco.data import shards
from ddiloco.data.errors import DataError
from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, Watermark
from ddiloco.workers.exchange import EventDelivery, fragments_with

Offer = Any  # a learner's validated fragment, to be merged; None where there are no arrays


class FragmentVersion(NamedTuple):
    """A committed version of a fragment."""

    version: int
    pieces: Any
    difference: Any = ()  # from the version before, in the update codec
    statement: bytes = b""  # of the shard on the version, signed; empty: it signs nothing


class SyncerDriver(Protocol):
    """The calls of a syncer's actor on its driver. No call waits."""

    def handled(self, event: events.SyncerEvent, decided: Sequence[Any], now: float) -> None:
        """The core has decided on an event; nothing of it is carried out yet."""

    def refuse(self, event: events.SyncerEvent, error: Exception) -> actions.Drop:
        """What becomes of an event on which the core raised; raises the error if that ends the syncer."""

    def remember(self, incarnations: Sequence[tuple[int, int]]) -> bool:
        """Makes learners' newest incarnations durable, before any is welcomed; whether they are."""

    def deliver(self, receiver: tuple[int, int], delivery: EventDelivery) -> None:
        """Sends to (learner, incarnation)."""

    def began(self, learner: int, incarnation: int) -> None:
        """A learner's incarnation counts from now on."""

    def merge(self, merge: actions.Merge, given: list[tuple[Contribution, Offer]]) -> None:
        """Begins a merge, and its commit; answered by `SyncerActor.merged`."""

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a line of the metrics."""

    def finish(self) -> None:
        """The run has ended."""


class SyncerActor:
    """One process of the syncer, which ends with it.

    Attributes:
      core: decides.
      offers: the arrays of the offers that the core has, from arrival to Release or Merge.
    """

    def __init__(self, core: Any, driver: SyncerDriver, versions: Mapping[int, FragmentVersion]) -> None:
        """`versions`: the committed ones, by fragment."""
        self.core = core
        self.offers: dict[Contribution, Offer] = {}
        self._driver = driver
        self._known: dict[int, int] = {}  # incarnations that are durable
        self._joined: set[int] = set()  # learners whose newest one may not be
        # By fragment, the newest version and the one before, which the core sends until it knows the newest.
        self._versions = {p: [version] for p, version in versions.items()}
        self._measured: dict[int, Mapping[str, Any]] = {}  # by fragment, of its newest merge
        self._ended = False

    def handle(self, *taken: events.SyncerEvent, now: float) -> None:
        """Takes events that bring no arrays; joins together, after one write to the disk."""
        decided = [action for event in taken for action in self._decide(event, now)]
        self._joined |= {event.learner for event in taken if isinstance(event, events.LearnerJoined)}
        if self._joined:
            self._remember()
        self.perform(decided)

    def take_offer(self, event: events.FragmentArrived, offer: Offer, now: float) -> None:
        """Accepts a learner's fragment, validated."""
        decided = self._decide(event, now)
        self.offers.setdefault(event.contribution, offer)  # the first, if it comes twice
        self.perform(decided)

    def _remember(self) -> None:
        newest = ((m, self.core.incarnation(m)) for m in sorted(self._joined))
        new = tuple((m, n) for m, n in newest if n is not None and n != self._known.get(m))
        if not new or self._driver.remember(new):
            self._known.update(new)
            self._joined.clear()

    def merged(
        self,
        finished: events.MergeFinished,
        version: int,
        made: NextVersion,
        measured: Mapping[str, Any],
        now: float,
    ) -> Sequence[Any]:
        """Takes the end of a merge, whose version is committed unless nothing was merged.

        Returns what the core decides, to be performed once the commit is on the tape.

        Args:
          finished: the event for the core.
          version: the newest of the fragment.
          made: the version's arrays.
          measured: of the merge, for the record of the round.
        """
        p = finished.round.fragment
        self._measured[p] = measured
        if not made.empty:
            self._versions[p] = [FragmentVersion(version, made.pieces, made.difference), self._versions[p][0]]
        return self._decide(finished, now)

    def certify(self, fragment: int, statement: bytes) -> None:
        """Adds the statement on a fragment's newest version, before that is sent."""
        newest, *older = self._versions[fragment]
        self._versions[fragment] = [newest._replace(statement=statement), *older]

    def end(self) -> None:
        """From now on only records are made of what the core decides."""
        self._ended = True

    def version(self, fragment: int, version: int) -> FragmentVersion:
        """This version of a fragment, or the newest if it is not known; for any thread."""
        known = self._versions[fragment]
        return next((one for one in known if one.version == version), known[0])

    def newest(self) -> list[Any]:
        """The pieces of the committed fragments."""
        return [self._versions[p][0].pieces for p in sorted(self._versions)]

    def _decide(self, event: events.SyncerEvent, now: float) -> Sequence[Any]:
        try:
            decided = self.core.handle(event, now)
        except Exception as error:
            dropped = self._driver.refuse(event, error)
            came = isinstance(event, events.FragmentArrived)
            return [dropped, *([actions.Release(event.contribution)] if came else [])]
        self._driver.handled(event, decided, now)
        return decided

    def perform(self, decided: Sequence[Any]) -> None:
        """Carries out what the core has decided, in order."""
        for action in decided:
            if not self._ended or not isinstance(action, actions.Send | actions.Merge | actions.Finish):
                self._perform(action)

    def _perform(self, action: Any) -> None:
        driver = self._driver
        match action:
            case actions.Send():
                self._send(action)
            case actions.Merge(contributions=given):
                driver.merge(action, [(c, self.offers.pop(c)) for c in given])
            case actions.Drop(learner, reason):
                driver.record("drop", {"learner": learner, "reason": reason})
            case actions.Release(offer):
                del self.offers[offer]
            case actions.Published(name, values, p):
                self._versions[p] = self._versions[p][:1]  # the next merge writes into the one before
                driver.record(name, {**values, **self._measured.pop(p, {})})
            case actions.Began(name, values, learner, incarnation):
                driver.began(learner, incarnation)
                driver.record(name, values)
            case actions.Record(name, values):
                driver.record(name, values)
            case actions.Finish():
                driver.finish()

    def _send(self, told: actions.Send) -> None:
        if isinstance(told.event, events.Welcomed):
            told = dataclasses.replace(told, event=self._with_data(told.event, told))
        delivery = self._with_pieces(told)
        for receiver in told.receivers:
            own = dataclasses.replace(delivery, event=told.to(receiver[0]))
            self._driver.deliver(receiver, own)

    def _with_pieces(self, told: actions.Send) -> EventDelivery:
        """A message with the fragments that it carries."""
        event, known = told.event, {"watermarks": told.watermarks}
        match event:
            case events.UpdateArrived(p, version):
                committed = self.version(p, version)
                with_it = {"difference": committed.difference, "statements": [committed.statement]}
                return EventDelivery(event, [committed.pieces], **with_it, **known)
            case events.Welcomed(versions=versions):
                held = [self.version(*one) for one in zip(fragments_with(event), versions, strict=True)]
                statements = [one.statement for one in held]
                return EventDelivery(event, [one.pieces for one in held], statements=statements, **known)
        return EventDelivery(event)

    def _with_data(self, event: events.Welcomed, told: actions.Send) -> events.Welcomed:
        """The welcome; a learner beyond the first ones begins beside the one whose shard it reads too."""
        [(learner, _)] = told.receivers
        first = learner - self.core.policy.num_learners
        if first < 0 or event.data.position:
            return event
        marks = [known[first] for known in told.watermarks.values() if first in known]
        data = dataclasses.replace(event.data, position=_beside(Watermark.furthest(marks).position))
        return dataclasses.replace(event, data=data)


def _beside(position: str) -> str:
    """Where a second reader of a learner's shards begins, JSON; empty: at their start."""
    try:
        return json.dumps(shards.beside(json.loads(position))) if position else ""
    except (DataError, ValueError, RecursionError):  # a learner's position is not trusted
        return ""
