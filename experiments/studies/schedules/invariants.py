"""What must hold after every event of a fleet, judged by events and actions, hardly by the cores' state."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, Report, RoundId, Watermark
from ddiloco.protocol.policy import MAX_AGE, TIMING, SyncPolicy
from ddiloco.protocol.round import Phase
from ddiloco.protocol.schedule import Schedule, fragments_of
from ddiloco.protocol.state import SyncerState, newest_incarnations
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.array_ports import VirtualCheckpoint
from experiments.studies.schedules.integers import Parameters, Pieces
from experiments.studies.schedules.ledger import ProcessLedger, require

Member = tuple[int, int]  # learner, incarnation
TAKEN = "the number of a live learner"


class _Standing(enum.Enum):
    JOINING = "joining"
    PRESENT = "present"
    GONE = "gone"


class _Process:
    """What is known of one process of the syncer; a crash ends it."""

    def __init__(self, core: SyncerCore) -> None:
        self.core = core
        self.standing: dict[Member, _Standing] = {}
        self.reports: dict[Member, Report] = {}  # the newest by clock, of after a welcome
        # The same, all of them, by step
        self.told: collections.defaultdict[Member, dict[int, Report]] = collections.defaultdict(dict)
        self.heard: dict[Member, float] = {}  # when it last reported
        self.counted: dict[Member, Report] = {}  # its last report that was taken in
        self.before: dict[Member, Report] = {}  # the same before the present event
        self.known: dict[Contribution, int] = {}  # steps known of when the offer came, and was not early
        self.early: set[Contribution] = set()  # that wait for the reports of their work
        self.shards: dict[Member, tuple[int, ...]] = {}  # of which it says that it is a member
        self.dismissed: set[Member] = set()  # notified that they are no members
        self.asked: collections.Counter[tuple[RoundId, Member]] = collections.Counter()
        # For which rounds an offer came, and how often its learner had been asked for each by then
        self.arrived: dict[Contribution, dict[RoundId, int]] = collections.defaultdict(dict)
        self.merging: dict[RoundId, actions.Merge] = {}
        self.refused: set[RoundId] = set()  # rounds with a merge whose offers were all left out


def _newness(report: Report) -> tuple[Any, ...]:
    """The larger the later its learner sent it; of one step with later versions."""
    return report.adopted, report.step, [base.version for base in report.bases]


class DiskImage(NamedTuple):
    """What is known of what a copy of a shard's disk holds."""

    committed: SyncerState
    merged: frozenset[RoundId]
    passed: frozenset[RoundId]
    steps: frozenset[tuple[int, int]]  # merged ones, by fragment
    batches: dict[tuple[int, int], int]  # the step of each merged one, by learner and number
    schedules: dict[int, list[tuple[int, Schedule]]]  # by fragment, from which round on
    lineages: dict[tuple[int, int], int]  # by fragment and version
    newest: dict[int, int]  # incarnation, by learner


def joined_state(states: Sequence[SyncerState]) -> SyncerState:
    """The state that has each fragment as it is in one of these, by fragment."""
    of_each = ("versions", "merged_steps", "lineages", "watermarks")
    mixed = {name: tuple(getattr(state, name)[p] for p, state in enumerate(states)) for name in of_each}
    known = newest_incarnations(*(state.incarnations for state in states))
    return dataclasses.replace(states[-1], incarnations=known, **mixed)


