"""A syncer of several processes: one authority over learners, and parts that each merge some fragments.

    learner --join, ready, report--> authority --news--> every part
    learner <--welcome, question, update-- part <--offer-- learner
    part --words--> authority

Messages between authority and parts keep their order; nothing else need. `SyncerCore` is the same with one
part in one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ddiloco.protocol import actions, events, news
from ddiloco.protocol.membership import Member, Membership, State
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.round import Round
from ddiloco.protocol.rounds import Rounds
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import Knowing

Said = list[actions.SyncerAction | news.Word]


@dataclasses.dataclass(frozen=True)
class FromPart:
    """The word of a part, as it comes to the authority."""

    part: int
    word: news.Word


@dataclasses.dataclass(frozen=True)
class PartConnected:
    """A part has a new connection to the authority."""

    part: int


@dataclasses.dataclass(frozen=True)
class ToPart:
    """News of the authority for one part; None: for every one."""

    part: int | None
    news: news.News


class AuthorityCore(Knowing):
    """The authority's process: decides for a syncer of many processes, as `SyncerCore` does for one."""

    def handle(
        self, event: events.FromLearner | events.Timeout | FromPart | PartConnected, now: float
    ) -> list[actions.SyncerAction | ToPart]:
        """Takes one event, returns what follows, in order; `now` is in seconds and never falls."""
        out: list[actions.SyncerAction | ToPart] = []
        match event:
            case FromPart(part, word):
                out += _addressed(self._authority.hear(word, part), part)
            case PartConnected(part):
                out += _addressed(self._authority.connected(part), part)
            case events.Timeout():
                pass
            case _:
                out += _addressed(self._authority.handle(event, now))
        out += _addressed(self._authority.mark_silent(now))
        return out + _addressed(self._authority.conclude(now))

    def next_deadline(self) -> float | None:
        """When to send it a Timeout, in the seconds of `now`; None if only an event can change anything."""
        return self._authority.next_deadline()


def _addressed(
    said: Sequence[actions.SyncerAction | news.News], part: int | None = None
) -> list[actions.SyncerAction | ToPart]:
    return [ToPart(part, one) if isinstance(one, news.News) else one for one in said]


class Part:
    """One part's process: the rounds of its fragments, and the learners that the authority reports."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        state: SyncerState,
        fragments: Iterable[int],
        lineage: int = 0,
    ) -> None:
        """`state`: what is durable of its fragments; the rest of it is ignored."""
        self.policy = policy
        self.lineage = lineage
        self._members = Membership(range(policy.num_fragments))
        self._rounds = Rounds(policy, total_steps, state, self._members, fragments, lineage)

    @property
    def merged(self) -> SyncerState:
        """What was merged of its fragments, as far as the authority knows of it."""
        return self._rounds.merged

    @property
    def durable(self) -> SyncerState:
        """The same, with what is durable and on its way to the authority."""
        state = self.merged
        for r in self._rounds.open:
            if r.committed:
                state = state.after(r.id, self.lineage, r.given)
        return state

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds in flight, to look at."""
        return self._rounds.open

    @property
    def versions(self) -> tuple[int, ...]:
        """By fragment; of those that are not its own they say nothing."""
        return self._rounds.merged.versions

    @property
    def step(self) -> int:
        """The newest global step of which it has merged a round."""
        return self._rounds.merged.step

    @property
    def unnoted(self) -> bool:
        """Whether a merge is durable that the authority has not answered for."""
        return any(r.committed for r in self._rounds.open)

    def handle(
        self,
        event: events.FragmentArrived
        | events.OfferFailed
        | events.MergeFinished
        | events.Timeout
        | news.News,
        now: float,
    ) -> Said:
        """Takes what concerns its rounds, and the news of the authority."""
        out = self._handle(event, now)
        return out + [said for offer in self._rounds.no_longer_early() for said in self._handle(offer, now)]

    def _handle(self, event: Any, now: float) -> Said:
        match event:
            case news.RollCall():
                known: Said = [*self._rounds.committed()]
                for m in self._members.present():  # no round goes on without them before the roll is over
                    left = news.Left(m.learner, m.incarnation, gone=True)
                    self._follow(left, now)
                    known += self._rounds.hear(left, now)
                return [*known, *self._rounds.advance(now)]
            case events.Timeout():
                return self._rounds.advance(now)
            case events.FragmentArrived() | events.OfferFailed() | events.MergeFinished():
                return [*self._rounds.handle(event, now), *self._rounds.advance(now)]
        self._follow(event, now)
        return [*self._rounds.hear(event, now), *self._rounds.advance(now)]

    def next_deadline(self) -> float | None:
        """When to send a Timeout, in the seconds of `now`; None if only an event can change anything."""
        return self._rounds.next_deadline()

    def _follow(self, message: news.News, now: float) -> None:
        """Keeps its members as the authority has them."""
        members = self._members
        match message:
            case news.Admitted(learner, incarnation):
                if members.current(learner, incarnation) is None:
                    members.admit(Member(learner, incarnation, heard_at=now))
            case news.Begun(learner, incarnation, step, versions):
                m = members.current(learner, incarnation) or members.admit(Member(learner, incarnation, now))
                members.begin(m, step, versions)
            case news.Heard(report, step_time):
                m = self._member(report.learner)
                if report.step > m.step:
                    m.reported_at = now
                if step_time is not None:  # else of an authority that has yet to measure it
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
