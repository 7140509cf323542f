"""What can happen to a fleet: each fault is a function of the fleet, a learner and a random source."""

from __future__ import annotations

import random
from collections.abc import Callable

from ddiloco.protocol import events
from ddiloco.protocol.messages import FragmentCounters, Report
from ddiloco.protocol.schedule import fragments_of
from ddiloco.virtual.fleet import Fleet

Fault = Callable[[Fleet, int, random.Random], None]

LONGEST = 40.0  # seconds that a hang or a partition lasts at most


def any_shard(fleet: Fleet, rng: random.Random) -> int:
    """A shard of the syncer."""
    return rng.randrange(len(fleet.syncers)) if len(fleet.syncers) > 1 else 0


def some_shards(fleet: Fleet, rng: random.Random) -> list[int]:
    """One shard of the syncer, or all."""
    every = [*range(len(fleet.syncers))]
    return rng.choice([every, *([shard] for shard in every)]) if len(every) > 1 else every


def num_fragments(fleet: Fleet, shard: int) -> int:
    """Of a shard."""
    return len(fragments_of(shard, len(fleet.syncers), fleet.policy.num_fragments))


def crash(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """A process dies and another one starts; the syncer may see the new one first, or it alone."""
    fleet.fail(learner, notice_seconds=rng.choice([0.1, 5.0, 60.0, 1000.0]))
    fleet.calendar.after(rng.uniform(0.1, 20.0), fleet.recover, learner)


def leave(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """A learner departs and says so; another process with its number joins much later."""
    fleet.leave(learner)
    fleet.calendar.after(rng.uniform(10.0, 40.0), fleet.recover, learner)


def hang(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """A process neither steps nor answers for a while, unnoticed by the syncer."""
    if (process := fleet.processes.get(learner)) is not None:
        process.hang(rng.uniform(1.0, LONGEST))


def false_alarm(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """A shard takes a living learner for lost; the learner rejoins with what it holds."""
    if (process := fleet.processes.get(learner)) is not None:
        shard = any_shard(fleet, rng)
        lost = events.LearnerLost(learner, process.core.incarnations[shard], "connection broken")
        fleet.calendar.after(rng.uniform(0.0, 2.0), fleet.syncers[shard].take, lost)


def second_process(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """Another process of the same number starts while the old one lives."""
    fleet.join(learner)


def partition(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """One or several learners are cut off in one direction or both, until the partition heals.

    From a shard of the syncer, or from all.
    """
    shards = some_shards(fleet, rng)
    several = [m for m in fleet.places if m == learner or rng.random() < 0.3]
    for m in several:
        place = fleet.places[m]
        for link in rng.choice([(place.up,), (place.down,), (place.up, place.down)]):
            fleet.cut_link(m, link, True, shards)
        fleet.calendar.after(rng.uniform(1.0, LONGEST), fleet.cut, m, False, shards)


def syncer_crash(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """One or all of the syncer's processes die, and are restarted from their durable state."""
    for shard in some_shards(fleet, rng):
        fleet.syncers[shard].crash()
        fleet.calendar.after(rng.choice([0.0, 1.0, 20.0]), fleet.syncers[shard].restart)


def nonsense(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """A report that cannot be true arrives in a learner's name."""
    incarnation, shard = 1, any_shard(fleet, rng)
    if (process := fleet.processes.get(learner)) is not None:
        incarnation = process.core.incarnations[shard]
    fragments = num_fragments(fleet, shard) + rng.choice([0, 0, 1])
    counters = FragmentCounters(rng.choice([0, 10**6]), rng.choice([-1, 1]), rng.choice([-5, 5]))
    step = rng.choice([-1, 10**9])
    report = Report(learner, incarnation, step, (counters,) * fragments)
    fleet.syncers[shard].take(events.StepReported(report))


def stray(fleet: Fleet, learner: int, rng: random.Random) -> None:
    """An old message arrives late, in the name of an incarnation that the learner had, or never had."""
    incarnation, shard = rng.randint(1, 3), any_shard(fleet, rng)
    event = rng.choice(
        [
            events.LearnerLost(learner, incarnation, "late news"),
            events.LearnerReady(learner, incarnation, 0, (0,) * num_fragments(fleet, shard)),
            events.Timeout(),
        ]
    )
    fleet.syncers[shard].take(event)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (crash, leave, hang, false_alarm, second_process, partition, syncer_crash, nonsense, stray)
}
