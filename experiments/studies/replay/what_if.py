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
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.calendar import Alarm, Calendar
from experiments.front import cli
from experiments.front.tables import markdown
from experiments.studies.replay.recorded import Recorded
from experiments.studies.replay.works import Apply, Handled, Offer, Plan


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
class Outcome:
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


@dataclasses.dataclass
class _Counted:
    version: int
    steps: int = 0
    tokens: int = 0


class _Update(NamedTuple):
    version: int
    came: float
    kept: int | None  # the step of the offer since which the learner keeps its work; None: it keeps none


class _Shadow:
    """A learner's process under the other policy: its steps as recorded, its counters as they then are."""

    def __init__(self, versions: Sequence[int], step: int, returned: bool = False) -> None:
        """`returned`: it holds work already, which its first report tells of."""
        self.step = step
        self._returned = returned
        self.fragments = [_Counted(version) for version in versions]
        self.waiting: dict[int, _Update] = {}  # by fragment, the newest that has come
        self.offered: dict[tuple[int, int], _Counted] = {}  # by fragment and step
        self.asked: dict[int, events.OfferAsked] = {}  # by fragment
        self.last: Report | None = None  # as recorded
        self.boundary = -math.inf  # when the last step ended

    def reported(self, recorded: Report, now: float, kept: Kept) -> Report:
        """The report that it now makes, in place of the recorded one: of a step since the last boundary."""
        for p, update in list(self.waiting.items()):
            if update.came <= self.boundary:
                del self.waiting[p]
                self.fragments[p] = self._after(p, update)
        if self._returned:
            self.fragments = [_Counted(c.version, c.steps, c.tokens) for c in recorded.counters]
            self._returned, self.last = False, recorded
        steps, tokens = work_between(self.last, recorded, kept)
        self.last, self.step, self.boundary = recorded, recorded.step, now
        for counted in self.fragments:
            counted.steps += steps
            counted.tokens += tokens
        counters = tuple(FragmentCounters(c.version, c.steps, c.tokens) for c in self.fragments)
        return dataclasses.replace(recorded, counters=counters)

    def _after(self, fragment: int, update: _Update) -> _Counted:
        """What its fragment stands for under the update: what it did since the offer in it, or nothing."""
        now, offer = self.fragments[fragment], self.offered.get((fragment, update.kept))
        self.offered = {key: counted for key, counted in self.offered.items() if key[0] != fragment}
        if offer is None or offer.version != now.version:
            return _Counted(update.version)
        return _Counted(update.version, now.steps - offer.steps, now.tokens - offer.tokens)

    def offers(self) -> list[tuple[RoundId, _Counted]]:
        """What it was asked for and has to give now; each once."""
        ready = [
            asked
            for p, asked in self.asked.items()
            if self.step >= asked.clock
            and self.fragments[p].version == asked.version
            and self.fragments[p].steps
        ]
        given = []
        for asked in ready:
            p = asked.round.fragment
            del self.asked[p]
            self.offered[p, self.step] = dataclasses.replace(self.fragments[p])
            given.append((asked.round, self.offered[p, self.step]))
        return given

    def versions(self) -> tuple[int, ...]:
        """Those that it has applied."""
        return tuple(c.version for c in self.fragments)


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


