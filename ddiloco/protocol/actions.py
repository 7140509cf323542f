"""Actions, the output of the protocol cores. Long work ends with an event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ddiloco.protocol import events
from ddiloco.protocol.estimates import OfferDelay
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, RoundId, Watermark


@dataclasses.dataclass(frozen=True)
class Send:
    """Send an event to the cores of these (learner, incarnation) pairs.

    A Welcomed carries all fragments, an UpdateArrived one fragment and the receiver's own watermark:
    `to(learner)` is the event for one receiver.
    """

    receivers: tuple[tuple[int, int], ...]
    event: events.FromSyncer
    # By fragment in the message and by learner: how far its work is merged in it
    watermarks: Mapping[int, Mapping[int, Watermark]] = dataclasses.field(default_factory=dict, compare=False)

    def to(self, learner: int) -> events.FromSyncer:
        """The event for this receiver."""
        if not isinstance(self.event, events.UpdateArrived):
            return self.event
        own = self.watermarks.get(self.event.fragment, {}).get(learner, NOTHING_MERGED)
        return dataclasses.replace(self.event, watermark=own.bare)


@dataclasses.dataclass(frozen=True)
class Merge:
    """Merge these contributions into `version` of the fragment; answered by MergeFinished.

    Without contributions the old version gets the next number. `watermarks` are those of the old version;
    updated by the contributions, they are committed with the new one, as are the learners' `delays`. Steps
    of a contribution beyond the `interval` add no weight; None: all do.
    """

    round: RoundId
    version: int
    contributions: tuple[Contribution, ...]
    watermarks: Mapping[int, Watermark] = dataclasses.field(default_factory=dict, compare=False)
    delays: Mapping[int, OfferDelay] = dataclasses.field(default_factory=dict, compare=False)
    interval: int | None = None


@dataclasses.dataclass(frozen=True)
class Drop:
    """A learner's message was not used, for this reason."""

    learner: int
    reason: str
    round: RoundId | None = None


@dataclasses.dataclass(frozen=True)
class Release:
    """Free the arrays of this offer; an offer without a Release is kept until its Merge."""

    offer: Contribution


@dataclasses.dataclass(frozen=True)
class Record:
    """A line for the metrics."""

    name: str
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Began(Record):
    """This incarnation is live from now on, with a state of the run's history."""

    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Published(Record):
    """A version is broadcast, and replaces older ones in queues; the merge's metrics join the record."""

    fragment: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """Every round up to the last step is merged, skipped or abandoned: learners may leave."""


SyncerAction = Send | Merge | Drop | Release | Record | Finish


@dataclasses.dataclass(frozen=True)
class SendToSyncer:
    """Send an event to the core of a shard of the syncer, without waiting for an answer."""

    event: events.LearnerJoined | events.LearnerReady | events.StepReported
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class EndProcess:
    """End this learner's process: a newer incarnation has replaced it."""

    reason: str


@dataclasses.dataclass(frozen=True)
class AdoptAll:
    """Load every fragment of the welcomes; earlier offers no longer count.

    `position`: from which the learner's data continue; empty: their start. None: the present one.
    """

    step: int
    versions: tuple[int, ...]
    position: str | None = None


@dataclasses.dataclass(frozen=True)
class DrawFrom:
    """Continue the learner's data at this position; empty: at their start."""

    position: str


@dataclasses.dataclass(frozen=True)
class MakeOffer:
    """Copy a fragment on the devices as the last started step leaves it, to be offered after that step.

    The contribution counts steps in flight as if none were skipped; that of the SendOffer is final.
    """

    contribution: Contribution


@dataclasses.dataclass(frozen=True)
class SendOffer:
    """An offer's step is complete: send it to the syncer, for this round."""

    round: RoundId
    contribution: Contribution


@dataclasses.dataclass(frozen=True)
class ApplyUpdate:
    """theta_p <- (1 - mixing) Theta_p + mixing theta_p, before the next step starts.

    With `rebase` the learner keeps work that the update does not contain: theta_p <- Theta_p + theta_p -
    base, where `base` is theta_p as in the merged offer or, without one, as of the previous version.
    """

    fragment: int
    version: int
    mixing: float
    merged: int | None = None  # `Watermark.steps` of the learner's offer in the update
    rebase: bool = False


LearnerAction = SendToSyncer | EndProcess | AdoptAll | DrawFrom | MakeOffer | SendOffer | ApplyUpdate | Drop