class LearnerInvariants:
    """Holds learners to the rules of docs/how_it_works.md."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.checks = 0  # events after which every rule held
        self.largest: dict[tuple[int, int], int] = {}
        """By shard and learner, the largest incarnation that the shard has seen, over all histories."""
        self._ledgers: dict[object, ProcessLedger] = {}
        self._ledger_of: dict[tuple[int, int, int], ProcessLedger] = {}  # by shard, learner and incarnation
        self._saved: dict[VirtualCheckpoint, ProcessLedger] = {}

    def ledger(self, shard: int, c: Contribution) -> ProcessLedger:
        """Of the process that a contribution to a shard is of."""
        return self._ledger_of[shard, c.learner, c.incarnation]

    def checkpointed(self, process: object, checkpoint: VirtualCheckpoint) -> None:
        """A learner's process has left a checkpoint."""
        self._saved[checkpoint] = self._ledgers[process].copy()

    def resumed(
        self,
        process: object,
        core: LearnerCore,
        checkpoint: VirtualCheckpoint,
        out: list[actions.LearnerAction],
    ) -> None:
        """A process goes on from a checkpoint; raises Violation if what followed breaks a rule."""
        self._ledgers[process] = ledger = self._saved[checkpoint].copy()
        ledger.handled(core, None, out)
        for shard, incarnation in enumerate(core.incarnations):
            self._ledger_of[shard, core.learner, incarnation] = ledger

    def handled(
        self,
        process: object,
        core: LearnerCore,
        event: events.LearnerEvent,
        out: list[actions.LearnerAction],
        batch: int = 0,
        parameters: Parameters | None = None,
    ) -> None:
        """A learner's core took an event; raises Violation if what followed breaks a rule.

        `batch`: the number of the last one that the learner has drawn. `parameters`: before what followed.
        """
        ledger = self._ledgers.setdefault(process, ProcessLedger())
        ledger.handled(core, event, out, batch, parameters)
        if core.recovered:
            for shard, incarnation in enumerate(core.incarnations):
                owner = self._ledger_of.setdefault((shard, core.learner, incarnation), ledger)
                require(owner is ledger, "two processes never go by one incarnation", owner, incarnation)
        if any(isinstance(action, actions.EndProcess) for action in out):
            newest = self.largest.get((event.shard, core.learner), -1)
            replaced = newest > core.incarnations[event.shard]
            require(replaced, "only a process that was replaced leaves", core.learner)
        if self.total_steps is not None:
            require(core.clock <= self.total_steps, "no clock passes the last step", core.learner, core.clock)
        self.checks += 1


