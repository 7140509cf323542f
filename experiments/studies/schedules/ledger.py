"""What one learner's process has really done, counted apart from its core: its steps, tokens and versions."""

from __future__ import annotations

import collections
import copy
import itertools
import math

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import KEPT_OFFERS, LearnerCore
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, Watermark
from ddiloco.protocol.policy import MAX_AGE, SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from experiments.studies.schedules.integers import Parameters, of_fragment


class Violation(AssertionError):
    """Something happened that must never happen; the message says what."""


def require(holds: bool, claim: str, *found: object) -> None:
    """Raises a Violation unless the claim holds; `found` is what was found instead."""
    if not holds:
        raise Violation(f"{claim}: {', '.join(map(str, found))}" if found else claim)


class ProcessLedger:
    """Counts a process's own steps and tokens, and compares its core with them after every event.

    Steps are numbered from 1 here: clocks jump, these numbers do not. Work on a version is the steps after
    the one at which that version was applied, or with rebase after the last offer that is merged.
    A process that goes on from a checkpoint goes on with a `copy` of the ledger as it was then.
    """

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.steps = 0
        self._at: dict[int, int] = {}  # steps by `Watermark.steps`
        self._boundary = 0  # the newest of these
        # Of each step: a number that no other step has, its batch, and what all up to it added to fragment 0
        self.history = [(0, 0, 0)]
        self._tokens, self._work = [0], [0]  # of all steps up to each: tokens and steps that were not skipped
        self._applied: list[dict[int, int]] = []  # by fragment: version -> steps when it was applied
        self._held: list[int] = []
        self._marks: list[Watermark] = []  # by fragment, how far its work is in the version held
        self._begun: list[int] = []  # by fragment, the version on which its oldest unmerged work began
        # By fragment and steps of the offer (`Watermark.steps`): first and last
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}
        self._in_flight: collections.deque[int] = collections.deque()  # steps started, not yet finished
        self._finished = 0
        self._reported = -1
        self._clock = 0
        self._incarnations: tuple[int, ...] = ()
        self._merged_at: list[int] = []  # by fragment, the step of the round that made the version held
        self._ends: dict[int, int] = {}  # by shard, the step to which it asks the clock to be set
        self._lineages: list[int] = []  # by fragment, of the version held
        self._policies: dict[int, SyncPolicy] = {}  # by shard, once it has set the timing
        self._made: dict[tuple[int, ...], tuple[int, int, int]] = {}
        """By fragment, version, steps, clock and tokens of all offers: as `_spans`, with their lineage."""

    def copy(self) -> ProcessLedger:
        """The ledger of a process that goes on from a checkpoint that is made now."""
        assert not self._in_flight, "checkpoints are made between two steps"
        copied = copy.copy(self)
        for name, value in vars(self).items():
            setattr(copied, name, copy.copy(value))
        copied._applied = [dict(versions) for versions in self._applied]
        copied._made.clear()
        copied._reported, copied._incarnations = -1, ()
        copied._ends.clear()
        copied._policies.clear()
        return copied

    def handled(
        self,
        core: LearnerCore,
        event: events.LearnerEvent | None,
        out: list[actions.LearnerAction],
        batch: int = 0,
        parameters: Parameters | None = None,
    ) -> None:
        """Counts an event and the actions that followed; raises Violation if they do not agree.

        `event` None: the core goes on from a checkpoint. `batch`: the number of the last one that was drawn.
        `parameters`: before the actions; None: there are none.
        """
        done = self.steps  # the step of a report: the one that finished, or else the newest
        match event:
            case events.StepStarted():
                self.steps += 1
                moved = self.history[-1][2] + (0 if parameters is None else parameters.moved)
                self.history.append((next(self._numbers), batch, moved))
                self._tokens.append(self._tokens[-1] + event.tokens)
                self._work.append(self._work[-1] + 1)
                self._in_flight.append(self.steps)
            case events.StepFinished():
                done = self._in_flight.popleft()
                if event.skipped:
                    self._skipped(done)
                self._finished = max(self._finished, done)
            case events.Heartbeat() if self._in_flight:  # the last report once more
                done = self._finished
        self._check_boundary(core, event)
        self._check_incarnations(core)
        if parameters is not None:
            self._check_parameters(core, parameters)
        if isinstance(event, events.ClockSet) and core.recovered:
            self._ends[event.shard] = event.step
        if isinstance(event, events.TimingSet):
            self._policies[event.shard] = event.applied_to(core.policy)
        for action in out:
            match action:
                case actions.AdoptAll(versions=versions):
                    self._merged_at = [fragment.merged_step for fragment in core.work.fragments]
                    self._held, self._begun = list(versions), list(versions)
                    self._marks = [fragment.watermark for fragment in core.work.fragments]
                    self._applied = [{version: self.steps} for version in versions]
                    self._finished = self.steps
                    self._reported = -1
                    self._lineages = [fragment.lineage for fragment in core.work.fragments]
                case actions.ApplyUpdate(fragment=p, version=version) if isinstance(event, events.Welcomed):
                    held = core.work.fragments[p]
                    self._held[p], self._applied[p] = version, {version: self.steps}
                    self._lineages[p], self._merged_at[p] = held.lineage, held.merged_step
                    self._marks[p], self._begun[p] = held.watermark, version
                case actions.ApplyUpdate(fragment=p, version=version):
                    require(version > self._held[p], "a learner's versions only rise", action)
                    self._check_kept(core, event, action)
                    first, kept = self.steps, action.rebase and action.merged is None
                    if kept:
                        first = self._applied[p][self._held[p]]
                    elif action.rebase:
                        _, first = self._spans[p, action.merged]
                    if not kept or self._work[first] == self._work[self.steps]:
                        self._begun[p] = version
                    self._held[p], self._marks[p] = version, event.watermark
                    self._lineages[p], self._merged_at[p] = event.lineage, event.step
                    self._applied[p][version] = first
                case actions.MakeOffer(contribution=c):
                    self._offered(core, c)
                case actions.SendOffer(contribution=c):
                    self._sent(c)
                case actions.SendToSyncer(events.StepReported(report), shard):
                    self._check_report(core, report, done, shard)
        self._check_clock(core, event)
        require(core.versions == tuple(self._held), "a learner holds what it applied", core.versions)
        if core.policy.max_run_ahead is None:
            require(not core.blocked, "a learner without a bound never waits", core.learner)

    def added(self, fragment: int, first: int, last: int) -> int:
        """What the steps after the first number, up to the last, have added to a fragment."""
        return of_fragment(fragment, self.history[last][2] - self.history[first][2])

    def span(self, c: Contribution) -> tuple[int, int]:
        """The work that a contribution stands for: the steps after the first number, up to the last."""
        key = (c.fragment, c.version, c.upto.steps, c.step, c.tokens)
        require(key in self._made, "what is merged was offered by the learner, with its tokens", c)
        first, last, _ = self._made[key]
        self._check_work(first, last, c, c, "a contribution's steps are those taken")
        return first, last

    def lineage(self, c: Contribution) -> int:
        """Which start of the syncer made the version that a contribution was made on."""
        return self._made[c.fragment, c.version, c.upto.steps, c.step, c.tokens][2]

    def _offered(self, core: LearnerCore, c: Contribution) -> None:
        first = self._applied[c.fragment][self._held[c.fragment]]
        require(c.version == self._held[c.fragment], "an offer is anchored on the version held", c)
        require(c.steps > 0, "an offer holds work", c)
        require(c.step == core.clock, "an offer bears the learner's clock", c)
        require(c.upto == core.reached, "an offer is of a step boundary of the learner's life", c)
        # By what is known so far.
        self._check_work(first, self.steps, c, c, "an offer's steps are those since its version")
        self._spans[c.fragment, c.upto.steps] = (first, self.steps)

    def _sent(self, c: Contribution) -> None:
        """Its steps are complete, so that it is known which of them were skipped."""
        first, last = self._spans[c.fragment, c.upto.steps]
        require(c.steps > 0, "an offer holds work", c)
        require(last not in self._in_flight, "an offer is sent after its last step", c)
        self._check_work(first, last, c, c, "an offer's steps are those since its version")
        key = (c.fragment, c.version, c.upto.steps, c.step, c.tokens)
        self._made[key] = (first, last, c.lineage)

    def _check_parameters(self, core: LearnerCore, parameters: Parameters) -> None:
        """A learner's parameters are the versions that it holds, and its work that is not in them."""
        if core.policy.mixing:
            return
        for p, version in enumerate(self._held):
            expected = parameters.versions[p, version, self._lineages[p]]
            expected += self.added(p, self._applied[p][version], self.steps)
            require(parameters.theta[p] == expected, "parameters are a version and work on it", p, expected)

    def _check_kept(
        self, core: LearnerCore, event: events.UpdateArrived, action: actions.ApplyUpdate
    ) -> None:
        """With rebase an update overwrites no work but what it has, what is too old, and that of other lives.

        An offer that it has may also be too old to be known.
        """
        p, work = action.fragment, core.work
        first = self._applied[p][self._held[p]]
        if not core.policy.rebase or first == self.steps:
            return
        kept = action.rebase and action.merged is None
        if event.watermark == self._marks[p]:
            may = kept or action.version - self._begun[p] > MAX_AGE
            require(may, "an update overwrites no work that may yet be merged", action)
            return
        life, ended = event.watermark.life, {**work.lives, work.life: math.inf}
        steps = min(event.watermark.steps, ended.get(life, -1))
        offers = [last for (q, last), (since, _) in self._spans.items() if (q, since) == (p, first)]
        found = steps if steps in offers[-KEPT_OFFERS:] else None
        claim = "an update leaves what came after the offer that it has"
        after = found is not None and self._at[found] < self.steps
        require(action.merged == found and action.rebase == after, claim, action, found)

    def _skipped(self, step: int) -> None:
        """It changed nothing: it counts for nothing."""
        tokens = self._tokens[step] - self._tokens[step - 1]
        for later in range(step, self.steps + 1):
            self._tokens[later] -= tokens
            self._work[later] -= 1

    def _check_clock(self, core: LearnerCore, event: events.LearnerEvent | None) -> None:
        """A clock counts steps taken, and is set forward only to what others have come to."""
        before, self._clock = self._clock, core.clock
        rose = core.clock - before
        match event:
            case events.StepStarted():
                require(rose == 1, "a step is one on the clock", before, core.clock)
            case events.Welcomed():
                as_welcomed = not rose or core.clock == event.step or len(core.incarnations) > 1
                require(as_welcomed, "a clock is set to the step in the message", event, core.clock)
            case events.UpdateArrived(fragment=p, step=step) if rose and not self._ends_now(core):
                policy = self._policies.get(p % len(core.incarnations), core.policy)
                far = rose > policy.band and core.clock == step
                require(far, "an update sets a clock only if that is far behind", before, core.clock)
            case _ if rose:
                require(self._ends_now(core), "nothing else moves a clock", event, before, core.clock)

    def _ends_now(self, core: LearnerCore) -> bool:
        """Whether its clock is where shards asked it to be set, and no shard that it is of needs it yet."""
        return core.clock in self._ends.values() and all(
            self._ends.get(shard) or self._is_over(core, shard) for shard in core.shards
        )

    def _is_over(self, core: LearnerCore, shard: int) -> bool:
        own = fragments_of(shard, len(core.incarnations), core.policy.num_fragments)
        last = math.inf if core.total_steps is None else core.total_steps
        return all(self._merged_at[p] >= last for p in own)

    def _check_boundary(self, core: LearnerCore, event: events.LearnerEvent | None) -> None:
        """Steps of watermarks rise by one a step, and else only to behind what a welcome says is merged."""
        rose = core.reached.steps - self._boundary
        stepped = isinstance(event, events.StepStarted)
        may = rose >= 0 if event is None or isinstance(event, events.Welcomed) else rose == stepped
        require(may, "steps of watermarks are steps taken", event, rose)
        self._boundary = core.reached.steps
        self._at[self._boundary] = self.steps

    def _check_incarnations(self, core: LearnerCore) -> None:
        known = self._incarnations or core.incarnations
        for shard, (new, old) in enumerate(zip(core.incarnations, known, strict=True)):
            require(new >= old, "a process's incarnation only rises", core.incarnations)
            if new > old:
                self._ends.pop(shard, None)
        self._incarnations = core.incarnations

    def _check_report(self, core: LearnerCore, report: Report, done: int, shard: int) -> None:
        current = report.incarnation == core.incarnations[shard]
        require(current, "a report bears the current incarnation", report)
        require(report.step >= self._reported, "a learner's reported clock never falls", report)
        self._reported = report.step
        own = fragments_of(shard, len(core.incarnations), core.policy.num_fragments)
        for p, counters in zip(own, report.counters, strict=True):
            applied = self._applied[p].get(counters.version)
            require(applied is not None, "a report names versions that were applied", report)
            claim = "a report counts the steps since each fragment's version"
            # A welcome in mid-step leaves no work of that step on the shard's fragments.
            self._check_work(min(applied, done), done, counters, report, claim)

    def _check_work(
        self, first: int, last: int, counted: Contribution | FragmentCounters, where: object, claim: str
    ) -> None:
        """Holds the counters to the steps after the first up to the last, without those that were skipped."""
        steps, tokens = self._work[last] - self._work[first], self._tokens[last] - self._tokens[first]
        # No `require`: its message would be formatted every time.
        if counted.steps != steps:
            raise Violation(f"{claim}, without those skipped, {steps}: {where}")
        if counted.tokens != tokens:
            raise Violation(f"tokens are those of the steps counted, {tokens}: {where}")
