"""The learner's side of the protocol: its clock, its counters, and what it does at a step boundary."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule

JOIN_AGAIN = 1.0
"""Seconds after which a learner that has not been welcomed asks again, as its number may have become free.
One that rejoins reports after as many, unless a step is complete before."""

BEYOND_REJOINING = 1 << 20
"""More incarnations than a process ever takes by rejoining: by leaps of it no two come to the same."""


KEPT_OFFERS = 4
"""Of a fragment, since its last update: the newest ones. Each takes the fragment's memory on the devices, and
as long as nothing is merged the learner is asked again and again."""


@dataclasses.dataclass
class FragmentWork:
    """What a learner knows of one fragment: the version it last applied and its work since then."""

    version: int
    merged_step: int  # global step at which `version` was merged
    steps: int = 0
    tokens: int = 0
    lineage: int = 0  # which start of the syncer made `version`
    offered: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By the step after which an offer was made: the steps and tokens in it. Only offers on `version`, and
    KEPT_OFFERS of them: an update that contains another is taken as if it contained none."""


@dataclasses.dataclass(frozen=True)
class _StartedStep:
    """A step that the devices still work on, with what becomes public once it is complete."""

    report: Report | None  # None once the learner was welcomed again: the step is of its earlier state
    offers: tuple[actions.SendOffer, ...]


