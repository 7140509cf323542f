"""A syncer of several processes: one authority over learners, and parts that each merge some fragments.

    learner --join, ready, report--> authority --news--> every part
    learner <--welcome, question, update-- part <--offer-- learner
    part --words--> authority

Messages between authority and parts keep their order; nothing else need. `SyncerCore` is the same with one
part in one process.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddiloco.protocol import actions, events, news
from ddiloco.protocol.membership import Member, Membership, State
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.rounds import Rounds
from ddiloco.protocol.state import SyncerState

Said = list[actions.SyncerAction | news.Word]


def fragments_of(part: int, parts: int, num_fragments: int) -> tuple[int, ...]:
    """Fragment p belongs to part p mod S."""
    return tuple(range(part, num_fragments, parts))


class Part:
    """One part's process: the rounds of its fragments, and learners as the authority tells of them."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        state: SyncerState,
        fragments: Iterable[int],
        lineage: int = 0,
    ) -> None:
        """`state`: what is durable of its fragments; of others it may say anything."""
        self.lineage = lineage
        self._members = Membership()
        self._rounds = Rounds(policy, total_steps, state, self._members, fragments, lineage)

    @property
    def merged(self) -> SyncerState:
        """What was merged of its fragments, as far as the authority knows of it."""
        return self._rounds.merged

    def connected(self, now: float) -> Said:
        """Begins with a new connection to the authority, which then has a roll call for it."""
        out: Said = []
        for m in self._members.present():  # a round that waited for it may go on
            out += self.hear(news.Left(m.learner, m.incarnation, gone=True), now)
        return [*out, *self._rounds.committed()]

    def handle(
        self,
        event: events.FragmentArrived | events.OfferFailed | events.MergeFinished | events.Timeout,
        now: float,
    ) -> Said:
        """Takes what concerns its rounds."""
        out = [] if isinstance(event, events.Timeout) else self._rounds.handle(event, now)
        return [*out, *self._rounds.advance(now)]

    def hear(self, told: news.News, now: float) -> Said:
        """Takes the news of the authority."""
        self._follow(told, now)
        return [*self._rounds.hear(told, now), *self._rounds.advance(now)]

    def next_deadline(self) -> float | None:
        """When to send a Timeout, in the seconds of `now`; None if only an event can change anything."""
        return self._rounds.next_deadline()

    def _follow(self, told: news.News, now: float) -> None:
        """Keeps its members as the authority has them."""
        members = self._members
        match told:
            case news.Admitted(learner, incarnation):
                members.admit(Member(learner, incarnation, heard_at=now))
            case news.Begun(learner, incarnation, step, versions):
                m = members.current(learner, incarnation) or members.admit(Member(learner, incarnation, now))
                members.begin(m, step, versions)
            case news.Heard(report, step_time):
                m = self._member(report.learner)
                if report.step > m.step:
                    m.reported_at = now
                m.step_time.value = step_time
                members.take(m, report)
            case news.Left(learner, _, gone):
                m = self._member(learner)
                members.move(m, State.GONE if gone else State.SILENT)
                m.reported_at = None
            case news.Returned(learner):
                members.move(self._member(learner), State.LIVE)

    def _member(self, learner: int) -> Member:
        m = self._members.newest(learner)
        assert m is not None, "the authority has told of it before"
        return m
