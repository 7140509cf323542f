"""The same learners under another policy: recorded steps, joins and losses, in a simulated fleet.

No array is touched. What a learner does of itself stays: how long each of its steps takes and on how many
tokens, and when its processes join and are lost. What follows from the policy is worked out again by a fleet
in virtual time: rounds, their quorums and grace windows, who is asked and merged, who waits, and where clocks
are set to. Offers, merges and updates take as long as they took in the run, and whose offer the guard left
out of a fragment's merge is left out of the one in its place here.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.outer.encoding import Traffic
from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.virtual.array_ports import CountingLearner, CountingSyncer, Observer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality
from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies.replay.recorded import RecordedRun
from experiments.studies.replay.works import Actor, Handled, Recorded, ReplayPlan

_LONGEST = 20.0  # times as long as the run took, after which another policy's ends


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


class TakenStep(NamedTuple):
    """A step that a learner took."""

    seconds: float  # since the step before was done, where it was begun by then
    tokens: int
    skipped: bool = False


def steps_of(actor: Actor) -> list[TakenStep]:
    """The steps that a process finished."""
    found, begun, free = [], collections.deque[tuple[float, int]](), float("-inf")
    for now, content, _ in actor.handled:
        match content:
            case events.StepStarted(tokens=tokens):
                begun.append((now, tokens))
            case events.StepFinished(skipped=skipped):
                at, tokens = begun.popleft()
                found.append(TakenStep(now - max(at, free), tokens, skipped))
                free = now
    return found


class _Learner(CountingLearner):
    """Takes the steps that a learner took; those beyond its record are like the one in their middle."""

    def __init__(self, steps: Sequence[TakenStep]) -> None:
        super().__init__(lambda: self._now.tokens, lambda: self._now.skipped)
        seconds = statistics.median(step.seconds for step in steps)
        self._usual = TakenStep(seconds, round(statistics.fmean(step.tokens for step in steps)))
        self._left: Iterator[TakenStep] = iter(steps)
        self._now = self._usual

    def step(self, clock: int) -> tuple[int, Mapping[str, Any]]:
        self._now = next(self._left, self._usual)
        return super().step(clock)

    def seconds(self) -> float:
        """Of the step that was begun last."""
        return self._now.seconds


class _Syncer(CountingSyncer):
    """Leaves out whose offers the guard left out in the run, merge by merge of each fragment."""

    def __init__(self, plan: ReplayPlan) -> None:
        nothing = (0,) * len(plan.begins)
        super().__init__(Traffic(nothing, (1,) * len(nothing), nothing))
        self._left_out: dict[int, collections.deque[tuple[int, ...]]] = collections.defaultdict(
            collections.deque
        )
        for _, content, _ in _entries(plan):
            if isinstance(content, events.MergeFinished):
                self._left_out[content.round.fragment].append(content.left_out)

    def merge(self, fragment: int, given: Sequence[tuple[Contribution, Any]]) -> NextVersion:
        merges = self._left_out[fragment]
        suspects = merges.popleft() if merges else ()
        left_out = tuple(c.learner for c, _ in given if c.learner in suspects)
        return NextVersion((), {}, left_out, empty=bool(given) and len(left_out) == len(given))


class _Rounds(Observer):
    """Keeps the syncer's records."""

    def __init__(self) -> None:
        self.records: list[Recorded] = []

    def noted(self, name: str, values: Mapping[str, Any], now: float) -> None:
        self.records.append(Recorded(now, name, values))


