"""What the protocol cores ask of their drivers. Long work comes back as an event when it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ddiloco.protocol.messages import Contribution, Report, RoundId


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Send a learner the clock, all fragments, their versions and merge steps; it answers LearnerReady."""

    learner: int
    incarnation: int
    step: int
    versions: tuple[int, ...]
    merged_steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reject:
    """Tell an incarnation that a newer one has its place; its core hears of it as events.Rejected."""

    learner: int
    incarnation: int
    reason: str


@dataclasses.dataclass(frozen=True)
class NotMember:
    """Tell an incarnation that it does not take part, or no longer; its core answers with Join."""

    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class SetClock:
    """Tell these (learner, incarnation) pairs that the global step has come.

    A grace window is open, or those who are done have nothing more for any round.
    """

    step: int
    receivers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class PullFragment:
    """Fetch a learner's fragment; comes back as FragmentArrived or PullFailed."""

    round: RoundId
    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Merge:
    """Merge these contributions into `version` of the fragment; comes back as MergeFinished."""

    round: RoundId
    version: int
    contributions: tuple[Contribution, ...]


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Send a fragment's version, merged at global step `step`, to these (learner, incarnation) pairs."""

    fragment: int
    version: int
    step: int
    receivers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Drop:
    """Something from a learner was not used, and why.

    In answer to FragmentArrived it means the arrays that came with that event, and no others: what the
    round accepted from the learner earlier stays, until a Merge takes it.
    """

    learner: int
    reason: str
    round: RoundId | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """Something worth a line in the metrics."""

    name: str
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Finish:
    """Every round up to the last step is merged or can never be: learners may leave."""


SyncerAction = (
    Welcome | Reject | NotMember | SetClock | PullFragment | Merge | Broadcast | Drop | Record | Finish
)


@dataclasses.dataclass(frozen=True)
class Join:
    """Ask the syncer to take part; it hears of it as events.LearnerJoined, with the same fields.

    From this action on the learner goes by this incarnation: a pull that names it is answered with what
    the learner has published before, under the new number.
    """

    learner: int
    incarnation: int
    step: int | None = None  # with `versions`: a return with what it holds; without: for the first time
    versions: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Leave:
    """End this learner's process: a newer incarnation has its place."""

    reason: str


@dataclasses.dataclass(frozen=True)
class AdoptAll:
    """Load every fragment of the welcome, then tell the syncer `ready`; what was published before is void."""

    step: int
    versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TakeSnapshot:
    """Copy a fragment on the devices as the last started step leaves it."""

    contribution: Contribution


@dataclasses.dataclass(frozen=True)
class Publish:
    """A snapshot's step is complete: the syncer may pull it from now on."""

    contribution: Contribution


@dataclasses.dataclass(frozen=True)
class ApplyUpdate:
    """theta_p <- (1 - mixing) Theta_p + mixing theta_p, before the next step starts."""

    fragment: int
    version: int
    mixing: float


@dataclasses.dataclass(frozen=True)
class SendReport:
    """Send the metadata of a finished step; nobody waits for an answer."""

    report: Report


LearnerAction = Join | Leave | AdoptAll | TakeSnapshot | Publish | ApplyUpdate | SendReport | Drop
