"""Requests for offers: when learners are asked, for which clock, and how long offers are waited for."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.estimates import MovingAverage
from ddiloco.protocol.membership import SHORTEST_LEAD, Asked, Member, Membership
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import TIMEOUT_SLACK, SyncPolicy
from ddiloco.protocol.round import Round

MISSED, IN_TIME = 1.0, 0.05
"""Steps by which a learner's margin grows with a missed round, and shrinks with an early offer.

A miss may lose an interval of work; a step of margin makes the offer a step older.
"""

ROUNDING = 0.25
"""Share of a step by which an offer may be late: steps vary in length."""

AGE = 0.5
"""Share of an offer's worth that is lost when it becomes an interval older."""

MIN_IN_TIME = 0.2
"""Share of its rounds for which a learner's offer must be in time, or the paper's window closes without it.

A window of a step makes all work a step older, which at H = 24 costs eight learners a sixth of an interval.
"""

BEHIND_ANOTHER = 2.0
"""Minimum wait for a learner, in its delivery times: offers may queue behind each other."""


@dataclasses.dataclass
class Front:
    """The step that a quorum of learners has reached, and its speed."""

    step: int = 0
    at: float | None = None  # when it was reached
    step_time: MovingAverage = dataclasses.field(default_factory=MovingAverage)  # seconds a step

    def move(self, step: int, now: float, joined: bool) -> None:
        """Sets the front's step: it may fall when learners leave, and jump when some join."""
        if step > self.step and self.at is not None and not joined:
            self.step_time.add((now - self.at) / (step - self.step))
        if step != self.step or self.at is None:
            self.step, self.at = step, now

    def reaches(self, step: int, now: float) -> float | None:
        """When it will reach a step, in the seconds of `now`; None: its speed is unknown."""
        if self.at is None or self.step_time.value is None:
            return None
        return max(now, self.at + (step - self.step) * self.step_time.value)


class OfferRequests:
    """Asks each learner early enough, and for an early enough clock, to have its offer when a round is due.

    Both are adapted for each learner: after a late offer it is asked earlier.
    """

    def __init__(self, policy: SyncPolicy) -> None:
        self.front = Front()
        self.policy = policy
        self._longest_lead = SHORTEST_LEAD

    def furthest(self, members: Membership) -> float:
        """The due step up to which rounds are to be open, so that all learners are asked in time."""
        if self.policy.quorum is None:
            return members.furthest() + SHORTEST_LEAD
        return self.front.step + self._longest_lead

    def ask(self, r: Round, members: Iterable[Member], now: float) -> list[actions.SyncerAction]:
        """Asks those of the unasked members whose time to be asked has come."""
        asked: dict[int, list[Member]] = {}
        for m in members:
            of = m.step if self.policy.quorum is None else self.front.step
            if r.id.step - of <= m.lead and not r.has_failed(m):
                asked.setdefault(self._clock(m, r, now), []).append(m)
        return [self._request(r, members, clock) for clock, members in asked.items()]

    def ask_late(self, r: Round, members: Membership) -> list[actions.SyncerAction]:
        """Asks learners that are later than expected to offer at once."""
        owing = ((m, r.owed.get(m.learner)) for m in members.live())
        late = [m for m, asked in owing if asked is not None and asked.clock > m.step + 1]
        return [self._request(r, late, 0)] if late else []

    def arrived(self, m: Member, which: RoundId, c: Contribution, now: float) -> None:
        """Updates the learner's delivery time and lead from an offer that was asked for a round."""
        newest = m.asked.get(c.fragment)
        asked = None if newest is None else newest.of(which.step)
        if asked is not None:
            asked.arrived_at = now
            m.punctual = asked.expected_at is None or now <= asked.expected_at
            if asked.quorum_at is None:
                m.was_early = True
            else:
                m.lag.add(now - asked.quorum_at)
        if m.step_time.value is None or m.reported_at is None:
            return
        made = m.reported_at - (m.step - c.step) * m.step_time.value
        m.delivery.add(max(0.0, now - made))
        if asked is None or not self.front.step_time.value:
            return
        late = c.step - max(asked.clock, asked.seen + 1)
        if late > 0:  # the request arrived after the requested clock
            m.lead = min(self.policy.interval, m.lead + late * m.step_time.value / self.front.step_time.value)
            self._longest_lead = max(self._longest_lead, m.lead)

    def merging(self, r: Round, members: Membership, now: float) -> None:
        """Asks learners that miss the round earlier from now on, and those with time for a later clock."""
        for m in members.live():
            if m.learner in r.arrived:
                self._in_time(m, m.asked.get(r.id.fragment), now)
            elif (owed := r.owed.get(m.learner)) is not None:
                m.punctual &= owed.expected_at is None or now < owed.expected_at
                m.in_time.add(0.0)
                m.lead = min(self.policy.interval, m.lead + 1)
                m.margin = min(self.policy.interval / 4, m.margin + MISSED)
        self._longest_lead = max((m.lead for m in members.live()), default=SHORTEST_LEAD)

    def _in_time(self, m: Member, asked: Asked | None, now: float) -> None:
        m.lead = max(SHORTEST_LEAD, m.lead - 0.1)
        arrived_at = now if asked is None or asked.arrived_at is None else asked.arrived_at
        if m.step_time.value is not None and now - arrived_at > m.step_time.value:
            m.margin = max(0.0, m.margin - IN_TIME)

    def _request(self, r: Round, members: Sequence[Member], clock: int) -> actions.Send:
        """The request, recorded to measure the learner's next offer."""
        for m in members:
            before = m.asked.get(r.id.fragment)
            if before is not None and before.step == r.id.step:  # it is asked again
                before = before.before
            elif before is not None:
                before.before = None
            asked = Asked(r.id.step, clock, m.step, before=before)
            r.owed[m.learner] = m.asked[r.id.fragment] = asked
            r.unasked.discard(m.learner)
            r.asked.add((m.learner, m.incarnation))
        pairs = tuple((m.learner, m.incarnation) for m in members)
        return actions.Send(pairs, events.OfferAsked(r.id, r.version, clock))

    def _clock(self, m: Member, r: Round, now: float) -> int:
        """The clock for the learner's offer: the due step, or less for a slow or distant learner."""
        due_at = self.front.reaches(r.id.step, now)
        if self.policy.quorum is None or due_at is None or not m.step_time.value or m.reported_at is None:
            return r.id.step
        left = due_at - m.reported_at - (m.delivery.value or 0.0)
        steps = math.floor(left / m.step_time.value + ROUNDING - m.margin)
        return min(r.id.step, m.step + max(0, steps))


