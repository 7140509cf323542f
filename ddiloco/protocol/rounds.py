"""The syncer's half for merges: offers, quorum, grace window, merge and broadcast of its fragments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import cast

from ddiloco.protocol import actions, events
from ddiloco.protocol.asking import AGE, MIN_IN_TIME, OfferRequests, Overdue, worth_waiting
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.estimates import MovingAverage, grace, slack
from ddiloco.protocol.membership import SELDOM, SHORTEST_LEAD, Member, Membership, MemberState
from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.protocol.policy import TIMING, SyncPolicy
from ddiloco.protocol.prospects import Prospects
from ddiloco.protocol.report_validator import ReportValidator
from ddiloco.protocol.round import Phase, Round
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.updates import Updates

Actions = list[actions.SyncerAction]

LAST_WAIT = 2.0
"""Maximum wait of a last round for offers, in intervals: all fragments are due, which fill a link for one."""

UNCHECKED_SECONDS = 1.0  # after which rounds that cannot go on are looked for, though few events have come


class Rounds:
    """Moves every round of its fragments from the first request to the update.

    A round (step, fragment) opens before a quorum of learners reaches the step, so that each is asked in time
    (`OfferRequests`). Rounds open in the order of the schedule, one for each fragment; at most max(1, tau)
    are between quorum and update.

    The cost of an event does not grow with the number of learners: only changed rounds, and learners still to
    be asked, are visited.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        state: SyncerState,
        members: Membership,
        validator: ReportValidator,
        lineage: int = 0,
        shard: int = 0,
    ) -> None:
        """Rounds of the fragments of `members`; `lineage`: of the versions that it makes.

        `validator` is notified of each new version.
        """
        self._validator, self._shard = validator, shard
        self.policy = policy
        self._timing: events.TimingSet | None = None  # the newest
        self.total_steps = total_steps
        self.members = members
        self._updates = Updates(policy, state, members.fragments, lineage, shard)
        self._schedule = policy.schedule(total_steps)
        self._prospects = Prospects(policy, self._schedule, members)
        self._open: dict[int, Round] = {}  # by fragment, in the order of opening
        self._next = self._due_from(self._oldest + 1, 0)
        self._sync_time = MovingAverage()
        self._asking = OfferRequests(policy)
        self._windows: dict[int, float] = {}  # by fragment, the end of its round's grace window
        self._overdue = Overdue(policy.offer_timeout, policy.num_fragments)
        self._touched: set[int] = set()  # fragments with an event of their own
        self._moved = self._ask_all = True  # whether to visit all rounds, and to ask all learners
        self._furthest = 0  # clock of a live learner when all rounds were visited
        self._heard: set[int] = set()  # learners with new reports
        # By learner and fragment, offers that overtook the reports of their work, or arrived between rounds
        self._waiting: dict[int, dict[int, events.FragmentArrived]] = {}
        self._caught_up: set[int] = set()  # learners whose state has changed, for their waiting offers
        self._turned: set[int] = set()  # fragments of which a round has begun or ended
        self._joined = False  # whether a learner has joined since the front was computed
        self._unchecked = 0  # events since `stuck` was determined
        self._check_at: float | None = None  # when it is to be, though no further event comes
        self.stuck = False  # whether no open round can gain from the learners that are done
        self.over = False  # whether every round is merged, skipped or abandoned

    def handle(
        self, event: events.FragmentArrived | events.OfferFailed | events.MergeFinished, now: float
    ) -> Actions:
        """Handles an event of a round.

        Raises:
          LocalProtocolError: a merge finished that was not under way.
        """
        match event:
            case events.FragmentArrived():
                return self._fragment_arrived(event, now)
            case events.OfferFailed():
                return self._offer_failed(event)
            case events.MergeFinished():
                r = self._find(event.round)
                if r is None or r.phase is not Phase.MERGING:
                    raise LocalProtocolError(f"{event.round} finished merging, but was not being merged")
                r.left_out = (*r.left_out, *event.left_out)
                if not r.given and not r.without_work:
                    return self._start_over(r) if self.policy.max_run_ahead is None else self._repeat(r)
                self._validator.committed(r.id, r.version + 1, self._updates.lineage)
                return self._broadcast(r, now)

    def no_longer_waiting(self) -> list[events.FragmentArrived]:
        """Waiting offers that are to be handled now."""
        if not self._waiting:
            self._caught_up.clear()
            self._turned.clear()
            return []
        found = [offer for m in sorted(self._caught_up) for offer in self._waiting.get(m, {}).values()]
        if self._turned:
            others = (self._waiting[m] for m in self._waiting if m not in self._caught_up)
            found += [offer for known in others for p, offer in known.items() if p in self._turned]
        self._caught_up.clear()
        self._turned.clear()
        return found

    # Changes of membership, after `members` has them.

    def admitted(self, m: Member, now: float) -> Actions:
        """Welcomes a learner."""
        m.admitted_at = now if m.admitted_at is None else m.admitted_at
        return [self._updates.welcome(m.learner, m.incarnation, self.furthest(m.learner))]

    def begun(self, m: Member, versions: Sequence[int], now: float) -> Actions:
        """A learner with these versions is live, and replaces its older incarnation."""
        self._caught_up.add(m.learner)
        self._goes(m.learner, now)
        self._comes(m.learner)
        if m.admitted_at is not None:
            m.welcome_seconds = now - m.admitted_at
        held = dict(zip(self.members.fragments, versions, strict=True))
        out: Actions = [*self._updates.bring_up_to_date(m, held, now)]
        if self._timing is not None:
            out.append(actions.Send(((m.learner, m.incarnation),), self._timing))
        return out

    def returned(self, learner: int) -> None:
        """A silent learner is live again, with its offers."""
        self._caught_up.add(learner)
        self._comes(learner)

    def left(self, learner: int, gone: bool, now: float) -> None:
        """A learner is no longer live: gone for good, or silent."""
        if gone:
            self._caught_up.add(learner)
        self._goes(learner, now)

    def heard(self, m: Member, now: float) -> Actions:
        """A learner's report was applied."""
        self._caught_up.add(m.learner)
        return self._hear_report(m, now)

    def all_present(self) -> None:
        """Ends the wait for known learners, of the start or of before a restart."""
        self._prospects.all_present()
        self._moved = True

    def set_timing(self, event: events.TimingSet, policy: SyncPolicy) -> Actions:
        """Continues with the rounds of another schedule; open rounds stay as they are.

        A turn of the schedule before that has come, but could not be taken yet, is skipped.
        """
        known, self._timing = self._timing, event
        if known is not None and policy == self.policy:
            return []
        # Without a live learner the front is behind what has opened.
        begins = max(self._asking.front.step, self._oldest, *(r.id.step for r in self.open))
        out = self._skip_turns(begins)
        self.policy = self._asking.policy = self._prospects.policy = policy
        self._schedule = policy.schedule(self.total_steps)
        self._prospects.schedule = self._schedule
        for m in self.members.present():
            m.lead, m.margin = min(policy.interval, m.lead), min(policy.interval / 4, m.margin)
        self._next = self._due_from(begins + (begins != self.total_steps), 0)
        self._moved = self._ask_all = True
        values = {name: getattr(policy, name) for name in TIMING}
        about = {"step": begins, "shard": self._shard, "reason": event.reason}
        out.append(actions.Record("timing_set", about | values))
        present = [m for m in self.members.present() if m.state is not MemberState.JOINING]
        receivers = tuple((m.learner, m.incarnation) for m in present)
        return [*out, actions.Send(receivers, event)] if receivers else out

    def _skip_turns(self, until: int) -> Actions:
        """Skips the turns at or before a step of which no round has opened, but for the last."""
        out: Actions = []
        while (due := self._next) is not None and due.step <= until and due.step != self.total_steps:
            out.append(actions.Record("round_skipped", dataclasses.asdict(due)))
            self._next = self._due_from(due.step, due.fragment + 1)
        return out

    @property
    def merged(self) -> SyncerState:
        """The state of its fragments; that of others is meaningless."""
        return self._updates.merged

    def furthest(self, learner: int) -> Watermark:
        """The furthest work of a learner that is merged, or is in an arrived offer."""
        here = [r.arrived[learner] for r in self._open.values() if learner in r.arrived]
        waiting = [offer.contribution for offer in self._waiting.get(learner, {}).values()]
        here += [c for c in waiting if self.members.current(learner, c.incarnation) is not None]
        return Watermark.furthest([self.merged.furthest(learner), *(c.upto for c in here)])

    @property
    def open(self) -> tuple[Round, ...]:
        """The open rounds, in the order of opening."""
        return tuple(self._open.values())

    def advance(self, now: float) -> Actions:
        """Moves every round as far as possible, opens due ones, and asks for offers."""
        out = self._expire(now)
        check_due = self._check_at is not None and now >= self._check_at
        self._moved |= self._prospects.waited_enough(now) or check_due
        self._touched |= {p for p, closes in self._windows.items() if now >= closes}
        touched = [self._open[p] for p in sorted(self._touched & self._open.keys())]
        ending = bool(touched or self._moved) and self._checks_end(check_due, now)
        if touched and not self._moved:
            out += self._move_rounds(touched, now)
            out += (given_up := self._abandon() if ending else [])
            self._moved = bool(given_up)
        before = None
        while self._moved and before != (before := self._progress()):
            self._move_front(now)
            out += self._open_rounds()
            out += self._move_rounds(self._open.values(), now)
            out += self._abandon() if ending else []
        if ending:
            self.stuck = self._prospects.is_stuck(self._open.values())
        if touched or self._moved:
            self.over |= not self._open and self._next is None
        return out + self._ask(now)

    def _checks_end(self, due: bool, now: float) -> bool:
        """Whether to look at all learners for rounds that cannot go on; seldom where there are many."""
        self._unchecked += 1
        if self._unchecked * SELDOM <= self.members.count and not due:
            self._check_at = now + UNCHECKED_SECONDS if self._check_at is None else self._check_at
            return False
        self._unchecked, self._check_at = 0, None
        return True

    def _ask(self, now: float) -> Actions:
        out: Actions = []
        if self._ask_all or self._heard:
            for r in self._open.values():
                whom = r.unasked if self._ask_all else r.unasked & self._heard
                if whom and r.phase is not Phase.MERGING:
                    out += self._asking.ask(r, map(self._member, sorted(whom)), now)
        self._moved = self._ask_all = False
        self._touched.clear()
        self._heard.clear()
        return out

    def next_deadline(self) -> float | None:
        """When to call `advance` again, in the seconds of `now`; None: only after an event."""
        others = self._overdue.next(self._open), self._prospects.waits_until, self._check_at
        times = (*self._windows.values(), *others)
        return min((time for time in times if time is not None), default=None)

    # Learners.

    def _comes(self, learner: int) -> None:
        for r in self._open.values():
            r.departed.discard(learner)
            r.left_owing.discard(learner)
            if learner not in r.arrived:
                r.unasked.add(learner)
            else:
                r.advance(self._member(learner))
        self._heard.add(learner)
        self._moved = self._joined = True
        self._prospects.somebody_came()

    def _goes(self, learner: int, now: float) -> None:
        for r in self._open.values():
            r.unasked.discard(learner)
            if r.owed.pop(learner, None) is not None and r.phase is Phase.GRACE:
                r.left_owing.add(learner)
            if learner in r.arrived:
                r.departed.add(learner)
                r.old.discard(learner)  # no newer one will come
                r.at_step.discard(learner)
        self._moved = True
        self._prospects.somebody_left(now)

    def _hear_report(self, m: Member, now: float) -> Actions:
        """Resends missing updates, and starts timeouts of offers whose steps are reported."""
        learner = m.learner
        self._heard.add(learner)
        for r in self._open.values():
            if learner in r.awaited and not self._prospects.may_give(m, r):
                r.awaited -= {learner}
                self._touched.add(r.id.fragment)
            asked = r.owed.get(learner)
            if asked is not None and asked.expires is None and m.step >= asked.clock:
                if self._prospects.may_hold(m, r):
                    self._overdue.expect(r, m, asked, now)
            elif r.has_aged(m, self.policy.interval // 2):
                r.old.add(learner)
                r.unasked.add(learner)
                r.advance(m)
                self._touched.add(r.id.fragment)
            if learner in r.arrived and m.step >= r.id.step:
                r.advance(m)
                if r.phase is Phase.GATHERING:
                    self._touched.add(r.id.fragment)
        moves = self.policy.quorum is None or m.step > self._furthest or self._prospects.done(m)
        front = self._asking.front.step
        moves = moves or (m.step > front and self.members.front(self.policy.quorum) != front)
        self._moved |= moves or any(r.departed for r in self._open.values())
        return [*self._updates.resend(m, now)]

    # Rounds: ask, gather, wait for a grace window, merge, broadcast.

    def _progress(self) -> tuple[RoundId | None, list[tuple[RoundId, Phase]]]:
        """A value that changes whenever a round opens, moves or ends."""
        return (self._next, [(r.id, r.phase) for r in self._open.values()])

    def _move_front(self, now: float) -> None:
        front = self.members.front(self.policy.quorum)
        if front != self._asking.front.step:
            self._ask_all = True
        self._asking.front.move(front, now, self._joined)
        self._furthest = self.members.furthest()
        self._joined = False

    def _open_rounds(self) -> Actions:
        """Opens rounds that are due soon, unless max(1, tau) rounds wait for their merges."""
        out: Actions = []
        most = max(1, self.policy.overlap)
        busy = (Phase.READY, Phase.MERGING) if self.policy.waits_for_expected else tuple(Phase)[1:]
        furthest = self._asking.furthest(self.members)
        while (due := self._next) is not None and self.members.count and due.step <= furthest:
            if due.fragment in self._open:
                break
            if self._prospects.too_late(due, self._asking.front.step):
                out.append(actions.Record("round_skipped", {"step": due.step, "fragment": due.fragment}))
            elif sum(r.phase in busy for r in self._open.values()) < most:
                everyone = {m.learner for m in self.members.live()}
                p, merged = due.fragment, self.merged
                late = self._asking.front.step > due.step - SHORTEST_LEAD
                self._open[p] = Round(due, merged.versions[p], merged.lineages[p], late, unasked=everyone)
                self._ask_all = True
                self._turned.add(p)
            else:
                break
            self._next = self._due_from(due.step, due.fragment + 1)
        return out

    def _move_rounds(self, rounds: Iterable[Round], now: float) -> Actions:
        out: Actions = []
        for r in rounds:
            if r.began is None and self.members.furthest() >= r.id.step:
                r.began = now
            if r.phase is Phase.GATHERING and self._prospects.has_quorum(r, self._asking.front.step):
                out += self._start_grace(r, now)
            if r.phase is Phase.GRACE:
                self._windows[r.id.fragment] = r.closes(self._prospects.awaits_learners)
                if now >= self._windows[r.id.fragment]:
                    r.phase = Phase.READY
                    del self._windows[r.id.fragment]
            if r.phase is Phase.READY:
                out += self._merge(r, now)
        return out

    def _start_grace(self, r: Round, now: float) -> Actions:
        """Opens the grace window, and asks late learners to offer at once."""
        r.phase = Phase.GRACE
        r.quorum_seconds = now - (r.began if r.began is not None else now)
        r.grace_began = now
        window = self._grace_window(r)
        r.window_closes = now + window
        out: Actions = [*self._asking.ask_late(r, self.members)] if window > 0 else []
        if self.policy.waits_for_expected:
            able = [m for m in self.members.live() if self._prospects.may_give(m, r)]
            fastest = min((m.step_time.value for m in able if m.step_time.value), default=math.inf)
            next_quorum = self._next_quorum(r, now)
            missed = next_quorum if self.policy.takes_late_work else self.policy.interval * fastest / AGE
            whom, seconds = worth_waiting(r, able, missed, next_quorum, now)
            if r.id.step == self.total_steps and fastest < math.inf:  # what misses it is never merged
                whom = {m.learner for m in able if m.expected_lag is not None}
                seconds = LAST_WAIT * self.policy.interval * fastest
            r.awaited, r.awaited_until = frozenset(whom), now + seconds
            r.hopeless = frozenset(m.learner for m in able if (m.in_time.value or 0.0) < MIN_IN_TIME)
        return out

    def _merge(self, r: Round, now: float) -> Actions:
        if sum(other.phase is Phase.MERGING for other in self._open.values()) >= max(1, self.policy.overlap):
            return []
        if not self._prospects.has_quorum(r, self._asking.front.step):
            r.phase = Phase.GATHERING
            return []
        r.phase = Phase.MERGING
        r.grace_seconds = now - r.grace_began
        r.merging_since = now
        self._asking.merging(r, self.members, now)
        return [self._merge_action(r, r.given)]

    def _repeat(self, r: Round) -> Actions:
        """Repeats the old version: no offer was merged, and waiting learners have no other."""
        r.without_work = True
        return [self._merge_action(r, ())]

    def _merge_action(self, r: Round, given: tuple[Contribution, ...]) -> actions.Merge:
        marks = self.merged.watermarks[r.id.fragment]
        interval = self.policy.interval if self.policy.rebase else None
        return actions.Merge(r.id, r.version + 1, given, marks, self.members.delays(), interval)

    def _start_over(self, r: Round) -> Actions:
        """Gathers again after a merge without a new version."""
        refused = r.refusal()
        r.start_over(self.members.live())
        self._moved = self._ask_all = True
        self._turned.add(r.id.fragment)
        return [refused]

    def _broadcast(self, r: Round, now: float) -> Actions:
        """Sends the update to all members but joining ones, whose welcome has all fragments."""
        del self._open[r.id.fragment]
        self._moved = True
        self._turned.add(r.id.fragment)
        self._updates.add(r.id, r.given)
        for c in r.given:
            m = self._member(c.learner)
            if m.incarnation == c.incarnation:  # another process has a clock of its own
                m.counted_from[c.fragment] = c.step
        self._sync_time.add(now - r.merging_since)
        receivers = [m for m in self.members.present() if m.state is not MemberState.JOINING]
        return [*self._updates.send(r.id.fragment, receivers, now), r.published(self.members.count, now)]

    def _abandon(self) -> Actions:
        """Abandons rounds that can no longer get a quorum."""
        out: Actions = []
        for r in self._prospects.hopeless(self._open.values()):
            del self._open[r.id.fragment]
            out += map(actions.Release, r.arrived.values())
            out.append(actions.Record("round_abandoned", dataclasses.asdict(r.id)))
        return out

    # Arrivals.

    def _fragment_arrived(self, event: events.FragmentArrived, now: float) -> Actions:
        """Accepts an offer, or stores it until it can be; releases superseded offers."""
        c, p = event.contribution, event.round.fragment
        before = self._kept(c.learner, p)
        waiting = self._waiting.get(c.learner, {}).get(p)
        m = self.members.current(c.learner, c.incarnation)
        if m is not None and waiting is not event:  # else it is handled again
            self._asking.arrived(m, event.round, c, now)
        out: Actions = []
        if waiting is not None and waiting.contribution.upto > c.upto:
            out.append(actions.Drop(c.learner, "an offer behind a later one", event.round))
        elif self.members.is_early(c, self.policy) or self._is_between_rounds(c):
            self._waiting.setdefault(c.learner, {})[p] = event
        else:
            if waiting is not None:
                del self._waiting[c.learner][p]
                if not self._waiting[c.learner]:
                    del self._waiting[c.learner]
            self._touched.add(p)
            out += self._offered(event)
        kept, known = self._kept(c.learner, p), dict.fromkeys([*before, c])
        return out + [actions.Release(offer) for offer in known if offer not in kept]

    def _is_between_rounds(self, c: Contribution) -> bool:
        """Whether an offer missed its round, and can be merged in the next one."""
        r, m = self._open.get(c.fragment), self.members.current(c.learner, c.incarnation)
        if not self.policy.takes_late_work or m is None or m.state is not MemberState.LIVE:
            return False
        between = r is None or r.phase is Phase.MERGING
        return between and c.fragment in m.asked and self._counts_from(c) is None

    def _kept(self, learner: int, fragment: int) -> list[Contribution]:
        """A learner's offers of the fragment whose arrays are needed."""
        r, waiting = self._open.get(fragment), self._waiting.get(learner, {}).get(fragment)
        kept = [] if waiting is None else [waiting.contribution]
        if r is not None and r.phase is not Phase.MERGING and learner in r.arrived:
            kept.append(r.arrived[learner])
        return kept

    @property
    def offers(self) -> set[Contribution]:
        """Offers whose arrays are kept."""
        gathering = [r for r in self._open.values() if r.phase is not Phase.MERGING]
        waiting = {offer.contribution for known in self._waiting.values() for offer in known.values()}
        return waiting | {c for r in gathering for c in r.arrived.values()}

    def _offered(self, event: events.FragmentArrived) -> Actions:
        c, r = event.contribution, self._find(event.round)
        m = self.members.current(c.learner, c.incarnation)
        late = r is None and self.policy.takes_late_work
        if late:
            r = self._open.get(event.round.fragment)
        if r is None or m is None or not self._wants(r, m, c, late):
            if not late and r is not None and m is not None and r.owed.pop(c.learner, None) is not None:
                r.unasked.add(c.learner)  # in case the running merge makes no version
            return [actions.Drop(c.learner, "unexpected fragment", event.round)]
        problem = "stale fragment" if c.fragment != r.id.fragment or c.steps < 1 or c.tokens < 0 else None
        problem = problem or self._counts_from(c)
        if problem is None and not m.can_have(c, self.policy):
            problem = "more work than it reported"
        if problem is not None:
            lost = c.version == r.version and c.lineage != r.lineage
            dismissed = [self.members.dismiss(c.learner, c.incarnation, self._shard)] if lost else []
            dropped = [actions.Drop(c.learner, problem, event.round)] if late else self._failed(r, m, problem)
            return [*dropped, *dismissed]
        if not late:
            m.in_time.add(1.0)
        r.owed.pop(c.learner, None)
        r.unasked.discard(c.learner)
        r.arrived[c.learner] = c
        r.old.discard(c.learner)
        r.advance(m)
        # It may overtake reports.
        r.known[c.learner] = c.steps if late else max(c.steps, m.steps_on(c.fragment, c.version))
        return []

    def _counts_from(self, c: Contribution) -> str | None:
        """Why an offer's work cannot be added to the newest version; None: it can."""
        newest = self.merged.versions[c.fragment]
        if c.version > newest or (c.version < newest and not self.policy.takes_late_work):
            return "stale fragment"
        if not self._updates.made(c.fragment, c.version, c.lineage):
            return "work on a version of a lost history"
        if c.since != self._updates.watermark(c.fragment, c.learner):
            return "work not counted from its watermark"
        return None

    def _wants(self, r: Round, m: Member, c: Contribution, late: bool) -> bool:
        """Whether an offer was asked for and can still be merged, late or not."""
        asked = c.fragment in m.asked if late else (c.learner, c.incarnation) in r.asked
        return asked and m.state is MemberState.LIVE and r.phase is not Phase.MERGING and r.lacks(c)

    def _offer_failed(self, event: events.OfferFailed) -> Actions:
        r = self._find(event.round)
        m = self.members.current(event.learner, event.incarnation)
        if r is None or m is None or event.learner not in r.owed:
            return []
        return self._failed(r, m, event.reason)

    def _failed(self, r: Round, m: Member, reason: str) -> Actions:
        """Asks the learner for another offer, after its next report."""
        r.owed.pop(m.learner, None)
        r.failed[m.learner] = (m.incarnation, m.reports)
        r.tries[m.learner] += self._prospects.done(m)
        r.unasked.add(m.learner)
        self._touched.add(r.id.fragment)
        return [actions.Drop(m.learner, reason, r.id)]

    def _expire(self, now: float) -> Actions:
        """Times out offers that do not arrive."""
        late = self._overdue.take(self._open, now)
        return [said for r, m in late for said in self._failed(r, self._member(m), "offer timed out")]

    def _grace_window(self, r: Round) -> float:
        """Seconds of the paper's window, by the step time of the fastest learner that may be merged."""
        learners = [m for m in self.members.live() if m.learner not in r.refused]
        known = [m.step_time.value for m in learners if m.step_time.value is not None]
        if not known or self.policy.quorum is None:
            return 0.0
        step_time, sync_time = min(known), self._sync_time.value or 0.0
        spare = slack(self.policy.overlap, step_time, r.quorum_seconds, sync_time)
        if r.opened_late:  # no learner was asked in time, as merges take longer than this
            step_time = min(max(known), max(step_time, sync_time))
            spare = slack(self.policy.overlap, step_time, 0.0, 0.0)
        return grace(self.policy.gamma, spare, self.policy.max_grace * step_time)

    def _next_quorum(self, r: Round, now: float) -> float:
        """Seconds until the fragment's next quorum, if as late as this one; 0: unknown speed."""
        front = self._asking.front
        turn = self._schedule.next_due(r.id.fragment, max(front.step, r.id.step))
        at = front.reaches(turn, now)
        return 0.0 if at is None else at - now + r.quorum_seconds

    def _due_from(self, step: int, fragment: int) -> RoundId | None:
        """The first unmerged round of its fragments in the schedule, from this one on."""
        begun = {p: self.merged.merged_steps[p] for p in self._updates.fragments}
        begun |= {p: r.id.step for p, r in self._open.items()}
        while self.total_steps is None or step <= self.total_steps:
            for p in self._schedule.due(step):
                if p >= fragment and p in self._updates.fragments and step > begun[p]:
                    return RoundId(step, p)
            step, fragment = step + 1, 0
        return None

    @property
    def _oldest(self) -> int:
        """The step of the round that made the oldest version."""
        return min(self.merged.merged_steps[p] for p in self._updates.fragments)

    def _member(self, learner: int) -> Member:
        return cast(Member, self.members.newest(learner))

    def _find(self, round_id: RoundId) -> Round | None:
        r = self._open.get(round_id.fragment)
        return r if r is not None and r.id == round_id else None
