"""Whether rounds have, or can still get, a quorum, given the clocks of the live learners."""

from __future__ import annotations

from collections.abc import Collection

from ddiloco.protocol.membership import Member, Membership
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.round import Phase, Round
from ddiloco.protocol.schedule import Schedule

MAX_TRIES = 4  # of an offer, once all learners are done


class Prospects:
    """Whether a round has its quorum, which learners may still contribute, and when to abandon it.

    Attributes:
      policy, schedule: the settings of synchronisation, which may change, and when fragments are due.
      awaits_learners: while True, known learners may still (re)connect: rounds are neither abandoned nor
        merged with quorum=None, and departed learners do not count.
      waits_until: when rounds continue without any live learner; None: there is one.
    """

    def __init__(self, policy: SyncPolicy, schedule: Schedule, members: Membership) -> None:
        self.awaits_learners = False
        self.waits_until: float | None = None
        self._timeout = policy.silence_timeout
        self.policy, self.schedule = policy, schedule
        self._nobody_waits = policy.max_run_ahead is None
        self._total_steps = schedule.last
        self._members = members

    def somebody_came(self) -> None:
        """A learner has joined; the first does not merge alone until all known learners are present."""
        self.awaits_learners |= self._members.count == 1
        self.waits_until = None

    def somebody_left(self, now: float) -> None:
        """A learner has left. If it was the last, as after a network failure, all may soon reconnect."""
        if not self._members.count:
            self.awaits_learners, self.waits_until = True, now + self._timeout

    def all_present(self) -> None:
        """All known learners are present; if all have left meanwhile, the wait for them continues."""
        self.awaits_learners = self.waits_until is not None

    def waited_enough(self, now: float) -> bool:
        """Whether the wait for a first learner is over."""
        if self.waits_until is None or now < self.waits_until:
            return False
        self.awaits_learners, self.waits_until = False, None
        return True

    def done(self, m: Member) -> bool:
        """Whether a learner has reached the last step."""
        return self._total_steps is not None and m.step >= self._total_steps

    def hopeless(self, rounds: Collection[Round]) -> list[Round]:
        """The rounds that can no longer get a quorum; none before all live learners are done."""
        if self._total_steps is None or not self._members.count or self.awaits_learners:
            return []
        if self._members.come_to(self._total_steps) < self._members.count:
            return []
        if any(m.report is None for m in self._members.live()):  # one has not reported yet
            return []
        return [r for r in rounds if r.phase is Phase.GATHERING and not self._may_complete(r)]

    def has_quorum(self, r: Round, front: int) -> bool:
        """Whether the offers of enough learners that have reached the round's step have arrived."""
        if self.policy.quorum is not None:
            if r.counted < self.policy.quorum or self._awaits_others(r):
                return False
            departed = 0 if self.awaits_learners else len(r.departed)  # else they may return
            return len(r.at_step) + departed >= self.policy.quorum
        if self.awaits_learners or not r.arrived or front < r.id.step:
            return False
        return self._nobody_owes(r)

    def too_late(self, due: RoundId, front: int) -> bool:
        """Whether a quorum has reached the fragment's next round; never where learners wait for updates."""
        enough = self._members.count >= self.policy.min_quorum
        return enough and front >= self.schedule.next_due(due.fragment, due.step) and self._nobody_waits

    def is_stuck(self, rounds: Collection[Round]) -> bool:
        """Whether no open round can gain from the learners that are done."""
        if self.policy.quorum is None or self._total_steps is None or not rounds:
            return False
        if not self._members.come_to(self._total_steps):
            return False
        return all(r.phase is Phase.GATHERING and not self._may_gain(r) for r in rounds)

    def _nobody_owes(self, r: Round) -> bool:
        """Whether no live learner owes an offer; begins with the one that last owed."""
        live = self._members.live()
        while r.settled < len(live) and not self._owes(live[r.settled], r):
            r.settled += 1
        if r.settled < len(live):
            return False
        r.settled = next((i for i, m in enumerate(live) if self._owes(m, r)), len(live))
        return r.settled == len(live)

    def _awaits_others(self, r: Round) -> bool:
        """Whether all offers are of learners that this round left out before, and another one may offer.

        So a fast learner whose offers are always left out does not keep out the work of others.
        """
        if not self._nobody_waits or not r.refused or r.arrived.keys() - r.refused.keys():
            return False
        others = (m for m in self._members.live() if m.learner not in r.refused.keys() | r.failed.keys())
        return any(self.may_give(m, r) for m in others)

    def _may_complete(self, r: Round) -> bool:
        """Whether learners that are all done have enough offers left."""
        able = sum(not r.has_given(m.learner) and self._has_left(m, r) for m in self._members.live())
        return r.counted + able >= self.policy.min_quorum

    def _owes(self, m: Member, r: Round) -> bool:
        """Whether a live learner has work to offer, or has not reported yet."""
        may = self.may_hold(m, r) and not r.has_failed(m)
        return not r.has_given(m.learner) and (may or m.report is None)

    def _has_left(self, m: Member, r: Round) -> bool:
        """Whether a learner that is done has work that was neither left out nor failed too often."""
        if self._unreported(m, r):
            return True
        left = m.steps_on(r.id.fragment, r.version) > r.refused.get(m.learner, 0)
        return left and r.tries[m.learner] < MAX_TRIES

    def _unreported(self, m: Member, r: Round) -> bool:
        """Whether a learner has yet to report its work: its first or, once done, on the newest version."""
        version = m.version(r.id.fragment)
        behind = version is not None and self.done(m) and version < r.version
        return version is None or (behind and r.tries[m.learner] < MAX_TRIES)

    def may_hold(self, m: Member, r: Round) -> bool:
        """Whether a learner has work on the round's version, as far as its reports tell."""
        return self._unreported(m, r) or m.has_work(r.id.fragment, r.version)

    def _may_gain(self, r: Round) -> bool:
        """Whether a learner at the round's step has offered or still may, and enough live ones still may."""
        able = [m for m in self._members.live() if not r.has_given(m.learner) and self.may_give(m, r)]
        few = r.counted + len(able) < self.policy.min_quorum
        if few and self._members.count >= self.policy.min_quorum:  # else others may join
            return False
        return bool(r.arrived) or any(m.step >= r.id.step for m in able)

    def may_give(self, m: Member, r: Round) -> bool:
        """Whether a learner still steps or has work left to offer; assumed before its first report."""
        return not self.done(m) or self.may_hold(m, r)
