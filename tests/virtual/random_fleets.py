"""Fleets drawn at random, whose every stream belongs to one actor, and snapshots of them on their way."""

import dataclasses
import json
import random

from ddiloco.protocol.policy import SyncPolicy
from ddiloco.virtual.durations import Varying
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.ghosts import Relay
from ddiloco.virtual.learner_process import Place
from ddiloco.virtual.links import Link, LinkQuality
from ddiloco.virtual.lives import Change
from ddiloco.virtual.ports import CountingLearner, CountingSyncer
from ddiloco.virtual.recording import Recorder
from ddiloco.virtual.resumption import put_back
from tests.virtual.small_fleet import Told

MAX_EVENTS = 60_000


class Everything(Told):
    """Keeps what is told, and what the cores decide."""

    def syncer_handled(self, event, out, now):
        self.all.append(("syncer", now, event, tuple(out)))

    def learner_handled(self, learner, event, out, now):
        """Left out: a learner's events before its own cut are not told again."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A fleet and what befalls it."""

    seed: int
    policy: SyncPolicy
    steps: int
    qualities: tuple[LinkQuality, ...]
    seconds: tuple[float, ...]
    deviation: float
    merge: tuple[float, float]
    sizes: tuple[int, ...] | None
    changes: tuple[Change, ...]
    cuts: tuple[tuple[float, int, bool], ...]
    crashes: tuple[float, ...]

    def fleet(self):
        """A new fleet with its lives entered, its relay, and who hears of it."""
        told = Everything()
        relay = Relay(told)
        places = {m: self._place(m) for m in range(self.policy.num_learners)}
        fleet = Fleet(
            self.policy,
            self.steps,
            places,
            lambda m: CountingLearner(10 + m),
            CountingSyncer(self.sizes),
            merge_time=Varying(*self.merge, random.Random(f"{self.seed} merge")),
            notice_seconds=1.5,
            recovery_seconds=2.0,
            observer=relay,
        )
        fleet.live(self.changes)
        for time, m, cut in self.cuts:
            fleet.calendar.at(time, fleet.cut, m, cut)
        for time in self.crashes:
            fleet.calendar.at(time, fleet.syncer.crash)
            fleet.calendar.at(time + 2.0, fleet.syncer.restart)
        return fleet, relay, told

    def _place(self, m):
        ways = [Link(self.qualities[m], random.Random(f"{self.seed} {way} {m}")) for way in ("up", "down")]
        pace = Varying(self.seconds[m], self.deviation, random.Random(f"{self.seed} pace {m}"))
        return Place(pace, *ways, 4)


def draw_plan(seed: int, *, crashes: bool = False) -> Plan:
    """The plan of a seed; many have equal times, so that ties are common."""
    rng = random.Random(f"plan {seed}")
    num = rng.randint(1, 4)
    kind = rng.choice(["decoupled", "decoupled", "decoupled", "streaming", "diloco"])
    interval = rng.randint(2, 6)
    policy = SyncPolicy(
        num_learners=num,
        num_fragments=1 if kind == "diloco" else rng.randint(1, 4),
        interval=interval,
        overlap=0 if kind == "diloco" else rng.randint(0, 2),
        quorum=rng.randint(1, num) if kind == "decoupled" else None,
        max_run_ahead={"decoupled": None, "streaming": rng.randint(0, interval - 1), "diloco": 0}[kind],
        mixing=rng.choice([0.0, 0.5]),
        pull_timeout=rng.choice([2.0, 10.0]),
        silence_timeout=rng.choice([4.0, 20.0]),
        resend_timeout=rng.choice([2.0, 10.0]),
    )
    even = rng.random() < 0.4  # times that are multiples of a quarter, and no chance

    def quality():
        return LinkQuality(
            latency=rng.choice([0.0, 0.25, 0.5, 1.0]) if even else rng.choice([0.0, 0.1, 0.7]),
            bandwidth=rng.choice([None, 400.0]) if even else rng.choice([None, 50.0, 500.0]),
            jitter=0.0 if even else rng.choice([0.0, 0.2, 1.0]),
            loss=0.0 if even else rng.choice([0.0, 0.0, 0.1, 0.3]),
            duplicates=0.0 if even else rng.choice([0.0, 0.1]),
        )

    seconds = tuple(rng.choice([0.25, 0.5, 1.0]) if even else 1 + rng.random() for _ in range(num))
    return Plan(
        seed=seed,
        policy=policy,
        steps=rng.randint(10, 30),
        qualities=tuple(quality() for _ in range(num)),
        seconds=seconds,
        deviation=0.0 if even else rng.choice([0.0, 0.2]),
        merge=(rng.choice([0.0, 0.25, 1.0]), 0.0 if even else rng.choice([0.0, 0.3])),
        sizes=None if rng.random() < 0.3 else tuple([100] * policy.num_fragments),
        changes=_draw_changes(rng, num, even),
        cuts=_draw_cuts(rng, num, even),
        crashes=(rng.uniform(3, 20),) if crashes else (),
    )


