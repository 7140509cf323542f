"""What drivers tell the protocol cores. Every event of a learner carries the learner's incarnation."""

from __future__ import annotations

import dataclasses

from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, Report, RoundId, Watermark


@dataclasses.dataclass(frozen=True)
class LearnerJoined:
    """A learner asks to take part; a larger incarnation of the same learner replaces the older one.

    With `step`, `versions` and their lineages it rejoins with what it holds of the shard's fragments, and
    needs only what is newer. `life` is then that of its state, `began` says after which work of earlier lives
    its data go on, and `left` where each of these was left. `shards` are those of which it knows that it is a
    member.
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
    """A welcomed learner has recovered: it holds these fragment versions and is about to step."""

    learner: int
    incarnation: int
    step: int
    versions: tuple[int, ...]


LEFT = "it left"
"""The reason of a LearnerLost whose learner left by itself, as when a run is stopped."""


@dataclasses.dataclass(frozen=True)
class LearnerLost:
    """A learner's incarnation is gone for good."""

    learner: int
    incarnation: int
    reason: str  # LEFT if it left by itself


@dataclasses.dataclass(frozen=True)
class StepReported:
    """A learner's metadata after an inner step, or repeated as a sign of life while it cannot step."""

    report: Report


FromLearner = LearnerJoined | LearnerReady | LearnerLost | StepReported
"""What a learner tells the syncer; a loss may be reported by others."""


@dataclasses.dataclass(frozen=True)
class FragmentArrived:
    """A fragment that a learner was asked for is with the syncer, and its arrays were found sound."""

    round: RoundId
    contribution: Contribution


@dataclasses.dataclass(frozen=True)
class OfferFailed:
    """An offer that was under way will not come: it was unsound, or the transfer broke."""

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
    """The time given by `next_deadline` has come."""


SyncerEvent = FromLearner | FragmentArrived | OfferFailed | MergeFinished | Timeout


@dataclasses.dataclass(frozen=True)
class Welcomed:
    """The syncer lets the learner in: its clock, and each fragment's version and the step it was merged at.

    The fragments come with it. Each shard welcomes with its own: a learner begins once it holds them all, and
    one that has begun replaces those of the shard.
    """

    incarnation: int
    step: int
    versions: tuple[int, ...]
    merged_steps: tuple[int, ...]
    fragments: tuple[int, ...] = ()  # which these are; empty: all of them
    lineages: tuple[int, ...] = ()  # which start of the syncer made each version; empty: the first
    watermarks: tuple[Watermark, ...] = ()  # the learner's own, by fragment; empty: nothing of it is merged
    data: Watermark = NOTHING_MERGED  # the furthest work of the learner that is merged, or may be yet
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class NotMember:
    """The shard does not, or no longer, know this incarnation; the learner answers by joining."""

    incarnation: int
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class Rejected:
    """The syncer knows a newer incarnation than this one."""

    incarnation: int
    reason: str
    newest: int = 0  # the incarnation that is known
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class ClockSet:
    """The shard asks learners that lag to end: those that are done have nothing more to give to it.

    A learner ends once each of its shards has asked, or has merged its last round.
    """

    step: int  # the last one; 0 takes it back
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class Disconnected:
    """The learner has no connection to this shard, which may have lost it."""

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
    """A broadcast fragment is here; it was merged at global step `step`.

    `watermark` says how far the receiver's own work is in it.
    """

    fragment: int
    version: int
    step: int
    watermark: Watermark = NOTHING_MERGED
    lineage: int = 0


FromSyncer = Welcomed | NotMember | Rejected | ClockSet | OfferAsked | UpdateArrived
"""What the syncer tells a learner."""


@dataclasses.dataclass(frozen=True)
class StepStarted:
    """The next inner step was given to the devices; what follows is ordered after it."""

    tokens: int
    waiting: int = 0  # offers of the learner that its link has yet to take


@dataclasses.dataclass(frozen=True)
class StepFinished:
    """The oldest started step is complete on the devices.

    One that was `skipped` changed nothing, as its gradients were not finite: it is no work.
    """

    skipped: bool = False


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The learner has said nothing for `LearnerCore.heartbeat` seconds: not welcomed, in a step, or done."""


LearnerEvent = FromSyncer | Disconnected | StepStarted | StepFinished | Heartbeat
