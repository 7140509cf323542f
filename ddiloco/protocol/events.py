"""Events, the input of the protocol cores. Every event of a learner carries its incarnation."""

from __future__ import annotations

import dataclasses

from ddiloco.protocol.messages import (
    NO_RECEIPT,
    NOTHING_MERGED,
    Contribution,
    OfferReceipt,
    Report,
    RoundId,
    Watermark,
)
from ddiloco.protocol.policy import TIMING, SyncPolicy


@dataclasses.dataclass(frozen=True)
class LearnerJoined:
    """A learner asks to take part; a larger incarnation of the same learner replaces the older one.

    With `step`, `versions` and their lineages it rejoins with its state of the shard's fragments, and
    receives only newer versions. Then `life` names the life of that state, `began` the work of earlier lives
    behind which its data stood as its work on those fragments began, and `left` the end of each earlier life.
    `shards` lists its memberships.
    """

    learner: int
    incarnation: int
    step: int | None = None
    versions: tuple[int, ...] | None = None
    lineages: tuple[int, ...] = ()
    life: int = 0
    began: Watermark = NOTHING_MERGED
    shards: tuple[int, ...] = ()
    left: tuple[Watermark, ...] = ()


@dataclasses.dataclass(frozen=True)
class LearnerReady:
    """A welcomed learner has loaded these fragment versions and is about to step."""

    learner: int
    incarnation: int
    step: int
    versions: tuple[int, ...]


LEFT = "it left"
"""The reason in a LearnerLost of a learner that left in order, as when a run is stopped."""


@dataclasses.dataclass(frozen=True)
class LearnerLost:
    """A learner's incarnation is gone for good."""

    learner: int
    incarnation: int
    reason: str  # LEFT if it left in order


@dataclasses.dataclass(frozen=True)
class StepReported:
    """A learner's metadata after an inner step; repeated as a heartbeat."""

    report: Report


FromLearner = LearnerJoined | LearnerReady | LearnerLost | StepReported
"""Messages of a learner to the syncer; others may report its loss."""


@dataclasses.dataclass(frozen=True)
class FragmentArrived:
    """A learner's offer has arrived at the syncer, with valid arrays."""

    round: RoundId
    contribution: Contribution
    receipt: OfferReceipt = NO_RECEIPT


@dataclasses.dataclass(frozen=True)
class OfferFailed:
    """The transfer of an offer failed, or its arrays were invalid."""

    round: RoundId
    learner: int
    incarnation: int
    reason: str


@dataclasses.dataclass(frozen=True)
class MergeFinished:
    """The merge of a round is done and committed: it is in the durable state, if there is one.

    If all of its offers are left out there is no new version, and nothing was committed.
    """

    round: RoundId
    left_out: tuple[int, ...] = ()  # learners whose offers are not in it after all


@dataclasses.dataclass(frozen=True)
class Timeout:
    """The deadline of `next_deadline` has passed."""


@dataclasses.dataclass(frozen=True)
class TimingSet:
    """The timing of rounds from now on, by an order to the syncer; each shard sends it to its members."""

    interval: int
    overlap: int
    quorum: int  # 0: all live learners
    gamma: float
    max_grace: float
    reason: str = ""
    shard: int = 0

    @classmethod
    def of(cls, policy: SyncPolicy, reason: str = "") -> TimingSet:
        """The timing of a policy."""
        timing = {name: getattr(policy, name) for name in TIMING}
        return cls(**{**timing, "quorum": policy.quorum or 0}, reason=reason)

    def applied_to(self, policy: SyncPolicy) -> SyncPolicy:
        """The policy with this timing; raises ValueError where settings contradict each other."""
        timing = {name: getattr(self, name) for name in TIMING}
        return dataclasses.replace(policy, **{**timing, "quorum": self.quorum or None})


SyncerEvent = FromLearner | FragmentArrived | OfferFailed | MergeFinished | TimingSet | Timeout


@dataclasses.dataclass(frozen=True)
class Welcomed:
    """The syncer admits the learner: its clock, and each fragment's version and the step of its merge.

    The message carries the fragments of one shard. A learner starts with the welcomes of all shards; one that
    has started replaces the fragments of that shard.
    """

    incarnation: int
    step: int
    versions: tuple[int, ...]
    merged_steps: tuple[int, ...]
    fragments: tuple[int, ...] = ()  # which these are; empty: all of them
    lineages: tuple[int, ...] = ()  # which start of the syncer made each version; empty: the first
    watermarks: tuple[Watermark, ...] = ()  # the learner's own, by fragment; empty: nothing of it is merged
    data: Watermark = NOTHING_MERGED  # the furthest work of the learner that is, or may still be, merged
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class NotMember:
    """This incarnation is not a member of the shard; the learner answers with LearnerJoined."""

    incarnation: int
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A newer incarnation has replaced this one."""

    incarnation: int
    reason: str
    newest: int = 0  # that incarnation
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class ClockSet:
    """The shard asks lagging learners to end: its rounds gain nothing more from learners that are done.

    A learner ends once each of its shards has asked, or has merged its last round.
    """

    step: int  # the last one; 0 takes it back
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class Disconnected:
    """The learner's connection to this shard is lost; it may no longer be a member."""

    shard: int = 0


@dataclasses.dataclass(frozen=True)
class OfferAsked:
    """The syncer asks for a fragment, for the round in which its `version` is replaced.

    The learner offers it at the first step boundary with work on that version and its clock at least `clock`.
    """

    round: RoundId
    version: int
    clock: int


@dataclasses.dataclass(frozen=True)
class UpdateArrived:
    """A broadcast fragment has arrived, merged at global step `step`.

    `watermark`: how far the receiver's own work is in it.
    """

    fragment: int
    version: int
    step: int
    watermark: Watermark = NOTHING_MERGED
    lineage: int = 0


FromSyncer = Welcomed | NotMember | Rejected | ClockSet | TimingSet | OfferAsked | UpdateArrived
"""Messages of the syncer to a learner."""


@dataclasses.dataclass(frozen=True)
class StepStarted:
    """The next inner step was dispatched to the devices; later events are ordered after it."""

    tokens: int
    waiting: int = 0  # offers of the learner in the queue of its link


@dataclasses.dataclass(frozen=True)
class StepFinished:
    """The oldest dispatched step is complete on the devices.

    A `skipped` step had gradients that are not finite: it changed nothing and does not count.
    """

    skipped: bool = False


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The learner has sent nothing for `LearnerCore.heartbeat` seconds: it joins, steps, or is done."""


LearnerEvent = FromSyncer | Disconnected | StepStarted | StepFinished | Heartbeat
