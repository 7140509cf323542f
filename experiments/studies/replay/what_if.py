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

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, Report, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.virtual.calendar import Calendar, Timer
from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies.replay.recorded import Recorded
from experiments.studies.replay.works import Apply, Handled, OfferWork, ReplayPlan


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


class _Learner:
    """A learner's process under the other policy: its core, which takes the steps that were recorded."""

    def __init__(self, core: LearnerCore) -> None:
        self.core = core
        self.updates: list[events.UpdateArrived] = []  # that have come since the last step boundary
        self._last: Report | None = None  # as recorded

    def report(self, recorded: Report, kept: Kept, state: SyncerState) -> list[actions.LearnerAction]:
        """What it does in place of the recorded report, before it applies the updates that have come.

        `state`: what is merged.
        """
        if not self.core.recovered:  # it rejoins with work from a snapshot, of which this report tells
            self._last = recorded
            told = zip(recorded.counters, watermarks_of(state, self.core.learner), strict=True)
            work = tuple(FragmentWork(c.version, 0, c.steps, c.tokens, watermark=mark) for c, mark in told)
            reached = state.furthest(self.core.learner)
            return self.core.resume(LearnerWork(recorded.step, reached.life, reached.steps, work))
        steps, tokens = work_between(self._last, recorded, kept)
        self._last = recorded
        self.core.clock = recorded.step - steps
        done = [] if steps else self._handle(events.Heartbeat())
        for left in range(steps, 0, -1):  # more than one where reports in between were lost
            done += self._handle(events.StepStarted(tokens // left))
            done += self._handle(events.StepFinished())
            tokens -= tokens // left
        for update in self.updates:
            self._handle(update)
        self.updates, self.core.clock = [], recorded.step
        return done

    def _handle(self, event: events.LearnerEvent) -> list[actions.LearnerAction]:
        return self.core.handle(event, 0.0)


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
        offers = {work.id: work.contribution for work in actor.works if isinstance(work, OfferWork)}
        for work in actor.works:
            if isinstance(work, Apply) and work.rebase and work.merged in offers:
                found[work.merged.learner, work.fragment, work.version] = offers[work.merged]
    return found


def _left_out(entries: Sequence[Handled]) -> dict[RoundId, list[tuple[int, ...]]]:
    """By round, whose offers each of its merges in the run left out; the last merge first."""
    found: dict[RoundId, list[tuple[int, ...]]] = {}
    for _, content, _ in reversed(entries):
        if isinstance(content, events.MergeFinished):
            found.setdefault(content.round, []).append(content.left_out)
    return found


class WhatIf:
    """One run of the recorded arrivals through a core of another policy."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        entries: Sequence[Handled],
        delays: Delays,
        kept: Kept,
        state: SyncerState | None = None,
    ) -> None:
        """`entries`: of the syncer's tapes in the run, which began from `state`."""
        if state is not None:  # what is worked out here has one history
            state = dataclasses.replace(state, lineages=())
        self._core = SyncerCore(policy, total_steps, state)
        self._policy = dataclasses.replace(policy, max_run_ahead=None)  # learners step as they did
        self._delays, self._kept = delays, kept
        self._calendar = Calendar()
        self._learners: dict[int, _Learner] = {}  # the newest process of each
        self._left_out = _left_out(entries)
        self._told: list[tuple[float, actions.Record]] = []
        self._alarm = Timer(self._calendar, lambda: self._take(events.Timeout()))
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
        return _outcome(self._told, self._begun)

    def _recorded(self, event: events.SyncerEvent) -> None:
        match event:
            case events.LearnerJoined():
                self._joined(event)
            case events.LearnerReady():
                self._welcome(event.learner, event.incarnation, event.step)
                self._take(dataclasses.replace(event, versions=self._core.versions))
            case events.StepReported(report=report):
                known = self._member(report.learner, report.incarnation)
                if known is not None:
                    self._act(known.report(report, self._kept, self._core.state()))
            case _:
                self._take(event)

    def _joined(self, event: events.LearnerJoined) -> None:
        m, incarnation, known = event.learner, event.incarnation, self._learners.get(event.learner)
        if event.versions is None:
            self._welcome(m, incarnation, self._core.step)
            self._take(event)
        elif known is None or not known.core.recovered:  # the run goes on from a snapshot
            self._learners[m] = _Learner(LearnerCore(m, incarnation, self._policy))
        else:
            core = known.core  # its syncer was killed; this one has been there all the time
            if core.incarnation < incarnation:
                self._take(events.LearnerLost(m, core.incarnation, "rejoined"))
            while core.incarnation < incarnation:
                core.handle(events.NotMember(core.incarnation), 0.0)
            self._take(dataclasses.replace(event, versions=core.versions, lineages=core.lineages))

    def _welcome(self, learner: int, incarnation: int, step: int) -> None:
        core = LearnerCore(learner, incarnation, self._policy)
        state = self._core.state()
        marks = watermarks_of(state, learner)
        welcome = events.Welcomed(incarnation, step, state.versions, state.merged_steps, watermarks=marks)
        core.handle(welcome, 0.0)
        self._learners[learner] = _Learner(core)

    def _member(self, learner: int, incarnation: int) -> _Learner | None:
        """The learner's process, if this is its incarnation."""
        known = self._learners.get(learner)
        return known if known is not None and known.core.incarnation == incarnation else None

    def _take(self, event: events.SyncerEvent) -> None:
        for action in self._core.handle(event, self._calendar.now):
            self._perform(action)
        self._alarm.set(self._core.next_deadline())

    def _perform(self, action: actions.SyncerAction) -> None:
        after = self._calendar.after
        match action:
            case actions.Tell(_, events.OfferAsked()):
                after(0.0, self._tell, action)
            case actions.Merge():
                merges = self._left_out.get(action.round)
                left_out = merges.pop() if merges else ()
                after(self._delays.merge, self._take, events.MergeFinished(action.round, left_out))
            case actions.Tell(_, events.UpdateArrived()):
                after(self._delays.update, self._tell, action)
            case actions.Record():
                self._told.append((self._calendar.now, action))

    def _tell(self, action: actions.Tell) -> None:
        for receiver in action.receivers:
            known, event = self._member(*receiver), action.to(receiver[0])
            if known is None:
                continue
            if isinstance(event, events.UpdateArrived):
                known.updates.append(event)
            else:  # who is asked late gives what it had at its last report
                self._act(known.core.handle(event, 0.0))

    def _act(self, done: Sequence[actions.LearnerAction]) -> None:
        for action in done:
            match action:
                case actions.TellSyncer(event):
                    self._take(event)
                case actions.SendOffer(round_id, contribution):
                    arrived = events.FragmentArrived(round_id, contribution)
                    self._calendar.after(self._delays.offer, self._take, arrived)


def what_if(plan: ReplayPlan, policy: SyncPolicy, total_steps: int | None) -> WhatIfOutcome:
    """What the rounds would have come to under a policy of the same fragments and learners."""
    state = plan.first.header.state
    return WhatIf(policy, total_steps, _entries(plan), delays(plan), _kept(plan), state).run()


def recorded(plan: ReplayPlan) -> WhatIfOutcome:
    """What the rounds came to in the run."""
    entries = _entries(plan)
    told = [
        (now, action)
        for now, _, decided in entries
        for action in decided
        if isinstance(action, actions.Record)
    ]
    return _outcome(told, entries[0].now if entries else 0.0)


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
    found = []
    for actor in plan.syncers:
        shift = actor.tape.wall(0.0) - plan.first.wall(0.0)
        found += [entry._replace(now=entry.now + shift) for entry in actor.handled if entry.now is not None]
    return sorted(found, key=lambda entry: entry.now)


def _outcome(told: Sequence[tuple[float, actions.Record]], begun: float) -> WhatIfOutcome:
    """What a run comes to whose syncer told this, at these times."""
    counts = collections.Counter(record.name for _, record in told)
    rounds = [record.values for _, record in told if record.name == "round"]
    merged_at = [now for now, record in told if record.name == "round"]

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


def compare(run: Recorded, overrides: Sequence[tuple[str, str]]) -> None:
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
