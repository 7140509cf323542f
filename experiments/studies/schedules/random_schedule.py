"""Random schedules: policy, weather and faults drawn from a seed, run until faults stop and the run ends."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

from ddiloco.protocol import actions, events
from ddiloco.protocol.policy import ALLOWANCE, SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.virtual.ports import Observer
from experiments.studies.schedules.faults import FAULTS, LONGEST, syncer_crash
from experiments.studies.schedules.invariants import Invariants
from experiments.studies.schedules.ledger import Violation, require
from experiments.studies.schedules.weather import Weather, WeatheredFleet

MAX_EVENTS = 100_000
SLOWEST = 10.0  # seconds of a step, at most
RETURN = 5.0  # seconds within which the dead are back after the storm
KEPT = 60  # events, the last ones of a schedule, that can be told


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a seed decides before the first event."""

    seed: int
    policy: SyncPolicy
    parts: int  # processes that merge, beside one that has authority over learners; 1: all in one
    total_steps: int
    weather: Weather
    storm: float  # seconds until everything works again
    joins: tuple[float, ...]  # by learner, when its first process starts; some come beyond the policy's M
    faults: tuple[tuple[float, str, int], ...]  # when, which of FAULTS, whom
    crash_in_merge: float = 0.0  # share of merges, during the storm, that the syncer dies in
    crash_at_commit: float = 0.0  # share of those after whose commit it dies, before its core hears of it
    rollbacks: tuple[tuple[float, float], ...] = ()  # from when to when commits are lost with the disk
    retired: tuple[tuple[float, int], ...] = ()  # when, which learner leaves for good


def draw_policy(rng: random.Random) -> SyncPolicy:
    """Any preset, and the extremes: an interval of one step, more fragments than steps, no overlap, K = M."""
    learners = rng.randint(1, 5)
    interval = rng.choice([1, 1, 2, 3, 4, 6, 10])
    overlap = rng.choice([0, 1, 2, 3, interval + 2])
    kind = rng.choice(["decoupled", "decoupled", "decoupled", "all live", "streaming", "diloco"])
    return SyncPolicy(
        num_learners=learners,
        num_fragments=1 if kind == "diloco" else rng.choice([1, 2, 3, 5, 9]),
        interval=interval,
        overlap=overlap,
        quorum=rng.choice([1, learners, rng.randint(1, learners)]) if kind == "decoupled" else None,
        gamma=rng.choice([0.0, 0.5, 0.95, 0.95]),
        max_grace=rng.choice([0.0, 1.0, 2.0, 2.0]),
        max_run_ahead={"streaming": rng.randrange(interval), "diloco": 0}.get(kind),
        rebase=rng.choice([False, True]),
        offer_timeout=rng.uniform(3, 15),
        silence_timeout=rng.uniform(5, 20),
        resend_timeout=rng.uniform(3, 10),
    )


