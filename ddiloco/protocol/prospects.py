"""What rounds can still hope for, from where the live learners stand."""

from __future__ import annotations

from collections.abc import Collection

from ddiloco.protocol.membership import Member, Membership
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.round import Phase, Round


class Prospects:
    """Who may still give to a round, and whether it can be given up."""

    def __init__(self, policy: SyncPolicy, total_steps: int | None, members: Membership) -> None:
        self._quorum = policy.quorum
        self._total_steps = total_steps
        self._members = members

    def done(self, m: Member) -> bool:
        """Whether a learner has reached the last step."""
        return self._total_steps is not None and m.step >= self._total_steps

    def all_done(self) -> bool:
        """Whether there are live learners, and all of them have reached the last step."""
        if self._total_steps is None or not self._members.count:
            return False
        return self._members.come_to(self._total_steps) == self._members.count

    def is_stuck(self, rounds: Collection[Round]) -> bool:
        """Whether learners that are done have nothing for any open round."""
        if self._quorum is None or self._total_steps is None or not rounds:
            return False
        if not self._members.come_to(self._total_steps):
            return False
        return all(r.phase is Phase.GATHERING and not self._may_gain(r) for r in rounds)

    def nobody_owes(self, r: Round) -> bool:
        """Whether all live learners have given what they have; begins with the one that last had not."""
        live = self._members.live()
        while r.settled < len(live) and not self._owes(live[r.settled], r):
            r.settled += 1
        if r.settled < len(live):
            return False
        r.settled = next((i for i, m in enumerate(live) if self._owes(m, r)), len(live))
        return r.settled == len(live)

    def may_go_on(self, r: Round) -> bool:
        """Whether the round has something to wait for or to do; learners may wait for those after it."""
        return (
            r.phase is not Phase.GATHERING
            or bool(r.arrived)
            or any(
                m.step < r.id.step or not m.counters or m.has_work(r.id.fragment, r.version)
                for m in self._members.live()
            )
        )

    def may_complete(self, r: Round) -> bool:
        """Whether learners that are all done have enough to give."""
        owing = sum(self._owes(m, r) for m in self._members.live())
        return len(r.arrived) + owing >= (self._quorum or 1)

    def _owes(self, m: Member, r: Round) -> bool:
        """Whether a learner that is there has something to give that is not here."""
        return m.learner not in r.arrived and m.has_work(r.id.fragment, r.version) and not r.has_failed(m)

    def _may_gain(self, r: Round) -> bool:
        """Whether a learner at the round's step has given or still may."""
        return bool(r.arrived) or any(
            m.step >= r.id.step
            and (not self.done(m) or not m.counters or m.has_work(r.id.fragment, r.version))
            for m in self._members.live()
        )
