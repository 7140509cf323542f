"""Random schedules: what a seed has drawn, run until faults stop and the run ends, each event checked."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from typing import Any

from ddiloco.protocol import actions, events
from ddiloco.protocol.policy import TIMEOUT_SLACK
from ddiloco.protocol.state import SyncerState, newest_incarnations
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.array_ports import Observer, VirtualCheckpoint
from ddiloco.virtual.learner_process import VirtualLearner
from experiments.studies.schedules.conditions import WeatheredFleet
from experiments.studies.schedules.faults import FAULTS, LONGEST, some_shards, syncer_crash
from experiments.studies.schedules.invariants import DiskImage, Invariants, LearnerInvariants, joined_state
from experiments.studies.schedules.ledger import Violation, require
from experiments.studies.schedules.plans import SchedulePlan, draw_fair, draw_plan
from experiments.studies.schedules.shares import Shares

MAX_EVENTS = 100_000
SLOWEST = 10.0  # seconds of a step, at most
RETURN = 5.0  # seconds within which the dead are back after the storm
MIN_SHARE = 0.5  # of a learner's work in any window of a plan that has such
LOOK_SECONDS = 0.5  # until a shard follows an order, at most
KEPT = 60  # events, the last ones of a schedule, that are shown
KEPT_VERSIONS = 3  # of a fragment, of which a snapshot may have one


class RandomSchedule(Observer):
    """Runs a plan; `run` raises unless the invariants hold after every event.

    Without `checked` the run is the same, but has no timeline, and only a run that does not end is found.
    """

    def __init__(self, plan: SchedulePlan, checked: bool = True) -> None:
        self.plan = plan
        self.checked = checked
        self._last: collections.deque[tuple[float, Any, Any, list[Any]]] = collections.deque(maxlen=KEPT)
        self.learners = LearnerInvariants(plan.total_steps)
        about = plan.policy, plan.total_steps, self.learners
        self.invariants = [Invariants(*about, shard, plan.shards) for shard in range(plan.shards)]
        self.commit_times: list[float] = []
        self.shares = Shares(plan.policy.num_fragments)
        self.states: set[int] = set()  # that the syncer was in, by `_state_of`
        self._rng = random.Random(plan.seed + 1)
        self._orders = random.Random(f"orders {plan.seed}")
        self._calm_at: float | None = None
        self._went_back = 0  # times to a snapshot
        self._images: dict[int, list[tuple[SyncerState, DiskImage]]] = {}  # by fragment, of its last versions
        self.fleet = WeatheredFleet(
            plan.policy,
            plan.total_steps,
            self._rng,
            plan.weather,
            learners=len(plan.joins),
            observer=self,
            shards=plan.shards,
            checkpoint_every=plan.checkpoint_every,
        )

    @property
    def events(self) -> int:
        """Calendar events that have happened."""
        return self.fleet.calendar.happened

    def run(self) -> None:
        """Runs through the storm and on to the end; raises Violation if a rule breaks, or none comes."""
        calendar = self.fleet.calendar
        for learner, at in enumerate(self.plan.joins):
            calendar.at(at, self.fleet.recover, learner)
        for at, name, learner in self.plan.faults:
            calendar.at(at, FAULTS[name], self.fleet, learner, self._rng)
        for at, learner in self.plan.retired:
            calendar.at(at, self.fleet.retire, learner)
        for at, timing in self.plan.timings:
            delay = functools.partial(self._orders.uniform, 0.0, LOOK_SECONDS)
            calendar.at(at, self.fleet.set_timing, timing, delay)
        for image_at, lost_at in self.plan.rollbacks:
            calendar.at(image_at, self._copy_disk, lost_at)
        for asked_at, resumed_at in self.plan.snapshots:
            calendar.at(asked_at, self._take_snapshot, resumed_at)
        calendar.at(self.plan.storm, self._calm)
        try:
            self.fleet.run(max_events=MAX_EVENTS)
        except TimeoutError:
            raise Violation(f"the run has not ended after {MAX_EVENTS} events") from None
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"a core raised {type(error).__name__}: {error}") from error
        require(self.fleet.over, "the run has not ended, and nothing is left to happen")
        if self.plan.window is not None and self.checked:
            self._check_shares(self.plan.window)

    def history(self) -> list[str]:
        """The plan and the last events, as lines to read."""
        plan = self.plan
        faults = [f"{at:10.3f}  {name} of {learner}" for at, name, learner in plan.faults]
        about = dataclasses.replace(plan, faults=())
        lines = [str(about), *faults, f"{plan.storm:10.3f}  calm", ""]
        for now, who, event, out in self._last:
            lines.append(f"{now:10.3f}  {who}: {_described(event)}")
            lines += [f"{'':14}-> {_described(action)}" for action in out]
        return lines

    # As an Observer.

    def syncer_handled(
        self, event: events.SyncerEvent, out: list[actions.SyncerAction], now: float, shard: int = 0
    ) -> None:
        """Checks, and now and then kills the syncer in a merge."""
        if self.checked:
            core = self.fleet.syncers[shard].core
            self._last.append((now, f"shard {shard}", event, out))
            self.invariants[shard].syncer_handled(core, event, out, now)
            self.states.add(_state_of(core))
        if self._strikes(self.plan.crash_in_merge) and any(isinstance(a, actions.Merge) for a in out):
            self.fleet.calendar.after(0.0, syncer_crash, self.fleet, 0, self._rng)

    def learner_handled(
        self,
        learner: VirtualLearner,
        event: events.LearnerEvent,
        out: list[actions.LearnerAction],
        now: float,
    ) -> None:
        """Checks."""
        if not self.checked:
            return
        self._last.append((now, f"learner {learner.number}", event, out))
        drawn = learner.arrays.drawn  # type: ignore[attr-defined]
        self.learners.handled(learner, learner.core, event, out, drawn, self.fleet.parameters(learner))
        self.shares.learner_handled(learner, event, out, now)

    def merged(self, merge: actions.Merge, left_out: Sequence[int], now: float) -> None:
        """Checks, and now and then kills the syncer after the commit, before its core handles it."""
        if self.checked:
            shard = merge.round.fragment % self.plan.shards
            self._last.append((now, f"commit of shard {shard}", merge, []))
            syncer = self.fleet.syncers[shard]
            self.invariants[shard].commit(merge, syncer.lineage, left_out, self.fleet.given)
            needed = None if syncer.core is None else syncer.core.offers
            kept = needed is None or syncer.offers == needed
            require(kept, "arrays are kept of offers that may be merged", syncer.offers, needed)
            self.commit_times.append(now)
            self.shares.merged(merge, left_out, now)
            self._check_time_between_merges(now)
            if self.plan.snapshots:
                kept = self._images.setdefault(merge.round.fragment, [])
                kept.append((syncer.durable, self.invariants[shard].image()))
                del kept[:-KEPT_VERSIONS]
        if self._strikes(self.plan.crash_at_commit):
            syncer_crash(self.fleet, 0, self._rng)

    def checkpointed(self, learner: VirtualLearner, checkpoint: VirtualCheckpoint, now: float) -> None:
        """Remembers what it holds."""
        if self.checked:
            self.learners.checkpointed(learner, checkpoint)

    def resumed(
        self,
        learner: VirtualLearner,
        checkpoint: VirtualCheckpoint,
        out: list[actions.LearnerAction],
        now: float,
    ) -> None:
        """Checks."""
        if not self.checked:
            return
        self._last.append((now, f"learner {learner.number}", "goes on from a checkpoint", out))
        self.learners.resumed(learner, learner.core, checkpoint, out)

    # The storm.

    def _copy_disk(self, lost_at: float) -> None:
        """The disk of a shard, or of all, is lost later, and it is started from the copy that is made now."""
        lost = [
            (shard, self.fleet.syncers[shard].durable, self.invariants[shard].image())
            for shard in some_shards(self.fleet, self._rng)
        ]

        copied_after = self._went_back

        def restore() -> None:
            if self._went_back != copied_after:
                return  # of a history that was left, whose data the present one draws again
            for shard, durable, image in lost:
                self.fleet.syncers[shard].crash()
                self.fleet.syncers[shard].durable = durable
                self.invariants[shard].rolled_back(image)
            for shard, *_ in lost:
                self.fleet.syncers[shard].restart()

        self.fleet.calendar.at(lost_at, restore)

    def _take_snapshot(self, resumed_at: float) -> None:
        """Learners write checkpoints, then shards pin versions as new; later the run goes back to these."""
        written: dict[int, VirtualCheckpoint] = {}
        for learner, process in self.fleet.processes.items():
            if process.alive:
                process.ask(functools.partial(written.__setitem__, learner))

        def pin() -> None:
            checkpoints = dict(written)  # one that comes later is not in it
            held = [[part.version for part in made.work.fragments] for made in checkpoints.values()]
            for shard, syncer in enumerate(self.fleet.syncers):
                chosen = []
                for p in range(self.plan.policy.num_fragments):
                    wanted = max((versions[p] for versions in held), default=-1)
                    own = self._images.get(p, []) if p % self.plan.shards == shard else []
                    of_it = [one for one in own if one[0].versions[p] == wanted]
                    chosen.append(of_it[0] if of_it else (syncer.durable, self.invariants[shard].image()))
                states, images = zip(*chosen, strict=True)
                pinned.append((joined_state(states), Invariants.joined(images)))
            self.fleet.calendar.at(max(resumed_at, self.fleet.calendar.now), go_back, checkpoints)

        def go_back(checkpoints: dict[int, VirtualCheckpoint]) -> None:
            if self._calm_at is not None:
                return
            self._went_back += 1
            for shard, syncer in enumerate(self.fleet.syncers):
                syncer.crash()
                durable, image = pinned[shard]
                known = newest_incarnations(syncer.durable.incarnations, durable.incarnations)
                syncer.durable = durable.with_incarnations(known)
                newest = {
                    **image.newest,
                    **self.invariants[shard].image().newest,
                }  # who joined is known
                self.invariants[shard].rolled_back(image._replace(newest=newest))
            for learner, place in self.fleet.places.items():
                place.checkpoints = [checkpoints[learner]] if learner in checkpoints else []
                if self._rng.random() < 0.8:  # others live on, with what is of later
                    self.fleet.fail(learner, notice_seconds=1000.0)
                    self.fleet.calendar.after(self._rng.uniform(0.1, RETURN), self.fleet.recover, learner)
            for syncer in self.fleet.syncers:
                syncer.restart()

        pinned: list[tuple[SyncerState, DiskImage]] = []
        self.fleet.calendar.after(self._rng.choice([0.1, 2.0, 10.0]), pin)

    def _strikes(self, share: float) -> bool:
        return share > 0 and self._calm_at is None and self._rng.random() < share

    def _calm(self) -> None:
        """Everything works again: the dead are restarted within a while, and there are no more faults."""
        self._calm_at = self.fleet.calendar.now
        self.fleet.calm()
        for syncer in self.fleet.syncers:
            syncer.restart()
        for learner in self.fleet.places:
            self.fleet.calendar.after(self._rng.uniform(0.0, RETURN), self.fleet.recover, learner)

    def _check_shares(self, window: int) -> None:
        """In the first window it is learnt what links and speeds are like."""
        for learner in self.fleet.places:
            shares = self.shares.in_windows(learner, window)[1:]
            claim = f"of any {window} steps of a learner {MIN_SHARE:.0%} are merged"
            require(min(shares, default=1.0) >= MIN_SHARE, claim, learner, shares)

    def _check_time_between_merges(self, now: float) -> None:
        """Timeouts and the schedule bound the time between merges; the slowest learners too where K > 1."""
        policy = self.plan.policy
        longest = max(rules.longest_interval for rules in self.invariants)
        quorums = {policy.quorum, *(timing.quorum or None for _, timing in self.plan.timings)}
        if not quorums <= {1, None} or self._calm_at is None or len(self.commit_times) < 2:
            return
        since = max(self._calm_at, self.commit_times[-2])
        weather = self.plan.weather
        settling = LONGEST + RETURN  # a fault may begin just before the calm
        tries = 2.0  # of a message; the longest row of lost ones grows with the learners'
        if weather.loss:
            tries = max(tries, math.log(100 * len(self.plan.joins)) / -math.log(weather.loss))
        timeouts = policy.silence_timeout + tries * (policy.offer_timeout + policy.resend_timeout)
        slowest = max(rules.longest_welcome for rules in self.invariants)
        timeouts += TIMEOUT_SLACK * slowest  # by which offers are waited for, too
        turn = SLOWEST * longest + 20 * (weather.delay + weather.merge_time)
        bound = settling + timeouts + turn
        require(now - since <= bound, f"merges are at most {bound:.0f} s apart", f"{now - since:.0f} s")


def _state_of(core: SyncerCore) -> int:
    """What of a syncer's state decides how it goes on, apart from how long the run is and what is when."""
    newest = core.step
    rounds = tuple(
        (r.id.step - newest, r.phase.value, tuple(sorted(r.arrived)), tuple(sorted(r.owed)), len(r.failed))
        for r in core.rounds
    )
    clocks = tuple((m, core.clocks[m][1] - newest) for m in core.live)
    return hash((core.policy, rounds, clocks))


