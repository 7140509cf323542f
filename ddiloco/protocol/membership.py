"""Membership: the states of a learner at the syncer, and the transitions between them."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import enum
from collections.abc import Mapping, Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.estimates import Delay, MovingAverage, OfferDelay
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.protocol.policy import SyncPolicy

SHORTEST_LEAD = 2.0
"""Steps of the front before a due step, by which every learner has been asked."""

MAX_LEARNERS = 1 << 16
"""Learner numbers are below it, which bounds the memory for them."""

SELDOM = 16
"""With N live members, what needs a look at all of them is computed anew after N over this many queries."""


class MemberState(enum.Enum):
    """MemberState of a learner.

    joining --ready or report--> live <--message / timeout--> silent;  any --lost or replaced--> gone
    """

    JOINING = "joining"  # welcomed, still loading: not in any quorum
    LIVE = "live"
    SILENT = "silent"  # no message for the silence timeout; live again with the next one
    GONE = "gone"


TRANSITIONS = {
    (MemberState.JOINING, MemberState.LIVE),
    (MemberState.LIVE, MemberState.SILENT),
    (MemberState.SILENT, MemberState.LIVE),
    (MemberState.JOINING, MemberState.GONE),
    (MemberState.LIVE, MemberState.GONE),
    (MemberState.SILENT, MemberState.GONE),
}


@dataclasses.dataclass
class Asked:
    """A request for an offer."""

    step: int  # when the round is due
    clock: int  # from which it offers
    seen: int  # its last reported clock at the request
    arrived_at: float | None = None
    quorum_at: float | None = None  # when the round had its quorum
    expected_at: float | None = None  # latest expected arrival of its offer, as of then
    expires: float | None = None  # timeout of an offer that it has made; None: not made yet
    before: Asked | None = None  # the request for the round before, whose offer may be on its way

    def of(self, step: int) -> Asked | None:
        """The request for the round that was due then: this one, or the one before."""
        return next((asked for asked in (self, self.before) if asked and asked.step == step), None)


@dataclasses.dataclass
class Member:
    """One incarnation of one learner."""

    learner: int
    incarnation: int
    heard_at: float
    repeats_since: float | None = None  # a report that cannot be confirmed yet; None: it does not
    state: MemberState = MemberState.JOINING
    step: int = -1
    reports: int = 0
    reported_at: float | None = None
    welcomed_at: float = 0.0
    admitted_at: float | None = None  # when its first welcome was sent
    welcome_seconds: float = 0.0  # from then until it was live with all fragments; 0: no welcome
    goes_on: bool = False  # it rejoined in an impossible state, which it keeps until the welcome arrives
    dismissed: bool = False  # it got NotMember: the next incarnation is its own
    step_time: MovingAverage = dataclasses.field(default_factory=MovingAverage)  # seconds
    delivery: MovingAverage = dataclasses.field(default_factory=MovingAverage)  # seconds from report to offer
    lag: Delay = dataclasses.field(default_factory=Delay)
    """Seconds from a round's quorum to its offer, of those that came after it."""
    was_early: bool = False  # whether one came before it
    punctual: bool = True  # whether its last offer arrived by `expected_at`
    in_time: MovingAverage = dataclasses.field(default_factory=lambda: MovingAverage(1.0))
    """The share of rounds for which its offer was in time, of those that it was asked for."""
    max_step_tokens: float = 0.0  # bound on a step's tokens: twice the reported ones
    margin: float = 0.0  # of its steps by which an offer is planned to come before it is due
    asked: dict[int, Asked] = dataclasses.field(default_factory=dict)  # by fragment, the last time
    lead: float = SHORTEST_LEAD  # steps of the front before a due step at which it is asked
    report: Report | None = None  # the last one
    places: Mapping[int, int] = dataclasses.field(default_factory=dict)  # by fragment, its place in reports
    compared: tuple[Report, list[int]] | None = None  # the newest report, and `changed` of it
    began_with: tuple[int, ...] = ()  # its versions when it became live
    counted_from: dict[int, int] = dataclasses.field(default_factory=dict)
    """By fragment the earliest clock from which its work counts; missing: unknown."""
    shards: tuple[int, ...] = ()  # its memberships, by its own report
    sent: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)  # fragment: version, time

    def move(self, state: MemberState) -> None:
        """Changes the state; moving to the present state changes nothing."""
        if state is self.state:
            return
        if (self.state, state) not in TRANSITIONS:
            raise AssertionError(f"learner {self.learner} cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def quiet_since(self) -> float:
        """When the silence timeout began."""
        return self.heard_at if self.repeats_since is None else self.repeats_since

    @property
    def expected_lag(self) -> float | None:
        """`lag` of its next offer that is not here at the quorum; None: none of its offers was measured."""
        return 0.0 if self.lag.value is None and self.was_early else self.lag.value

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment in the learner's last report."""
        return self.began_with if self.report is None else self.report.versions

    def counters(self, fragment: int) -> FragmentCounters | None:
        """The fragment's counters in the learner's last report."""
        r = self.report
        return None if r is None else r.counted(r.bases[self.places[fragment]])

    def version(self, fragment: int) -> int | None:
        """The fragment's version in the learner's last report."""
        return None if self.report is None else self.report.bases[self.places[fragment]].version

    def can_have(self, c: Contribution, policy: SyncPolicy) -> bool:
        """Whether the learner's reports allow for the work that a contribution claims.

        The offer may overtake the reports of an interval's steps, and that of a newer version, to which
        earlier work was rebased.
        """
        known = self.counters(c.fragment)
        if known is None:
            return False
        goes_on = known.version <= c.version or policy.rebase
        steps, tokens = (known.steps, known.tokens) if goes_on else (0, 0)
        # An update may have set its clock forward.
        unreported = min(policy.interval, max(0, c.step - self.step))
        return c.steps <= steps + unreported and c.tokens <= tokens + unreported * self.max_step_tokens

    def changed(self, report: Report) -> list[int]:
        """Where a report's bases differ from those of the last one."""
        if self.compared is None or self.compared[0] is not report:
            self.compared = report, report.changed_since(self.report)
        return self.compared[1]

    def knows_better(self, report: Report) -> bool:
        """Whether the report is older than an earlier one of the same step."""
        earlier = self.report
        if earlier is None:
            return False
        return any(report.bases[i].version < earlier.bases[i].version for i in self.changed(report))

    def steps_to(self, report: Report) -> int:
        """Steps that the learner has taken since its last report, at least one; a clock may have jumped."""
        earlier = self.report
        if earlier is None:
            return 1
        changed = self.changed(report)
        done = report.steps - earlier.steps
        taken = [done] if len(changed) < len(report.bases) else []
        pairs = [(report.bases[i], earlier.bases[i]) for i in changed]
        taken += [done + new.steps - old.steps for new, old in pairs if new.version == old.version]
        if not taken:  # with rebase some may be earlier work
            taken = [min(report.step - self.step, report.steps + new.steps) for new, _ in pairs]
        return max(1, *taken, 1)

    def take(self, report: Report, places: Mapping[int, int]) -> None:
        """Applies a newer report; `places`: by fragment, its place in reports."""
        self.reports += 1
        earlier = self.report
        works = [(base.steps, base.tokens) for base in map(report.bases.__getitem__, self.changed(report))]
        if earlier is not None:
            works.append((-earlier.steps, -earlier.tokens))
        for steps, tokens in works:
            if (steps := steps + report.steps) > 0:
                self.max_step_tokens = max(self.max_step_tokens, 2 * (tokens + report.tokens) / steps)
        self.step = report.step
        self.report, self.places, self.compared = report, places, None

    def has_work(self, fragment: int, version: int) -> bool:
        """Whether the learner has reported steps on this version of a fragment."""
        return self.steps_on(fragment, version) > 0

    def steps_on(self, fragment: int, version: int) -> int:
        """Reported steps on this version of a fragment."""
        if self.report is None:
            return 0
        base = self.report.bases[self.places[fragment]]
        return base.steps + self.report.steps if base.version == version else 0


class Membership:
    """The current incarnation of every learner ever seen; departed ones stay known, so that none rejoins.

    Queries of every event have a cost independent of the number of learners: counts are kept up to date.
    """

    def __init__(self, fragments: Sequence[int]) -> None:
        """`fragments`: of which learners report."""
        self.fragments = fragments
        self._places = {p: i for i, p in enumerate(fragments)}
        self._members: dict[int, Member] = {}
        self._strangers: dict[int, int] = {}  # learner: incarnation that was dismissed before it joined
        self._live: list[Member] = []  # by learner number
        self._at: collections.Counter[int] = collections.Counter()  # live members by step
        self.count = 0  # of the live members
        self._last_heard_at = 0.0  # of the last member that was live
        self._median_step: float | None = None
        self._still = 0  # queries until it is computed anew

    def newest(self, learner: int) -> Member | None:
        """The learner's newest incarnation, gone or not."""
        return self._members.get(learner)

    def current(self, learner: int, incarnation: int) -> Member | None:
        """Exactly this incarnation, unless it is gone or replaced."""
        member = self._members.get(learner)
        if member is None or member.incarnation != incarnation or member.state is MemberState.GONE:
            return None
        return member

    def is_early(self, c: Contribution, policy: SyncPolicy) -> bool:
        """Whether an offer has overtaken the reports of its work (`Member.can_have`)."""
        m = self.current(c.learner, c.incarnation)
        return m is not None and m.state is MemberState.LIVE and m.step < c.step and not m.can_have(c, policy)

    def dismiss(self, learner: int, incarnation: int, shard: int) -> actions.Send:
        """Sends NotMember to an incarnation; its process takes the next one."""
        m = self.current(learner, incarnation)
        if m is not None:
            m.dismissed = True
        elif 0 <= learner < MAX_LEARNERS:
            self._strangers[learner] = incarnation
        return actions.Send(((learner, incarnation),), events.NotMember(incarnation, shard))

    def was_dismissed(self, learner: int, incarnation: int) -> bool:
        """Whether an incarnation was dismissed before it joined; forgets it."""
        return self._strangers.pop(learner, None) == incarnation

    def admit(self, member: Member) -> Member:
        """Replaces the learner's older incarnation by a new one, not live yet; returns it."""
        old = self._members.get(member.learner)
        if old is not None:
            member.welcome_seconds, member.step_time = old.welcome_seconds, old.step_time
            member.lag, member.delivery, member.punctual = old.lag, old.delivery, old.punctual
            member.in_time, member.was_early = old.in_time, old.was_early
            member.counted_from = dict(old.counted_from)
            if old.state is MemberState.LIVE:
                self.move(old, MemberState.GONE)
        self._members[member.learner] = member
        return member

    def move(self, member: Member, state: MemberState) -> None:
        """Changes a member's state; raises AssertionError for a move that is not in TRANSITIONS."""
        counted = member.state is MemberState.LIVE
        member.move(state)
        if counted != (state is MemberState.LIVE):
            at = bisect.bisect_left(self._live, member.learner, key=lambda m: m.learner)
            if counted:
                del self._live[at]
            else:
                self._live.insert(at, member)
            self._count(member.step, -1 if counted else 1)
            self.count += -1 if counted else 1
            self._still = min(self._still, self.count // SELDOM)
            if not self.count:
                self._last_heard_at = member.heard_at

    def lost_with_the_last(self, seconds: float) -> set[int]:
        """Former live learners whose last message is at most this much older than the last one's."""
        since = self._last_heard_at - seconds
        lost = (m for m in self._members.values() if m.state in (MemberState.SILENT, MemberState.GONE))
        return {m.learner for m in lost if m.step >= 0 and m.heard_at >= since}

    def begin(self, member: Member, step: int, versions: Sequence[int]) -> None:
        """Makes a member live, at this step and with these versions."""
        self.move(member, MemberState.LIVE)
        self.advance(member, step)
        member.began_with = tuple(versions)

    def advance(self, member: Member, step: int) -> None:
        """Sets a member's clock."""
        if member.state is MemberState.LIVE:
            self._count(member.step, -1)
            self._count(step, 1)
        member.step = step

    def take(self, member: Member, report: Report) -> None:
        """Applies a newer report of the member."""
        self.advance(member, report.step)
        member.take(report, self._places)

    def restore(self, incarnations: Sequence[tuple[int, int]], delays: Mapping[int, OfferDelay]) -> None:
        """Restores the learners of before a restart, none present, with their measured delays."""
        for learner, incarnation in incarnations:
            m = self.admit(Member(learner, incarnation, heard_at=0.0, state=MemberState.GONE))
            if (known := delays.get(learner)) is not None:
                m.lag, m.was_early = Delay(known.lag or None, known.deviation), not known.lag
                m.delivery = MovingAverage(known.delivery)

    def delays(self) -> dict[int, OfferDelay]:
        """Measured delays of offers, by learner."""
        return {
            m.learner: OfferDelay(lag, m.lag.deviation, m.delivery.value or 0.0)
            for m in self._members.values()
            if (lag := m.expected_lag) is not None
        }

    def incarnations(self) -> tuple[tuple[int, int], ...]:
        """(learner, newest incarnation) of every learner ever seen, by learner number."""
        return tuple(sorted((m.learner, m.incarnation) for m in self._members.values()))

    def steps(self) -> dict[int, tuple[int, int]]:
        """Newest incarnation and step of each learner with a known step."""
        return {m.learner: (m.incarnation, m.step) for m in self._members.values() if m.step >= 0}

    def present(self) -> list[Member]:
        """Every member that has not gone, by learner number."""
        there = [m for m in self._members.values() if m.state is not MemberState.GONE]
        return sorted(there, key=lambda m: m.learner)

    def live(self) -> Sequence[Member]:
        """The live members, by learner number."""
        return self._live

    def median_step(self) -> float | None:
        """Step time of the median live member, of two the shorter; None: unknown.

        A member in its first step counts as the slowest; at least half must be measured.
        """
        self._still -= 1
        if self._still < 0:
            times = sorted(m.step_time.value for m in self.live() if m.step_time.value)
            middle = max(0, self.count - 1) // 2
            self._median_step = times[middle] if middle < len(times) else None
            self._still = self.count // SELDOM
        return self._median_step

    # Clocks of the live members; the cost grows with the number of different clocks.

    def furthest(self) -> int:
        """The largest clock of a live member; 0 without any."""
        return max(self._at, default=0)

    def come_to(self, step: int) -> int:
        """Number of live members that have reached a step."""
        return sum(count for at, count in self._at.items() if at >= step)

    def front(self, quorum: int | None) -> int:
        """The step reached by a quorum of live members, or by all if they are too few."""
        needed = self.count if quorum is None else min(quorum, self.count)
        for step in sorted(self._at, reverse=True):
            needed -= self._at[step]
            if needed <= 0:
                return step
        return 0

    def _count(self, step: int, by: int) -> None:
        self._at[step] += by
        if not self._at[step]:
            del self._at[step]
