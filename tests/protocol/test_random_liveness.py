"""Random schedules at the edges of the policy in which anything may fail: once all is well, runs end."""

import dataclasses
import random

import pytest

from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule
from tests.protocol.fleet import Fleet, Weather

STORM = 60.0  # seconds until everything works again


def edge_policy(rng: random.Random) -> SyncPolicy:
    """Intervals of a step, no overlap or more than the interval, more fragments than steps, tight bounds."""
    learners = rng.randint(1, 4)
    interval = rng.choice([1, 1, 2, 3, 8])
    bounded = rng.random() < 0.5
    return SyncPolicy(
        num_learners=learners,
        num_fragments=rng.choice([1, 2, 5, 9]),
        interval=interval,
        overlap=rng.choice([0, 1, 2, interval + 2]),
        quorum=None if bounded else rng.choice([1, learners, None]),
        gamma=rng.choice([0.0, 0.9]),
        max_run_ahead=rng.randrange(interval) if bounded else None,
        pull_timeout=5.0,
        silence_timeout=8.0,
        resend_timeout=4.0,
    )


def weather_the_storm(fleet: Fleet, rng: random.Random) -> None:
    """Every learner, the first too, may freeze or crash, alone or with all others; each comes back."""
    for number in range(fleet.policy.num_learners):
        fleet.join(number)
        at, incarnation = 0.0, 1
        while (at := at + rng.uniform(1, 30)) < STORM:
            if rng.random() < 0.5:
                fleet.after(at, fleet.freeze, number, incarnation, rng.uniform(1, 30))
            else:
                fleet.after(at, fleet.crash, number, incarnation, rng.choice([0.1, 5.0, 90.0]))
                incarnation += 1
                at += rng.uniform(0.1, 20)
                fleet.after(at, fleet.join, number, incarnation)

    def calm() -> None:
        fleet.weather = dataclasses.replace(fleet.weather, loss=0.0, unsound=0.0, duplicates=0.0)

    fleet.after(STORM, calm)


@pytest.mark.parametrize("chunk", range(10))
def test_after_a_storm_the_run_ends_with_every_round_accounted_for(chunk):
    """A state in which nothing more would ever happen shows as a run that never ends."""
    for seed in range(chunk * 40, (chunk + 1) * 40):
        rng = random.Random(seed)
        policy = edge_policy(rng)
        total = rng.randint(40, 90)
        rough = Weather(delay=rng.choice([0.05, 1.0]), loss=0.3, unsound=0.2, duplicates=0.2)
        fleet = Fleet(policy, total, seed, rough)
        weather_the_storm(fleet, rng)
        fleet.run()
        context = f"seed {seed}, {policy}, {total} steps"

        assert fleet.finished_at is not None, f"the run never finished: {context}"
        schedule = Schedule(policy.num_fragments, policy.interval)
        due = sum(schedule.times_due(p, total) for p in range(policy.num_fragments))
        ended = len(fleet.merges) + fleet.count("round_skipped") + fleet.count("round_abandoned")
        assert ended == due, f"{ended} of {due} rounds ended: {context}"
