"""One synchronisation of one fragment, from the requests for offers to the broadcast."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable

from ddiloco.protocol import actions
from ddiloco.protocol.membership import Asked, Member
from ddiloco.protocol.messages import Contribution, RoundId


class Phase(enum.Enum):
    """Phase of a round."""

    GATHERING = "gathering"  # requests and arriving offers; the quorum is not complete
    GRACE = "grace"  # the quorum is complete; waits for further offers until the deadline
    READY = "ready"  # waits while tau rounds merge; still accepts offers
    MERGING = "merging"


@dataclasses.dataclass
class Round:
    """An open round."""

    id: RoundId
    version: int  # that the round replaces
    lineage: int = 0  # of that version
    opened_late: bool = False  # with too few steps left to ask ahead
    phase: Phase = Phase.GATHERING
    began: float | None = None  # when the first learner reached the step
    quorum_seconds: float = 0.0
    grace_began: float = 0.0
    grace_seconds: float = 0.0
    merging_since: float = 0.0
    unasked: set[int] = dataclasses.field(default_factory=set)  # live learners still to be asked
    asked: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # (learner, incarnation), ever
    owed: dict[int, Asked] = dataclasses.field(default_factory=dict)
    arrived: dict[int, Contribution] = dataclasses.field(default_factory=dict)
    known: dict[int, int] = dataclasses.field(default_factory=dict)  # reported steps at the offer's arrival
    old: set[int] = dataclasses.field(default_factory=set)  # learners whose offer waits for a newer one
    at_step: set[int] = dataclasses.field(default_factory=set)
    """Live learners at the round's step, whose offers have arrived and are not old."""
    window_closes: float = 0.0  # end of the paper's window, which waits for all
    awaited: frozenset[int] = frozenset()  # learners waited for after it
    awaited_until: float = 0.0
    hopeless: frozenset[int] = frozenset()  # learners not waited for, even in the window
    left_owing: set[int] = dataclasses.field(default_factory=set)  # left in the window, may rejoin in it
    departed: set[int] = dataclasses.field(default_factory=set)  # left learners whose offer has arrived
    failed: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # incarnation, reports
    tries: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # at the end
    left_out: tuple[int, ...] = ()  # learners whose offers the merge left out
    without_work: bool = False  # all offers were left out: the old version gets the next number
    refused: dict[int, int] = dataclasses.field(default_factory=dict)  # steps in offers to such merges
    settled: int = 0  # number of live learners, from the first, that owe nothing

    @property
    def given(self) -> tuple[Contribution, ...]:
        """The arrived offers that are not left out, by learner number."""
        return tuple(self.arrived[who] for who in sorted(self.arrived) if who not in self.left_out)

    @property
    def counted(self) -> int:
        """Number of offers in the quorum: arrived and not old."""
        return len(self.arrived) - len(self.old)

    def advance(self, m: Member) -> None:
        """Updates `at_step` for a live learner."""
        if self.has_given(m.learner) and m.step >= self.id.step:
            self.at_step.add(m.learner)
        else:
            self.at_step.discard(m.learner)

    def has_given(self, learner: int) -> bool:
        """Whether its offer has arrived and counts in the quorum; an old one is merged, but does not."""
        return learner in self.arrived and learner not in self.old

    def closes(self, awaits_learners: bool) -> float:
        """Until when offers are waited for after the quorum.

        Those are offers that are owed, or were as the learner left, or will be when it is asked again.
        """
        owing = self.owed.keys() | self.left_owing | (self.awaited & self.unasked)
        if self.awaited & owing:
            return max(self.window_closes, self.awaited_until)
        return self.window_closes if owing - self.hopeless or awaits_learners else 0.0

    def has_aged(self, m: Member, steps: int) -> bool:
        """Whether a waiting offer's learner has since taken more than so many steps.

        And more than half as many as are in the offer: if all learners are needed, one would always be old
        otherwise.
        """
        if not self.has_given(m.learner) or self.phase is Phase.MERGING:
            return False
        offer, version = self.arrived[m.learner], m.version(self.id.fragment)
        if version is None or version < offer.version:
            return False
        since = m.steps_on(self.id.fragment, version) - self.known[m.learner]
        return since > max(1, steps, offer.steps // 2)

    def lacks(self, c: Contribution) -> bool:
        """Whether its learner has no offer here, or an old one that this may replace."""
        return not self.has_given(c.learner) and (
            c.learner not in self.old or c.steps > self.arrived[c.learner].steps
        )

    def has_failed(self, m: Member) -> bool:
        """Whether the learner's offer failed, and it has not reported since."""
        return self.failed.get(m.learner) == (m.incarnation, m.reports)

    def start_over(self, live: Iterable[Member]) -> None:
        """Forgets its offers, none of which was merged; asks live learners again after their next report."""
        for m in live:
            if m.learner in self.arrived:
                self.failed[m.learner] = (m.incarnation, m.reports)
                self.unasked.add(m.learner)
        self.refused.update({who: c.steps for who, c in self.arrived.items()})
        self.arrived.clear()
        self.known.clear()
        self.departed.clear()
        self.old.clear()
        self.at_step.clear()
        self.left_out = ()
        self.left_owing.clear()
        self.began = None
        self.phase = Phase.GATHERING

    def refusal(self) -> actions.Record:
        """The record of a merge without a new version."""
        values = {"step": self.id.step, "fragment": self.id.fragment, "left_out": sorted(self.arrived)}
        return actions.Record("round_refused", values)

    def published(self, live: int, now: float) -> actions.Published:
        """The record of its end; `live`: number of live learners."""
        left_out = sorted(set(self.arrived) & set(self.left_out))
        return actions.Published(
            "round",
            {
                "step": self.id.step,
                "fragment": self.id.fragment,
                "version": self.version + 1,
                "quorum": len(self.given),
                "learners": [c.learner for c in self.given],
                "live": live,
                "tokens": sum(c.tokens for c in self.given),
                "contributions": [c.brief for c in self.given],
                "quorum_seconds": self.quorum_seconds,
                "grace_seconds": self.grace_seconds,
                "sync_seconds": now - self.merging_since,
                **({"left_out": left_out} if left_out else {}),
            },
            self.id.fragment,
        )
