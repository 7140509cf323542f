"""The same learners under another policy: recorded steps, joins and losses meet another syncer's core.

No array is touched. What a learner does of itself stays: when it steps and on how many tokens, when it
joins and is lost, and where its clock is. What follows from the policy is worked out again: rounds,
their quorums and grace windows, who is asked and merged, and so what each learner's counters stand for.
Offers, merges and updates take as long as they took in the run, and whose offer the guard left out of a
round is left out of the same one here.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, Report, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.virtual.calendar import Calendar, Timer
from ddiloco.workers.exchange import EventDelivery, fragments_with
from ddiloco.workers.learner_actor import LearnerActor, LearnerArrays, LearnerDriver
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor, SyncerDriver
from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies.replay.recorded import RecordedRun
from experiments.studies.replay.works import Actor, Apply, Handled, Recorded, ReplayPlan


@dataclasses.dataclass(frozen=True)
class Delays:
    """Seconds that things took in the run: offers and merges by the median, updates at their quickest tenth.

    An offer takes from the report of its step to its arrival. What lies between the merge's end and the step
    boundary at which a learner applies the update is for the most part the wait for that boundary.
    """

    offer: float
    merge: float
    update: float


@dataclasses.dataclass(frozen=True)
class WhatIfOutcome:
    """What the rounds of a run come to."""

    merged: int  # rounds that were merged; `skipped` and `abandoned` were not
    skipped: int  # as the syncer was too late
    abandoned: int  # at the end, without their quorum
    contributions: float  # in a merge, on average
    tokens: int  # that were merged
    quorum_seconds: float  # from the opening of a round to its quorum, on average
    grace_seconds: float  # that windows were open, likewise
    sync_seconds: float  # from the merge's begin to the broadcast, likewise
    seconds: float  # from the first event to the last merge


class _Learner(LearnerDriver):
    """A learner's process under the other policy: its actor, which takes the steps that were recorded."""

    def __init__(self, run: WhatIf, core: LearnerCore) -> None:
        self.core = core
        self.updates: list[events.UpdateArrived] = []  # that have come since the last step boundary
        self._run = run
        self._actor = LearnerActor(core, _NoArrays(), self)
        self._last: Report | None = None  # as recorded

    def handle(self, *taken: events.LearnerEvent) -> None:
        """Takes events that have come."""
        for event in taken:
            self._actor.handle(event, 0.0, [None] * len(fragments_with(event)))

    def report(self, recorded: Report, kept: Kept, state: SyncerState) -> None:
        """Does what stands in place of the recorded report, and applies the updates that have come.

        `state`: what is merged.
        """
        last, self._last = self._last, recorded
        if not self.core.recovered:  # it rejoins with work from a snapshot, of which this report tells
            held = zip(recorded.counters, watermarks_of(state, self.core.learner), strict=True)
            work = tuple(FragmentWork(c.version, 0, c.steps, c.tokens, watermark=mark) for c, mark in held)
            reached = state.furthest(self.core.learner)
            resumed = LearnerWork(recorded.step, reached.life, reached.steps, work)
            self._actor.perform(self._actor.resume(resumed))
            return
        steps, tokens = work_between(last, recorded, kept)
        self.core.clock = recorded.step - steps
        if not steps:
            self.handle(events.Heartbeat())
        for left in range(steps, 0, -1):  # more than one where reports in between were lost
            self.handle(events.StepStarted(tokens // left), events.StepFinished())
            tokens -= tokens // left
        self.handle(*self.updates)
        self.updates, self.core.clock = [], recorded.step

    # As the driver of its actor.

    def send(self, event: events.FromLearner, shard: int) -> None:
        if not isinstance(event, events.LearnerReady):  # it is ready when it was
            self._run.take(event)

    def send_offer(self, offer: events.FragmentArrived, arrays: None) -> None:
        self._run.offered(offer)


class _NoArrays(LearnerArrays):
    """A learner without arrays."""


def watermarks_of(state: SyncerState, learner: int) -> tuple[Watermark, ...]:
    """By fragment, how far the learner's work is in its version."""
    return tuple(known.get(learner, NOTHING_MERGED).bare for known in state.watermarks)


Kept = Mapping[tuple[int, int, int], Contribution]
"""By learner, fragment and version: the learner's offer that is in it, where it kept what it did since."""


def work_between(last: Report | None, now: Report, kept: Kept) -> tuple[int, int]:
    """Steps and tokens between two reports of a process: those of a fragment that no update came to.

    Or of one whose counters, under the update, begin with what was kept, and was counted before.
    """
    if last is not None:
        for p, (before, after) in enumerate(zip(last.counters, now.counters, strict=False)):
            if before.version == after.version:
                return after.steps - before.steps, after.tokens - before.tokens
            offer = kept.get((now.learner, p, after.version))
            if offer is not None and offer.version == before.version:
                return offer.steps + after.steps - before.steps, offer.tokens + after.tokens - before.tokens
    most = max(now.counters, key=lambda c: c.steps)
    return most.steps, most.tokens


def _kept(plan: ReplayPlan) -> Kept:
    found = {}
    for actor in plan.learners:
        for work in actor.works:
            if isinstance(work, Apply) and work.rebase and work.merged in actor.sent:
                found[work.merged.learner, *work.update] = actor.sent[work.merged]
    return found


def _left_out(entries: Sequence[Handled]) -> dict[RoundId, list[tuple[int, ...]]]:
    """By round, whose offers each of its merges in the run left out; the last merge first."""
    found: dict[RoundId, list[tuple[int, ...]]] = {}
    for _, content, _ in reversed(entries):
        if isinstance(content, events.MergeFinished):
            found.setdefault(content.round, []).append(content.left_out)
    return found


class WhatIf(SyncerDriver):
    """One run of the recorded arrivals through an actor of another policy."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        entries: Sequence[Handled],
        delays: Delays,
        kept: Kept,
        state: SyncerState,
    ) -> None:
        """`entries`: of the syncer's tapes in the run, which began from `state`."""
        # What is worked out here has one history.
        self._core = SyncerCore(policy, total_steps, dataclasses.replace(state, lineages=()))
        versions = {p: FragmentVersion(version, None) for p, version in enumerate(state.versions)}
        self._actor = SyncerActor(self._core, self, versions)
        self._policy = dataclasses.replace(policy, max_run_ahead=None)  # learners step as they did
        self._delays, self._kept = delays, kept
        self._calendar = Calendar()
        self._learners: dict[int, _Learner] = {}  # the newest process of each
        self._left_out = _left_out(entries)
        self._records: list[Recorded] = []
        self._alarm = Timer(self._calendar, lambda: self.take(events.Timeout()))
        self._begun = entries[0].now if entries else 0.0
        self._calendar.now = self._begun
        for now, content, _ in entries:
            if isinstance(
                content, events.LearnerJoined | events.LearnerReady | events.LearnerLost | events.StepReported
            ):
                self._calendar.at(now, self._recorded, content)

    def run(self) -> WhatIfOutcome:
        """Lets all arrive."""
        while not self._core.finished and self._calendar.advance():
            pass
        return _outcome(self._records, self._begun)

    def take(self, event: events.SyncerEvent) -> None:
        """Something has come from a learner, or it is time."""
        self._actor.handle(event, now=self._calendar.now)
        self._alarm.set(self._core.next_deadline())

    def offered(self, offer: events.FragmentArrived) -> None:
        """A learner sends an offer."""
        self._calendar.after(self._delays.offer, self._take_offer, offer)

    def _take_offer(self, offer: events.FragmentArrived) -> None:
        self._actor.take_offer(offer, None, self._calendar.now)
        self._alarm.set(self._core.next_deadline())

    def _recorded(self, event: events.SyncerEvent) -> None:
        match event:
            case events.LearnerJoined():
                self._joined(event)
            case events.LearnerReady():
                self._welcome(event.learner, event.incarnation, event.step)
                self.take(dataclasses.replace(event, versions=self._core.versions))
            case events.StepReported(report=report):
                known = self._member(report.learner, report.incarnation)
                if known is not None:
                    known.report(report, self._kept, self._core.state())
            case _:
                self.take(event)

    def _joined(self, event: events.LearnerJoined) -> None:
        m, incarnation, known = event.learner, event.incarnation, self._learners.get(event.learner)
        if event.versions is None:
            self._welcome(m, incarnation, self._core.step)
            self.take(event)
        elif known is None or not known.core.recovered:  # the run goes on from a snapshot
            self._learners[m] = _Learner(self, LearnerCore(m, incarnation, self._policy))
        else:
            core = known.core  # its syncer was killed; this one has been there all the time
            if core.incarnation < incarnation:
                self.take(events.LearnerLost(m, core.incarnation, "rejoined"))
            while core.incarnation < incarnation:
                core.handle(events.NotMember(core.incarnation), 0.0)
            self.take(dataclasses.replace(event, versions=core.versions, lineages=core.lineages))

    def _welcome(self, learner: int, incarnation: int, step: int) -> None:
        state = self._core.state()
        marks = watermarks_of(state, learner)
        self._learners[learner] = _Learner(self, LearnerCore(learner, incarnation, self._policy))
        welcome = events.Welcomed(incarnation, step, state.versions, state.merged_steps, watermarks=marks)
        self._learners[learner].handle(welcome)

    def _member(self, learner: int, incarnation: int) -> _Learner | None:
        """The learner's process, if this is its incarnation."""
        known = self._learners.get(learner)
        return known if known is not None and known.core.incarnation == incarnation else None

    # As the driver of its actor.

    def refuse(self, event: events.SyncerEvent, error: Exception) -> actions.Drop:
        raise error

    def deliver(self, receiver: tuple[int, int], delivery: EventDelivery) -> None:
        match delivery.event:
            case events.OfferAsked():
                self._calendar.after(0.0, self._deliver, receiver, delivery.event)
            case events.UpdateArrived():
                self._calendar.after(self._delays.update, self._deliver, receiver, delivery.event)

    def merge(self, merge: actions.Merge, given: list[tuple[Contribution, None]]) -> None:
        self._calendar.after(self._delays.merge, self._merged, merge)

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        self._records.append(Recorded(self._calendar.now, name, values))

    def _merged(self, merge: actions.Merge) -> None:
        merges = self._left_out.get(merge.round)
        left_out = merges.pop() if merges else ()
        finished, made = events.MergeFinished(merge.round, left_out), NextVersion((), {}, left_out)
        self._actor.perform(self._actor.merged(finished, merge.version, made, {}, self._calendar.now))
        self._alarm.set(self._core.next_deadline())

    def _deliver(self, receiver: tuple[int, int], event: events.FromSyncer) -> None:
        known = self._member(*receiver)
        if known is None:
            return
        if isinstance(event, events.UpdateArrived):
            known.updates.append(event)
        else:  # who is asked late gives what it had at its last report
            known.handle(event)


def what_if(plan: ReplayPlan, policy: SyncPolicy, total_steps: int | None) -> WhatIfOutcome:
    """What the rounds would have come to under a policy of the same fragments and learners."""
    state = plan.first.header.state
    return WhatIf(policy, total_steps, _entries(plan), delays(plan), _kept(plan), state).run()


def recorded(plan: ReplayPlan) -> WhatIfOutcome:
    """What the rounds came to in the run."""
    entries = _entries(plan)
    made = [
        record._replace(now=record.now + shift) for actor, shift in _clocks(plan) for record in actor.records
    ]
    made.sort(key=lambda record: record.now)
    return _outcome(made, entries[0].now if entries else 0.0)


def delays(plan: ReplayPlan) -> Delays:
    """How long offers, merges and updates took in the run."""
    reported: dict[tuple[int, int], float] = {}  # by learner and step
    begun: dict[Any, float] = {}
    sent: dict[tuple[int, int, int], float] = {}
    boundary: dict[int, float] = {}
    offers: list[float] = []
    merges: list[float] = []
    updates: list[float] = []
    for now, content, decided in _entries(plan):
        match content:
            case events.FragmentArrived(contribution=c):
                offers.append(now - reported.get((c.learner, c.step), now))
            case events.MergeFinished(round=r):
                if r in begun:
                    merges.append(now - begun.pop(r))
            case events.StepReported(report=report):
                reported.setdefault((report.learner, report.step), now)
                for p, c in enumerate(report.counters):
                    at = sent.pop((report.learner, p, c.version), None)
                    if at is not None and report.learner in boundary:
                        updates.append(max(0.0, boundary[report.learner] - at))
                boundary[report.learner] = now
        for action in decided:
            match action:
                case actions.Merge(round=r):
                    begun[r] = now
                case actions.Tell(receivers, events.UpdateArrived(p, version)):
                    for m, _ in receivers:
                        sent.setdefault((m, p, version), now)
    quickest = sorted(updates)[len(updates) // 10] if updates else 0.0
    return Delays(
        statistics.median(offers) if offers else 0.0, statistics.median(merges) if merges else 0.0, quickest
    )


def _entries(plan: ReplayPlan) -> list[Handled]:
    """The entries of all processes of the syncer, by the clock of the first."""
    found = [
        entry._replace(now=entry.now + shift)
        for actor, shift in _clocks(plan)
        for entry in actor.handled
        if entry.now is not None
    ]
    return sorted(found, key=lambda entry: entry.now)


def _clocks(plan: ReplayPlan) -> list[tuple[Actor, float]]:
    """The processes of the syncer, each with what its clock lacks to that of the first."""
    return [(actor, actor.tape.wall(0.0) - plan.first.wall(0.0)) for actor in plan.syncers]


def _outcome(records: Sequence[Recorded], begun: float) -> WhatIfOutcome:
    """What a run comes to whose syncer made these records."""
    counts = collections.Counter(record.name for record in records)
    rounds = [record.values for record in records if record.name == "round"]
    merged_at = [record.now for record in records if record.name == "round"]

    def mean(name: str) -> float:
        return statistics.fmean(r[name] for r in rounds) if rounds else 0.0

    return WhatIfOutcome(
        merged=len(rounds),
        skipped=counts["round_skipped"],
        abandoned=counts["round_abandoned"],
        contributions=mean("quorum"),
        tokens=sum(r["tokens"] for r in rounds),
        quorum_seconds=mean("quorum_seconds"),
        grace_seconds=mean("grace_seconds"),
        sync_seconds=mean("sync_seconds"),
        seconds=merged_at[-1] - begun if merged_at else 0.0,
    )


def compare(run: RecordedRun, overrides: Sequence[tuple[str, str]]) -> None:
    """Prints figures of the run, its own policy simulated, and the one with these overrides of the policy."""
    sync, steps = run.experiment.sync, run.experiment.train.steps
    policy = program.with_overrides(sync, overrides, "sync")
    for name in ("num_learners", "num_fragments"):
        if getattr(policy, name) != getattr(sync, name):
            raise program.UsageError(f"config.sync.{name}: --what_if cannot change it")
    columns = {
        "recorded": recorded(run.plan),
        "same policy": what_if(run.plan, sync, steps),
        "what if": what_if(run.plan, policy, steps),
    }
    print(", ".join(f"{path}={text}" for path, text in overrides) or "nothing is changed")
    rows = [
        [field.name, *(f"{getattr(outcome, field.name):.6g}" for outcome in columns.values())]
        for field in dataclasses.fields(WhatIfOutcome)
    ]
    print(markdown(["", *columns], rows, align=True))