def what_if(plan: ReplayPlan, policy: SyncPolicy, total_steps: int | None) -> WhatIfOutcome:
    """What the rounds would have come to under a policy of the same fragments and learners."""
    header, took, rounds = plan.first.header, delays(plan), _Rounds()
    taken: dict[int, list[TakenStep]] = collections.defaultdict(list)
    for actor in plan.learners:
        taken[actor.tape.header.learner] += steps_of(actor)
    learners = {m: _Learner(steps) for m, steps in taken.items() if steps}
    rng = random.Random(0)  # of which these links ask nothing
    offers = LinkQuality(bandwidth=1 / took.offer if took.offer else None)
    places = {
        m: VirtualPlace(learner.seconds, Link(offers, rng), Link(LinkQuality(latency=took.update), rng))
        for m, learner in learners.items()
    }
    fleet = Fleet(
        policy,
        total_steps,
        places,
        learners.__getitem__,
        _Syncer(plan),
        takes=Durations(lambda: took.merge),
        observer=rounds,
        shards=header.shards,
    )
    begun = _begun(plan)
    for syncer in fleet.syncers:
        syncer.crash()
        syncer.durable = begun
        syncer.restart()
    first, last = _span(plan)
    fleet.schedule(change for change in _changes(plan, first) if change.learner in learners)
    ended = any(isinstance(a, actions.Finish) for entry in _entries(plan) for a in entry.decided)
    until = (last - first) * (_LONGEST if ended else 1.0)
    fleet.run(stop=lambda: fleet.calendar.now > until)
    return _outcome(rounds.records, 0.0)


def _begun(plan: ReplayPlan) -> SyncerState:
    """What the run began with, each fragment as the first process had it; no learner has taken part."""
    states: dict[int, SyncerState] = {}
    for header in (actor.tape.header for actor in plan.syncers):
        states = dict.fromkeys(header.fragments, header.state) | states
    each = [(states[p].versions[p], states[p].merged_steps[p]) for p in sorted(states)]
    return SyncerState(*map(tuple, zip(*each, strict=True)))


def _span(plan: ReplayPlan) -> tuple[float, float]:
    """Unix seconds of the first entry and of the last one."""
    walls = [
        actor.tape.wall(entry.now)
        for actor in plan.actors
        for entry in actor.handled
        if entry.now is not None
    ]
    return min(walls, default=0.0), max(walls, default=0.0)


def _changes(plan: ReplayPlan, first: float) -> Iterator[Change]:
    """When processes of learners took their first steps, and when they were lost or left, since `first`."""
    merged = [
        actor.tape.wall(entry.now)
        for actor in plan.syncers
        for entry in actor.handled
        if isinstance(entry.content, events.MergeFinished)
    ]
    newest = {actor.tape.header.learner: actor for actor in plan.learners}
    for actor in plan.learners:
        begun = [e.now for e in actor.handled if isinstance(e.content, events.StepStarted)]
        if not begun:
            continue
        learner, ended = actor.tape.header.learner, max(e.now for e in actor.handled if e.now is not None)
        yield Change(actor.tape.wall(begun[0]) - first, learner, "join")
        # One that was there to the last merge may have more to do here.
        if newest[learner] is not actor or actor.tape.wall(ended) < max(merged, default=0.0):
            yield Change(actor.tape.wall(ended) - first, learner, "leave" if actor.tape.ended else "fail")


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
                for p, c in zip(plan.first.header.fragments, report.counters, strict=False):
                    at = sent.pop((report.learner, p, c.version), None)
                    if at is not None and report.learner in boundary:
                        updates.append(max(0.0, boundary[report.learner] - at))
                boundary[report.learner] = now
        for action in decided:
            match action:
                case actions.Merge(round=r):
                    begun[r] = now
                case actions.Send(receivers, events.UpdateArrived(p, version)):
                    for m, _ in receivers:
                        sent.setdefault((m, p, version), now)
    quickest = sorted(updates)[len(updates) // 10] if updates else 0.0
    return Delays(
        statistics.median(offers) if offers else 0.0, statistics.median(merges) if merges else 0.0, quickest
    )


def _entries(plan: ReplayPlan) -> list[Handled]:
    """The entries of all processes of the syncer, by the clock of the first, which learners report to."""
    found = [
        entry._replace(now=entry.now + shift)
        for actor, shift in _clocks(plan)
        for entry in actor.handled
        if entry.now is not None
        and not (actor.tape.header.shard and isinstance(entry.content, events.FromLearner))
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
