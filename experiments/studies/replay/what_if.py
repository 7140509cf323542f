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
import math
import random
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.outer.encoding import Traffic
from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.telemetry import records
from ddiloco.virtual.array_ports import CountingLearner, CountingSyncer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality
from ddiloco.virtual.run import RecordingObserver
from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies.replay.outcomes import FleetOutcome, between, outcome_of
from experiments.studies.replay.recorded import RecordedRun
from experiments.studies.replay.works import Actor, Handled, ReplayPlan

_LONGEST = 20.0  # times as long as the run took, after which another policy's ends


@dataclasses.dataclass(frozen=True)
class Delays:
    """Seconds that things took in the run: offers and merges by the median, updates at their quickest tenth.

    An offer takes from the report of its step, or the arrival of the learner's offer before, to its arrival.
    An update takes from its sending to the step boundary at which it is applied; over a link that keeps up
    that is for the most part the wait for the boundary. Of one that does not, what counts is the time from
    the learner's update before, but for a step.
    """

    offers: Mapping[int, float]  # by learner, for each byte
    merge: float
    updates: Mapping[int, float]  # by learner whose link keeps up
    down: Mapping[int, float]  # of updates, by learner, for each byte; 0: the link keeps up


class TakenStep(NamedTuple):
    """A step that a learner took."""

    seconds: float  # since the step before was done, where it was begun by then
    tokens: int
    skipped: bool = False


def taken_steps(handled: Iterable[tuple[float, Any]]) -> list[TakenStep]:
    """The steps that a process finished, of the events of its core with their times."""
    found, begun, free = [], collections.deque[tuple[float, int]](), float("-inf")
    for now, content in handled:
        match content:
            case events.StepStarted(tokens=tokens):
                begun.append((now, tokens))
            case events.StepFinished(skipped=skipped) if begun:
                at, tokens = begun.popleft()
                found.append(TakenStep(now - max(at, free), tokens, skipped))
                free = now
    return found


def _steps_of(actor: Actor) -> list[TakenStep]:
    return taken_steps((now, content) for now, content, _ in actor.handled)


class _Learner(CountingLearner):
    """Takes the steps that a learner took."""

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
    """Leaves out whose offers the guard left out, merge by merge of each fragment."""

    def __init__(self, left_out: Mapping[int, Sequence[tuple[int, ...]]], sizes: Traffic) -> None:
        super().__init__(sizes)
        self._left_out = {p: collections.deque(merges) for p, merges in left_out.items()}

    def merge(
        self, fragment: int, given: Sequence[tuple[Contribution, Any]], interval: int | None
    ) -> NextVersion:
        merges = self._left_out.get(fragment)
        suspects = merges.popleft() if merges else ()
        left_out = tuple(c.learner for c, _ in given if c.learner in suspects)
        return NextVersion((), {}, left_out, empty=bool(given) and len(left_out) == len(given))