def explore(seed: int, fair: bool = False) -> RandomSchedule:
    """Runs the schedule of a seed, of those in which nothing goes wrong if `fair`.

    Raises:
      Violation: a rule was broken; its one line begins with the command that repeats the run.
    """
    schedule = schedule_of(seed, fair)
    try:
        schedule.run()
    except Violation as violation:
        command = f"python -m experiments.bench schedules{' --fair' if fair else ''} --seed={seed}"
        raise Violation(f"{command}: {violation}") from violation
    return schedule


def schedule_of(seed: int, fair: bool = False, checked: bool = True) -> RandomSchedule:
    """The schedule of a seed, not yet run."""
    return RandomSchedule((draw_fair if fair else draw_plan)(seed), checked)


def _described(of: Any) -> str:
    match of:
        case actions.SendToSyncer(event):
            return f"Send {_described(event)}"
        case events.StepReported(report):
            counters = " ".join(f"v{c.version}+{c.steps}" for c in report.counters)
            return f"StepReported {report.learner}#{report.incarnation} step {report.step}: {counters}"
        case actions.Merge(round=which, version=version, contributions=given):
            who = ", ".join(f"{c.learner}#{c.incarnation} {c.steps} steps" for c in given)
            return f"Merge {which.step}/{which.fragment} into version {version}: {who}"
        case actions.Record(name=name, values=values):
            return f"Record {name} {dict(values)}"
    return str(of)
