"""The learner's side of the protocol: its clock, its counters, and what it does at a step boundary."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, FragmentCounters, Report, Watermark
from ddiloco.protocol.policy import MAX_AGE, TOO_OLD, SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.work import FragmentWork, HeldFragment, LearnerWork, Total, goes_on_after

JOIN_AGAIN = 1.0
"""Seconds after which an unwelcomed learner joins again, as its number may have become free. A rejoined
learner repeats its report after as many, unless a step is complete before."""

BEYOND_REJOINING = 1 << 20
"""More incarnations than a process ever takes by rejoining; jumps of it avoid collisions."""

KEPT_OFFERS = 4
"""Maximum copies of a fragment's offers since an update last had some of its work."""

KEPT_LIVES = 16
"""Maximum number of earlier lives that a learner remembers."""


@dataclasses.dataclass(frozen=True)
class _Offer:
    """An offer that is sent once the steps in it are complete."""

    asked: events.OfferAsked
    contribution: Contribution  # with steps in flight counted as if none were skipped
    base: Total
    made: Total

    @property
    def settled(self) -> Contribution:
        """The contribution without steps known to be skipped."""
        steps, tokens = self.made.since(self.base)
        return dataclasses.replace(self.contribution, steps=steps, tokens=tokens)


@dataclasses.dataclass(frozen=True)
class _Standing:
    """The content of a report: clock, fragments and work at the end of a step."""

    clock: int
    held: tuple[tuple[int, Total], ...]  # by fragment, its version and the start of its work
    done: Total


@dataclasses.dataclass(frozen=True)
class _StartedStep:
    """A step in flight on the devices, with what is sent once it is complete."""

    tokens: int
    done: Total  # after it
    clock: int | None  # None after another welcome: the step is of an earlier state
    held: tuple[tuple[int, Total], ...] = ()
    offers: tuple[_Offer, ...] = ()

    @property
    def forgotten(self) -> _StartedStep:
        """The same as a step of an earlier state."""
        return _StartedStep(self.tokens, self.done, clock=None)


_At = TypeVar("_At", _StartedStep, _Standing)


@dataclasses.dataclass
class _Session:
    """The learner's membership of one shard of the syncer."""

    shard: int
    incarnation: int
    fragments: tuple[int, ...]
    policy: SyncPolicy  # of the shard at present
    member: bool = False  # to the learner's knowledge
    welcomed_as: int | None = None  # incarnation of the last complete welcome
    known_as: int | None = None  # incarnation under which it reported or was welcomed
    joined_step: int = 0
    began: Watermark = NOTHING_MERGED  # the merged work behind whose data its fragments' work begins
    ends_at: int = 0  # step of the shard's ClockSet; 0: none
    welcome: dict[int, HeldFragment] = dataclasses.field(default_factory=dict)  # an incomplete one
    welcome_step: int = 0
    welcome_data: Watermark = NOTHING_MERGED
    reported: tuple[FragmentCounters, ...] = ()  # `Report.bases` of the last report

    def report(self, at: _Standing) -> None:
        """Sets `reported`; what has not changed stays the same object, which reports share."""
        held, known = [at.held[p] for p in self.fragments], self.reported or (None,) * len(self.fragments)
        self.reported = tuple(
            old
            if old is not None
            and (old.version, old.steps, old.tokens) == (version, -base.steps, -base.tokens)
            else FragmentCounters(version, -base.steps, -base.tokens)
            for old, (version, base) in zip(known, held, strict=True)
        )

    @property
    def welcomed(self) -> bool:
        """Whether the welcome of the present incarnation is complete."""
        return self.welcomed_as == self.incarnation


