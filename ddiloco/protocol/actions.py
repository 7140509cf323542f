"""What the protocol cores ask of their drivers. The end of long work is an event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ddiloco.protocol import events
from ddiloco.protocol.estimates import OfferDelay
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, RoundId, Watermark


@dataclasses.dataclass(frozen=True)
class Tell:
    """Send an event to the cores of these (learner, incarnation) pairs.

    All fragments go with a Welcomed; with an UpdateArrived goes the one that it names, and each learner is
    told its own watermark: `to(learner)` is what it is sent.
    """

    receivers: tuple[tuple[int, int], ...]
    event: events.FromSyncer
    # By fragment that goes with the event and by learner: how far its work is in it
    watermarks: Mapping[int, Mapping[int, Watermark]] = dataclasses.field(default_factory=dict, compare=False)

    def to(self, learner: int) -> events.FromSyncer:
        """The event as this learner is sent it."""
        if not isinstance(self.event, events.UpdateArrived):
            return self.event
        own = self.watermarks.get(self.event.fragment, {}).get(learner, NOTHING_MERGED)
        return dataclasses.replace(self.event, watermark=own.bare)


@dataclasses.dataclass(frozen=True)
class Merge:
    """Merge these contributions into `version` of the fragment; answered by MergeFinished.

    Of none, it is the version before under the next number. `watermarks` are those of the version before;
    with those of what is merged, and the learners' `delays`, they are committed with it.
    """

    round: RoundId
    version: int
    contributions: tuple[Contribution, ...]
    watermarks: Mapping[int, Watermark] = dataclasses.field(default_factory=dict, compare=False)
    delays: Mapping[int, OfferDelay] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Something from a learner was not used, and why."""

    learner: int
    reason: str
    round: RoundId | None = None


@dataclasses.dataclass(frozen=True)
class Release:
    """The arrays of this offer are not needed any more; until then, or until its Merge, they are kept."""

    offer: Contribution


@dataclasses.dataclass(frozen=True)
class Record:
    """Something worth a line in the metrics."""

    name: str
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Began(Record):
    """This incarnation of a learner counts from now on: what it holds is of the run's history."""

    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Published(Record):
    """A version is sent to all, and none before it any more; measurements of its merge join the record."""

    fragment: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """Every round up to the last step is merged, or can never be merged: learners may leave."""


SyncerAction = Tell | Merge | Drop | Release | Record | Finish


@dataclasses.dataclass(frozen=True)
class TellSyncer:
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

    `position`: where the learner's data go on; empty: at their start. None: from where they are.
    """

    step: int
    versions: tuple[int, ...]
    position: str | None = None


@dataclasses.dataclass(frozen=True)
class DrawFrom:
    """Go on with the learner's data at this position; empty: at their start."""

    position: str


@dataclasses.dataclass(frozen=True)
class MakeOffer:
    """Copy a fragment on the devices as the last started step leaves it, to be offered after that step.

    The contribution counts steps under way as if none were skipped; that of the SendOffer is true.
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

    With `rebase` the learner keeps its work that the update does not contain: theta_p <- Theta_p + theta_p -
    then, where `then` is theta_p as it was when it made the offer, or without one as it adopted the version
    before.
    """

    fragment: int
    version: int
    mixing: float
    merged: int | None = None  # steps (`Watermark.steps`) of the learner's offer that is in the update
    rebase: bool = False


LearnerAction = TellSyncer | EndProcess | AdoptAll | DrawFrom | MakeOffer | SendOffer | ApplyUpdate | Drop
