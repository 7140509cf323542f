"""Who takes part, as the syncer knows it: who joins, rejoins, reports or is silent; and what each is sent."""

from __future__ import annotations

from collections.abc import Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.membership import Member, Membership, State
from ddiloco.protocol.messages import Contribution, Given, Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.speed_limit import SpeedLimit
from ddiloco.protocol.state import SyncerState

Actions = list[actions.SyncerAction]

MOST_LEARNERS = 1 << 16
"""Learners are numbered below it, so that what is kept of each is bounded."""


class Attendance:
    """The half of the syncer that deals with learners; the other half deals with rounds.

    `merged`, where a method takes it, is what the syncer has merged so far.
    """

    def __init__(self, policy: SyncPolicy, total_steps: int | None, state: SyncerState) -> None:
        self.policy = policy
        self.total_steps = total_steps
        self._members = Membership()
        # If merges need all learners, the first one needs all that the run starts with, however late.
        starts = policy.quorum is None and not state.step
        self._not_yet = set(range(policy.num_learners)) if starts else set()
        self._patience: float | None = None  # until when to wait for those
        self._speed_limit = SpeedLimit(policy, state)
        for learner, incarnation in state.incarnations:
            self._members.admit(Member(learner, incarnation, heard_at=0.0, state=State.GONE))

    def live(self) -> tuple[Member, ...]:
        """The members that count, by learner number."""
        return self._members.live()

    def newest(self, learner: int) -> Member | None:
        """The learner's newest incarnation, gone or not."""
        return self._members.newest(learner)

    def current(self, learner: int, incarnation: int) -> Member | None:
        """Exactly this incarnation, unless it is gone or replaced."""
        return self._members.current(learner, incarnation)

    def is_live(self, learner: int, incarnation: int) -> bool:
        """Whether exactly this incarnation counts."""
        m = self._members.current(learner, incarnation)
        return m is not None and m.state is State.LIVE

    def incarnations(self) -> tuple[tuple[int, int], ...]:
        """Every learner ever seen with its newest incarnation, by learner number."""
        return self._members.incarnations()

    def steps(self) -> dict[int, tuple[int, int]]:
        """By learner, if a step of it is known: its newest incarnation, and the step."""
        return self._members.steps()

    def done(self, m: Member) -> bool:
        """Whether the learner has reached the last step."""
        return self.total_steps is not None and m.step >= self.total_steps

    @property
    def gathering(self) -> bool:
        """Whether learners that the run starts with have yet to begin; always False if K is a number."""
        return bool(self._not_yet)

    def deadlines(self) -> list[float]:
        """When learners become silent unless they report or join, in the seconds of `now`."""
        silent = [m.heard_at + self.policy.silence_timeout for m in self.live() if not self.done(m)]
        return [*silent, self._patience] if self._not_yet and self._patience is not None else silent

    # Coming and going.

    def joined(self, event: events.LearnerJoined, merged: SyncerState, now: float) -> Actions:
        """Lets an incarnation in unless it has departed: with a welcome, or at once if it rejoins.

        One that counts already but asks as if for the first time is another process with a number that is
        taken, or never got its welcome: either rejoins under the next number.
        """
        learner, incarnation = event.learner, event.incarnation
        if not 0 <= learner < MOST_LEARNERS:
            return [actions.Drop(learner, "a learner's number beyond belief")]
        old = self._members.newest(learner)
        out: Actions = []
        if old is not None and incarnation < old.incarnation:
            return [_replaced(learner, incarnation)]
        if old is not None and incarnation == old.incarnation:
            counts = old.state in (State.LIVE, State.SILENT)
            if counts and event.versions is not None:
                return [actions.Drop(learner, "joined twice")]
            if counts or old.state is State.GONE:
                return [_not_member(learner, incarnation)]
        elif old is not None and old.state is not State.GONE:
            out += self.lost(events.LearnerLost(old.learner, old.incarnation, "replaced"))
        held = self._held(event, merged, now)
        m = self._members.admit(Member(learner, incarnation, heard_at=now))
        if held is not None:
            return [*out, *self._begin(m, *held, merged, now)]
        if event.versions is not None:
            out.append(actions.Drop(learner, "return with a step or versions that there never were"))
        welcome = events.Welcomed(incarnation, merged.step, merged.versions, merged.merged_steps)
        return [*out, actions.Tell(((learner, incarnation),), welcome)]

    def ready(self, event: events.LearnerReady, merged: SyncerState, now: float) -> Actions:
        """Counts a welcomed learner from now on."""
        m = self._members.current(event.learner, event.incarnation)
        if m is None or m.state is not State.JOINING or len(event.versions) != self.policy.num_fragments:
            return [actions.Drop(event.learner, "ready without a welcome")]
        if not self._can_be(event.step, event.versions, merged, now):
            return [actions.Drop(event.learner, "ready with a step or versions that there never were")]
        return self._begin(m, event.step, event.versions, merged, now)

    def lost(self, event: events.LearnerLost) -> Actions:
        """Lets an incarnation go for good."""
        self._not_yet.discard(event.learner)
        m = self._members.current(event.learner, event.incarnation)
        if m is None:
            return []
        self._members.move(m, State.GONE)
        fields = {"learner": m.learner, "incarnation": m.incarnation, "reason": event.reason}
        return [actions.Record("learner_lost", fields)]

    def mark_silent(self, now: float) -> Actions:
        """Stops waiting for learners that have not been heard of for the silence timeout."""
        out: Actions = []
        if self._patience is None:
            self._patience = now + self.policy.silence_timeout
        if now >= self._patience:
            self._not_yet.clear()
        for m in self.live():
            if now >= m.heard_at + self.policy.silence_timeout and not self.done(m):
                self._members.move(m, State.SILENT)
                m.reported_at = None  # the pause is no step time
                out.append(actions.Record("learner_silent", {"learner": m.learner}))
        return out

    # Reports and updates.

    def reported(self, report: Report, merged: SyncerState, now: float) -> Actions:
        """Takes a learner's metadata; drops an impossible report as a whole.

        A learner that is no member, or whose report is impossible, is told so. It then rejoins with what it
        holds; if that is impossible too, it is welcomed as if it held nothing.
        """
        m = self._members.newest(report.learner)
        if m is None or m.incarnation != report.incarnation or m.state is State.GONE:
            return self._stranger(report, m)
        if self._impossible(report, merged, now):
            out: Actions = [actions.Drop(report.learner, "impossible report")]
            welcomed = m.state is State.JOINING
            return out if welcomed else [*out, _not_member(m.learner, m.incarnation)]
        if report.step < m.step or (report.step == m.step and m.knows_better(report)):
            return [actions.Drop(report.learner, "stale report")]
        out = []
        if m.state is State.JOINING:  # its `ready` was lost, or comes later
            out += self._begin(m, report.step, [c.version for c in report.counters], merged, now)
        if report.step > m.step:
            if m.reported_at is not None:
                m.step_time.add((now - m.reported_at) / m.steps_to(report))
            m.reported_at = now
        m.take(report)
        self._speed_limit.reached(report.step, self.live(), now)
        return [*out, *self._speaks(m, now), *self._resend(m, merged, now)]

    def broadcast(
        self, fragment: int, merged: SyncerState, given: Sequence[Contribution], now: float
    ) -> Actions:
        """Sends an update to all recovered members, in the merge or not; a welcome brings all fragments."""
        receivers = [m for m in self._members.present() if m.state is not State.JOINING]
        return self._send(fragment, receivers, merged, now, tuple(Given(c.learner, c.step) for c in given))

    def _begin(
        self, m: Member, step: int, versions: Sequence[int], merged: SyncerState, now: float
    ) -> Actions:
        """Counts a member that holds these versions, and sends it what is newer."""
        self._members.move(m, State.LIVE)
        self._not_yet.discard(m.learner)
        m.heard_at = now
        m.step = step
        self._speed_limit.reached(step, self.live(), now)
        out: Actions = [actions.Record("learner_ready", {"learner": m.learner, "incarnation": m.incarnation})]
        for fragment, version in enumerate(versions):
            if version < merged.versions[fragment]:
                out += self._send(fragment, [m], merged, now)
        return out

    def _stranger(self, report: Report, newest: Member | None) -> Actions:
        """Rejects one that was replaced; any other may rejoin as a new incarnation."""
        out: Actions = [actions.Drop(report.learner, "report of a learner that is not taking part")]
        if newest is not None and report.incarnation < newest.incarnation:
            return [*out, _replaced(report.learner, report.incarnation)]
        return [*out, _not_member(report.learner, report.incarnation)]

    def _speaks(self, m: Member, now: float) -> Actions:
        m.heard_at = now
        if m.state is not State.SILENT:
            return []
        self._members.move(m, State.LIVE)
        return [actions.Record("learner_returned", {"learner": m.learner})]

    def _resend(self, m: Member, merged: SyncerState, now: float) -> Actions:
        """Sends an update again that a learner should have applied long ago, but by its report has not."""
        out: Actions = []
        for fragment, (version, sent_at) in list(m.sent.items()):
            if m.counters and m.version(fragment) >= version:
                del m.sent[fragment]
            elif now >= sent_at + self.policy.resend_timeout:
                out += self._send(fragment, [m], merged, now)
        return out

    def _send(
        self,
        fragment: int,
        receivers: list[Member],
        merged: SyncerState,
        now: float,
        given: tuple[Given, ...] = (),
    ) -> Actions:
        if not receivers:
            return []
        version, step = merged.versions[fragment], merged.merged_steps[fragment]
        for m in receivers:
            m.sent[fragment] = (version, now)
        pairs = tuple((m.learner, m.incarnation) for m in receivers)
        return [actions.Tell(pairs, events.UpdateArrived(fragment, version, step, given))]

    # What is possible.

    def _impossible(self, report: Report, merged: SyncerState, now: float) -> bool:
        counters = report.counters
        if not self._can_be(report.step, [c.version for c in counters], merged, now):
            return True
        return any(c.steps < 0 or c.tokens < 0 for c in counters)

    def _held(
        self, event: events.LearnerJoined, merged: SyncerState, now: float
    ) -> tuple[int, tuple[int, ...]] | None:
        """Step and versions that a learner rejoins with; None if there are none, or they are impossible."""
        step, versions = event.step, event.versions
        if step is None or versions is None or not self._can_be(step, versions, merged, now):
            return None
        return step, versions

    def _can_be(self, step: int, versions: Sequence[int], merged: SyncerState, now: float) -> bool:
        """Whether a learner can have reached this step with these versions."""
        if len(versions) != self.policy.num_fragments:
            return False
        past_the_end = self.total_steps is not None and step > self.total_steps
        if step < 0 or past_the_end or step > self._speed_limit.furthest(self.live(), merged.step, now):
            return False
        return all(0 <= theirs <= ours for theirs, ours in zip(versions, merged.versions, strict=True))


def _replaced(learner: int, incarnation: int) -> actions.Tell:
    rejected = events.Rejected(incarnation, "a newer incarnation is known")
    return actions.Tell(((learner, incarnation),), rejected)


def _not_member(learner: int, incarnation: int) -> actions.Tell:
    return actions.Tell(((learner, incarnation),), events.NotMember(incarnation))