def _draw_changes(rng, num, even):
    found = []
    for m in range(num):
        now, there = 0.0, True
        for _ in range(rng.randint(0, 4)):
            now += rng.randint(1, 12) / 4 if even else rng.expovariate(0.2)
            if not there:
                found.append(Change(now, m, "recover"))
                there = True
                continue
            what = rng.choice(["fail", "leave", "detect", "reconfigure", "step"])
            if what in ("fail", "leave"):
                there = False
                found.append(Change(now, m, what))
            else:
                found.append(Change(now, m, what, 0.5 if what == "step" else 1.0))
                now += rng.choice([0.5, 3.0])
                found.append(Change(now, m, "step", rng.choice([0.5, 1.0])))
        if not there:
            found.append(Change(now + 1.0, m, "join"))
    return tuple(sorted(found, key=lambda change: change.time))


def _draw_cuts(rng, num, even):
    if rng.random() < 0.6:
        return ()
    start = float(rng.randint(1, 10)) if even else rng.uniform(1, 10)
    m = rng.randrange(num)
    return (start, m, True), (start + rng.choice([0.5, 6.0]), m, False)


def heard(recording):
    """How much had been told when the syncer was recorded."""
    return recording.syncer.values["observer"]["told"]


@dataclasses.dataclass
class Taken:
    """What came of a run with snapshots."""

    told: list
    end: tuple
    recordings: list
    given_up: list


def end_of(fleet):
    """What the run came to."""
    calendar, syncer = fleet.calendar, fleet.syncer
    return calendar.now, calendar.happened, calendar.entered, syncer.durable, fleet.over


def run_out(fleet):
    """Runs to the end; a fleet that never ends stops after so many events."""
    try:
        fleet.run(max_events=MAX_EVENTS - fleet.calendar.happened)
    except TimeoutError:
        raise AssertionError("the fleet does not come to its end") from None


def play(plan, at=(), *, start=None, timeout=60.0, prepare=lambda fleet: None):
    """Runs a plan to its end, from its start or from a recording, with snapshots after these many events."""
    fleet, relay, told = plan.fleet()
    prepare(fleet)
    epoch = 0
    if start is not None:
        put_back(fleet, relay, start.syncer, start.learners)
        epoch = start.number
    recordings, given_up, due = [], [], sorted(at)

    def wanted():
        if due and fleet.calendar.happened >= due[0]:
            while due and fleet.calendar.happened >= due[0]:
                due.pop(0)
            numbers.append(numbers[-1] + 1)
            return numbers[-1]
        return None

    numbers = [epoch]
    if at:
        Recorder(
            fleet,
            relay,
            timeout,
            wanted,
            lambda recording: recordings.append(stored(recording)),
            lambda number, reason: given_up.append((number, reason)),
            observer_state=lambda learner: {"told": len(told.all)},
            epoch=epoch,
        )
    run_out(fleet)
    return Taken(told.all, end_of(fleet), recordings, given_up)


def stored(recording):
    """The recording as it comes back from a file."""

    def document(d):
        return dataclasses.replace(d, values=json.loads(json.dumps(d.values)))

    learners = {m: document(d) for m, d in recording.learners.items()}
    return dataclasses.replace(recording, syncer=document(recording.syncer), learners=learners)
