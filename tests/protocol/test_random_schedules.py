"""Thousands of random schedules of the protocol cores in virtual time keep their invariants."""

import random

import pytest

from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule
from tests.protocol.fleet import Fleet, Weather

CHUNKS = 24
PER_CHUNK = 100


def random_policy(rng: random.Random, quorum: int | None, learners: int) -> SyncPolicy:
    interval = rng.randint(2, 10)
    bounded = quorum is None and rng.random() < 0.5
    overlap = rng.randint(1, 3)
    return SyncPolicy(
        num_learners=learners,
        num_fragments=rng.randint(1, 12),
        interval=interval,
        overlap=overlap,
        quorum=quorum,
        gamma=rng.uniform(0, 0.95),
        max_grace=rng.uniform(0, 2),
        max_run_ahead=min(overlap, interval - 1) if bounded else None,
        pull_timeout=rng.uniform(3, 20),
        silence_timeout=rng.uniform(5, 20),
        resend_timeout=rng.uniform(3, 10),
    )


def random_weather(rng: random.Random) -> Weather:
    return Weather(
        delay=rng.choice([0.01, 0.2, 1.0, 4.0]),
        loss=rng.choice([0.0, 0.0, 0.05, 0.3]),
        speed_spread=rng.choice([0.0, 0.3, 4.0]),
        merge_time=rng.choice([0.01, 0.5, 5.0]),
        unsound=rng.choice([0.0, 0.0, 0.1]),
    )


def unleash(fleet: Fleet, rng: random.Random, learners: int, horizon: float) -> None:
    """Late joins, crashes with and without return, freezes; learner 0 lives on to tell the tale."""
    for number in range(learners):
        fleet.after(rng.choice([0.0, rng.uniform(0, horizon)]), fleet.join, number)
        if number == 0:
            continue
        incarnation, at = 1, 0.0
        for _ in range(rng.randint(0, 3)):
            at += rng.uniform(0, horizon / 2)
            if rng.random() < 0.4:
                fleet.after(at, fleet.freeze, number, incarnation, rng.uniform(1, 40))
            else:
                # Sometimes the return is known before the loss: the old incarnation still lingers.
                fleet.after(at, fleet.crash, number, incarnation, rng.choice([0.1, 5.0, 60.0]))
                incarnation += 1
                at += rng.uniform(0.1, horizon / 3)
                fleet.after(at, fleet.join, number, incarnation)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_schedules_keep_the_invariants(chunk):
    """The fleet itself checks versions, quorum and single use of tokens at every merge."""
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        rng = random.Random(seed)
        learners = rng.randint(1, 6)
        quorum = rng.choice([1, 1, None, rng.randint(1, learners)])
        policy = random_policy(rng, quorum, learners)
        total = rng.randint(1, 6) * policy.interval
        fleet = Fleet(policy, total, seed, random_weather(rng))
        unleash(fleet, rng, learners, horizon=total * 1.5)
        fleet.run()
        context = f"seed {seed}, {policy}, {fleet.weather}"

        assert fleet.finished_at is not None, f"the run never finished: {context}"
        schedule = Schedule(policy.num_fragments, policy.interval)
        due = sum(schedule.times_due(p, total) for p in range(policy.num_fragments))
        ended = len(fleet.merges) + fleet.count("round_skipped") + fleet.count("round_abandoned")
        assert ended == due, f"{ended} of {due} rounds ended: {context}"
        if policy.max_run_ahead is None:
            waited = sum(learner.waited for learner in fleet.learners.values())
            assert waited == 0, f"a learner waited: {context}"


@pytest.mark.parametrize("seed", range(100))
def test_with_any_learner_alive_rounds_keep_completing(seed):
    """K=1: while learner 0 steps, timeouts bound the time between merges, whatever befalls the others."""
    rng = random.Random(seed)
    policy = SyncPolicy(
        num_learners=5,
        num_fragments=6,
        interval=6,
        overlap=2,
        quorum=1,
        pull_timeout=5.0,
        silence_timeout=10.0,
        resend_timeout=5.0,
    )
    fleet = Fleet(policy, 120, seed, Weather(delay=0.3))
    unleash(fleet, rng, 5, horizon=120.0)
    fleet.run()
    start = min(fleet.merge_times)
    gaps = [b - a for a, b in zip(fleet.merge_times, fleet.merge_times[1:], strict=False)]
    assert max(gaps) < policy.pull_timeout + policy.resend_timeout + 2 * policy.interval
    assert len(fleet.merges) >= 0.8 * 120, (start, len(fleet.merges))


@pytest.mark.parametrize(
    ("quorum", "bounded"), [(1, False), (3, False), (4, False), (None, False), (None, True)]
)
def test_without_faults_every_fragment_is_merged_as_often_as_it_is_due(quorum, bounded):
    policy = SyncPolicy(num_fragments=6, interval=12, quorum=quorum, max_run_ahead=2 if bounded else None)
    fleet = Fleet(policy, 96, seed=3, weather=Weather(delay=0.05, speed_spread=0.1))
    for number in range(4):
        fleet.join(number)
    fleet.run()
    schedule = Schedule(6, 12)
    assert [fleet.times_merged(p) for p in range(6)] == [schedule.times_due(p, 96) for p in range(6)]
    assert not fleet.drops


def test_the_same_seed_gives_the_same_run():
    def run(seed):
        policy = SyncPolicy(num_fragments=5, interval=5, quorum=2)
        fleet = Fleet(policy, 60, seed, Weather(loss=0.1))
        unleash(fleet, random.Random(seed), 5, horizon=60)
        fleet.run()
        return fleet.merges, fleet.merge_times

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_learners_of_like_speed_nearly_all_take_part_although_one_would_do():
    """K=1, grace of up to a step: to lag a bit more than that must not shut a learner out for good."""
    policy = SyncPolicy(num_learners=4, num_fragments=12, interval=24, overlap=2, quorum=1)
    for seed in range(5):
        fleet = Fleet(policy, 240, seed, Weather(delay=0.03, speed_spread=0.05, jitter=0.2, merge_time=0.3))
        for number in range(4):
            fleet.after(0.7 * number, fleet.join, number)
        fleet.run()
        quorums = [len(merge.contributions) for merge in fleet.merges]
        assert sum(quorums) / len(quorums) > 3.5
