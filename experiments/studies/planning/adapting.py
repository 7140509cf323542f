"""A controller that retimes a fleet by plays of what it has measured lately, against intervals that stay."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.outer.encoding import Traffic, traffic
from ddiloco.protocol import events
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment
from ddiloco.settings.timing import timing_of
from ddiloco.telemetry.loss_estimate import ERROR, loss_percent
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.run import RecordingObserver, counting_fleet, play
from experiments.studies.planning.choices import INTERVALS, MARGIN
from experiments.studies.planning.weathers import LEARNERS, Weather
from experiments.studies.replay.outcomes import FleetOutcome, between, outcome_of
from experiments.studies.replay.what_if import MeasuredFleet, delays, taken_steps
from experiments.studies.replay.works import Handled

PHASE = 384  # steps of a second, half of a run
EVERY = 48.0  # seconds from one consideration to the next
WINDOW = 96.0  # seconds that are measured, and from a change to the next
TURNS = 3  # of a fragment that a play has, of which the first does not count


def loss_of(outcome: FleetOutcome) -> float:
    """The estimate, of float32."""
    return loss_percent(outcome.work, outcome.age, outcome.share, "f32")


class Meter(RecordingObserver):
    """Keeps the records of a fleet, and of its newest seconds what a `MeasuredFleet` is made of."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        super().__init__(self.recorded.append)
        self._syncer: collections.deque[Handled] = collections.deque()
        self._learners: dict[int, collections.deque[tuple[float, Any]]] = collections.defaultdict(
            collections.deque
        )

    def syncer_handled(self, event: events.SyncerEvent, out: list[Any], now: float, shard: int = 0) -> None:
        """Keeps the entry."""
        self._syncer.append(Handled(now, event, tuple(out)))

    def learner_handled(self, learner: Any, event: events.LearnerEvent, out: list[Any], now: float) -> None:
        """Keeps the begin and the end of a step."""
        if isinstance(event, events.StepStarted | events.StepFinished):
            self._learners[learner.number].append((now, event))

    def measured(self, fleet: Fleet, sizes: Traffic) -> MeasuredFleet:
        """The fleet as it was in the last WINDOW seconds; learners that are not there now are left out."""
        since, fragments = fleet.calendar.now - WINDOW, fleet.policy.num_fragments
        while self._syncer and self._syncer[0].now < since:
            self._syncer.popleft()
        taken = {}
        for m, handled in self._learners.items():
            while handled and handled[0][0] < since:
                handled.popleft()
            steps = taken_steps(handled)
            if steps and fleet.processes[m].alive:
                taken[m] = steps
        took = delays(self._syncer, range(fragments), sizes)
        return MeasuredFleet(sizes, took, taken, SyncerState.initial(fragments), until=100 * WINDOW)


class Controller:
    """Sets the interval of a fleet whose plays promise less loss with another one.

    Attributes:
      changes: time, interval and what it was predicted to gain, of each change.
    """

    def __init__(self, fleet: Fleet, meter: Meter, sizes: Traffic) -> None:
        self.changes: list[tuple[float, int, float]] = []
        self._fleet, self._meter, self._sizes = fleet, meter, sizes
        self._policy = fleet.policy
        self._wanted: int | None = None
        fleet.calendar.after(WINDOW, self._consider)

    def _consider(self) -> None:
        self._fleet.calendar.after(EVERY, self._consider)
        if self.changes and self._fleet.calendar.now < self.changes[-1][0] + WINDOW:
            return
        fleet, own = self._meter.measured(self._fleet, self._sizes), self._policy.interval
        if not fleet.taken:
            return
        played = {h: self._played(fleet, h) for h in dict.fromkeys((own, *INTERVALS))}
        best = min(played, key=played.__getitem__)
        gain = played[own] - played[best]
        if gain <= MARGIN:
            self._wanted = None
        elif gain <= ERROR and self._wanted != best:
            self._wanted = best  # and so again next time, or it was chance
        else:
            self._wanted = None
            self.changes.append((self._fleet.calendar.now, best, gain))
            reason = f"plan: -{gain:.1f}%"
            self._policy = dataclasses.replace(self._policy, interval=best)
            self._fleet.set_timing(timing_of(self._fleet.policy, {"interval": best}, reason))

    def _played(self, fleet: MeasuredFleet, interval: int) -> float:
        there = len(fleet.taken)
        quorum = None if self._policy.quorum is None else min(self._policy.quorum, there)
        policy = dataclasses.replace(self._policy, interval=interval, num_learners=there, quorum=quorum)
        second = statistics.median(step.seconds for steps in fleet.taken.values() for step in steps)
        links = (fleet.took.offers, fleet.took.down)
        slowest = max(statistics.median(of.values() or [0.0]) for of in links)
        turn = max(interval, 24, round(slowest * sum(self._sizes.version) / second))  # as links make it
        return loss_of(fleet.play(policy, TURNS * turn, since=turn * second))


@dataclasses.dataclass(frozen=True)
class Course:
    """A run through a weather: the estimated loss of its two halves, and the changes of its timing."""

    losses: tuple[float, float]
    changes: Sequence[tuple[float, int, float]] = ()
    rounds: tuple[int, int] = (0, 0)  # in each half


def run(
    experiment: Experiment, weather: Weather, policy: SyncPolicy, adapts: bool = False, half: int = PHASE
) -> Course:
    """One run of two halves of so many steps; `adapts`: with a controller."""
    layout = assembly_of(experiment).layout
    need = sum(layout.bytes) / experiment.sync.interval
    train = dataclasses.replace(experiment.train, steps=2 * half, tokens=None)
    e = weather.of(dataclasses.replace(experiment, sync=policy, train=train), need)
    sizes, meter = traffic(layout, e.outer), Meter()
    fleet = counting_fleet(e, e.train.steps, sizes, meter)
    if weather.change is not None:
        fleet.calendar.at(float(half), weather.change, fleet, need)
    changes = Controller(fleet, meter, sizes).changes if adapts else ()
    play(fleet, e, meter, threading.Event())
    spans = ((0.0, half), (half, 2.0 * half))
    first, second = (outcome_of(between(meter.recorded, *span), e.sync.num_fragments) for span in spans)
    return Course((loss_of(first), loss_of(second)), changes, (first.merged, second.merged))


def courses(experiment: Experiment, weather: Weather) -> Mapping[str, Course]:
    """The weather with each interval, and with a controller that begins with the experiment's."""
    sync = dataclasses.replace(experiment.sync, num_learners=LEARNERS)
    found = {
        str(h): run(experiment, weather, dataclasses.replace(sync, interval=h))
        for h in dict.fromkeys((sync.interval, *INTERVALS))
    }
    return found | {"plan": run(experiment, weather, sync, adapts=True)}
