"""Fleets without arrays, small enough to reckon with by hand, and all that they tell."""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.outer.encoding import Traffic
from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.virtual.array_ports import CountingLearner, CountingSyncer, Observer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality

TOKENS = 10  # of a step
CHIPS = 4  # of a learner
ONE = SyncPolicy(num_learners=1, num_fragments=1, interval=4, quorum=1)
TWO = SyncPolicy(num_learners=2, num_fragments=1, interval=4, quorum=1)
BOTH = SyncPolicy(num_learners=2, num_fragments=1, interval=4, overlap=0, quorum=None, max_run_ahead=0)


class EventDelivery(Observer):
    """Keeps everything that a fleet tells, in order."""

    def __init__(self):
        self.all = []

    def stepped(self, learner, clock, tokens, metrics, now):
        self.all.append(("step", now, learner, clock, tokens))

    def entered(self, learner, state, chips, now):
        self.all.append(("state", now, learner, state, chips))

    def noted(self, name, values, now):
        self.all.append((name, now, dict(values)))

    def transferred(self, learner, sent, received):
        self.all.append(("bytes", learner, sent, received))

    def merged(self, merge, left_out, now):
        self.all.append(("merge", now, merge.round.step, merge.version))

    def learner_handled(self, learner, event, out, now):
        if isinstance(event, events.UpdateArrived):
            self.all.append(("update", now, learner.number, event.version))
        told = [action.event for action in out if isinstance(action, actions.SendToSyncer)]
        if any(isinstance(event, events.LearnerJoined) for event in told):
            self.all.append(("return", now, learner.number, learner.core.incarnation))

    def of(self, name: str) -> list[tuple]:
        """What was told under a name, without it."""
        return [told[1:] for told in self.all if told[0] == name]

    def step_ends(self, learner: int) -> list[float]:
        """When each step of the learner was complete."""
        return [time for time, number, *_ in self.of("step") if number == learner]

    def states(self, learner: int) -> list[tuple[float, State]]:
        """When the learner came into which state."""
        return [(time, state) for time, number, state, _ in self.of("state") if number == learner]


class LeavingOut(CountingSyncer):
    """A syncer without arrays, whose guard leaves out whatever these learners offer."""

    def __init__(self, sizes: Sequence[int], learners: Collection[int]) -> None:
        each = tuple(sizes)
        super().__init__(Traffic(each, (each,), each))
        self._learners = learners

    def merge(self, fragment, given, interval):
        left_out = tuple(c.learner for c, _ in given if c.learner in self._learners)
        return NextVersion((), {}, left_out, empty=bool(given) and len(left_out) == len(given))


def small_fleet(
    policy: SyncPolicy = ONE,
    total_steps: int | None = 12,
    *,
    seconds: Sequence[float] = (1.0,),
    quality: LinkQuality = LinkQuality(),  # noqa: B008
    changes: Iterable[Change] = (),
    sizes: Sequence[int] | None = None,
    merge_seconds: float = 0.0,
    notice: float = 10.0,
    recovery: float = 30.0,
    seed: int = 0,
    noise: Callable[[random.Random], float] = lambda rng: 1.0,
    learner_arrays: Callable[[int], CountingLearner] = lambda learner: CountingLearner(lambda: TOKENS),
    left_out: Collection[int] = (),
    observer: Observer | None = None,
    shards: int = 1,
) -> tuple[Fleet, EventDelivery]:
    """A fleet with its changes scheduled, and who hears of it unless an `observer` does.

    `seconds`: of a step, by learner or for all. `left_out`: learners whose offers are in no merge.
    """

    def place(learner: int) -> VirtualPlace:
        rng = random.Random(f"{seed} {learner}")
        mean = seconds[learner] if len(seconds) > 1 else seconds[0]
        ways = [Link(quality, random.Random(f"{seed} {learner} {way}")) for way in ("up", "down")]
        return VirtualPlace(lambda: mean * noise(rng), *ways, CHIPS)

    told = EventDelivery()
    fleet = Fleet(
        policy,
        total_steps,
        {learner: place(learner) for learner in range(policy.num_learners)},
        learner_arrays,
        LeavingOut(sizes or (0,) * policy.num_fragments, left_out),
        takes=Durations(lambda: merge_seconds, notice, recovery),
        observer=observer or told,
        shards=shards,
    )
    fleet.schedule(changes)
    return fleet, told


def run(fleet: Fleet) -> None:
    """Runs to the end, which must come."""
    fleet.run(max_events=20_000)
    assert fleet.over


def played(*policy_and_steps, **fleet: Any) -> EventDelivery:
    """What a small fleet tells that has run to its end."""
    made, told = small_fleet(*policy_and_steps, **fleet)
    run(made)
    return told
