"""One synchronisation of one fragment, from the asking of learners to the broadcast."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable

from ddiloco.protocol import actions
from ddiloco.protocol.membership import Asked, Member
from ddiloco.protocol.messages import Contribution, RoundId


class Phase(enum.Enum):
    """Where a round stands."""

    GATHERING = "gathering"  # offers are asked for and come in; the quorum is not complete
    GRACE = "grace"  # the quorum is complete; further offers are waited for until the deadline
    READY = "ready"  # waits, since no more rounds may merge at a time; whatever comes meanwhile is taken
    MERGING = "merging"


@dataclasses.dataclass
class Round:
    """A round in flight."""

    id: RoundId
    version: int  # which the round replaces
    lineage: int = 0  # of that version
    opened_late: bool = False  # with too few steps left to ask ahead
    phase: Phase = Phase.GATHERING
    began: float | None = None  # when the first learner had reached the step
    quorum_seconds: float = 0.0
    grace_began: float = 0.0
    grace_seconds: float = 0.0
    merging_since: float = 0.0
    unasked: set[int] = dataclasses.field(default_factory=set)  # live learners that are to be asked
    asked: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # (learner, incarnation), ever
    owed: dict[int, Asked] = dataclasses.field(default_factory=dict)
    arrived: dict[int, Contribution] = dataclasses.field(default_factory=dict)
    known: dict[int, int] = dataclasses.field(default_factory=dict)  # steps known of when the offer came
    old: set[int] = dataclasses.field(default_factory=set)  # whose offer is here until a newer one is
    window_closes: float = 0.0  # the paper's, in which all are waited for
    awaited: frozenset[int] = frozenset()  # learners that are waited for after it
    awaited_until: float = 0.0
    left_owing: set[int] = dataclasses.field(default_factory=set)  # in the window, and may be back in it
    departed: set[int] = dataclasses.field(default_factory=set)  # whose offer is here, but who have left
    failed: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # incarnation, reports
    tries: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # at the end
    left_out: tuple[int, ...] = ()  # whose offers are not in the merge after all
    without_work: bool = False  # since all of them were left out, its version is the one before once more
    refused: dict[int, int] = dataclasses.field(default_factory=dict)  # steps in offers to merges of nothing
    settled: int = 0  # of the live learners, how many in a row were seen to owe nothing

    @property
    def given(self) -> tuple[Contribution, ...]:
        """The offers that are here and not left out, by learner number."""
        return tuple(self.arrived[who] for who in sorted(self.arrived) if who not in self.left_out)

    @property
    def counted(self) -> int:
        """How many offers count in the quorum: those that are here and not old."""
        return len(self.arrived) - len(self.old)

    def has_given(self, learner: int) -> bool:
        """Whether its offer is here, and counts in the quorum; an old one is merged, but does not count."""
        return learner in self.arrived and learner not in self.old

    def closes(self, awaits_learners: bool) -> float:
        """Until when offers are waited for, once there is a quorum.

        Of learners that owe one, owed one as they left, or are back and have yet to be asked again.
        """
        owing = self.owed.keys() | self.left_owing | (self.awaited & self.unasked)
        if self.awaited & owing:
            return max(self.window_closes, self.awaited_until)
        return self.window_closes if owing or awaits_learners else 0.0

    def has_aged(self, m: Member, steps: int) -> bool:
        """Whether an offer waits here while its learner has gone on for more than so many steps.

        And for more than half as many as the offer has: where all must be there at a time, some would else
        always be old.
        """
        if not self.has_given(m.learner) or self.phase is Phase.MERGING:
            return False
        offer, now = self.arrived[m.learner], m.counters[self.id.fragment]
        since = now.steps - self.known[m.learner]
        return now.version >= offer.version and since > max(1, steps, offer.steps // 2)

    def lacks(self, c: Contribution) -> bool:
        """Whether no offer of its learner is here, or an old one that it may replace."""
        return not self.has_given(c.learner) and (
            c.learner not in self.old or c.steps > self.arrived[c.learner].steps
        )

    def has_failed(self, m: Member) -> bool:
        """Whether the learner's offer failed, and it has not reported since."""
        return self.failed.get(m.learner) == (m.incarnation, m.reports)

    def start_over(self, live: Iterable[Member]) -> None:
        """Forgets its offers, none of which was merged; who is live is asked again after the next report."""
        for m in live:
            if m.learner in self.arrived:
                self.failed[m.learner] = (m.incarnation, m.reports)
                self.unasked.add(m.learner)
        self.refused.update({who: c.steps for who, c in self.arrived.items()})
        self.arrived.clear()
        self.known.clear()
        self.departed.clear()
        self.old.clear()
        self.left_out = ()
        self.left_owing.clear()
        self.began = None
        self.phase = Phase.GATHERING

    def refusal(self) -> actions.Record:
        """What the metrics say of a merge that made no version."""
        values = {"step": self.id.step, "fragment": self.id.fragment, "left_out": sorted(self.arrived)}
        return actions.Record("round_refused", values)

    def published(self, live: int, now: float) -> actions.Published:
        """Its end, and what is worth knowing of it; `live`: how many learners are."""
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