class LearnerCore:
    """Decides for one process of a learner; starts no thread, reads no clock, touches no array.

    It has a session with each shard of the syncer, and starts once all have welcomed it. At a shard that has
    lost it, it takes the next incarnation and rejoins with its state.

    The driver may dispatch several steps before the first completes: counters change at `StepStarted`, and
    are reported at `StepFinished`. A step that was skipped is in no counter; a learner with skipped steps
    only has no work to offer.
    """

    def __init__(
        self,
        learner: int,
        incarnation: int,
        policy: SyncPolicy,
        total_steps: int | None = None,
        shards: int = 1,
    ) -> None:
        self.learner = learner
        self.policy = policy
        own = (fragments_of(shard, shards, policy.num_fragments) for shard in range(shards))
        self._sessions = [_Session(n, incarnation, fragments, policy) for n, fragments in enumerate(own)]
        self.total_steps = total_steps
        self.clock = 0
        self._reported_step = -1
        self._life = self._steps = 0  # as of a Watermark; 0: it holds no state
        self._lives: dict[int, int] = {}  # earlier ones, with the steps at the end of each
        self._began = NOTHING_MERGED  # the work of those behind which its data continue
        self._welcomed_after: dict[int, int] = {}  # other lives in welcomes, with their steps
        self._fragments: list[HeldFragment] = []
        self._done = Total()  # after the last step that was started
        self._asked: dict[int, events.OfferAsked] = {}  # open requests, by fragment
        self._last: _Standing | None = None  # repeated as a heartbeat
        self._started: collections.deque[_StartedStep] = collections.deque()
        self._unsent = 0  # offers in the link's queue at the start of the last step, or sent since
        self._waited = False  # whether some were in the queue then
        self._room: float = math.inf  # offers that may be made before the next step starts

    @property
    def incarnation(self) -> int:
        """The incarnation that it has at the first shard."""
        return self._sessions[0].incarnation

    @property
    def incarnations(self) -> tuple[int, ...]:
        """The incarnation that it has at each shard."""
        return tuple(session.incarnation for session in self._sessions)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of which it is, to its knowledge, a member."""
        return tuple(session.shard for session in self._sessions if session.member)

    @property
    def recovered(self) -> bool:
        """Whether it has all welcomes, and so parameters to train."""
        return bool(self._fragments)

    @property
    def heartbeat(self) -> float:
        """Seconds without a message after which to send a Heartbeat.

        Shorter while it joins, or reports its state after rejoining: the syncer may wait for that.
        """
        known = self.recovered and all(s.known_as == s.incarnation for s in self._sessions)
        return self.policy.heartbeat if known else min(JOIN_AGAIN, self.policy.heartbeat)

    @property
    def done(self) -> bool:
        """Whether the clock has reached the last step."""
        return self.total_steps is not None and self.clock >= self.total_steps

    @property
    def blocked(self) -> bool:
        """Whether the run-ahead bound forbids the next step until an update arrives (never if unbounded).

        Shards that have lost it are not counted, as they send no update; unless all have lost it.
        """
        bound = self.policy.max_run_ahead
        if bound is None or not self.recovered:
            return False
        return any(self.clock - due >= bound for due in self._outstanding())

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that was last applied."""
        return tuple(fragment.version for fragment in self._fragments)

    @property
    def lineages(self) -> tuple[int, ...]:
        """The lineage of each of these versions."""
        return tuple(fragment.lineage for fragment in self._fragments)

    @property
    def offered(self) -> set[int]:
        """The `Watermark.steps` of the kept offers, which may still be merged."""
        return {steps for fragment in self._fragments for steps in fragment.offered}

    @property
    def reached(self) -> Watermark:
        """The newest step boundary."""
        return Watermark(self._life, self._steps)

    @property
    def work(self) -> LearnerWork:
        """The argument of `resume`; steps in flight count as if none were skipped."""
        fragments = tuple(FragmentWork.of(held, self._done) for held in self._fragments)
        return LearnerWork(self.clock, self._life, self._steps, fragments, dict(self._lives))

    def resume(self, work: LearnerWork, began: Watermark = NOTHING_MERGED) -> list[actions.LearnerAction]:
        """Continues the state of an earlier process of the learner in a new life, and rejoins with it.

        Args:
          work: of that process.
          began: the furthest work of the learner that is, or may still be, merged; its data continue behind
            that, or at the end of `work` if that is later.

        Raises:
          LocalProtocolError: the core has started already, the state has another number of fragments, or
            another process of the learner has continued it.
        """
        after = work.begins_after([began])
        if after is None:
            raise LocalProtocolError("another process of the learner has continued an earlier life")
        if self.recovered or len(work.fragments) != self.policy.num_fragments:
            raise LocalProtocolError(f"a state of {len(work.fragments)} fragments cannot be resumed")
        self.clock = self._reported_step = work.clock
        for session in self._sessions:
            session.joined_step, session.began = work.clock, after.bare
        self._fragments = [fragment.held() for fragment in work.fragments]
        self._life, self._steps = max(self.incarnations), max(work.steps, after.steps)
        lives = [*work.lives.items(), (work.life, work.steps)]
        self._lives = dict(lives[-KEPT_LIVES:])
        self._began = after.bare
        self._last = self._standing()
        joined = ((self._join(session), self._report(session, self._last)) for session in self._sessions)
        return [said for both in joined for said in both]

    def join(self) -> list[actions.LearnerAction]:
        """Joins every shard."""
        return [self._join(session) for session in self._sessions]

    def handle(self, event: events.LearnerEvent, now: float) -> list[actions.LearnerAction]:
        """Takes one event, returns the actions that follow, in order.

        Raises:
          LocalProtocolError: a step was started that may not start, or one finished that was never started.
        """
        match event:
            case events.Welcomed():
                return self._welcomed(event)
            case events.NotMember():
                return self._not_member(event)
            case events.Rejected():
                return self._rejected(event)
            case events.StepStarted():
                return self._step_started(event)
            case events.StepFinished():
                return self._step_finished(event)
            case events.ClockSet():
                return self._clock_set(event)
            case events.TimingSet():
                return self._timing_set(event)
            case events.OfferAsked():
                return self._offer_asked(event)
            case events.UpdateArrived():
                return self._update_arrived(event)
            case events.Disconnected():
                self._sessions[event.shard].member = False
                return self._end_with_others()
            case events.Heartbeat():
                return self._heartbeat()

    def _welcomed(self, event: events.Welcomed) -> list[actions.LearnerAction]:
        session = self._sessions[event.shard]
        if event.incarnation != session.incarnation:
            return [actions.Drop(self.learner, "welcome of another incarnation")]
        if session.welcomed:
            return [actions.Drop(self.learner, "welcomed twice")]
        fragments = event.fragments or session.fragments
        lineages = event.lineages or (0,) * len(fragments)
        marks = event.watermarks or (NOTHING_MERGED,) * len(fragments)
        counts = {len(event.versions), len(event.merged_steps), len(lineages), len(marks)}
        if counts != {len(fragments)} or not set(fragments) <= set(session.fragments):
            return [actions.Drop(self.learner, "welcome with another number of fragments")]
        for p, version, step, lineage, mark in zip(
            fragments, event.versions, event.merged_steps, lineages, marks, strict=True
        ):
            session.welcome[p] = HeldFragment(version, step, self._done, lineage, mark, begun_on=version)
        session.welcome_step = max(session.welcome_step, event.step)
        session.welcome_data = Watermark.furthest([session.welcome_data, event.data])
        if len(session.welcome) < len(session.fragments):
            return []
        session.welcomed_as = session.known_as = session.incarnation
        session.member = True
        if self.recovered and len(session.fragments) < self.policy.num_fragments:
            return self._adopt(session)
        return self._begin() if all(session.welcomed for session in self._sessions) else []

    def _begin(self) -> list[actions.LearnerAction]:
        """Starts with the complete welcomes of all shards."""
        self.clock = max(session.welcome_step for session in self._sessions)
        self._reported_step = -1
        welcome = {p: held for session in self._sessions for p, held in session.welcome.items()}
        self._fragments = [dataclasses.replace(welcome[p], base=self._done) for p in sorted(welcome)]
        known = sorted(session.welcome_data for session in self._sessions)
        position = self._go_on_after(Watermark.furthest(known), self._sessions)
        self._welcomed_after |= {data.life: data.steps for data in known}
        for session in self._sessions:
            session.joined_step = self.clock
            session.welcome, session.welcome_step, session.welcome_data = {}, 0, NOTHING_MERGED
        self._started = collections.deque(step.forgotten for step in self._started)
        self._asked.clear()
        self._last = self._standing()  # for heartbeats during its first step
        adopt = actions.AdoptAll(self.clock, self.versions, position)
        return [adopt, *map(self._ready, self._sessions)]

    def _adopt(self, session: _Session) -> list[actions.LearnerAction]:
        """Replaces the fragments of the shard that has welcomed it; work on others continues."""
        out: list[actions.LearnerAction] = []
        self._end_work(session)
        for p in session.fragments:
            self._fragments[p] = dataclasses.replace(session.welcome[p], base=self._done)
            out.append(actions.ApplyUpdate(p, self._fragments[p].version, mixing=0.0))
        self._started = collections.deque(self._renewed(session, step) for step in self._started)
        self._last = None if self._last is None else self._renewed(session, self._last)
        if session.welcome_step - self.clock > session.policy.band:
            self.clock = session.welcome_step
        position = self._go_on_after(session.welcome_data, [session])
        session.joined_step = self.clock
        session.welcome, session.welcome_step, session.welcome_data = {}, 0, NOTHING_MERGED
        if position is not None:
            out.append(actions.DrawFrom(position))
        return [*out, self._ready(session), *self._say_last()]

    def _go_on_after(self, data: Watermark, sessions: Iterable[_Session]) -> str | None:
        """The position behind `data`, the furthest work that may be merged; None: the present position.

        `sessions` are those of the shards that say so. Where other shards have work of this process, the
        position moves only forward. A shard on an older disk may name a life before the one that the data
        continue behind: they stay where they are. It may name a process that lived beside this one: if that
        is further on, the data continue behind it.
        """
        begins, began = not self._life, self._began
        elsewhere, position = not begins and len(self._sessions) > 1, None
        if begins:
            self._life = max(self.incarnations)
        known = not begins and (data.life == self._life or goes_on_after(began, self._left, data))
        if not known and elsewhere and data.life < began.life:
            began = data.bare  # as these shards know it; what the data continue behind is later
        elif not known:
            as_far = data.steps <= self._steps  # else it would draw what is merged once more
            position = None if elsewhere and as_far else data.position
            began = self._began = data.bare
            self._steps = max(self._steps, data.steps)
        for session in sessions:
            session.began = began
        return position

    @property
    def _left(self) -> dict[int, int]:
        """Earlier lives, with the steps of each behind which its data continue."""
        return {**self._welcomed_after, **self._lives}

    def _renewed(self, session: _Session, at: _At) -> _At:
        """The same with the present fragments of a shard, without work on them."""
        held = list(at.held)
        for p in session.fragments if held else ():
            held[p] = self._fragments[p].version, at.done
        return dataclasses.replace(at, held=tuple(held))

    def _ready(self, session: _Session) -> actions.SendToSyncer:
        versions = tuple(self._fragments[p].version for p in session.fragments)
        ready = events.LearnerReady(self.learner, session.incarnation, self.clock, versions)
        return actions.SendToSyncer(ready, session.shard)

    def _rejected(self, event: events.Rejected) -> list[actions.LearnerAction]:
        """Ends if a newer process has replaced it; one that is still starting takes a larger incarnation.

        A restarted shard may know an incarnation that the learner itself has at another shard.
        """
        session = self._sessions[event.shard]
        if event.incarnation != session.incarnation:
            return []
        if session.incarnation < event.newest <= max(self.incarnations):
            return self._join_as(session, event.newest + 1)
        if self.recovered or event.newest <= session.incarnation:
            return [actions.EndProcess(event.reason)]
        # At all shards, so that of two processes the same one has the larger number everywhere.
        leap = ((event.newest - session.incarnation) // BEYOND_REJOINING + 1) * BEYOND_REJOINING
        return [said for one in self._sessions for said in self._join_as(one, one.incarnation + leap)]

    def _not_member(self, event: events.NotMember) -> list[actions.LearnerAction]:
        """Rejoins as the next incarnation, so that messages in transit under this one do no harm."""
        session = self._sessions[event.shard]
        if event.incarnation != session.incarnation:
            return []
        return [*self._join_as(session, session.incarnation + 1), *self._end_with_others()]

    def _join_as(self, session: _Session, incarnation: int) -> list[actions.LearnerAction]:
        """Joins as this incarnation; messages of earlier ones no longer count."""
        session.incarnation, session.member, session.ends_at = incarnation, False, 0
        session.welcome, session.welcome_step, session.welcome_data = {}, 0, NOTHING_MERGED
        self._end_work(session)
        return [self._join(session)]

    def _end_work(self, session: _Session) -> None:
        """Forgets the requests of a shard, which are void for a new incarnation."""
        for p in session.fragments:
            self._asked.pop(p, None)
            self._started = collections.deque(_without(p, step) for step in self._started)

    def _heartbeat(self) -> list[actions.LearnerAction]:
        if not self.recovered:
            return self.join()
        if self._started:
            return [] if self._last is None else self._reports(self._last)
        return self._say(self._standing())

    def _join(self, session: _Session) -> actions.SendToSyncer:
        joined = events.LearnerJoined(self.learner, session.incarnation, shards=self.shards)
        if self.recovered:
            finished = max(self._reported_step, session.joined_step)  # not the step that is under way
            held = [self._fragments[p] for p in session.fragments]
            joined = dataclasses.replace(
                joined,
                step=finished,
                versions=tuple(fragment.version for fragment in held),
                lineages=tuple(fragment.lineage for fragment in held),
                life=self._life,
                began=session.began,
                left=tuple(Watermark(life, steps) for life, steps in self._left.items()),
            )
        return actions.SendToSyncer(joined, session.shard)

    def _step_started(self, event: events.StepStarted) -> list[actions.LearnerAction]:
        if not self.recovered or self.blocked or self.done:
            raise LocalProtocolError(
                "a step was started before recovery, while blocked, or past the last step"
            )
        self.clock += 1
        self._steps += 1
        self._done = self._done.after(event.tokens)
        self._make_room(event.waiting)
        copies, offers = self._offers()
        self._started.append(_StartedStep(event.tokens, self._done, self.clock, self._held(), offers))
        return [*copies]

    def _step_finished(self, event: events.StepFinished) -> list[actions.LearnerAction]:
        if not self._started:
            raise LocalProtocolError("a step finished that was never started")
        step = self._started.popleft()
        if event.skipped:
            for one in (step, *self._started):
                one.done.without(step.tokens)
        if step.clock is None:
            return self._say_last()
        self._reported_step = step.clock
        told = self._say(_Standing(step.clock, step.held, step.done))
        held_back = self._offer_now() if self.done and not self._started else ()
        return [*told, *self._send(step.offers), *held_back, *self._say_last()]

    def _send(self, offers: Sequence[_Offer]) -> list[actions.LearnerAction]:
        """Sends offers with work in them; if all steps were skipped, later work is offered."""
        out: list[actions.LearnerAction] = []
        empty = [offer.asked for offer in offers if not offer.settled.steps]
        out += [actions.SendOffer(o.asked.round, o.settled) for o in offers if o.settled.steps]
        self._unsent += len(out)
        for asked in empty:
            newest = self._asked.setdefault(asked.round.fragment, asked)
            if newest.round.step < asked.round.step:  # of two offers of one step
                self._asked[asked.round.fragment] = asked
        return [*out, *(self._offer_now() if empty else ())]

    def _clock_set(self, event: events.ClockSet) -> list[actions.LearnerAction]:
        """Ends once no shard of which it is a member needs further work."""
        if not self.recovered:
            return []
        if self.total_steps is not None and event.step > self.total_steps:
            return [actions.Drop(self.learner, "clock past the last step")]
        session = self._sessions[event.shard]
        session.member, session.ends_at = True, event.step
        return self._end_with_others()

    def _timing_set(self, event: events.TimingSet) -> list[actions.LearnerAction]:
        """Judges by the shard's present timing how far its clock may lag, and whether the shard is over."""
        session = self._sessions[event.shard]
        session.policy = event.applied_to(session.policy)
        return self._end_with_others() if self.recovered else []

    def _end_with_others(self) -> list[actions.LearnerAction]:
        """Sets the clock to the end, and offers its work, if all shards have asked or are over."""
        members = [session for session in self._sessions if session.member]
        end = max((session.ends_at for session in members), default=0)
        if end <= self.clock or not all(session.ends_at or self._is_over(session) for session in members):
            return []
        self.clock = end
        if self._started:
            last = self._started.pop()
            self._started.append(dataclasses.replace(last, clock=self.clock, held=self._held()))
            return self._offer_now()
        return [*self._say_last(), *self._offer_now()]

    def _is_over(self, session: _Session) -> bool:
        """Whether the last rounds of all fragments of a shard are merged."""
        last = math.inf if self.total_steps is None else self.total_steps
        return all(self._fragments[p].merged_step >= last for p in session.fragments)

    def _session_of(self, fragment: int) -> _Session:
        return self._sessions[fragment % len(self._sessions)]

    def _offer_asked(self, event: events.OfferAsked) -> list[actions.LearnerAction]:
        """Offers the fragment at once if due, as of the last dispatched step."""
        if not self.recovered:
            return [actions.Drop(self.learner, "asked before welcome")]
        if not 0 <= event.round.fragment < len(self._fragments):
            return [actions.Drop(self.learner, "asked for an unknown fragment")]
        self._session_of(event.round.fragment).member = True
        if not any(offer.asked.round == event.round for step in self._started for offer in step.offers):
            self._asked[event.round.fragment] = event
        return self._offer_now()

    def _offer_now(self) -> list[actions.LearnerAction]:
        if not self._started:
            self._room = math.inf  # there may be no further step
        copies, offers = self._offers()
        if not self._started:
            return [*copies, *self._send(offers)]
        last = self._started.pop()
        self._started.append(dataclasses.replace(last, offers=last.offers + offers))
        return [*copies]

    def _update_arrived(self, event: events.UpdateArrived) -> list[actions.LearnerAction]:
        if not self.recovered:
            return [actions.Drop(self.learner, "update before welcome")]
        if not 0 <= event.fragment < len(self._fragments):
            return [actions.Drop(self.learner, "update of an unknown fragment")]
        self._session_of(event.fragment).member = True
        p, old = event.fragment, self._fragments[event.fragment]
        if event.version <= old.version:
            return [actions.Drop(self.learner, "stale update")]
        new = HeldFragment(
            event.version, event.step, self._done, event.lineage, event.watermark, begun_on=event.version
        )
        merged = self._merged_offer(old, event.watermark)
        out: list[actions.LearnerAction] = []
        goes_on = self.policy.rebase and event.watermark == old.watermark  # no further work is merged
        if goes_on and event.version - old.begun_on > MAX_AGE and self._has_work(old):
            out.append(actions.Drop(self.learner, TOO_OLD))
            goes_on = False
        if goes_on:
            new.base, new.offered = old.base, old.offered
            new.begun_on = old.begun_on if self._has_work(old) else event.version
            # The request holds, since an offer can be added to any version.
            if p in self._asked and self.policy.takes_late_work:
                newest = max(event.version, self._asked[p].version)
                self._asked[p] = dataclasses.replace(self._asked[p], version=newest)
        else:
            self._started = collections.deque(_without(p, step) for step in self._started)
        if self.policy.rebase and merged is not None:
            new.base = old.offered[merged]
        self._fragments[p] = new
        if event.step - self.clock > self._session_of(p).policy.band:
            self.clock = event.step
        rebase = new.base is not self._done
        apply = actions.ApplyUpdate(p, event.version, self.policy.mixing, merged, rebase)
        later = [*self._say_last(), *self._end_with_others()]
        # A request may have come before its version; no further step would bring the work that is kept.
        return [*out, apply, *later, *(self._offer_now() if self.blocked or self.done else [])]

    def _merged_offer(self, old: HeldFragment, mark: Watermark) -> int | None:
        """The steps of the kept offer that is in an update; None if it has none."""
        if mark.life != self._life and mark.life not in self._lives:
            return None
        steps = min(mark.steps, self._lives.get(mark.life, mark.steps))
        return steps if steps in old.offered else None

    def _held(self) -> tuple[tuple[int, Total], ...]:
        return tuple((f.version, f.base) for f in self._fragments)

    def _standing(self) -> _Standing:
        return _Standing(self.clock, self._held(), self._done)

    def _report(self, session: _Session, at: _Standing) -> actions.SendToSyncer:
        """A report to a shard, on its fragments."""
        session.known_as = session.incarnation
        session.report(at)
        known = session.reported, session.welcomed, self.shards
        report = Report(self.learner, session.incarnation, at.clock, *known, at.done.steps, at.done.tokens)
        return actions.SendToSyncer(events.StepReported(report), session.shard)

    def _reports(self, at: _Standing) -> list[actions.LearnerAction]:
        return [self._report(session, at) for session in self._sessions]

    def _say_last(self) -> list[actions.LearnerAction]:
        """A report without a step: an update came after the last step, or set the clock to it."""
        at = self._standing()
        if self._started or not self.done or (self._reported_step >= self.clock and self._last == at):
            return []
        self._reported_step = self.clock
        return self._say(at)

    def _say(self, at: _Standing) -> list[actions.LearnerAction]:
        self._last = at
        return self._reports(at)

    def _outstanding(self) -> list[int]:
        """The newest due steps of fragments with work to offer and without the update."""
        out, schedule = [], self.policy.schedule(self.total_steps)
        for session in [s for s in self._sessions if s.member] or self._sessions:
            for p in session.fragments:
                fragment, step = self._fragments[p], schedule.last_due(p, self.clock)
                if self._has_work(fragment) and step > max(fragment.merged_step, session.joined_step):
                    out.append(step)
        return out

    def _has_work(self, fragment: HeldFragment) -> bool:
        return self._done.steps > fragment.base.steps

    def _offers(self) -> tuple[list[actions.MakeOffer], tuple[_Offer, ...]]:
        """The requested offers that are due now, with their copies; drops void requests."""
        copies, offers = [], []
        for p, asked in sorted(self._asked.items(), key=self._urgency):
            f = self._fragments[p]
            # Without an offer in flight a newer version cannot contain this work.
            fits = f.version == asked.version or (self.policy.takes_late_work and not f.offered)
            if f.version > asked.version:
                del self._asked[p]
            elif fits and self._has_work(f) and self.clock >= asked.clock:
                if self._room <= 0:
                    break
                del self._asked[p]
                self._room -= 1
                contribution = self._contribution(p)
                if self._steps not in f.offered:  # else it is requested again, as after a loss
                    f.offered[self._steps] = self._done
                    if len(f.offered) > KEPT_OFFERS:
                        self._forget(p, next(iter(f.offered)))
                    copies.append(actions.MakeOffer(contribution))
                offers.append(_Offer(asked, contribution, f.base, self._done))
        return copies, tuple(offers)

    def _urgency(self, asked: tuple[int, events.OfferAsked]) -> tuple[bool, int, int]:
        """Order of offers where the link limits them: the oldest work without an offer in flight."""
        fragment = self._fragments[asked[0]]
        first = (bool(fragment.offered), fragment.base.steps) if self.policy.takes_late_work else (False, 0)
        return *first, asked[1].round.step

    def _make_room(self, waiting: int) -> None:
        """Delays offers until the link has room, so that they do not grow old in its queue.

        The queue may hold one and a half times what the link sent during the last step, and one more. Offers
        are not delayed if the queue is empty at two boundaries in a row, nor where learners wait for merges.
        """
        taken, self._unsent = max(0, self._unsent - waiting), waiting
        full, self._waited = self._waited or waiting > 0, waiting > 0
        held_back = full and self.policy.max_run_ahead is None
        self._room = 1 + taken * 3 // 2 - waiting if held_back else math.inf

    def _forget(self, fragment: int, steps: int) -> None:
        """Drops the copy of an offer."""
        del self._fragments[fragment].offered[steps]
        self._started = collections.deque(
            _without(fragment, started, lambda offer: offer.contribution.upto.steps == steps)
            for started in self._started
        )

    def _contribution(self, p: int) -> Contribution:
        f = self._fragments[p]
        work, upto = self._done.since(f.base), self.reached
        made_on = f.lineage, f.watermark
        incarnation = self._session_of(p).incarnation
        return Contribution(self.learner, incarnation, p, f.version, self.clock, *work, *made_on, upto)


def _without(
    fragment: int, step: _StartedStep, which: Callable[[_Offer], bool] = lambda offer: True
) -> _StartedStep:
    """The step without these void offers of a fragment."""
    kept = tuple(o for o in step.offers if o.asked.round.fragment != fragment or not which(o))
    return step if len(kept) == len(step.offers) else dataclasses.replace(step, offers=kept)
