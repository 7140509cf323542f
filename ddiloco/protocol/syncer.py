"""The syncer's side of the protocol: offers, quorum, grace window, merge, broadcast."""

from __future__ import annotations

import dataclasses

from ddiloco.protocol import actions, events
from ddiloco.protocol.asking import Asking
from ddiloco.protocol.attendance import Attendance
from ddiloco.protocol.clocks import VectorClock
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.estimates import MovingAverage, grace, slack
from ddiloco.protocol.membership import Member
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.rounds import Phase, Round
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.state import SyncerState

Actions = list[actions.SyncerAction]


class SyncerCore:
    """Decides for the syncer; starts no thread, reads no clock, touches no array.

    A round (step, fragment) opens before a quorum of learners comes to the step, so that each can be asked in
    time for what it is to offer; `Asking` knows when, and `Attendance` who is live. Rounds open in the order
    of the schedule, of different fragments; at most tau (at least one) are due and not merged.

    With the `state` of one that crashed it continues from there: it knows what was merged, so no round is
    merged twice, and no learner is a member until it rejoins.

    Raises:
      LocalProtocolError: the state is of another number of fragments.
    """

    def __init__(
        self, policy: SyncPolicy, total_steps: int | None = None, state: SyncerState | None = None
    ) -> None:
        self.policy = policy
        self.schedule = Schedule(policy.num_fragments, policy.interval)
        self.total_steps = total_steps
        self.finished = False
        self._merged = state or SyncerState.initial(policy.num_fragments)
        self._merged.check(policy.num_fragments)
        self._attendance = Attendance(policy, total_steps, self._merged)
        self._rounds: list[Round] = []
        self._next = self._due_from(min(self._merged.merged_steps) + 1, 0)
        self._called: set[tuple[int, int]] = set()  # (learner, incarnation) told to end with the others
        self._sync_time = MovingAverage()
        self._asking = Asking(policy)

    # What a driver calls.

    def handle(self, event: events.SyncerEvent, now: float) -> Actions:
        """Takes one event, returns the actions that follow, in order; `now` is in seconds and never falls.

        Raises:
          LocalProtocolError: a merge finished that was not under way.
        """
        match event:
            case events.LearnerJoined():
                out = self._attendance.joined(event, self._merged, now)
            case events.LearnerReady():
                out = self._attendance.ready(event, self._merged, now)
            case events.LearnerLost():
                out = self._attendance.lost(event)
            case events.StepReported():
                out = self._attendance.reported(event.report, self._merged, now)
            case events.FragmentArrived():
                out = self._fragment_arrived(event, now)
            case events.OfferFailed():
                out = self._offer_failed(event)
            case events.MergeFinished():
                out = self._merge_finished(event, now)
            case events.Timeout():
                out = []
        return [*out, *self._attendance.mark_silent(now), *self._advance(now)]

    def next_deadline(self) -> float | None:
        """When to send a Timeout, in the seconds of `now`; None if only an event can change anything."""
        times = [r.deadline for r in self._rounds if r.deadline is not None]
        times += [a.due for r in self._rounds for a in r.owed.values() if a.due is not None]
        return min([*times, *self._attendance.deadlines()], default=None)

    def state(self) -> SyncerState:
        """What must survive a crash, as of now; `state().after(round)` is what a merge leaves."""
        return dataclasses.replace(self._merged, incarnations=self._attendance.incarnations())

    @property
    def step(self) -> int:
        """The newest global step of which a round was merged."""
        return self._merged.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return self._merged.versions

    @property
    def merged_steps(self) -> tuple[int, ...]:
        """By fragment, the global step of the round that made its version."""
        return self._merged.merged_steps

    @property
    def vector_clock(self) -> VectorClock:
        """What the syncer's state follows from: what was merged, and what learners have reported."""
        versions = {p: version for p, version in enumerate(self.versions) if version}
        return VectorClock(self._attendance.steps(), versions)

    @property
    def live(self) -> tuple[int, ...]:
        """The learners that count towards a quorum."""
        return tuple(m.learner for m in self._attendance.live())

    # Rounds: ask, gather, wait for a grace window, merge, broadcast.

    def _advance(self, now: float) -> Actions:
        """Moves every round as far as it can go, and opens those whose turn has come."""
        self._asking.front.move(self._front(), now)
        out = self._forget_owed(now)
        before = None
        while before != (before := self._progress()):
            out += self._open_rounds()
            out += self._move_rounds(now)
            out += self._call_the_rest()
            out += self._abandon_and_finish()
        return out + self._asking.ask(self._rounds, self._attendance.live(), now)

    def _progress(self) -> tuple[RoundId | None, bool, list[tuple[RoundId, Phase]]]:
        """Changes whenever a round opens, moves or ends."""
        return (self._next, self.finished, [(r.id, r.phase) for r in self._rounds])

    def _open_rounds(self) -> Actions:
        out: Actions = []
        live, front = self._attendance.live(), self._asking.front.step
        furthest, most = self._asking.furthest(live), max(1, self.policy.overlap)
        while (due := self._next) is not None and live and due.step <= furthest:
            if any(r.id.fragment == due.fragment for r in self._rounds):
                break
            if self._too_late(due):
                out.append(actions.Record("round_skipped", {"step": due.step, "fragment": due.fragment}))
            elif sum(r.id.step <= front and self._may_go_on(r) for r in self._rounds) < most:
                self._rounds.append(Round(due, self.versions[due.fragment]))
            else:
                break
            self._next = self._due_from(due.step, due.fragment + 1)
        return out

    def _move_rounds(self, now: float) -> Actions:
        out: Actions = []
        for r in self._rounds:
            if r.began is None and any(m.step >= r.id.step for m in self._attendance.live()):
                r.began = now
            if r.phase is Phase.GATHERING and self._has_quorum(r):
                out += self._start_grace(r, now)
            if r.phase is Phase.GRACE and r.complete(now):
                r.phase, r.deadline = Phase.READY, None
            if r.phase is Phase.READY:
                out += self._merge(r, now)
        return out

    def _has_quorum(self, r: Round) -> bool:
        """Whether enough learners have come to the round's step, and enough offers are here."""
        live = self._attendance.live()
        if self.policy.quorum is None:
            all_here = all(m.step >= r.id.step and not self._owes(m, r) for m in live)
            return bool(r.arrived) and all_here and not self._attendance.gathering
        steps = {m.learner: m.step for m in live}
        there = [who for who in {*steps, *r.arrived} if steps.get(who, r.id.step) >= r.id.step]
        return min(len(there), len(r.arrived)) >= self.policy.quorum

    def _owes(self, m: Member, r: Round) -> bool:
        """Whether a learner that is there has something to give that is not here."""
        return m.learner not in r.arrived and self._has_work(m, r) and not r.has_failed(m)

    def _start_grace(self, r: Round, now: float) -> Actions:
        """Opens the window; learners that are later than was foreseen offer what they have."""
        r.phase = Phase.GRACE
        r.quorum_seconds = now - (r.began if r.began is not None else now)
        r.grace_began = now
        r.deadline = now + self._grace_window(r)
        return self._asking.ask_late(r, self._attendance.live()) if r.deadline > now else []

    def _merge(self, r: Round, now: float) -> Actions:
        for who, c in list(r.arrived.items()):  # what a long wait has made old is asked for again
            m = self._attendance.current(who, c.incarnation)
            if m is not None and self._has_work(m, r):
                trained_on = m.counters[r.id.fragment].steps - c.steps
                if trained_on > max(1, self.policy.interval // 2):
                    del r.arrived[who]
        if not self._has_quorum(r):
            r.phase = Phase.GATHERING
            return []
        if sum(other.phase is Phase.MERGING for other in self._rounds) >= max(1, self.policy.overlap):
            return []
        r.phase = Phase.MERGING
        r.grace_seconds = now - r.grace_began
        r.merging_since = now
        self._asking.merging(r, self._attendance.live(), now)
        contributions = tuple(r.arrived[learner] for learner in sorted(r.arrived))
        return [actions.Merge(r.id, r.version + 1, contributions)]

    def _merge_finished(self, event: events.MergeFinished, now: float) -> Actions:
        r = self._find(event.round)
        if r is None or r.phase is not Phase.MERGING:
            raise LocalProtocolError(f"{event.round} finished merging, but was not being merged")
        self._rounds.remove(r)
        self._merged = self._merged.after(r.id)
        self._sync_time.add(now - r.merging_since)
        given = [r.arrived[learner] for learner in sorted(r.arrived) if learner not in event.left_out]
        return [
            *self._attendance.broadcast(r.id.fragment, self._merged, given, now),
            self._round_record(r, given, now),
        ]

    def _call_the_rest(self) -> Actions:
        """Has slower learners give what they have when those that are done have nothing for any open round.

        Updates have replaced the last work of those; they would wait while the slowest trains on alone.
        """
        if self.policy.quorum is None or self.total_steps is None:
            return []
        if not any(map(self._attendance.done, self._attendance.live())):
            return []
        if not self._rounds or any(r.phase is not Phase.GATHERING or self._may_gain(r) for r in self._rounds):
            return []
        rest = tuple(who for who in self._behind(self.total_steps) if who not in self._called)
        self._called |= set(rest)
        return [actions.Tell(rest, events.ClockSet(self.total_steps))] if rest else []

    def _abandon_and_finish(self) -> Actions:
        """Once all live learners are done, gives up rounds that lack a quorum; then the run finishes."""
        live = self._attendance.live()
        if self.finished or self.total_steps is None or not live or self._attendance.gathering:
            return []
        if not all(map(self._attendance.done, live)):
            return []
        hopeless = [r for r in self._rounds if r.phase is Phase.GATHERING and not self._may_complete(r)]
        out: Actions = [
            actions.Record("round_abandoned", {"step": r.id.step, "fragment": r.id.fragment})
            for r in hopeless
        ]
        self._rounds = [r for r in self._rounds if r not in hopeless]
        if not self._rounds and self._next is None:
            self.finished = True
            out.append(actions.Finish())
        return out

    # Arrivals.

    def _fragment_arrived(self, event: events.FragmentArrived, now: float) -> Actions:
        c = event.contribution
        r = self._find(event.round)
        m = self._attendance.current(c.learner, c.incarnation)
        if m is not None:
            self._asking.arrived(m, c, now)
        if r is None or m is None or not self._welcomes(r, c):
            return [actions.Drop(c.learner, "unexpected fragment", event.round)]
        r.owed.pop(c.learner, None)
        if c.fragment != r.id.fragment or c.version != r.version or c.steps < 1 or c.tokens < 0:
            r.failed[c.learner] = (m.incarnation, m.reports)
            return [actions.Drop(c.learner, "stale fragment", r.id)]
        if not m.can_have(c):
            r.failed[c.learner] = (m.incarnation, m.reports)
            return [actions.Drop(c.learner, "more work than it reported", r.id)]
        r.arrived[c.learner] = c
        return []

    def _welcomes(self, r: Round, c: Contribution) -> bool:
        """Whether a fragment was asked for and can still be merged; it may be late, as over a slow link."""
        who = (c.learner, c.incarnation)
        asked = who in r.asked and self._attendance.is_live(*who)
        return asked and r.phase is not Phase.MERGING and c.learner not in r.arrived

    def _offer_failed(self, event: events.OfferFailed) -> Actions:
        r = self._find(event.round)
        m = self._attendance.current(event.learner, event.incarnation)
        if r is None or m is None or event.learner not in r.owed:
            return []
        del r.owed[event.learner]
        r.failed[event.learner] = (m.incarnation, m.reports)
        return [actions.Drop(event.learner, event.reason, r.id)]

    # Questions.

    def _has_work(self, m: Member, r: Round) -> bool:
        if not m.counters:
            return False
        counters = m.counters[r.id.fragment]
        return counters.version == r.version and counters.steps > 0

    def _may_gain(self, r: Round) -> bool:
        """Whether a learner at the round's step has given or still may."""
        return bool(r.arrived) or any(
            m.step >= r.id.step and (not self._attendance.done(m) or not m.counters or self._has_work(m, r))
            for m in self._attendance.live()
        )

    def _may_go_on(self, r: Round) -> bool:
        """Whether the round has something to wait for or to do; learners may wait for those after it."""
        return (
            r.phase is not Phase.GATHERING
            or bool(r.arrived)
            or any(
                m.step < r.id.step or not m.counters or self._has_work(m, r) for m in self._attendance.live()
            )
        )

    def _may_complete(self, r: Round) -> bool:
        """Whether learners that are all done have enough to give."""
        owing = sum(self._owes(m, r) for m in self._attendance.live())
        return len(r.arrived) + owing >= (self.policy.quorum or 1)

    def _behind(self, step: int) -> tuple[tuple[int, int], ...]:
        """(learner, incarnation) of the live learners that have yet to reach a step."""
        return tuple((m.learner, m.incarnation) for m in self._attendance.live() if m.step < step)

    def _grace_window(self, r: Round) -> float:
        """Seconds, by the fastest live learner's steps: it would be the first to miss the update."""
        known = [m.step_time.value for m in self._attendance.live() if m.step_time.value is not None]
        if not known or self.policy.quorum is None:
            return 0.0
        step_time = min(known)
        spare = slack(self.policy.overlap, step_time, r.quorum_seconds, self._sync_time.value or 0.0)
        return grace(self.policy.gamma, spare, self.policy.max_grace * step_time)

    def _front(self) -> int:
        """The step that enough live learners for a quorum have reached; all of them, if there are too few."""
        steps = sorted((m.step for m in self._attendance.live()), reverse=True)
        if not steps:
            return 0
        return steps[-1] if self.policy.quorum is None else steps[: self.policy.quorum][-1]

    def _too_late(self, due: RoundId) -> bool:
        """Whether the fragment's next turn has come for a whole quorum; never where learners wait."""
        enough = len(self._attendance.live()) >= (self.policy.quorum or 1)
        next_turn = due.step + self.policy.interval
        return self.policy.max_run_ahead is None and enough and self._asking.front.step >= next_turn

    def _due_from(self, step: int, fragment: int) -> RoundId | None:
        """The first round of the schedule, from this one on, that has not been merged."""
        while self.total_steps is None or step <= self.total_steps:
            for due in self.schedule.due(step):
                if due >= fragment and step > self.merged_steps[due]:
                    return RoundId(step, due)
            step, fragment = step + 1, 0
        return None

    def _find(self, round_id: RoundId) -> Round | None:
        return next((r for r in self._rounds if r.id == round_id), None)

    def _forget_owed(self, now: float) -> Actions:
        """Stops waiting for learners that have gone or fallen silent, and for offers that do not come."""
        out: Actions = []
        for r in self._rounds:
            for learner, asked in list(r.owed.items()):
                m = self._attendance.current(learner, asked.incarnation)
                if m is None or not self._attendance.is_live(learner, asked.incarnation):
                    del r.owed[learner]
                elif asked.due is None and m.step >= asked.clock and self._has_work(m, r):
                    in_the_making = m.step_time.value or 0.0  # it may have been asked in mid-step
                    asked.due = now + in_the_making + self.policy.offer_timeout
                elif asked.due is not None and now >= asked.due:
                    del r.owed[learner]
                    r.failed[learner] = (m.incarnation, m.reports)
                    out.append(actions.Drop(learner, "offer timed out", r.id))
        return out

    def _round_record(self, r: Round, given: list[Contribution], now: float) -> actions.Record:
        merged = [c.learner for c in given]
        left_out = sorted(set(r.arrived) - set(merged))
        return actions.Record(
            "round",
            {
                "step": r.id.step,
                "fragment": r.id.fragment,
                "version": self.versions[r.id.fragment],
                "quorum": len(given),
                "learners": merged,
                "live": len(self._attendance.live()),
                "tokens": sum(c.tokens for c in given),
                "contributions": [c.brief for c in given],
                "quorum_seconds": r.quorum_seconds,
                "grace_seconds": r.grace_seconds,
                "sync_seconds": now - r.merging_since,
                **({"left_out": left_out} if left_out else {}),
            },
        )