@dataclasses.dataclass(frozen=True)
class MeasuredFleet:
    """The learners, links and merges of a run as they were measured, as a simulated fleet under any policy.

    Attributes:
      sizes: of fragments in the run.
      took: the durations of offers, merges and updates.
      taken: by learner, its steps; further ones are like the one in their middle.
      begun: the syncer's durable state at the beginning.
      until: seconds after which a play ends.
      changes: of learners.
      left_out: by fragment, the learners that the guard left out, merge by merge.
      shards: of the syncer.
    """

    sizes: Traffic
    took: Delays
    taken: Mapping[int, Sequence[TakenStep]]
    begun: SyncerState
    until: float
    changes: Sequence[Change] = ()
    left_out: Mapping[int, Sequence[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    shards: int = 1

    @property
    def learners(self) -> list[int]:
        """Those that took a step."""
        return sorted(self.taken)

    def play(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        sizes: Traffic | None = None,
        without: Collection[int] = (),
        since: float = 0.0,
    ) -> FleetOutcome:
        """What the rounds come to under a policy of the same fragments.

        `sizes`: of fragments in other codecs. `without`: learners that are left out. `since`: seconds from
        which rounds and steps count; before it bytes do not, either.
        """
        learners = {m: _Learner(steps) for m, steps in self.taken.items() if m not in without}
        rng = random.Random(0)  # which these links do not use

        def link(seconds: float, latency: float = 0.0) -> Link:
            return Link(LinkQuality(latency, bandwidth=1 / seconds if seconds else None), rng)

        def place(m: int, learner: _Learner) -> VirtualPlace:
            down = self.took.down.get(m, 0.0), self.took.updates.get(m, 0.0)
            return VirtualPlace(learner.seconds, link(self.took.offers.get(m, 0.0)), link(*down))

        recorded: list[Any] = []
        fleet = Fleet(
            policy,
            total_steps,
            {m: place(m, learner) for m, learner in learners.items()},
            learners.__getitem__,
            _Syncer(self.left_out, sizes or self.sizes),
            takes=Durations(lambda: self.took.merge),
            observer=RecordingObserver(recorded.append),
            shards=self.shards,
        )
        for syncer in fleet.syncers:
            syncer.crash()
            syncer.durable = self.begun
            syncer.restart()
        fleet.schedule(change for change in self.changes if change.learner in learners)
        fleet.run(stop=lambda: fleet.calendar.now > self.until)
        return outcome_of(between(recorded, since) if since else recorded, policy.num_fragments)


def recorded_fleet(plan: ReplayPlan, sizes: Traffic | None = None, steps: int | None = None) -> MeasuredFleet:
    """The fleet of a recorded run.

    `sizes`: of fragments in the run; None: all alike. `steps`: of a learner, the last; None: all.
    """
    alike, entries = (1,) * len(plan.begins), _entries(plan)
    sizes = sizes or Traffic(alike, (alike,), alike)
    taken: dict[int, list[TakenStep]] = collections.defaultdict(list)
    for actor in plan.learners:
        taken[actor.tape.header.learner] += _steps_of(actor)
    first, last = _span(plan)
    most, begun = max(map(len, taken.values()), default=0), _begun(plan)
    if steps is not None and steps < most:  # as if the run had begun later
        first = last - (last - first) * steps / most
        taken = {m: of_it[-math.ceil(len(of_it) * steps / most) :] for m, of_it in taken.items()}
        begun = SyncerState.initial(len(alike))
    left_out: dict[int, list[tuple[int, ...]]] = collections.defaultdict(list)
    for _, content, _ in entries:
        if isinstance(content, events.MergeFinished):
            left_out[content.round.fragment].append(content.left_out)
    ends = any(isinstance(a, actions.Finish) for entry in entries for a in entry.decided)
    return MeasuredFleet(
        sizes,
        delays(entries, plan.first.header.fragments, sizes),
        {m: of_it for m, of_it in taken.items() if of_it},
        begun,
        (last - first) * (_LONGEST if ends else 1.0),
        tuple(_changes(plan, first)),
        left_out,
        plan.first.header.shards,
    )


def what_if(plan: ReplayPlan, policy: SyncPolicy, total_steps: int | None) -> FleetOutcome:
    """What the rounds would have come to under a policy of the same fragments and learners."""
    return recorded_fleet(plan).play(policy, total_steps)


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
        if actor.tape.wall(ended) < first:
            continue
        yield Change(max(0.0, actor.tape.wall(begun[0]) - first), learner, "join")
        # One that was there to the last merge may have more to do here.
        if newest[learner] is not actor or actor.tape.wall(ended) < max(merged, default=0.0):
            yield Change(actor.tape.wall(ended) - first, learner, "leave" if actor.tape.ended else "fail")


def recorded(plan: ReplayPlan, sizes: Traffic | None = None) -> FleetOutcome:
    """What the rounds came to in the run; `sizes`: of its fragments, None: an offer counts as a byte."""
    entries = _entries(plan)
    begun = entries[0].now if entries else 0.0
    made: list[Any] = [
        records.Noted(record.name, record.values, record.now + shift - begun)
        for actor, shift in _clocks(plan)
        for record in actor.records
    ]
    for now, content, _ in entries:
        match content:
            case events.StepReported(report=r):
                made.append(records.StepDone(r.learner, r.step, now - begun, 0, {}))
            case events.FragmentArrived(contribution=c):
                sent = 1 if sizes is None else sizes.offer(c.learner)[c.fragment]
                made.append(records.Transferred(c.learner, sent, 0))
    for actor in plan.learners:
        learner, tokens = actor.tape.header.learner, sum(s.tokens for s in _steps_of(actor) if not s.skipped)
        made.append(records.StepDone(learner, 0, 0.0, tokens, {}))
    made.sort(key=lambda record: getattr(record, "time", 0.0))
    return outcome_of(made, len(plan.begins))


def delays(entries: Iterable[Handled], fragments: Sequence[int], sizes: Traffic) -> Delays:
    """How long offers, merges and updates took; `fragments`: of reports' counters, `sizes`: of all."""
    reported: dict[tuple[int, int], float] = {}  # by learner and step
    begun: dict[Any, float] = {}
    sent: dict[tuple[int, int, int], float] = {}
    boundary: dict[int, float] = {}
    offers: dict[int, list[float]] = collections.defaultdict(list)
    arrived, applied = dict[int, float](), dict[int, float]()
    merges: list[float] = []
    updates: dict[int, list[float]] = collections.defaultdict(list)
    carried: dict[int, list[float]] = collections.defaultdict(list)
    for now, content, decided in entries:
        match content:
            case events.FragmentArrived(contribution=c):
                begins = max(reported.get((c.learner, c.step), now), arrived.get(c.learner, 0.0))
                offers[c.learner].append((now - begins) / sizes.offer(c.learner)[c.fragment])
                arrived[c.learner] = now
            case events.MergeFinished(round=r):
                if r in begun:
                    merges.append(now - begun.pop(r))
            case events.StepReported(report=report):
                reported.setdefault((report.learner, report.step), now)
                m, came = report.learner, list[tuple[int, float]]()
                for p, c in zip(fragments, report.counters, strict=False):
                    at = sent.pop((m, p, c.version), None)
                    if at is not None and m in boundary:
                        came.append((min(sizes.version[p], sizes.difference[p]), at))
                for size, at in came:  # one after the other
                    updates[m].append(max(0.0, boundary[m] - at))
                    took = boundary[m] - max(at, applied.get(m, 0.0)) - (now - boundary[m])
                    carried[m].append(max(0.0, took) / len(came) / size)
                if came:
                    applied[m] = boundary[m]
                boundary[m] = now
        for action in decided:
            match action:
                case actions.Merge(round=r):
                    begun[r] = now
                case actions.Send(receivers, events.UpdateArrived(p, version)):
                    for m, _ in receivers:
                        sent.setdefault((m, p, version), now)
    down = {m: statistics.median(took) for m, took in carried.items()}
    return Delays(
        {m: statistics.median(took) for m, took in offers.items()},
        statistics.median(merges) if merges else 0.0,
        {m: sorted(took)[len(took) // 10] for m, took in updates.items() if not down[m]},
        down,
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
        for field in dataclasses.fields(FleetOutcome)
        if field.name not in ("shares", "ages")
    ]
    print(markdown(["", *columns], rows, align=True))