def _kept(plan: Plan) -> Kept:
    found = {}
    for actor in plan.learners:
        offers = {work.id: work.contribution for work in actor.works if isinstance(work, Offer)}
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
        self._core, self._policy = SyncerCore(policy, total_steps, state), policy
        self._delays, self._kept = delays, kept
        self._calendar = Calendar()
        self._shadows: dict[int, tuple[int, _Shadow]] = {}  # by learner, its newest incarnation
        self._left_out = _left_out(entries)
        self._rounds: list[dict[str, Any]] = []
        self._counts: collections.Counter[str] = collections.Counter()
        self._alarm = Alarm(self._calendar, lambda: self._take(events.Timeout()))
        self._begun = entries[0].now if entries else 0.0
        self._merged_at = self._begun
        self._calendar.now = self._begun
        for now, content, _ in entries:
            if isinstance(
                content, events.LearnerJoined | events.LearnerReady | events.LearnerLost | events.StepReported
            ):
                self._calendar.at(now, self._recorded, content)

    def run(self) -> Outcome:
        """Lets all arrive."""
        while not self._core.finished and self._calendar.advance():
            pass
        return _outcome(self._rounds, self._counts, self._merged_at - self._begun)

    def _recorded(self, event: events.SyncerEvent) -> None:
        match event:
            case events.LearnerJoined(learner=m, incarnation=incarnation):
                known = self._shadows.get(m)
                if event.versions is not None and known is not None:
                    before, shadow = known
                    if before < incarnation:  # its syncer was killed; this one has been there all the time
                        self._take(events.LearnerLost(m, before, "rejoined"))
                    self._shadows[m] = incarnation, shadow
                    event = dataclasses.replace(event, versions=shadow.versions(), lineages=())
                elif event.versions is not None:  # from the snapshot that the run goes on from
                    self._shadows[m] = incarnation, _Shadow(event.versions, event.step, returned=True)
                else:
                    event = events.LearnerJoined(m, incarnation)
                    self._shadows[m] = incarnation, _Shadow(self._core.versions, self._core.step)
            case events.LearnerReady(learner=m, incarnation=incarnation):
                shadow = _Shadow(self._core.versions, event.step)
                self._shadows[m] = incarnation, shadow
                event = dataclasses.replace(event, versions=shadow.versions())
            case events.StepReported(report=report):
                known = self._shadows.get(report.learner)
                if known is None or known[0] != report.incarnation:
                    return
                event = events.StepReported(known[1].reported(report, self._calendar.now, self._kept))
        self._take(event)
        if isinstance(event, events.StepReported):
            self._offer(event.report.learner, event.report.incarnation)

    def _take(self, event: events.SyncerEvent) -> None:
        for action in self._core.handle(event, self._calendar.now):
            self._perform(action)
        self._alarm.set(self._core.next_deadline())

    def _perform(self, action: actions.SyncerAction) -> None:
        after = self._calendar.after
        match action:
            case actions.Tell(receivers, events.OfferAsked() as asked):
                for receiver in receivers:
                    self._ask(receiver, asked)
            case actions.Merge():
                merges = self._left_out.get(action.round)
                left_out = merges.pop() if merges else ()
                after(self._delays.merge, self._take, events.MergeFinished(action.round, left_out))
            case actions.Tell(receivers, events.UpdateArrived() as update):
                after(self._delays.update, self._updated, receivers, update)
            case actions.Record(name="round", values=values):
                self._rounds.append(dict(values))
                self._merged_at = self._calendar.now
            case actions.Record(name=name):
                self._counts[name] += 1

    def _ask(self, receiver: tuple[int, int], asked: events.OfferAsked) -> None:
        """Has a learner offer; one that is asked late gives what it had at its last report."""
        known = self._shadows.get(receiver[0])
        if known is not None and known[0] == receiver[1]:
            known[1].asked[asked.round.fragment] = asked
            self._calendar.after(0.0, self._offer, *receiver)

    def _offer(self, learner: int, incarnation: int) -> None:
        known = self._shadows.get(learner)
        if known is None or known[0] != incarnation:
            return
        for r, c in known[1].offers():
            work = Contribution(learner, incarnation, r.fragment, c.version, known[1].step, c.steps, c.tokens)
            self._calendar.after(self._delays.offer, self._take, events.FragmentArrived(r, work))

    def _updated(self, receivers: Sequence[tuple[int, int]], update: events.UpdateArrived) -> None:
        for learner, incarnation in receivers:
            known = self._shadows.get(learner)
            if known is not None and known[0] == incarnation:
                kept = next((g.step for g in update.merged if g.learner == learner), None)
                kept = kept if self._policy.rebase else None
                known[1].waiting[update.fragment] = _Update(update.version, self._calendar.now, kept)


def what_if(plan: Plan, policy: SyncPolicy, total_steps: int | None) -> Outcome:
    """What the rounds would have come to under a policy of the same fragments and learners."""
    state = plan.first.header.state
    return WhatIf(policy, total_steps, _entries(plan), delays(plan), _kept(plan), state).run()


def recorded(plan: Plan) -> Outcome:
    """What the rounds came to in the run."""
    rounds: list[dict[str, Any]] = []
    counts: collections.Counter[str] = collections.Counter()
    entries = _entries(plan)
    merged_at = begun = entries[0].now if entries else 0.0
    for now, _, decided in entries:
        for action in decided:
            if isinstance(action, actions.Record):
                counts[action.name] += 1
                if action.name == "round":
                    rounds.append(dict(action.values))
                    merged_at = now
    return _outcome(rounds, counts, merged_at - begun)


def delays(plan: Plan) -> Delays:
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


def _entries(plan: Plan) -> list[Handled]:
    """The entries of all processes of the syncer, by the clock of the first."""
    found = []
    for actor in plan.syncers:
        shift = actor.tape.wall(0.0) - plan.first.wall(0.0)
        found += [entry._replace(now=entry.now + shift) for entry in actor.handled if entry.now is not None]
    return sorted(found, key=lambda entry: entry.now)


def _outcome(rounds: list[dict[str, Any]], counts: collections.Counter[str], seconds: float) -> Outcome:
    def mean(name: str) -> float:
        return statistics.fmean(r[name] for r in rounds) if rounds else 0.0

    return Outcome(
        merged=len(rounds),
        skipped=counts["round_skipped"],
        abandoned=counts["round_abandoned"],
        contributions=mean("quorum"),
        tokens=sum(r["tokens"] for r in rounds),
        quorum_seconds=mean("quorum_seconds"),
        grace_seconds=mean("grace_seconds"),
        sync_seconds=mean("sync_seconds"),
        seconds=seconds,
    )


def compare(run: Recorded, overrides: Sequence[tuple[str, str]]) -> None:
    """Prints figures of the run, its own policy simulated, and the one with these overrides of the policy."""
    sync, steps = run.experiment.sync, run.experiment.train.steps
    policy = cli.changed(sync, overrides, "sync")
    for name in ("num_learners", "num_fragments"):
        if getattr(policy, name) != getattr(sync, name):
            raise cli.UsageError(f"config.sync.{name}: --what_if cannot change it")
    columns = {
        "recorded": recorded(run.plan),
        "same policy": what_if(run.plan, sync, steps),
        "what if": what_if(run.plan, policy, steps),
    }
    print(", ".join(f"{path}={text}" for path, text in overrides) or "nothing is changed")
    rows = [
        [field.name, *(f"{getattr(outcome, field.name):.6g}" for outcome in columns.values())]
        for field in dataclasses.fields(Outcome)
    ]
    print(markdown(["", *columns], rows, align=True))
