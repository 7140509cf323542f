"""The syncer's side of the protocol: quorum, grace window, pull, merge, broadcast; membership beside them."""

from __future__ import annotations

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.estimates import MovingAverage, grace, slack
from ddiloco.protocol.membership import Member, Membership, State
from ddiloco.protocol.messages import Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.rounds import Phase, Round
from ddiloco.protocol.schedule import Schedule

Actions = list[actions.SyncerAction]


class SyncerCore:
    """Decides for the syncer; starts no thread, reads no clock, touches no array.

    A round (step, fragment) opens when a live learner has reported the step. Rounds open in the order
    of the schedule, at most tau at a time (at least one), always of different fragments.
    """

    def __init__(self, policy: SyncPolicy, total_steps: int | None = None) -> None:
        self.policy = policy
        self.schedule = Schedule(policy.num_fragments, policy.interval)
        self.total_steps = total_steps
        self.step = 0  # the newest global step of which a round was merged
        self.versions = [0] * policy.num_fragments
        self.merged_steps = [0] * policy.num_fragments
        self.finished = False
        self._members = Membership()
        self._rounds: list[Round] = []
        self._next = RoundId(1, 0)
        self._sync_time = MovingAverage()

    # What a driver calls.

    def handle(self, event: events.SyncerEvent, now: float) -> Actions:
        """Takes one event, returns the actions that follow, in order; `now` is in seconds and never falls.

        Raises:
          LocalProtocolError: a merge finished that was not under way.
        """
        match event:
            case events.LearnerJoined():
                out = self._joined(event, now)
            case events.LearnerReady():
                out = self._ready(event, now)
            case events.LearnerLost():
                out = self._lost(event)
            case events.StepReported():
                out = self._step_reported(event, now)
            case events.FragmentArrived():
                out = self._fragment_arrived(event)
            case events.PullFailed():
                out = self._pull_failed(event)
            case events.MergeFinished():
                out = self._merge_finished(event, now)
            case events.Timeout():
                out = []
        return [*out, *self._mark_silent(now), *self._advance(now)]

    def next_deadline(self) -> float | None:
        """When to send a Timeout, in the seconds of `now`; None if only an event can change anything."""
        times = [r.deadline for r in self._rounds if r.deadline is not None]
        times += [m.heard_at + self.policy.silence_timeout for m in self._members.live() if not self._done(m)]
        return min(times, default=None)

    @property
    def live(self) -> tuple[int, ...]:
        """The learners that count towards a quorum."""
        return tuple(m.learner for m in self._members.live())

    # Rounds: quorum, grace window, pull, merge, broadcast.

    def _advance(self, now: float) -> Actions:
        """Moves every round as far as it can go, and opens those whose turn has come."""
        out: Actions = []
        before = None
        while before != (before := self._progress()):
            out += self._open_rounds(now)
            out += self._move_rounds(now)
            out += self._abandon_and_finish()
        return out

    def _progress(self) -> tuple:
        """Changes whenever a round opens, moves or ends."""
        return (self._next, self.finished, [(r.id, r.phase) for r in self._rounds])

    def _move_rounds(self, now: float) -> Actions:
        out: Actions = []
        for r in self._rounds:
            if r.phase is Phase.GATHERING and self._has_quorum(r):
                out += self._start_grace(r, now)
            if r.phase is Phase.GRACE and (now >= r.deadline or not self._awaited(r)):
                out += self._pull(r, now)
            if r.phase is Phase.PULLING and now >= r.deadline:
                out += self._give_up_pulls(r)
            if r.phase is Phase.PULLING and not r.pulled:
                out += self._merge(r)
        return out

    def _open_rounds(self, now: float) -> Actions:
        out: Actions = []
        front = max((m.step for m in self._members.live()), default=0)
        while (due := self._next_round()) is not None and due.step <= front:
            if any(r.id.fragment == due.fragment for r in self._rounds):
                break
            if self._too_late(due):
                out.append(actions.Record("round_skipped", {"step": due.step, "fragment": due.fragment}))
            elif len(self._rounds) < max(1, self.policy.overlap):
                self._rounds.append(Round(due, opened_at=now))
            else:
                break
            self._next = RoundId(due.step, due.fragment + 1)
        return out

    def _has_quorum(self, r: Round) -> bool:
        count = len(r.arrived) + len(self._candidates(r))
        if self.policy.quorum is None:
            return count > 0 and not self._awaited(r)
        return count >= self.policy.quorum

    def _start_grace(self, r: Round, now: float) -> Actions:
        """Opens the window, and tells those who lag that a step boundary within it lets them in."""
        r.phase = Phase.GRACE
        r.quorum_time = now - r.opened_at
        r.grace_started = now
        r.deadline = now + self._grace_window(r)
        behind = tuple((m.learner, m.incarnation) for m in self._members.live() if m.step < r.id.step)
        return [actions.SetClock(r.id.step, behind)] if behind and r.deadline > now else []

    def _pull(self, r: Round, now: float) -> Actions:
        if not self._has_quorum(r):
            r.phase, r.deadline = Phase.GATHERING, None
            return []
        r.phase = Phase.PULLING
        r.grace_used = now - r.grace_started
        r.pulling_since = now
        r.deadline = now + self.policy.pull_timeout
        r.pulled = {m.learner: m.incarnation for m in self._candidates(r)}
        return [actions.PullFragment(r.id, learner, incarnation) for learner, incarnation in r.pulled.items()]

    def _give_up_pulls(self, r: Round) -> Actions:
        late = list(r.pulled)
        for learner in late:
            self._pass_over(r, learner)
        return [actions.Drop(learner, "pull timed out", r.id) for learner in late]

    def _merge(self, r: Round) -> Actions:
        r.deadline = None
        if len(r.arrived) < (self.policy.quorum or 1):
            r.phase = Phase.GATHERING
            return []
        r.phase = Phase.MERGING
        contributions = tuple(r.arrived[learner] for learner in sorted(r.arrived))
        return [actions.Merge(r.id, self.versions[r.id.fragment] + 1, contributions)]

    def _merge_finished(self, event: events.MergeFinished, now: float) -> Actions:
        r = self._find(event.round)
        if r is None or r.phase is not Phase.MERGING:
            raise LocalProtocolError(f"{event.round} finished merging, but was not being merged")
        self._rounds.remove(r)
        step, fragment = r.id.step, r.id.fragment
        self.versions[fragment] += 1
        self.merged_steps[fragment] = step
        self.step = max(self.step, step)
        self._sync_time.add(now - r.pulling_since)
        return [*self._broadcast(fragment, self._members.present(), now), self._round_record(r, now)]

    def _broadcast(self, fragment: int, members: list[Member], now: float) -> Actions:
        """To every member that has recovered, in the merge or not; a joiner gets all with its welcome."""
        receivers = [m for m in members if m.state is not State.JOINING]
        for m in receivers:
            m.sent[fragment] = (self.versions[fragment], now)
        if not receivers:
            return []
        pairs = tuple((m.learner, m.incarnation) for m in receivers)
        return [actions.Broadcast(fragment, self.versions[fragment], self.merged_steps[fragment], pairs)]

    def _abandon_and_finish(self) -> Actions:
        """Once all live learners are done, a round without its quorum can never get it."""
        live = self._members.live()
        if self.finished or self.total_steps is None or not live or not all(map(self._done, live)):
            return []
        hopeless = [r for r in self._rounds if r.phase is Phase.GATHERING and not self._has_quorum(r)]
        out: Actions = [
            actions.Record("round_abandoned", {"step": r.id.step, "fragment": r.id.fragment})
            for r in hopeless
        ]
        self._rounds = [r for r in self._rounds if r not in hopeless]
        if not self._rounds and self._next_round() is None:
            self.finished = True
            out.append(actions.Finish())
        return out

    # Arrivals.

    def _fragment_arrived(self, event: events.FragmentArrived) -> Actions:
        c = event.contribution
        r = self._find(event.round)
        if r is None or r.phase is not Phase.PULLING or r.pulled.get(c.learner) != c.incarnation:
            return [actions.Drop(c.learner, "unexpected fragment", event.round)]
        if (
            c.fragment != r.id.fragment
            or c.version != self.versions[r.id.fragment]
            or c.steps < 1
            or c.tokens < 0
        ):
            self._pass_over(r, c.learner)
            return [actions.Drop(c.learner, "stale fragment", r.id)]
        del r.pulled[c.learner]
        r.arrived[c.learner] = c
        return []

    def _pull_failed(self, event: events.PullFailed) -> Actions:
        r = self._find(event.round)
        if r is None or r.phase is not Phase.PULLING or r.pulled.get(event.learner) != event.incarnation:
            return []
        self._pass_over(r, event.learner)
        return [actions.Drop(event.learner, event.reason, r.id)]

    def _step_reported(self, event: events.StepReported, now: float) -> Actions:
        report = event.report
        m = self._members.current(report.learner, report.incarnation)
        if m is None or m.state is State.JOINING:
            return [actions.Drop(report.learner, "report of a learner that is not taking part")]
        if self._impossible(report):
            return [actions.Drop(report.learner, "impossible report")]
        if report.step < m.step or (report.step == m.step and m.knows_better(report)):
            return [actions.Drop(report.learner, "stale report")]
        if report.step > m.step:
            if m.reported_at is not None:
                m.step_time.add(now - m.reported_at)
            m.reported_at = now
        m.take(report)
        return [*self._speaks(m, now), *self._resend(m, now)]

    # Membership.

    def _joined(self, event: events.LearnerJoined, now: float) -> Actions:
        old = self._members.newest(event.learner)
        out: Actions = []
        if old is not None and event.incarnation < old.incarnation:
            return [actions.Reject(event.learner, event.incarnation, "a newer incarnation is known")]
        if old is not None and event.incarnation == old.incarnation:
            if old.state is State.GONE:
                return [actions.Reject(event.learner, event.incarnation, "this incarnation has departed")]
            if old.state is not State.JOINING:
                return [actions.Drop(event.learner, "joined twice")]
        elif old is not None and old.state is not State.GONE:
            out += self._lost(events.LearnerLost(old.learner, old.incarnation, "replaced"))
        self._members.admit(Member(event.learner, event.incarnation, heard_at=now))
        versions, merged = tuple(self.versions), tuple(self.merged_steps)
        return [*out, actions.Welcome(event.learner, event.incarnation, self.step, versions, merged)]

    def _ready(self, event: events.LearnerReady, now: float) -> Actions:
        m = self._members.current(event.learner, event.incarnation)
        if m is None or m.state is not State.JOINING or len(event.versions) != self.policy.num_fragments:
            return [actions.Drop(event.learner, "ready without a welcome")]
        merged = all(theirs <= ours for theirs, ours in zip(event.versions, self.versions, strict=True))
        if not merged or self._past_the_end(event.step):
            return [actions.Drop(event.learner, "ready with a step or versions that there never were")]
        m.move(State.LIVE)
        m.heard_at = now
        m.step = event.step
        out: Actions = [actions.Record("learner_ready", {"learner": m.learner, "incarnation": m.incarnation})]
        for fragment, version in enumerate(event.versions):
            if version < self.versions[fragment]:
                out += self._broadcast(fragment, [m], now)
        return out

    def _lost(self, event: events.LearnerLost) -> Actions:
        m = self._members.current(event.learner, event.incarnation)
        if m is None:
            return []
        m.move(State.GONE)
        self._end_pulls(m)
        fields = {"learner": m.learner, "incarnation": m.incarnation, "reason": event.reason}
        return [actions.Record("learner_lost", fields)]

    def _speaks(self, m: Member, now: float) -> Actions:
        m.heard_at = now
        if m.state is not State.SILENT:
            return []
        m.move(State.LIVE)
        return [actions.Record("learner_returned", {"learner": m.learner})]

    def _mark_silent(self, now: float) -> Actions:
        out: Actions = []
        for m in self._members.live():
            if now >= m.heard_at + self.policy.silence_timeout and not self._done(m):
                m.move(State.SILENT)
                self._end_pulls(m)
                m.reported_at = None  # the pause is no step time
                out.append(actions.Record("learner_silent", {"learner": m.learner}))
        return out

    def _resend(self, m: Member, now: float) -> Actions:
        """Sends an update anew that a learner should long have applied and, by its report, has not."""
        out: Actions = []
        for fragment, (version, sent_at) in list(m.sent.items()):
            if m.counters and m.version(fragment) >= version:
                del m.sent[fragment]
            elif now >= sent_at + self.policy.resend_timeout:
                out += self._broadcast(fragment, [m], now)
        return out

    # Questions.

    def _candidates(self, r: Round) -> list[Member]:
        """Live learners at the round's step with work on the fragment's current version to give."""
        return [m for m in self._members.live() if m.learner not in r.arrived and self._can_give(m, r)]

    def _can_give(self, m: Member, r: Round) -> bool:
        if m.step < r.id.step or not m.counters or r.is_passed_over(m.learner, m.incarnation, m.reports):
            return False
        counters = m.counters[r.id.fragment]
        return counters.version == self.versions[r.id.fragment] and counters.steps > 0

    def _awaited(self, r: Round) -> bool:
        """Whether a live learner has yet to reach the round's step."""
        return any(m.step < r.id.step for m in self._members.live())

    def _grace_window(self, r: Round) -> float:
        """Seconds; by the fastest live learner's steps, since it is the first that could miss the update."""
        known = [m.step_time.value for m in self._members.live() if m.step_time.value is not None]
        if not known or self.policy.quorum is None:
            return 0.0
        step_time = min(known)
        spare = slack(self.policy.overlap, step_time, r.quorum_time, self._sync_time.value or 0.0)
        return grace(self.policy.gamma, spare, self.policy.max_grace * step_time)

    def _quorum_clock(self) -> int:
        """The step that enough live learners for a quorum have reached."""
        steps = sorted((m.step for m in self._members.live()), reverse=True)
        needed = len(steps) if self.policy.quorum is None else self.policy.quorum
        return steps[needed - 1] if steps and needed <= len(steps) else 0

    def _too_late(self, due: RoundId) -> bool:
        """Whether the fragment's next turn has come; where learners wait for updates, none is left out."""
        if self.policy.max_run_ahead is not None:
            return False
        return self._quorum_clock() >= due.step + self.policy.interval

    def _next_round(self) -> RoundId | None:
        """The first round of the schedule that has not been opened or skipped."""
        step, first = self._next.step, self._next.fragment
        while self.total_steps is None or step <= self.total_steps:
            for fragment in self.schedule.due(step):
                if fragment >= first:
                    return RoundId(step, fragment)
            step, first = step + 1, 0
        return None

    def _done(self, m: Member) -> bool:
        return self.total_steps is not None and m.step >= self.total_steps

    def _past_the_end(self, step: int) -> bool:
        return self.total_steps is not None and step > self.total_steps

    def _impossible(self, report: Report) -> bool:
        if len(report.counters) != self.policy.num_fragments or self._past_the_end(report.step):
            return True
        pairs = zip(report.counters, self.versions, strict=True)
        return any(c.version > version or c.steps < 0 or c.tokens < 0 for c, version in pairs)

    def _find(self, round_id: RoundId) -> Round | None:
        return next((r for r in self._rounds if r.id == round_id), None)

    def _end_pulls(self, m: Member) -> None:
        for r in self._rounds:
            if r.pulled.get(m.learner) == m.incarnation:
                self._pass_over(r, m.learner)

    def _pass_over(self, r: Round, learner: int) -> None:
        m = self._members.newest(learner)
        r.pass_over(learner, r.pulled[learner], m.reports if m is not None else 0)

    def _round_record(self, r: Round, now: float) -> actions.Record:
        given = r.arrived.values()
        return actions.Record(
            "round",
            {
                "step": r.id.step,
                "fragment": r.id.fragment,
                "version": self.versions[r.id.fragment],
                "quorum": len(r.arrived),
                "learners": sorted(r.arrived),
                "live": len(self._members.live()),
                "tokens": sum(c.tokens for c in given),
                "quorum_seconds": r.quorum_time,
                "grace_seconds": r.grace_used,
                "sync_seconds": now - r.pulling_since,
            },
        )