class LearnerCore:
    """Decides for one process of a learner; starts no thread, reads no clock, touches no array.

    When the syncer has lost it, the process takes the next incarnation and rejoins with what it holds.

    The driver may give several steps to the devices before the first completes: counters change at
    `StepStarted`, and are reported at `StepFinished`.
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
        self._welcome: dict[int, FragmentWork] = {}  # by fragment, what has come of a welcome
        self._welcome_step = 0
        self._fragments: list[FragmentWork] = []
        self._asked: dict[int, events.OfferAsked] = {}  # by fragment, what the syncer waits for
        self._last: Report | None = None  # repeated as a sign of life
        self._started: collections.deque[_StartedStep] = collections.deque()

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
    def fragments(self) -> tuple[FragmentWork, ...]:
        """By fragment, copies of what `resume` takes."""
        return tuple(map(dataclasses.replace, self._fragments))

    def resume(self, clock: int, fragments: Sequence[FragmentWork]) -> list[actions.LearnerAction]:
        """Takes up the state of an earlier process of the learner, then rejoins with it.

        Raises:
          LocalProtocolError: the core has begun already, or the state is of another number of fragments.
        """
        if self.recovered or len(fragments) != self.policy.num_fragments:
            raise LocalProtocolError(f"a state of {len(fragments)} fragments cannot be taken up")
        self.clock = self._joined_step = self._reported_step = clock
        self._fragments = [dataclasses.replace(f, offered={}) for f in fragments]
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
                return self._step_finished()
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
        counts = {len(event.versions), len(event.merged_steps), len(lineages)}
        if counts != {len(fragments)} or not set(fragments) <= set(range(self.policy.num_fragments)):
            return [actions.Drop(self.learner, "welcome with another number of fragments")]
        for p, version, step, lineage in zip(
            fragments, event.versions, event.merged_steps, lineages, strict=True
        ):
            self._welcome[p] = FragmentWork(version, step, lineage=lineage)
        self._welcome_step = max(self._welcome_step, event.step)
        return self._adopt() if len(self._welcome) == self.policy.num_fragments else []

    def _adopt(self) -> list[actions.LearnerAction]:
        """Begins with the welcome, now that all parts of it are here."""
        self._welcomed_as = self._known_as = self.incarnation
        self.clock = self._joined_step = self._welcome_step
        self._reported_step = -1
        self._fragments = [self._welcome[p] for p in range(self.policy.num_fragments)]
        self._welcome, self._welcome_step = {}, 0
        self._started = collections.deque(_StartedStep(None, ()) for _ in self._started)
        self._asked.clear()
        self._last = self._report()  # for the signs of life of its first step
        return [actions.AdoptAll(self.clock, self.versions)]

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
        self._welcome, self._welcome_step = {}, 0
        self._started = collections.deque(self._renumbered(step) for step in self._started)
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
        held = self.versions, self.lineages
        return actions.TellSyncer(events.LearnerJoined(self.learner, self.incarnation, finished, *held))

    def _renumbered(self, step: _StartedStep) -> _StartedStep:
        """The step under the new number, without offers: nobody has asked for them under it."""
        if step.report is None:
            return _StartedStep(None, ())
        return _StartedStep(dataclasses.replace(step.report, incarnation=self.incarnation, adopted=False), ())

    def _step_started(self, event: events.StepStarted) -> list[actions.LearnerAction]:
        if not self.recovered or self.blocked or self.done:
            raise LocalProtocolError(
                "a step was started before recovery, while blocked, or past the last step"
            )
        self.clock += 1
        for fragment in self._fragments:
            fragment.steps += 1
            fragment.tokens += event.tokens
        copies, offers = self._offers()
        self._started.append(_StartedStep(self._report(), offers))
        return [*copies]

    def _step_finished(self) -> list[actions.LearnerAction]:
        if not self._started:
            raise LocalProtocolError("a step finished that was never started")
        step = self._started.popleft()
        if step.report is None:
            return self._say_last()
        self._reported_step = step.report.step
        return [self._say(step.report), *step.offers, *self._say_last()]

    def _clock_set(self, event: events.ClockSet) -> list[actions.LearnerAction]:
        """Ends with the others, with what there is."""
        if not self.recovered or event.step <= self.clock:
            return []
        if self.total_steps is not None and event.step > self.total_steps:
            return [actions.Drop(self.learner, "clock past the last step")]
        self.clock = event.step
        if self._started:
            last = self._started.pop()
            self._started.append(_StartedStep(self._report(), last.offers))
            return self._offer_now()
        return [*self._say_last(), *self._offer_now()]

    def _offer_asked(self, event: events.OfferAsked) -> list[actions.LearnerAction]:
        """Offers the fragment at once if that is due: as the last started step leaves it."""
        if not self.recovered:
            return [actions.Drop(self.learner, "asked before welcome")]
        if not 0 <= event.round.fragment < len(self._fragments):
            return [actions.Drop(self.learner, "asked for an unknown fragment")]
        if not any(offer.round == event.round for step in self._started for offer in step.offers):
            self._asked[event.round.fragment] = event
        return self._offer_now()

    def _offer_now(self) -> list[actions.LearnerAction]:
        copies, offers = self._offers()
        if not self._started:
            return [*copies, *offers]
        last = self._started.pop()
        self._started.append(_StartedStep(last.report, last.offers + offers))
        return [*copies]

    def _update_arrived(self, event: events.UpdateArrived) -> list[actions.LearnerAction]:
        if not self.recovered:
            return [actions.Drop(self.learner, "update before welcome")]
        if not 0 <= event.fragment < len(self._fragments):
            return [actions.Drop(self.learner, "update of an unknown fragment")]
        old = self._fragments[event.fragment]
        if event.version <= old.version:
            return [actions.Drop(self.learner, "stale update")]
        new = self._fragments[event.fragment] = FragmentWork(event.version, event.step, lineage=event.lineage)
        merged = self._merged_offer(old, event)
        rebase = self.policy.rebase and merged is not None
        if rebase:
            steps, tokens = old.offered[merged]  # type: ignore[index]
            new.steps, new.tokens = old.steps - steps, old.tokens - tokens
        self._started = collections.deque(_without(event.fragment, step) for step in self._started)
        if event.step - self.clock > self.policy.band:
            self.clock = event.step
        apply = actions.ApplyUpdate(event.fragment, event.version, self.policy.mixing, merged, rebase)
        return [apply, *self._say_last()]

    def _merged_offer(self, old: FragmentWork, event: events.UpdateArrived) -> int | None:
        """The step of this process's offer that is in the update; None if there is none."""
        step = next((given.step for given in event.merged if given.learner == self.learner), None)
        return step if event.version == old.version + 1 and step in old.offered else None

    def _report(self) -> Report:
        counters = tuple(FragmentCounters(f.version, f.steps, f.tokens) for f in self._fragments)
        adopted = self._welcomed_as == self.incarnation
        return Report(self.learner, self.incarnation, self.clock, counters, adopted)

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
            if fragment.steps and step > max(fragment.merged_step, self._joined_step)
        ]

    def _offers(self) -> tuple[list[actions.MakeOffer], tuple[actions.SendOffer, ...]]:
        """What was asked for and is due now, with the copies for it; forgets what can no longer come."""
        copies, offers = [], []
        for p, asked in list(self._asked.items()):
            f = self._fragments[p]
            if f.version > asked.version:
                del self._asked[p]
            elif f.version == asked.version and f.steps and self.clock >= asked.clock:
                del self._asked[p]
                contribution = self._contribution(p)
                if self.clock not in f.offered:  # else it is asked for a second time, as when it was lost
                    f.offered[self.clock] = (f.steps, f.tokens)
                    if len(f.offered) > KEPT_OFFERS:
                        self._forget(p, next(iter(f.offered)))
                    copies.append(actions.MakeOffer(contribution))
                offers.append(actions.SendOffer(asked.round, contribution))
        return copies, tuple(offers)

    def _forget(self, fragment: int, step: int) -> None:
        """Gives up the copy of an offer."""
        del self._fragments[fragment].offered[step]
        self._started = collections.deque(
            _without(fragment, started, lambda offer: offer.contribution.step == step)
            for started in self._started
        )

    def _contribution(self, p: int) -> Contribution:
        f = self._fragments[p]
        return Contribution(
            self.learner, self.incarnation, p, f.version, self.clock, f.steps, f.tokens, f.lineage
        )


def _without(
    fragment: int, step: _StartedStep, which: Callable[[actions.SendOffer], bool] = lambda offer: True
) -> _StartedStep:
    """The step without these offers of a fragment, which are worth nothing now."""
    kept = tuple(o for o in step.offers if o.round.fragment != fragment or not which(o))
    return step if len(kept) == len(step.offers) else dataclasses.replace(step, offers=kept)
