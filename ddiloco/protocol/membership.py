"""Who takes part: the states of a learner as the syncer sees it, and the moves between them."""

from __future__ import annotations

import dataclasses
import enum

from ddiloco.protocol.estimates import MovingAverage
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report


class State(enum.Enum):
    """Where a learner stands.

    joining --ready or reported--> live <--spoke / silent--> silent;  any --lost or replaced--> gone
    """

    JOINING = "joining"  # welcomed, still recovering: neither seeds nor forms a quorum
    LIVE = "live"
    SILENT = "silent"  # not heard of for the silence timeout; counts again once it speaks
    GONE = "gone"


TRANSITIONS = {
    (State.JOINING, State.LIVE),
    (State.LIVE, State.SILENT),
    (State.SILENT, State.LIVE),
    (State.JOINING, State.GONE),
    (State.LIVE, State.GONE),
    (State.SILENT, State.GONE),
}


@dataclasses.dataclass
class Asked:
    """What a learner was asked for."""

    incarnation: int
    version: int
    clock: int  # from which it offers
    seen: int  # its clock as the syncer knew it when it asked
    steps: int | None  # on the fragment's version, likewise; None: it had another
    arrived_at: float | None = None
    due: float | None = None  # until when an offer that it has made may be on its way; None: not made yet


@dataclasses.dataclass
class Member:
    """One incarnation of one learner."""

    learner: int
    incarnation: int
    heard_at: float
    state: State = State.JOINING
    step: int = -1
    reports: int = 0
    reported_at: float | None = None
    step_time: MovingAverage = dataclasses.field(default_factory=MovingAverage)  # seconds
    delivery: MovingAverage = dataclasses.field(default_factory=MovingAverage)  # seconds from report to offer
    most_tokens: float = 0.0  # that a step may have: twice what was reported
    margin: float = 0.0  # of its steps by which an offer is planned to come before it is due
    asked: dict[int, Asked] = dataclasses.field(default_factory=dict)  # by fragment, the last time
    lead: float = 2.0  # steps of the front before a due step at which it is asked
    counters: tuple[FragmentCounters, ...] = ()
    sent: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)  # fragment: version, when

    def move(self, state: State) -> None:
        """Changes the state; moving to the present state changes nothing."""
        if state is self.state:
            return
        if (self.state, state) not in TRANSITIONS:
            raise AssertionError(f"learner {self.learner} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def version(self, fragment: int) -> int:
        """The fragment version that the learner last said it holds."""
        return self.counters[fragment].version

    def can_have(self, c: Contribution) -> bool:
        """Whether the learner's reports allow for the work that a contribution claims."""
        if not self.counters:
            return False
        known = self.counters[c.fragment]
        steps, tokens = (known.steps, known.tokens) if known.version == c.version else (0, 0)
        unreported = max(0, c.step - self.step)
        return c.steps <= steps + unreported and c.tokens <= tokens + unreported * self.most_tokens

    def knows_better(self, report: Report) -> bool:
        """Whether the report is older than one of the same step that came before it."""
        pairs = zip(report.counters, self.counters, strict=False)
        return any(theirs.version < known.version for theirs, known in pairs)

    def steps_to(self, report: Report) -> int:
        """Steps that the learner has taken since its last report, at least one; a clock may have jumped."""
        pairs = zip(report.counters, self.counters, strict=False)
        taken = (new.steps - old.steps for new, old in pairs if new.version == old.version)
        return max(1, *taken, 1)

    def take(self, report: Report) -> None:
        """Adopts what a newer report says."""
        self.reports += 1
        of_a_step = (2 * c.tokens / c.steps for c in report.counters if c.steps)
        self.most_tokens = max(self.most_tokens, *of_a_step, 0.0)
        self.step = report.step
        self.counters = report.counters


class Membership:
    """The current incarnation of every learner ever seen; departed ones stay known, so that none rejoins."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by learner number, in that order
        self._live: tuple[Member, ...] | None = None  # asked for at every event; None: to be computed again

    def newest(self, learner: int) -> Member | None:
        """The learner's newest incarnation, gone or not."""
        return self._members.get(learner)

    def current(self, learner: int, incarnation: int) -> Member | None:
        """Exactly this incarnation, unless it is gone or replaced."""
        member = self._members.get(learner)
        if member is None or member.incarnation != incarnation or member.state is State.GONE:
            return None
        return member

    def admit(self, member: Member) -> Member:
        """Puts a new incarnation in the place of the learner's older one; returns it."""
        self._members = dict(sorted({**self._members, member.learner: member}.items()))
        self._live = None
        return member

    def move(self, member: Member, state: State) -> None:
        """Changes a member's state; raises AssertionError for a move that is not in TRANSITIONS."""
        member.move(state)
        self._live = None

    def incarnations(self) -> tuple[tuple[int, int], ...]:
        """(learner, newest incarnation) of every learner ever seen, by learner number."""
        return tuple((m.learner, m.incarnation) for m in self._members.values())

    def steps(self) -> dict[int, tuple[int, int]]:
        """By learner, if a step of it is known: its newest incarnation, and the step."""
        return {m.learner: (m.incarnation, m.step) for m in self._members.values() if m.step >= 0}

    def furthest(self) -> int:
        """The largest step that the newest incarnation of a learner, gone or not, has reported."""
        return max((m.step for m in self._members.values()), default=0)

    def present(self) -> list[Member]:
        """Every member that has not gone, by learner number."""
        return [m for m in self._members.values() if m.state is not State.GONE]

    def live(self) -> tuple[Member, ...]:
        """The members that count, by learner number."""
        if self._live is None:
            self._live = tuple(m for m in self._members.values() if m.state is State.LIVE)
        return self._live
