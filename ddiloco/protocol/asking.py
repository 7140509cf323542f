"""When the syncer asks a learner for a fragment, and as of which of the learner's steps."""

from __future__ import annotations

import dataclasses
import math

from ddiloco.protocol.estimates import MovingAverage
from ddiloco.protocol.membership import Asked, Member
from ddiloco.protocol.messages import Contribution, RoundId

ROUNDING = 0.25
"""Share of a step by which an offer may come late: steps are not of equal length."""


@dataclasses.dataclass
class Front:
    """The step that enough learners for a quorum have reached, and how fast it moves."""

    step: int = 0
    at: float | None = None  # when it was reached
    pace: MovingAverage = dataclasses.field(default_factory=MovingAverage)  # seconds a step

    def move(self, step: int, now: float) -> None:
        """Notes where the front is now; it falls back when learners in it are lost."""
        if step > self.step and self.at is not None:
            self.pace.add((now - self.at) / (step - self.step))
        if step != self.step or self.at is None:
            self.step, self.at = step, now

    def reaches(self, step: int, now: float) -> float | None:
        """When it will have come to a step, in the seconds of `now`; None if its pace is not known."""
        if self.at is None or self.pace.value is None:
            return None
        return max(now, self.at + (step - self.step) * self.pace.value)


def offer_clock(m: Member, due_step: int, due_at: float | None) -> int:
    """The clock from which on the learner is to offer, so that the offer is here when the front is due.

    At most the due step; less for a learner that is slow, or far behind a thin link.
    """
    if due_at is None or m.step_time.value is None or m.reported_at is None:
        return due_step
    left = due_at - m.reported_at - (m.delivery.value or 0.0)
    return min(due_step, m.step + max(0, math.floor(left / m.step_time.value + ROUNDING - m.margin)))


def note_arrival(m: Member, c: Contribution, front: Front, longest: float, now: float) -> None:
    """Takes from an offer how long the learner's link takes, and how early it must be asked.

    Args:
      m: the learner.
      c: what has come.
      front: whose pace the learner is measured by.
      longest: steps of the front before a due step at which it may be asked at the earliest.
      now: in seconds.
    """
    if m.step_time.value is None or m.reported_at is None or front.pace.value is None:
        return
    made = m.reported_at - (m.step - c.step) * m.step_time.value
    m.delivery.add(max(0.0, now - made))
    asked = m.asked.get(c.fragment)
    if asked is None or asked.steps is None:
        return
    late = c.steps - asked.steps - max(1, asked.clock - asked.seen)
    if late > 0:  # the question came after the step that it was about
        m.lead = min(longest, m.lead + late * m.step_time.value / front.pace.value)


def ask(m: Member, round_id: RoundId, version: int, clock: int) -> Asked:
    """Notes what the learner is asked for: the round's fragment on this version, from this clock on."""
    known = m.counters[round_id.fragment] if m.counters else None
    steps = known.steps if known is not None and known.version == version else None
    m.asked[round_id.fragment] = asked = Asked(m.incarnation, clock, m.step, steps)
    return asked


def note_merge(m: Member, arrived_at: float | None, longest: float, now: float) -> None:
    """Asks a learner that has missed a round earlier, and for an earlier step; one that need not wait, later.

    `arrived_at`: when its offer came; None: it has not come by `now`, when the round begins to merge.
    """
    if arrived_at is None:
        m.lead, m.margin = min(longest, m.lead + 1), min(longest / 2, m.margin + MISSED)
        return
    m.lead = max(SHORTEST_LEAD, m.lead - 0.1)
    if m.step_time.value is not None and now - arrived_at > m.step_time.value:
        m.margin = max(0.0, m.margin - IN_TIME)


SHORTEST_LEAD = 2.0
"""Steps of the front before a due step at which every learner has been asked."""

MISSED, IN_TIME = 0.5, 0.05
"""By how many steps the margin grows when a learner misses a round, and shrinks when it is in time."""
