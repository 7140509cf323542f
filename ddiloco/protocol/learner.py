"""The learner's side of the protocol: its clock, its counters, and what it does at a step boundary."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, FragmentCounters, Report, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.work import FragmentWork, HeldFragment, LearnerWork, Total

JOIN_AGAIN = 1.0
"""Seconds after which a learner that has not been welcomed asks again, as its number may have become free.
One that rejoins reports after as many, unless a step is complete before."""

BEYOND_REJOINING = 1 << 20
"""More incarnations than a process ever takes by rejoining: by leaps of it no two come to the same."""

KEPT_OFFERS = 4
"""Of a fragment, since its last update: the newest ones. Each takes the fragment's memory on the devices, and
as long as nothing is merged the learner is asked again and again."""

KEPT_LIVES = 16
"""Of those before a learner's present one, the newest. An update that holds work of an older life holds, as
far as the learner knows, all that it has."""


@dataclasses.dataclass(frozen=True)
class _Offer:
    """An offer that is sent once the steps in it are complete."""

    asked: events.OfferAsked
    contribution: Contribution  # with steps under way counted as if none were skipped
    base: Total
    made: Total

    @property
    def settled(self) -> Contribution:
        """The contribution by what is known now."""
        steps, tokens = self.made.since(self.base)
        return dataclasses.replace(self.contribution, steps=steps, tokens=tokens)


@dataclasses.dataclass(frozen=True)
class _StartedStep:
    """A step that the devices still work on, with what becomes public once it is complete."""

    tokens: int
    done: Total  # after it
    clock: int | None  # None once the learner was welcomed again: the step is of its earlier state
    held: tuple[tuple[int, Total], ...] = ()  # by fragment, the version and from where on its work counts
    offers: tuple[_Offer, ...] = ()

    @property
    def forgotten(self) -> _StartedStep:
        """The step as one of an earlier state."""
        return _StartedStep(self.tokens, self.done, clock=None)


class LearnerCore:
    """Decides for one process of a learner; starts no thread, reads no clock, touches no array.

    When the syncer has lost it, the process takes the next incarnation and rejoins with what it holds.

    The driver may give several steps to the devices before the first completes: counters change at
    `StepStarted`, and are reported at `StepFinished`, which also says whether the step was skipped: then it
    is in no counter. Who has only skipped steps has no work, and offers nothing.
    """

    def __init__(
        self, learner: int, incarnation: int, policy: SyncPolicy, total_steps: int | None = None
    ) -> None:
        self.learner = learner
        self.incarnation = incarnation
        self.policy = policy
        self.schedule = Schedule(policy.num_fragments, policy.interval)
        self.total_steps = total_steps
        self.clock = 0
        self._joined_step = 0
        self._welcomed_as: int | None = None  # incarnation whose welcome was adopted
        self._reported_step = -1
        self._known_as: int | None = None  # incarnation under which it said what it has, or was welcomed
        self._welcome: dict[int, HeldFragment] = {}  # by fragment, what has come of a welcome
        self._welcome_step, self._welcome_data = 0, NOTHING_MERGED
        self._life = self._steps = 0  # as of a Watermark; 0: it holds no state
        self._lives: dict[int, int] = {}  # those before, and after how many steps each was left
        self._began = NOTHING_MERGED  # the work of those after which its data go on
        self._fragments: list[HeldFragment] = []
        self._done = Total()  # after the last step that was started
        self._asked: dict[int, events.OfferAsked] = {}  # by fragment, what the syncer waits for
        self._last: Report | None = None  # repeated as a sign of life
        self._started: collections.deque[_StartedStep] = collections.deque()
        self._unsent = 0  # offers that waited for the link when the last step started, or were sent since
        self._waited = False  # whether some waited then
        self._room: float = math.inf  # offers that may be made before the next step starts

    @property
    def recovered(self) -> bool:
        """Whether a welcome has come, so that there are parameters to train."""
        return bool(self._fragments)

    @property
    def heartbeat(self) -> float:
        """Seconds after which to send a Heartbeat if it has said nothing.

        Sooner while it asks to be let in, and to say what it has where it rejoins: others may wait for that.
        """
        known = self._known_as == self.incarnation
        return self.policy.heartbeat if known else min(JOIN_AGAIN, self.policy.heartbeat)

    @property
    def done(self) -> bool:
        """Whether the clock has reached the last step."""
        return self.total_steps is not None and self.clock >= self.total_steps

    @property
    def blocked(self) -> bool:
        """Whether the run-ahead bound forbids the next step until an update arrives (never if unbounded)."""
        bound = self.policy.max_run_ahead
        if bound is None:
            return False
        return any(self.clock - due >= bound for due in self._outstanding())

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that was last applied."""
        return tuple(fragment.version for fragment in self._fragments)

    @property
    def lineages(self) -> tuple[int, ...]:
        """Which start of the syncer made each of these versions."""
        return tuple(fragment.lineage for fragment in self._fragments)

    @property
    def work(self) -> LearnerWork:
        """What `resume` takes; steps under way count as if none were skipped."""
        fragments = tuple(FragmentWork.of(held, self._done) for held in self._fragments)
        return LearnerWork(self.clock, self._life, self._steps, fragments, dict(self._lives))

    def resume(self, work: LearnerWork, began: Watermark = NOTHING_MERGED) -> list[actions.LearnerAction]:
        """Takes up the state of an earlier process of the learner in a life of its own, then rejoins with it.

        Args:
          work: of that process.
          began: the furthest work of the learner that was merged, or may be; its data go on after that, or
            where `work` ends if that is later.

        Raises:
          LocalProtocolError: the core has begun already, or the state is of another number of fragments.
        """
        if self.recovered or len(work.fragments) != self.policy.num_fragments:
            raise LocalProtocolError(f"a state of {len(work.fragments)} fragments cannot be taken up")
        self.clock = self._joined_step = self._reported_step = work.clock
        self._fragments = [fragment.held() for fragment in work.fragments]
        self._life, self._steps = self.incarnation, work.steps
        lives = [*work.lives.items(), (work.life, work.steps)]
        self._lives = dict(lives[-KEPT_LIVES:])
        self._began = max(began.bare, work.reached)
        return [self._join(), self._say(self._report())]

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
            case events.OfferAsked():
                return self._offer_asked(event)
            case events.UpdateArrived():
                return self._update_arrived(event)
            case events.Heartbeat():
                return self._heartbeat()

    def _welcomed(self, event: events.Welcomed) -> list[actions.LearnerAction]:
        if event.incarnation != self.incarnation:
            return [actions.Drop(self.learner, "welcome of another incarnation")]
        if self._welcomed_as == self.incarnation:
            return [actions.Drop(self.learner, "welcomed twice")]
        fragments = event.fragments or tuple(range(self.policy.num_fragments))
        lineages = event.lineages or (0,) * len(fragments)
        marks = event.watermarks or (NOTHING_MERGED,) * len(fragments)
        counts = {len(event.versions), len(event.merged_steps), len(lineages), len(marks)}
        if counts != {len(fragments)} or not set(fragments) <= set(range(self.policy.num_fragments)):
            return [actions.Drop(self.learner, "welcome with another number of fragments")]
        for p, version, step, lineage, mark in zip(
            fragments, event.versions, event.merged_steps, lineages, marks, strict=True
        ):
            self._welcome[p] = HeldFragment(version, step, self._done, lineage, mark)
        self._welcome_step = max(self._welcome_step, event.step)
        self._welcome_data = max(self._welcome_data, event.data)
        return self._adopt() if len(self._welcome) == self.policy.num_fragments else []

    def _adopt(self) -> list[actions.LearnerAction]:
        """Begins with the welcome, now that all parts of it are here."""
        self._welcomed_as = self._known_as = self.incarnation
        self.clock = self._joined_step = self._welcome_step
        self._reported_step = -1
        welcome = (self._welcome[p] for p in range(self.policy.num_fragments))
        self._fragments = [dataclasses.replace(held, base=self._done) for held in welcome]
        position = self._go_on_after(self._welcome_data)
        self._welcome, self._welcome_step, self._welcome_data = {}, 0, NOTHING_MERGED
        self._started = collections.deque(step.forgotten for step in self._started)
        self._asked.clear()
        self._last = self._report()  # for the signs of life of its first step
        return [actions.AdoptAll(self.clock, self.versions, position)]

    def _go_on_after(self, data: Watermark) -> str | None:
        """Where the data go on of which the furthest that may be merged is `data`; None: where they are."""
        begins = not self._life
        if begins:
            self._life = self.incarnation
        if not begins and (data.life == self._life or data <= self._began):
            return None
        self._began = data.bare
        return data.position

    def _rejected(self, event: events.Rejected) -> list[actions.LearnerAction]:
        """Leaves if a newer process has taken its place; one that is only starting takes a higher number."""
        if event.incarnation != self.incarnation:
            return []
        if self.recovered or event.newest <= self.incarnation:
            return [actions.Leave(event.reason)]
        leaps = (event.newest - self.incarnation) // BEYOND_REJOINING + 1
        return self._join_as(self.incarnation + leaps * BEYOND_REJOINING)

    def _not_member(self, event: events.NotMember) -> list[actions.LearnerAction]:
        """Rejoins under the next number, so that what is still on its way under this one does no harm."""
        if event.incarnation != self.incarnation:
            return []
        return self._join_as(self.incarnation + 1)

    def _join_as(self, incarnation: int) -> list[actions.LearnerAction]:
        """Asks to take part under this number; what came under an earlier one no longer counts."""
        self.incarnation = incarnation
        self._welcome, self._welcome_step, self._welcome_data = {}, 0, NOTHING_MERGED
        # Without offers: nobody has asked for them under the new number.
        self._started = collections.deque(dataclasses.replace(step, offers=()) for step in self._started)
        self._asked.clear()
        if self._last is not None:
            self._last = dataclasses.replace(self._last, incarnation=self.incarnation, adopted=False)
        return [self._join()]

    def _heartbeat(self) -> list[actions.LearnerAction]:
        if not self.recovered:
            return [self._join()]
        if self._started:
            return [self._say(self._last)] if self._last is not None else []
        return [self._say(self._report())]

    def _join(self) -> actions.TellSyncer:
        if not self.recovered:
            return actions.TellSyncer(events.LearnerJoined(self.learner, self.incarnation))
        finished = max(self._reported_step, self._joined_step)  # not the step that is under way
        held = self.versions, self.lineages, self._life, self._began
        return actions.TellSyncer(events.LearnerJoined(self.learner, self.incarnation, finished, *held))

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
        told = self._say(self._report_at(step.clock, step.held, step.done))
        held_back = self._offer_now() if self.done and not self._started else ()
        return [told, *self._send(step.offers), *held_back, *self._say_last()]

    def _send(self, offers: Sequence[_Offer]) -> list[actions.LearnerAction]:
        """Sends those with work in them; where all steps were skipped the next work is offered."""
        out: list[actions.LearnerAction] = []
        empty = [offer.asked for offer in offers if not offer.settled.steps]
        out += [actions.SendOffer(o.asked.round, o.settled) for o in offers if o.settled.steps]
        self._unsent += len(out)
        for asked in empty:
            self._asked.setdefault(asked.round.fragment, asked)
        return [*out, *(self._offer_now() if empty else ())]

    def _clock_set(self, event: events.ClockSet) -> list[actions.LearnerAction]:
        """Ends with the others, with what there is."""
        if not self.recovered or event.step <= self.clock:
            return []
        if self.total_steps is not None and event.step > self.total_steps:
            return [actions.Drop(self.learner, "clock past the last step")]
        self.clock = event.step
        if self._started:
            last = self._started.pop()
            self._started.append(dataclasses.replace(last, clock=self.clock, held=self._held()))
            return self._offer_now()
        return [*self._say_last(), *self._offer_now()]

    def _offer_asked(self, event: events.OfferAsked) -> list[actions.LearnerAction]:
        """Offers the fragment at once if that is due: as the last started step leaves it."""
        if not self.recovered:
            return [actions.Drop(self.learner, "asked before welcome")]
        if not 0 <= event.round.fragment < len(self._fragments):
            return [actions.Drop(self.learner, "asked for an unknown fragment")]
        if not any(offer.asked.round == event.round for step in self._started for offer in step.offers):
            self._asked[event.round.fragment] = event
        return self._offer_now()

    def _offer_now(self) -> list[actions.LearnerAction]:
        if not self._started:
            self._room = math.inf  # another step may never start
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
        old = self._fragments[event.fragment]
        if event.version <= old.version:
            return [actions.Drop(self.learner, "stale update")]
        merged = self._merged_offer(old, event.watermark)
        rebase = self.policy.rebase and merged is not None
        base = old.offered[merged] if rebase else self._done  # type: ignore[index]
        self._fragments[event.fragment] = HeldFragment(
            event.version, event.step, base, event.lineage, event.watermark
        )
        self._started = collections.deque(_without(event.fragment, step) for step in self._started)
        if event.step - self.clock > self.policy.band:
            self.clock = event.step
        apply = actions.ApplyUpdate(event.fragment, event.version, self.policy.mixing, merged, rebase)
        return [apply, *self._say_last()]

    def _merged_offer(self, old: HeldFragment, mark: Watermark) -> int | None:
        """The steps of the offer up to which this learner's work is in an update; None if none is known."""
        if mark.life != self._life and mark.life not in self._lives:
            return None
        steps = min(mark.steps, self._lives.get(mark.life, mark.steps))
        return steps if steps in old.offered else None

    def _held(self) -> tuple[tuple[int, Total], ...]:
        return tuple((f.version, f.base) for f in self._fragments)

    def _report(self) -> Report:
        return self._report_at(self.clock, self._held(), self._done)

    def _report_at(self, clock: int, held: Sequence[tuple[int, Total]], done: Total) -> Report:
        counters = tuple(FragmentCounters(version, *done.since(base)) for version, base in held)
        adopted = self._welcomed_as == self.incarnation
        return Report(self.learner, self.incarnation, clock, counters, adopted)

    def _say_last(self) -> list[actions.LearnerAction]:
        """A report without a step: an update took the clock to the last step, so no step will follow."""
        if self._started or not self.done or self._reported_step >= self.clock:
            return []
        self._reported_step = self.clock
        return [self._say(self._report())]

    def _say(self, report: Report) -> actions.TellSyncer:
        self._last, self._known_as = report, report.incarnation
        return actions.TellSyncer(events.StepReported(report))

    def _outstanding(self) -> list[int]:
        """The newest due step of each fragment with work to offer whose update has not been applied."""
        due = (self.schedule.last_due(p, self.clock) for p in range(len(self._fragments)))
        return [
            step
            for step, fragment in zip(due, self._fragments, strict=True)
            if self._has_work(fragment) and step > max(fragment.merged_step, self._joined_step)
        ]

    def _has_work(self, fragment: HeldFragment) -> bool:
        return self._done.steps > fragment.base.steps

    def _offers(self) -> tuple[list[actions.MakeOffer], tuple[_Offer, ...]]:
        """What was asked for and is due now, with the copies for it; forgets what can no longer come."""
        copies, offers = [], []
        for p, asked in sorted(self._asked.items(), key=lambda one: one[1].round.step):
            f = self._fragments[p]
            if f.version > asked.version:
                del self._asked[p]
            elif f.version == asked.version and self._has_work(f) and self.clock >= asked.clock:
                if self._room <= 0:
                    break
                del self._asked[p]
                self._room -= 1
                contribution = self._contribution(p)
                if self._steps not in f.offered:  # else it is asked for a second time, as when it was lost
                    f.offered[self._steps] = self._done
                    if len(f.offered) > KEPT_OFFERS:
                        self._forget(p, next(iter(f.offered)))
                    copies.append(actions.MakeOffer(contribution))
                offers.append(_Offer(asked, contribution, f.base, self._done))
        return copies, tuple(offers)

    def _make_room(self, waiting: int) -> None:
        """Holds offers back until the link has room, so that they do not grow old in its queue.

        As many may wait as the link took during the last step, half as many more, and one. None is held back
        where none waits at two boundaries in a row, nor where learners wait for merges.
        """
        taken, self._unsent = max(0, self._unsent - waiting), waiting
        full, self._waited = self._waited or waiting > 0, waiting > 0
        held_back = full and self.policy.max_run_ahead is None
        self._room = 1 + taken * 3 // 2 - waiting if held_back else math.inf

    def _forget(self, fragment: int, steps: int) -> None:
        """Gives up the copy of an offer."""
        del self._fragments[fragment].offered[steps]
        self._started = collections.deque(
            _without(fragment, started, lambda offer: offer.contribution.upto.steps == steps)
            for started in self._started
        )

    def _contribution(self, p: int) -> Contribution:
        f = self._fragments[p]
        work, upto = self._done.since(f.base), Watermark(self._life, self._steps)
        made_on = f.lineage, f.watermark
        return Contribution(self.learner, self.incarnation, p, f.version, self.clock, *work, *made_on, upto)


def _without(
    fragment: int, step: _StartedStep, which: Callable[[_Offer], bool] = lambda offer: True
) -> _StartedStep:
    """The step without these offers of a fragment, which are worth nothing now."""
    kept = tuple(o for o in step.offers if o.asked.round.fragment != fragment or not which(o))
    return step if len(kept) == len(step.offers) else dataclasses.replace(step, offers=kept)