def worth_waiting(
    r: Round, able: Iterable[Member], missed: float, next_quorum: float, now: float
) -> tuple[set[int], float]:
    """The learners whose offers a merge waits for after its quorum, and for how many seconds.

    Each offer has an interval of its learner's work. Without a wait, that of an expected one becomes older by
    `missed`; a wait makes all work in the merge older. Learners are taken in the order of their expected
    arrival, up to the number with the largest difference; the wait ends when it would make the work of those
    that are here older by more than it can make that of the others younger. Learners of whom no offer was
    measured, or whose last one was later than expected, are not waited for.

    Args:
      able: learners that may still offer.
      missed: seconds by which an offer's work becomes older, or what else it loses, if it misses the merge.
      next_quorum: seconds until the fragment's next quorum, the longest wait.
    """
    coming = []
    for m in able:
        asked = r.owed.get(m.learner)
        if asked is None:
            continue
        asked.quorum_at = now
        if (lag := m.expected_lag) is None:
            continue
        bound = max(m.lag.bound, BEHIND_ANOTHER * (m.delivery.value or 0.0))
        asked.expected_at = now + bound
        if m.punctual and lag <= next_quorum:
            coming.append((lag, m.learner, bound))
    coming.sort()
    here = len(r.arrived)
    gains = [n * missed - (here + n) * lag for n, (lag, _, _) in enumerate(coming, start=1)]
    best = max(gains, default=0.0)
    many = gains.index(best) + 1 if best > 0 else 0
    longest = max((latest for _, _, latest in coming[:many]), default=0.0)
    even = many * missed / max(1, here + many)
    return {learner for _, learner, _ in coming[:many]}, min(longest, next_quorum, even)


class Overdue:
    """A heap of the timeouts of offers; entries of offers no longer owed are skipped."""

    def __init__(self, timeout: float, num_fragments: int) -> None:
        """`timeout`: seconds from the report of an offer's step, without the transfer."""
        self._timeout, self._num_fragments = timeout, num_fragments
        self._deadlines: list[tuple[float, RoundId, int]] = []

    def expect(self, r: Round, m: Member, asked: Asked, now: float) -> None:
        """Starts the timeout of an offer whose step is reported."""
        in_the_making = m.step_time.value or 0.0  # the request may have arrived in mid-step
        # Its share of the welcome's time or its delivery time; rejoined learners had no welcome.
        on_its_way = max(m.welcome_seconds / self._num_fragments, m.delivery.value or 0.0)
        asked.expires = now + in_the_making + self._timeout + TIMEOUT_SLACK * on_its_way
        heapq.heappush(self._deadlines, (asked.expires, r.id, m.learner))

    def next(self, rounds: Mapping[int, Round]) -> float | None:
        """The next timeout of an offer, in the seconds of `now`; `rounds`: the open ones, by fragment."""
        while self._deadlines:
            expires, which, learner = self._deadlines[0]
            r = rounds.get(which.fragment)
            asked = r.owed.get(learner) if r is not None and r.id == which else None
            if asked is not None and asked.expires == expires:
                return expires
            heapq.heappop(self._deadlines)
        return None

    def take(self, rounds: Mapping[int, Round], now: float) -> Iterator[tuple[Round, int]]:
        """Rounds and learners whose offers time out now."""
        while (first := self.next(rounds)) is not None and now >= first:
            _, which, learner = heapq.heappop(self._deadlines)
            if now > first + self._timeout / 4:  # this process hung itself, and offers may be queued
                asked = rounds[which.fragment].owed[learner]
                asked.expires = now + self._timeout / 4
                heapq.heappush(self._deadlines, (asked.expires, which, learner))
            else:
                yield rounds[which.fragment], learner