class Invariants:
    """Holds a shard of the syncer to the rules of docs/how_it_works.md."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        learners: LearnerInvariants,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.policy, self.total_steps = policy, total_steps
        self.shard, self._shards = shard, shards
        self._own = fragments_of(shard, shards, policy.num_fragments)
        self._learners = learners
        self.committed = SyncerState.initial(policy.num_fragments)
        self._lineages: dict[tuple[int, int], int] = {}  # by fragment and version
        self.merged: set[RoundId] = set()
        self.passed: set[RoundId] = set()  # skipped or abandoned
        self.checks = 0  # events after which every rule held
        self.longest_welcome = 0.0  # seconds from a learner's first message to its membership
        self._admitted: dict[Member, float] = {}
        self._schedules = {p: [(0, policy.schedule(total_steps))] for p in self._own}
        """By fragment each schedule so far, with the step after which its rounds begin."""
        self.longest_interval = policy.interval  # of all schedules so far
        self._open: dict[int, int] = {}  # by fragment, the step of its open round
        self._newest: dict[int, int] = {}  # by learner, over all processes of the syncer
        self._syncer: _Process | None = None
        self._merged_steps: set[tuple[int, int]] = set()  # fragment, and number of the step in the ledgers
        self._merged_batches: dict[tuple[int, int], int] = {}  # by learner and batch, the step it was for

    def syncer_handled(
        self, core: SyncerCore, event: events.SyncerEvent, out: list[actions.SyncerAction], now: float
    ) -> None:
        """The syncer's core took an event; raises Violation if what followed breaks a rule."""
        if self._syncer is None or self._syncer.core is not core:
            self._syncer = _Process(core)
            self._open.clear()
            if len(self._own) < self.policy.num_fragments:
                self._read_disks(core, event)
        if not any(isinstance(action, actions.Drop) and action.reason == TAKEN for action in out):
            self._book(event)
        if isinstance(event, events.StepReported) and not any(isinstance(a, actions.Drop) for a in out):
            member = (event.report.learner, event.report.incarnation)
            self._syncer.heard[member] = now
        for action in out:
            if isinstance(action, actions.Began):
                self._begin((action.learner, action.incarnation), event)
        self._syncer.before = dict(self._syncer.counted)
        self._count(core)
        for c in self._syncer.early & self._syncer.known.keys():
            self._syncer.known[c] = max(self._syncer.known[c], self._steps_on(c))
        if isinstance(event, events.LearnerJoined):
            self._admitted.setdefault((event.learner, event.incarnation), now)
        for action in out:
            self._check(action, event, now)
        require(core.versions == self.committed.versions, "what is committed is known", core.versions)
        require(core.merged_steps == self.committed.merged_steps, "merged steps are known", core.merged_steps)
        deadline = core.next_deadline()
        require(deadline is None or deadline > now, "a deadline that has come is acted on at once", deadline)
        # While an offer is merged it may come a second time, and then waits.
        gathering = [r for r in core.rounds if r.phase is not Phase.MERGING]
        taken = {c: r.id for r in gathering for c in r.arrived.values()}
        for c in self._syncer.early & taken.keys():
            self._book_offer(taken[c], c)
        self._syncer.early = core.offers - taken.keys()
        self._open = {r.id.fragment: r.id.step for r in core.rounds}
        self.checks += 1

    def commit(
        self,
        merge: actions.Merge,
        lineage: int = 0,
        left_out: Sequence[int] = (),
        given: Mapping[Contribution, Pieces] | None = None,
    ) -> None:
        """A merge became durable, by a syncer's process of this lineage, without the offers of some learners.

        `given`: what came with its offers; None: nothing.

        Raises:
          Violation: it was not under way, merges a step or a batch again, or work of a history that was lost;
            or an offer is not what its steps have added.
        """
        under_way = self._syncer.merging.pop(merge.round, None)
        require(under_way == merge, "what is committed was being merged", merge.round)
        merged = [c for c in merge.contributions if c.learner not in left_out]
        some = bool(merged) or not merge.contributions
        require(some, "no version comes of a merge whose offers are all left out", merge.round)
        for c in merged:
            ledger = self._learners.ledger(self.shard, c)
            self._check_steps(ledger, c)
            self._count_steps(ledger, c)
            if given is not None:
                added = (-ledger.added(c.fragment, *ledger.span(c)),)
                require(given[c] == added, "an offer is what its steps have added", c, given[c], added)
            history = (ledger.lineage(c), self._lineages.get((c.fragment, c.version), 0))
            require(history[0] == history[1], "work is merged into the history that it is of", c, history)
        self.committed = self.committed.after(merge.round, lineage, merged)
        p = merge.round.fragment
        self._lineages[p, self.committed.versions[p]] = lineage
        self.merged.add(merge.round)

    def _check_steps(self, ledger: ProcessLedger, c: Contribution) -> None:
        """None of a contribution's steps, nor any batch of an earlier life, may be merged already."""
        first, last = ledger.span(c)
        for number, batch, _ in ledger.history[first + 1 : last + 1]:
            require((c.fragment, number) not in self._merged_steps, "no step is merged twice", c, number)
            step = self._merged_batches.get((c.learner, batch), number)
            once = step == number or not batch
            require(once, "no batch is drawn twice of those merged", c, batch)

    def _count_steps(self, ledger: ProcessLedger, c: Contribution) -> None:
        first, last = ledger.span(c)
        for number, batch, _ in ledger.history[first + 1 : last + 1]:
            self._merged_steps.add((c.fragment, number))
            self._merged_batches[c.learner, batch] = number

    def image(self) -> DiskImage:
        """What a copy of the disk holds; for `rolled_back`."""
        return DiskImage(
            self.committed,
            frozenset(self.merged),
            frozenset(self.passed),
            frozenset(self._merged_steps),
            dict(self._merged_batches),
            {p: [*known] for p, known in self._schedules.items()},
            dict(self._lineages),
            dict(self._newest),
        )

    @staticmethod
    def joined(images: Sequence[DiskImage]) -> DiskImage:
        """What a disk holds that has each fragment as it is in one of these images, by fragment."""
        merged, passed = (
            frozenset(which for p, rounds in enumerate(of_each) for which in rounds if which.fragment == p)
            for of_each in ([image.merged for image in images], [image.passed for image in images])
        )
        steps = frozenset((p, step) for p, image in enumerate(images) for q, step in image.steps if p == q)
        numbers = {step for _, step in steps}
        return DiskImage(
            joined_state([image.committed for image in images]),
            merged,
            passed,
            steps,
            {key: n for image in images for key, n in image.batches.items() if n in numbers},
            {p: known for p, image in enumerate(images) for q, known in image.schedules.items() if p == q},
            {key: n for p, image in enumerate(images) for key, n in image.lineages.items() if key[0] == p},
            {m: max(i.newest.get(m, -1) for i in images) for image in images for m in image.newest},
        )

    def rolled_back(self, image: DiskImage) -> None:
        """The syncer's disk is an older one again: what was merged since is lost."""
        self.committed = image.committed
        self.merged, self.passed, self._merged_steps = set(image.merged), set(image.passed), set(image.steps)
        self._schedules = {p: [*image.schedules[p]] for p in self._own}
        if self._syncer is not None:
            self._syncer.merging.clear()
        self._merged_batches, self._lineages = dict(image.batches), dict(image.lineages)
        self._newest = dict(image.newest)

    def _read_disks(self, core: SyncerCore, event: events.SyncerEvent) -> None:
        """A process that starts knows what is on the disks of other shards, too; and the event by now."""
        joins = (event.learner, event.incarnation) if isinstance(event, events.LearnerJoined) else None
        for member in core.state().incarnations:
            if member != joins:
                self._record_incarnation(*member)

    def _record_incarnation(self, learner: int, incarnation: int) -> None:
        self._newest[learner] = max(incarnation, self._newest.get(learner, -1))
        key = self.shard, learner
        self._learners.largest[key] = max(incarnation, self._learners.largest.get(key, -1))

    def _book(self, event: events.SyncerEvent) -> None:
        """Notes where each member stands by the syncer's event, before the syncer answers."""
        process = self._syncer
        match event:
            case events.LearnerJoined(learner=learner, incarnation=incarnation):
                if process.standing.get((learner, incarnation)) is not _Standing.PRESENT:  # else it is late
                    process.shards[learner, incarnation] = event.shards
                newest = self._newest.get(learner, -1)
                if incarnation > newest:
                    process.standing[learner, newest] = _Standing.GONE
                    process.standing[learner, incarnation] = _Standing.JOINING
                    self._record_incarnation(learner, incarnation)
            case events.LearnerLost(learner=learner, incarnation=incarnation):
                process.standing[learner, incarnation] = _Standing.GONE
            case events.StepReported(report=report) if 0 <= report.step <= (self.total_steps or math.inf):
                member = (report.learner, report.incarnation)
                told, known = process.told[member], process.reports.get(member, report)
                if report.step >= known.step:  # else it is late
                    process.shards[member] = report.shards
                process.reports[member] = max(known, report, key=_newness)
                told[report.step] = max(told.get(report.step, report), report, key=_newness)
            case events.FragmentArrived(round=which, contribution=c):
                self._book_offer(which, c)
            case events.MergeFinished(round=which, left_out=left_out):
                self._check_result(which, left_out)

    def _book_offer(self, which: RoundId, c: Contribution) -> None:
        """An offer is here that its learner was asked for; an early one may be asked for while it waits."""
        process, member = self._syncer, (c.learner, c.incarnation)
        asked = (which, member) in process.asked
        if self.policy.takes_late_work:  # an answer to what was asked before it rejoined will do
            asked = any(r.fragment == which.fragment and who == member for r, who in process.asked)
        if asked and self._stands(member, _Standing.PRESENT):
            process.arrived[c][which] = process.asked[which, member]
            process.known[c] = max(c.steps, self._steps_on(c))

    def _check_result(self, which: RoundId, left_out: tuple[int, ...]) -> None:
        """A merge has ended; if it is still under way here, it was not committed."""
        uncommitted = self._syncer.merging.pop(which, None)
        if uncommitted is not None:
            learners = {c.learner for c in uncommitted.contributions}
            require(learners <= set(left_out), "a merge of which something came is committed", which)
            self._syncer.refused.add(which)
            return

    def _stands(self, member: Member, where: _Standing) -> bool:
        """Whether the member stands there; the syncer's present process must have met it."""
        return self._syncer.standing.get(member, _Standing.GONE) is where

    def _was_made(self, fragment: int, version: int, step: int) -> bool:
        """Whether this is the newest version."""
        return (version, step) == (self.committed.versions[fragment], self.committed.merged_steps[fragment])

    def _check(self, action: actions.SyncerAction, event: events.SyncerEvent, now: float) -> None:
        match action:
            case actions.Record(name="learner_lost", values={"reason": "replaced", **values}):
                member = (values["learner"], values["incarnation"])
                quiet = now - self._syncer.heard.get(member, -math.inf) >= 1.5 * self.policy.heartbeat
                at_some = 0 < len(self._syncer.shards.get(member, ())) < self._shards
                may = quiet or at_some or member in self._syncer.dismissed
                require(may, "whoever speaks is not replaced", action)
            case actions.Began(learner=learner, incarnation=incarnation):
                member = (learner, incarnation)
                require(self._newest.get(member[0]) == member[1], "the newest incarnation counts", action)
                require(self._stands(member, _Standing.JOINING), "none that departed comes back", action)
                self._syncer.standing[member] = _Standing.PRESENT
                self.longest_welcome = max(self.longest_welcome, now - self._admitted.get(member, now))
            case actions.Record(name="round_skipped" | "round_abandoned", values=values):
                which = RoundId(values["step"], values["fragment"])
                self._check_due(which)
                require(which not in self.merged, "what is merged is not given up", action)
                self.passed.add(which)
            case actions.Record(name="timing_set", values=values):
                self._set_timing(values)
            case actions.Send(receivers):
                for member in receivers:
                    self._check_message(member, action.to(member[0]))
            case actions.Merge():
                self._check_merge(action)
                self._check_awaited(action.round, now)
                if not isinstance(event, events.TimingSet):  # a smaller quorum leaves no time to ask again
                    for c in action.contributions:
                        self._check_freshness(action.round, c)
            case actions.Finish():
                self._check_finish()

    def _set_timing(self, values: Mapping[str, Any]) -> None:
        """From here on rounds are those of another schedule, beyond the ones that are open or merged."""
        timing = {name: values[name] for name in TIMING}
        self.policy = dataclasses.replace(self.policy, **timing)
        self.longest_interval = max(self.longest_interval, self.policy.interval)
        merged = self.committed.merged_steps
        schedule = self.policy.schedule(self.total_steps)
        for p, known in self._schedules.items():
            known.append((max(values["step"], merged[p], self._open.get(p, 0)), schedule))

    def _is_due(self, which: RoundId) -> bool:
        return which.fragment in self._schedule(which.fragment, which.step).due(which.step)

    def _schedule(self, fragment: int, step: int) -> Schedule:
        """The schedule by which a round of the fragment at this step is due, or is not."""
        known = reversed(self._schedules[fragment])
        return next(schedule for begins, schedule in known if begins < max(step, 1))

    def _check_awaited(self, which: RoundId, now: float) -> None:
        """By the core's own record: whom it expected, and until when, depends on all that it measured."""
        for r in self._syncer.core.rounds:
            owing = r.owed.keys() - r.arrived.keys()  # of one who gave and is asked again there is an offer
            missing = r.awaited & owing if r.id == which else frozenset()
            kept = not missing or now >= r.awaited_until
            require(kept, "whom a merge left out, it could not expect", which, sorted(missing))

    def _check_message(self, member: Member, message: events.FromSyncer) -> None:
        match message:
            case events.Welcomed(step=step, versions=versions, merged_steps=merged_steps):
                require(self._stands(member, _Standing.JOINING), "those are welcomed that join", member)
                known = zip(message.fragments or range(len(versions)), versions, merged_steps, strict=True)
                made = all(self._was_made(*version) for version in known)
                require(made and step == max(merged_steps), "a welcome has what is committed", message)
                marks = message.watermarks or (NOTHING_MERGED,) * len(versions)
                fragments = zip(message.fragments or range(len(versions)), versions, marks, strict=True)
                for p, version, mark in fragments:
                    self._check_watermark(member[0], p, version, mark)
            case events.NotMember(incarnation):
                self._syncer.dismissed.add((member[0], incarnation))
            case events.Rejected(incarnation):
                newest = self._newest.get(member[0], -1)
                require(incarnation < newest, "only the replaced are rejected", member)
            case events.ClockSet(step):
                front = max((r.step for r in self._syncer.reports.values()), default=0)
                require(step <= front, "a clock is set to a step that was reported", message)
                require(self._stands(member, _Standing.PRESENT), "members alone are spoken to", member)
            case events.OfferAsked():
                self._check_asking(member, message)
            case events.UpdateArrived(p, version, step):
                require(self._was_made(p, version, step), "what is committed is broadcast", message)
                self._check_watermark(member[0], p, version, message.watermark)
                require(self._stands(member, _Standing.PRESENT), "members alone are spoken to", member)

    def _check_watermark(self, learner: int, p: int, version: int, claimed: Watermark) -> None:
        if version == self.committed.versions[p]:
            truly = self.committed.watermarks[p].get(learner, NOTHING_MERGED)
            claim = "a learner receives the watermark of its work in a version"
            require(claimed == truly, claim, learner, p, version, claimed, truly)

    def _check_due(self, which: RoundId) -> None:
        require(self._is_due(which), "a round is one of the schedule", which)
        if self.total_steps is not None:
            require(which.step <= self.total_steps, "no round is past the last step", which)

    def _check_asking(self, member: Member, asked: events.OfferAsked) -> None:
        which = asked.round
        self._check_due(which)
        require(self._stands(member, _Standing.PRESENT), "members alone are asked", member)
        newest = self.committed.versions[which.fragment]
        require(asked.version == newest, "the newest is asked for", asked)
        require(asked.clock <= which.step, "nobody is to wait for a later step than the round's", asked)
        if self.policy.quorum is None:
            require(asked.clock == which.step, "where all are needed, all give the round's step", asked)
        self._syncer.asked[which, member] += 1

    def _check_quorum(self, which: RoundId, given: set[int]) -> None:
        """Whether enough for a quorum of those that gave have come to the round's step; one that died had."""
        live = set(self._syncer.core.live)
        reports = {m: self._syncer.reports.get((m, self._newest[m])) for m in live}
        # One that rejoined at that step has reached it, though it has not reported since.
        come = {m for m, report in reports.items() if report is None or report.step >= which.step}
        if self.policy.quorum is None:
            require(come == live, "the quorum of all is of all that are live", which, live - come)
        else:
            quorum = given & come | given - live
            require(len(quorum) >= self.policy.quorum, "a quorum of those that gave is at the step", which)

    def _check_merge(self, merge: actions.Merge) -> None:
        which, given = merge.round, merge.contributions
        p = which.fragment
        self._check_due(which)
        require(merge.version == self.committed.versions[p] + 1, "versions rise by one", merge)
        require(which.step > self.committed.merged_steps[p], "rounds of a fragment come in order", merge)
        require(which not in self.merged, "no round is merged twice", merge)
        learners = {c.learner for c in given}
        require(len(learners) == len(given), "a learner gives once to a merge", merge)
        if given:
            require(len(learners) >= self.policy.min_quorum, "a merge has its quorum", merge)
        else:
            waits = self.policy.max_run_ahead is not None and which in self._syncer.refused
            require(waits, "nothing is merged only for who waits, once all offers were left out", merge)
        for c in given:
            age = merge.version - 1 - c.version
            most = MAX_AGE if self.policy.takes_late_work else 0
            require(c.fragment == p and 0 <= age <= most, "work is on one of the last versions", c)
            if c in self._syncer.early:
                self._book_offer(which, c)
            came = self._syncer.arrived.get(c, {})
            known = which in came or (bool(came) and self.policy.takes_late_work)
            require(known, "what is merged arrived while its learner took part", c)
            self._check_steps(self._learners.ledger(self.shard, c), c)
            mark = self.committed.watermarks[p].get(c.learner, NOTHING_MERGED)
            require(c.since == mark, "work begins where what is merged of its learner's ends", c, mark)
        require(
            all(other.fragment != p for other in self._syncer.merging), "fragments in flight differ", merge
        )
        if given:  # else who has come since is not asked for anything
            self._check_quorum(which, learners)
        self._syncer.merging[which] = merge
        most = max(1, self.policy.overlap)
        require(len(self._syncer.merging) <= most, f"at most {most} rounds are in flight", merge)

    def _check_freshness(self, which: RoundId, c: Contribution) -> None:
        if self._stands((c.learner, c.incarnation), _Standing.GONE):
            return  # it can be asked for nothing
        # What this very event shows is too late to ask for another.
        since = self._steps_on(c, self._syncer.before) - self._syncer.known[c]
        fresh = since <= max(1, self.longest_interval // 2, c.steps // 2)
        asked = self._syncer.asked[which, (c.learner, c.incarnation)]
        again = asked > self._syncer.arrived[c].get(which, 0)
        require(fresh or again, "a learner far beyond its offer is asked for another", c, since)

    def _begin(self, member: Member, event: events.SyncerEvent) -> None:
        """Forgets what a member reported before its welcome; one that was kept back is of after it."""
        match event:
            case events.StepReported(report) if (report.learner, report.incarnation) == member:
                self._syncer.reports[member] = report
                self._syncer.told[member] = {report.step: report}
            case events.LearnerReady() | events.LearnerJoined():
                self._syncer.reports.pop(member, None)
                self._syncer.told.pop(member, None)

    def _count(self, core: SyncerCore) -> None:
        """Counts reports that the syncer believes, which may be only since others bear them out.

        Of several that it kept back it may believe an older one first.
        """
        for learner, (incarnation, step) in core.clocks.items():
            report = self._syncer.told[learner, incarnation].get(step)
            if report is not None:
                self._syncer.counted[learner, incarnation] = report

    def _steps_on(self, c: Contribution, counted: Mapping[Member, Report] | None = None) -> int:
        """How many steps its learner has reported on the version that a contribution is of."""
        counted = self._syncer.counted if counted is None else counted
        report = counted.get((c.learner, c.incarnation))
        counters = None if report is None else report.counters[self._own.index(c.fragment)]
        return 0 if counters is None or counters.version != c.version else counters.steps

    def _check_finish(self) -> None:
        require(self.total_steps is not None, "a run without an end does not finish")
        for p in self._own:
            for step in range(1, self.total_steps + 1):
                which = RoundId(step, p)
                known = which in self.merged or which in self.passed
                due = self._is_due(which)
                require(known or not due, "every round is merged, skipped or abandoned at the end", which)
