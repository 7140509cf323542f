"""Membership of learners: incarnations, clocks, silence and the end of the run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.membership import MAX_LEARNERS, Member, Membership, MemberState
from ddiloco.protocol.messages import Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.report_validator import ReportValidator
from ddiloco.protocol.rounds import Rounds
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.work import goes_on_after

Actions = list[actions.SyncerAction]

TAKEN = "the number of a live learner"
TOO_EARLY = "a step too far ahead of the other learners"
DRAWN_AGAIN = "rejoined before data that are merged"

MAX_INCARNATIONS = 1 << 62
"""Incarnations are below it, so that there is always a next one."""


class Authority:
    """The syncer's half for membership; it notifies the other half, `Rounds`, of changes."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        state: SyncerState,
        members: Membership,
        validator: ReportValidator,
        rounds: Rounds,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """`state`: the syncer's initial state."""
        self._shard, self._shards = shard, shards
        self.policy, self.total_steps = policy, total_steps
        self.members = members
        self.finished = False
        self._rounds, self._validator = rounds, validator
        # If merges need all learners, the first merge needs all initial ones, however late. And learners of
        # before a restart still hold work: the first to rejoin must not end the run or merge alone.
        starts = policy.quorum is None and not state.step
        self._not_yet = {learner for learner, _ in state.incarnations}
        self._not_yet |= set(range(policy.num_learners)) if starts else set()
        self._wait_until = 0.0  # until when to wait for those, once one learner is live
        self._kept_back: dict[int, Report] = {}  # by learner, reports that are too early so far
        self._idle_since: float | None = None  # since when learners that are done cannot contribute
        self._called: set[tuple[int, int]] = set()  # (learner, incarnation) asked to end with the others
        self._quiet: list[tuple[float, int, int]] = []  # heap: since, learner, incarnation; may be outdated
        members.restore(state.incarnations, state.delays)

    def handle(self, event: events.FromLearner, now: float) -> Actions:
        """Handles an event of a learner."""
        match event:
            case events.LearnerJoined():
                return self._joined(event, now)
            case events.LearnerReady():
                return self._ready(event, now)
            case events.LearnerLost():
                return self._lost(event, now)
            case events.StepReported():
                return self._reported(event.report, now) + self._believed(now)

    def set_policy(self, policy: SyncPolicy) -> None:
        """Follows another policy."""
        self.policy = policy
        self._validator.set_policy(policy)

    def conclude(self, now: float) -> Actions:
        """Ends the run when all rounds are over."""
        last = self.total_steps
        if last is None or not (self._rounds.stuck or self._rounds.over):
            self._idle_since = None
            return self._call_back()
        since = self._idle_since = now if self._idle_since is None else self._idle_since
        return [*self._call_the_rest(last), *self._leave_behind(now - since, now), *self._finish(last)]

    def next_deadline(self) -> float | None:
        """When the next learner becomes silent without a message, in the seconds of `now`."""
        silent = self._quietest()
        times = [] if silent is None else [silent.quiet_since + self.policy.silence_timeout]
        if self._not_yet and self.members.count:
            times.append(self._wait_until)
        return min(times, default=None)

    # Joining and leaving.

    def _joined(self, event: events.LearnerJoined, now: float) -> Actions:
        """Admits an incarnation unless it has departed: with a welcome, or at once if it rejoins.

        While a learner's process sends messages, no other replaces it. A first join under an incarnation that
        is or was a member is of another process: that takes the next incarnation.
        """
        learner, incarnation = event.learner, event.incarnation
        if not 0 <= learner < MAX_LEARNERS:
            return [actions.Drop(learner, "learner number out of range")]
        if not 0 <= incarnation < MAX_INCARNATIONS:
            return [actions.Drop(learner, "incarnation out of range")]
        old = self.members.newest(learner)
        if old is not None and incarnation < old.incarnation:
            begins = old.state is MemberState.JOINING or self._is_at_some(old)
            if event.versions is None and begins and self._speaks(old, now):
                return [actions.Drop(learner, TAKEN)]  # else the two would replace each other forever
            return [self._replaced(old, incarnation)]
        if old is not None and self._speaks_for_itself(old, event, now):
            return [actions.Drop(learner, TAKEN)]
        if old is not None and incarnation == old.incarnation:
            if old.state is MemberState.JOINING:
                old.shards = event.shards
                return self._welcome_again(old, now)
            if old.state is not MemberState.GONE and event.versions is not None:
                return [actions.Drop(learner, "joined twice")]
            return [self.members.dismiss(learner, incarnation, self._shard)]
        ended = [] if old is None or old.state is MemberState.GONE else self._ends(old, "replaced", now)
        if self._validator.too_early(event, now):
            self.members.admit(Member(learner, incarnation, heard_at=now, state=MemberState.GONE))
            return [*ended, actions.Drop(learner, TOO_EARLY)]
        behind = self._is_behind(event)
        possible = not behind and self._validator.can_rejoin(event, now)
        m = self.members.admit(Member(learner, incarnation, heard_at=now, welcomed_at=now))
        m.shards = event.shards
        m.dismissed = self.members.was_dismissed(learner, incarnation)  # by a report that overtook this
        if possible:
            # One that went on from an earlier state counts its work anew, on the clock that it had then.
            m.counted_from = {p: at for p, at in m.counted_from.items() if at <= (event.step or 0)}
            return [*ended, *self._begin(m, event.step or 0, event.versions or (), now)]
        m.counted_from = dict.fromkeys(self.members.fragments, self._validator.merged.step)
        if event.versions is not None:
            m.goes_on = True
            never = "rejoined with an impossible step or versions"
            ended.append(actions.Drop(learner, DRAWN_AGAIN if behind else never))
        return [*ended, *self._rounds.admitted(m, now)]

    def _is_behind(self, event: events.LearnerJoined) -> bool:
        """Whether its data position is before data of another life that may be merged."""
        furthest = self._rounds.furthest(event.learner)
        if event.versions is None or furthest.life == event.life:
            return False
        return not goes_on_after(event.began, {mark.life: mark.steps for mark in event.left}, furthest)

    def _welcome_again(self, m: Member, now: float) -> Actions:
        """Sends a welcome again, in case it was lost; a large one may still be in transit."""
        m.heard_at = now
        if now < m.welcomed_at + self.policy.resend_timeout or self._shard in m.shards:
            return []
        m.welcomed_at = now
        return self._rounds.admitted(m, now)

    def _speaks_for_itself(self, m: Member, event: events.LearnerJoined, now: float) -> bool:
        """Whether another process holds the number and may not be replaced; a dismissed one may rejoin.

        A member of some shards only may be replaced, since another process may be a member of the rest.
        """
        itself = event.incarnation == m.incarnation + m.dismissed and event.versions is not None
        another = m.state is MemberState.JOINING and event.incarnation != m.incarnation
        alone = not self._is_at_some(m)
        present = m.state in (MemberState.LIVE, MemberState.SILENT)  # a silent one may repeat its report
        return (present or another) and not itself and alone and self._speaks(m, now)

    def _is_at_some(self, m: Member) -> bool:
        """Whether a present learner is, by its own report, a member of some shards but not of all."""
        return m.state is not MemberState.GONE and 0 < len(m.shards) < self._shards

    def _speaks(self, m: Member, now: float) -> bool:
        return now < m.heard_at + 1.5 * self.policy.heartbeat

    def _ready(self, event: events.LearnerReady, now: float) -> Actions:
        """Makes a welcomed learner live."""
        m = self.members.current(event.learner, event.incarnation)
        if (
            m is None
            or m.state is not MemberState.JOINING
            or len(event.versions) != len(self.members.fragments)
        ):
            return [actions.Drop(event.learner, "ready without a welcome")]
        if not self._validator.is_possible(event.learner, event.step, event.versions, now):
            return [actions.Drop(event.learner, "ready with an impossible step or versions")]
        return self._begin(m, event.step, event.versions, now)

    def _lost(self, event: events.LearnerLost, now: float) -> Actions:
        """Removes an incarnation for good."""
        self._waited_for_no_longer(event.learner)
        m = self.members.current(event.learner, event.incarnation)
        return [] if m is None else self._ends(m, event.reason, now)

    def _ends(self, m: Member, reason: str, now: float) -> Actions:
        self._kept_back.pop(m.learner, None)
        self.members.move(m, MemberState.GONE)
        who = {"learner": m.learner, "incarnation": m.incarnation}
        self._rounds.left(m.learner, gone=True, now=now)
        return [actions.Record("learner_lost", {**who, "reason": reason})]

    def mark_silent(self, now: float) -> Actions:
        """Marks learners silent that have sent nothing for the silence timeout."""
        out: Actions = []
        if self._not_yet and self.members.count and now >= self._wait_until:
            self._not_yet.clear()
            self._rounds.all_present()
        if not self._quiet or now < self._quiet[0][0] + self.policy.silence_timeout:
            return out
        while (m := self._quietest()) is not None and now >= m.quiet_since + self.policy.silence_timeout:
            if now > m.quiet_since + self.policy.silence_timeout + self.policy.heartbeat:
                # This process hung itself: their messages may be queued behind this event.
                m.heard_at = now - self.policy.silence_timeout + 1.5 * self.policy.heartbeat
                m.repeats_since = None
                continue
            heapq.heappop(self._quiet)
            self.members.move(m, MemberState.SILENT)
            self._kept_back.pop(m.learner, None)  # its next message repeats it
            m.reported_at = None  # the pause is no step time
            self._rounds.left(m.learner, gone=False, now=now)
            out.append(actions.Record("learner_silent", {"learner": m.learner}))
        return out

    def _quietest(self) -> Member | None:
        """The live learner with the oldest last message."""
        while self._quiet:
            since, learner, incarnation = self._quiet[0]
            m = self.members.current(learner, incarnation)
            if m is None or m.state is not MemberState.LIVE:
                heapq.heappop(self._quiet)
            elif m.quiet_since > since:
                heapq.heapreplace(self._quiet, (m.quiet_since, learner, incarnation))
            else:
                return m
        return None

    def _begin(self, m: Member, step: int, versions: Sequence[int], now: float) -> Actions:
        """Makes a member with these versions live."""
        self.members.begin(m, step, versions)
        m.heard_at = now
        self._validator.reached(step, now)
        who = {"learner": m.learner, "incarnation": m.incarnation}
        began = [actions.Began("learner_ready", who, **who), *self._rounds.begun(m, versions, now)]
        self._counts(m, now)
        return began

    def _counts(self, m: Member, now: float) -> None:
        """A learner becomes live; the first after a time without any does not end or merge alone."""
        heapq.heappush(self._quiet, (now, m.learner, m.incarnation))
        if self.members.count == 1:
            self._not_yet |= self.members.lost_with_the_last(1.5 * self.policy.heartbeat) | {m.learner}
            self._wait_until = now + self.policy.silence_timeout
        self._waited_for_no_longer(m.learner)

    def _waited_for_no_longer(self, learner: int) -> None:
        if learner in self._not_yet:
            self._not_yet.discard(learner)
            if not self._not_yet:
                self._rounds.all_present()

    # Reports.

    def _reported(self, report: Report, now: float) -> Actions:
        """Applies a learner's report; drops an impossible one as a whole.

        A learner that is no member, or whose report is impossible, gets NotMember. It then rejoins with its
        state; if that is impossible too, it is welcomed as if it had none.
        """
        m = self.members.newest(report.learner)
        allowed = self._validator.allows(report.learner, report.step, now)
        if not allowed and self._validator.may_be(report, now):
            return self._keep_back(report, m, now)
        if m is None or m.incarnation != report.incarnation or m.state is MemberState.GONE:
            return self._stranger(report, m)
        if self._kept_back.get(m.learner, report).step <= report.step:  # else this one is late
            self._kept_back.pop(m.learner, None)
            m.shards = report.shards if report.step >= m.step else m.shards
        if m.goes_on and not report.adopted:  # of the state that its welcome replaces
            joining = m.state is MemberState.JOINING
            return self._welcome_again(m, now) if joining else [actions.Drop(report.learner, "stale report")]
        if not (allowed and self._validator.can_report(report)):
            out: Actions = [actions.Drop(report.learner, "impossible report")]
            recovering = m.state is MemberState.JOINING and not report.adopted
            return out if recovering else [*out, self.members.dismiss(m.learner, m.incarnation, self._shard)]
        if report.step < m.step or (report.step == m.step and m.knows_better(report)):
            return [actions.Drop(report.learner, "stale report")]
        out = []
        if m.state is MemberState.JOINING:  # its `ready` was lost or overtaken
            out += self._begin(m, report.step, report.versions, now)
        if m.state is MemberState.SILENT:
            out += self._returned(m, now)
        if report.step > m.step:
            if m.reported_at is not None:
                m.step_time.add((now - m.reported_at) / m.steps_to(report))
            m.reported_at = now
        m.heard_at, m.repeats_since = now, None
        self.members.take(m, report)
        speed = self._validator.reached(report.step, now)
        if speed is not None and self.policy.quorum == 1:
            out.append(actions.Record("clock_ahead", {"learner": m.learner, "speed": speed}))
        return [*out, *self._rounds.heard(m, now)]

    def _keep_back(self, report: Report, m: Member | None, now: float) -> Actions:
        """Stores a learner's furthest report until other learners are as far."""
        if m is None or m.incarnation != report.incarnation:
            return [actions.Drop(report.learner, TOO_EARLY)]
        m.heard_at, kept = now, self._kept_back.get(m.learner)
        # One that comes no further may wait for those that wait for it, until it counts as silent.
        m.repeats_since = (m.repeats_since or now) if kept is not None and kept.step == report.step else None
        if m.state is MemberState.GONE:
            return [actions.Drop(report.learner, TOO_EARLY)]
        m.shards = report.shards
        if kept is None or kept.step <= report.step:
            self._kept_back[m.learner] = report
        values = {"learner": m.learner, "step": report.step}
        return [] if kept else [actions.Record("report_kept_back", values)]

    def _believed(self, now: float) -> Actions:
        """Applies the stored reports that are no longer too early, nearest first."""
        if not self._kept_back:
            return []
        out: Actions = []
        for report in sorted(self._kept_back.values(), key=lambda report: report.step):
            if not self._validator.too_early(report, now):
                out += self._reported(report, now)
        return out

    def _returned(self, m: Member, now: float) -> Actions:
        """Makes a silent learner live again."""
        self.members.move(m, MemberState.LIVE)
        self._rounds.returned(m.learner)
        self._counts(m, now)
        return [actions.Record("learner_returned", {"learner": m.learner})]

    def _stranger(self, report: Report, newest: Member | None) -> Actions:
        """Rejects a replaced incarnation; any other may rejoin as a new one."""
        out: Actions = [actions.Drop(report.learner, "report of a learner that is not taking part")]
        if newest is not None and report.incarnation < newest.incarnation:
            return [*out, self._replaced(newest, report.incarnation)]
        return [*out, self.members.dismiss(report.learner, report.incarnation, self._shard)]

    def _replaced(self, newest: Member, incarnation: int) -> actions.Send:
        known = "a newer incarnation is known", newest.incarnation, self._shard
        return actions.Send(((newest.learner, incarnation),), events.Rejected(incarnation, *known))

    # The end.

    def _done(self, m: Member) -> bool:
        """Whether the learner has reached the last step."""
        return self.total_steps is not None and m.step >= self.total_steps

    def _call_the_rest(self, last: int) -> Actions:
        """Asks slower learners to end once those that are done cannot contribute any more.

        Updates have replaced their last work; they would wait while the slowest trains on alone.
        """
        behind = ((m.learner, m.incarnation) for m in self.members.live() if not self._done(m))
        rest = tuple(who for who in behind if self._rounds.stuck and who not in self._called)
        self._called |= set(rest)
        return [actions.Send(rest, events.ClockSet(last, self._shard))] if rest else []

    def _call_back(self) -> Actions:
        """Revokes that for learners that still step, as their further work is needed after all."""
        if not self._called:
            return []
        known = ((m, m.incarnation) for m in self.members.live() if not self._done(m))
        told = tuple((m.learner, n) for m, n in known if (m.learner, n) in self._called)
        self._called.clear()
        return [actions.Send(told, events.ClockSet(0, self._shard))] if told else []

    def _leave_behind(self, idle: float, now: float) -> Actions:
        """Drops learners that are not done after so many idle seconds, enough for any honest one."""
        if idle < self.policy.silence_timeout:
            return []
        live = self.members.live()
        longest = max((m.step_time.value or 0.0 for m in live), default=0.0)
        timeout = self.policy.silence_timeout + 2 * self.policy.interval * longest
        if idle < timeout or not any(map(self._done, live)):
            return []
        late = [(m.learner, m.incarnation) for m in live if not self._done(m)]
        lost = (events.LearnerLost(*who, "never at the last step") for who in late)
        return [said for one in lost for said in self._lost(one, now)]

    def _finish(self, last: int) -> Actions:
        """Once all live learners are done and no round is left, the run finishes."""
        all_done = self.members.come_to(last) == self.members.count > 0
        if self.finished or not all_done or not self._rounds.over or self._not_yet:
            return []
        self.finished = True
        return [actions.Finish()]