def draw_weather(rng: random.Random) -> Weather:
    """From fair to foul."""
    return Weather(
        delay=rng.choice([0.01, 0.2, 1.0, 4.0]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        duplicates=rng.choice([0.0, 0.0, 0.2]),
        unsound=rng.choice([0.0, 0.0, 0.1]),
        refused=rng.choice([0.0, 0.0, 0.1, 0.6]),
        speed_spread=rng.choice([0.0, 0.3, 4.0]),
        merge_time=rng.choice([0.01, 0.5, 5.0]),
    )


def draw_plan(seed: int) -> Plan:
    """The plan of a seed; the same on every machine."""
    rng = random.Random(seed)
    policy = draw_policy(rng)
    total = rng.randint(4, 50)
    storm = rng.uniform(0.3, 1.0) * total
    learners = range(policy.num_learners)
    kinds = rng.sample(sorted(FAULTS), rng.randint(0, len(FAULTS)))  # only some, for rare mixtures
    count = rng.choice([0, 2, 5, 10]) if kinds else 0
    faults = sorted((rng.uniform(0, storm), rng.choice(kinds), rng.choice(learners)) for _ in range(count))
    plan = Plan(
        seed=seed,
        policy=policy,
        parts=rng.choice([1, 1, 2, 3]) if policy.num_fragments > 2 else 1,
        total_steps=total,
        weather=draw_weather(rng),
        storm=storm,
        joins=tuple(rng.choice([0.0, rng.uniform(0, storm)]) for _ in learners),
        faults=tuple(faults),
        crash_in_merge=rng.choice([0.0, 0.0, 0.0, 0.2]),
        crash_at_commit=rng.choice([0.0, 0.0, 0.0, 0.2]),
        rollbacks=rng.choice([(), (), ((rng.uniform(0, storm), storm),)]),
    )
    later = tuple(rng.uniform(0, storm) for _ in range(rng.choice([0, 0, 1, 2])))
    joins = (*plan.joins, *later)
    leaving = rng.sample(range(len(joins)), rng.randrange(len(joins))) if rng.random() < 0.3 else ()
    retired = tuple(sorted((rng.uniform(joins[m], storm), m) for m in leaving))
    return dataclasses.replace(plan, joins=joins, retired=retired)


class RandomSchedule(Observer):
    """Runs a plan; `run` raises unless the invariants hold after every event.

    Without `checked` the run is the same, but has no timeline, and only a run that does not end is found.
    """

    def __init__(self, plan: Plan, checked: bool = True) -> None:
        self.plan = plan
        self.checked = checked
        self._last: collections.deque[tuple[float, Any, Any, list[Any]]] = collections.deque(maxlen=KEPT)
        self.invariants = Invariants(plan.policy, plan.total_steps, plan.parts)
        self.commit_times: list[float] = []
        self.states: set[int] = set()  # that the syncer was in, told apart by `_state_of`
        self._rng = random.Random(plan.seed + 1)
        self._calm_at: float | None = None
        self.fleet = WeatheredFleet(
            plan.policy,
            plan.total_steps,
            self._rng,
            plan.weather,
            learners=len(plan.joins),
            observer=self,
            parts=plan.parts,
        )
        if plan.parts > 1:
            self.fleet.syncer.on_death = self.invariants.part_died

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
        for image_at, lost_at in self.plan.rollbacks:
            calendar.at(image_at, self._copy_disk, lost_at)
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

    def told(self) -> list[str]:
        """The plan and the last events, as lines to read."""
        plan = self.plan
        faults = [f"{at:10.3f}  {name} of {learner}" for at, name, learner in plan.faults]
        about = dataclasses.replace(plan, faults=())
        lines = [str(about), *faults, f"{plan.storm:10.3f}  calm", ""]
        for now, who, event, out in self._last:
            lines.append(f"{now:10.3f}  {who}: {_say(event)}")
            lines += [f"{'':14}-> {_say(action)}" for action in out]
        return lines

    # As an Observer.

    def syncer_handled(self, event: events.SyncerEvent, out: list[actions.SyncerAction], now: float) -> None:
        """Checks, and now and then kills the syncer in a merge."""
        if self.checked:
            self._last.append((now, "syncer", event, out))
            self.invariants.syncer_handled(self.fleet.syncer.core, event, out, now)
            if isinstance(core := self.fleet.syncer.core, SyncerCore):
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
        self.invariants.learner_handled(learner, learner.core, event, out)

    def merged(self, merge: actions.Merge, now: float) -> None:
        """Checks, and now and then kills the syncer after the commit, before its core hears of it."""
        if self.checked:
            self._last.append((now, "commit", merge, []))
            self.invariants.commit(merge, self.fleet.syncer.lineage)
            self.commit_times.append(now)
            self._check_pace(now)
        if self._strikes(self.plan.crash_at_commit):
            syncer_crash(self.fleet, 0, self._rng)

    # The storm.

    def _copy_disk(self, lost_at: float) -> None:
        """The syncer's disk is lost later, and it is started from the copy that is made now."""
        durable, image = self.fleet.syncer.durable, self.invariants.image()

        def restore() -> None:
            self.fleet.crash_syncer()
            self.fleet.syncer.durable = durable
            self.invariants.rolled_back(image)
            self.fleet.syncer.restart()

        self.fleet.calendar.at(lost_at, restore)

    def _strikes(self, share: float) -> bool:
        return share > 0 and self._calm_at is None and self._rng.random() < share

    def _calm(self) -> None:
        """Everything works again: the dead are restarted within a while, and there are no more faults."""
        self._calm_at = self.fleet.calendar.now
        self.fleet.calm()
        self.fleet.syncer.restart()
        for learner in self.fleet.places:
            self.fleet.calendar.after(self._rng.uniform(0.0, RETURN), self.fleet.recover, learner)

    def _check_pace(self, now: float) -> None:
        """Timeouts and the schedule bound the time between merges; the slowest learners too where K > 1."""
        policy = self.plan.policy
        if policy.quorum not in (1, None) or self._calm_at is None or len(self.commit_times) < 2:
            return
        since = max(self._calm_at, self.commit_times[-2])
        weather = self.plan.weather
        aftermath = LONGEST + RETURN  # a fault may begin just before the calm
        timeouts = policy.silence_timeout + 2 * (policy.offer_timeout + policy.resend_timeout)
        timeouts += ALLOWANCE * self.invariants.longest_welcome  # by which offers are waited for, too
        turn = SLOWEST * policy.interval + 20 * (weather.delay + weather.merge_time)
        bound = aftermath + timeouts + turn
        require(now - since <= bound, f"merges are at most {bound:.0f} s apart", f"{now - since:.0f} s")


def _state_of(core: SyncerCore) -> int:
    """What of a syncer's state decides how it goes on, apart from how long the run is and what is when."""
    newest = core.step
    rounds = tuple(
        (r.id.step - newest, r.phase.value, tuple(sorted(r.arrived)), tuple(sorted(r.owed)), len(r.failed))
        for r in core.rounds
    )
    clocks = tuple((m, core.vector_clock.learners[m][1] - newest) for m in core.live)
    return hash((core.policy, rounds, clocks))


def explore(seed: int) -> RandomSchedule:
    """Runs the schedule of a seed.

    Raises:
      Violation: a rule was broken; its one line begins with the command that repeats the run.
    """
    schedule = RandomSchedule(draw_plan(seed))
    try:
        schedule.run()
    except Violation as violation:
        raise Violation(f"python -m experiments.bench schedules --seed={seed}: {violation}") from violation
    return schedule


def _say(of: Any) -> str:
    match of:
        case actions.TellSyncer(event):
            return f"Tell {_say(event)}"
        case events.StepReported(report):
            counters = " ".join(f"v{c.version}+{c.steps}" for c in report.counters)
            return f"StepReported {report.learner}#{report.incarnation} step {report.step}: {counters}"
        case actions.Merge(round=which, version=version, contributions=given):
            who = ", ".join(f"{c.learner}#{c.incarnation} {c.steps} steps" for c in given)
            return f"Merge {which.step}/{which.fragment} into version {version}: {who}"
        case actions.Record(name=name, values=values):
            return f"Record {name} {dict(values)}"
    return str(of)
