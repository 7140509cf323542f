"""Offers that were reported as made: until when each is waited for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from ddiloco.protocol.membership import Asked, Member
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.policy import ALLOWANCE
from ddiloco.protocol.round import Round


class Overdue:
    """A heap of deadlines; those of offers that have come or are no longer owed are passed over."""

    def __init__(self, timeout: float, num_fragments: int) -> None:
        """`timeout`: seconds from the report that says that an offer was made, beside what bytes take."""
        self._timeout, self._num_fragments = timeout, num_fragments
        self._deadlines: list[tuple[float, RoundId, int]] = []

    def expect(self, r: Round, m: Member, asked: Asked, now: float) -> None:
        """From now on an offer that was reported may be on its way, for so long."""
        if m.has_work(r.id.fragment, r.version):
            in_the_making = m.step_time.value or 0.0  # it may have been asked in mid-step
            # Its share of a welcome, or what its offers took: who came back to another syncer got none.
            on_its_way = max(m.welcome_seconds / self._num_fragments, m.delivery.value or 0.0)
            asked.expires = now + in_the_making + self._timeout + ALLOWANCE * on_its_way
            heapq.heappush(self._deadlines, (asked.expires, r.id, m.learner))

    def next(self, rounds: Mapping[int, Round]) -> float | None:
        """When the next offer is given up, in the seconds of `now`; `rounds`: the open ones, by fragment."""
        while self._deadlines:
            expires, which, learner = self._deadlines[0]
            r = rounds.get(which.fragment)
            asked = r.owed.get(learner) if r is not None and r.id == which else None
            if asked is not None and asked.expires == expires:
                return expires
            heapq.heappop(self._deadlines)
        return None

    def take(self, rounds: Mapping[int, Round], now: float) -> Iterator[tuple[Round, int]]:
        """The rounds and learners whose offers are to be given up now."""
        while (first := self.next(rounds)) is not None and now >= first:
            _, which, learner = heapq.heappop(self._deadlines)
            if now > first + self._timeout / 4:  # this process stood still itself, and offers may have come
                asked = rounds[which.fragment].owed[learner]
                asked.expires = now + self._timeout / 4
                heapq.heappush(self._deadlines, (asked.expires, which, learner))
            else:
                yield rounds[which.fragment], learner
