"""One synchronisation of one fragment, from the first learner that reaches its step to the broadcast."""

from __future__ import annotations

import dataclasses
import enum

from ddiloco.protocol.messages import Contribution, RoundId


class Phase(enum.Enum):
    """Where a round stands; it goes back to GATHERING when pulls fail and leave it below its quorum."""

    GATHERING = "gathering"  # too few learners have reported the step
    GRACE = "grace"  # the quorum is in; others may join until the deadline
    PULLING = "pulling"  # fragments are on their way
    MERGING = "merging"


@dataclasses.dataclass
class Round:
    """A round in flight."""

    id: RoundId
    opened_at: float
    phase: Phase = Phase.GATHERING
    deadline: float | None = None  # of the grace window or of the pulls
    quorum_time: float = 0.0
    grace_started: float = 0.0
    grace_used: float = 0.0
    pulling_since: float = 0.0
    pulled: dict[int, int] = dataclasses.field(default_factory=dict)  # learner: incarnation, not yet arrived
    asked: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # (learner, incarnation), ever
    arrived: dict[int, Contribution] = dataclasses.field(default_factory=dict)
    passed_over: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def overdue(self, now: float) -> bool:
        """Whether the deadline has come."""
        return self.deadline is not None and now >= self.deadline

    def pass_over(self, learner: int, incarnation: int, reports: int) -> None:
        """Stops asking the learner until it has sent more than `reports` reports."""
        self.pulled.pop(learner, None)
        self.passed_over[learner] = (incarnation, reports)

    def is_passed_over(self, learner: int, incarnation: int, reports: int) -> bool:
        """Whether a pull from the learner failed and it has not reported since."""
        return self.passed_over.get(learner) == (incarnation, reports)
