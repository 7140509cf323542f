"""What virtual fleets achieve: rounds complete whatever befalls some, and in fair weather all take part."""

import collections
import itertools
import random

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule
from experiments.studies.schedules.conditions import Weather, WeatheredFleet
from experiments.studies.schedules.faults import crash, false_alarm, hang
from tests.long import times
from tests.studies.schedules.witness import Witness, join_all


def fleet_of(policy, total_steps, seed, weather, **more):
    witness = Witness()
    return WeatheredFleet(
        policy, total_steps, random.Random(seed), weather, observer=witness, **more
    ), witness


def test_with_any_learner_alive_rounds_keep_completing():
    """K=1: while learner 0 steps, timeouts bound the time between merges, whatever befalls the others."""
    policy = SyncPolicy(
        num_learners=5,
        num_fragments=6,
        interval=6,
        overlap=2,
        quorum=1,
        offer_timeout=5.0,
        silence_timeout=10.0,
        resend_timeout=5.0,
    )
    for seed in range(times(6, 40)):
        fleet, witness = fleet_of(policy, 120, seed, Weather(delay=0.3))
        rng = random.Random(seed)
        join_all(fleet, [0.0, *(rng.choice([0.0, rng.uniform(0, 100)]) for _ in range(4))])
        for _ in range(12):
            fault, learner = rng.choice([crash, hang, false_alarm]), rng.randint(1, 4)
            fleet.calendar.at(rng.uniform(0, 120), fault, fleet, learner, rng)
        fleet.run(max_events=100_000)
        merged_at = witness.merge_times
        gaps = [b - a for a, b in itertools.pairwise(merged_at)]
        assert max(gaps) < policy.offer_timeout + policy.resend_timeout + 2 * policy.interval, seed
        assert len(merged_at) >= 0.8 * 120, (seed, len(merged_at))


@pytest.mark.parametrize(("quorum", "bounded"), [(1, False), (3, False), (None, True)])
def test_without_faults_every_fragment_is_merged_as_often_as_it_is_due(quorum, bounded):
    policy = SyncPolicy(num_fragments=6, interval=12, quorum=quorum, max_run_ahead=2 if bounded else None)
    fleet, witness = fleet_of(policy, 96, 3, Weather(delay=0.05, speed_spread=0.1))
    join_all(fleet, [0.0] * 4)
    fleet.run(max_events=100_000)
    merged = [
        fragment for step, fragment in witness.rounds() if step < 96
    ]  # the last may have nothing to merge
    assert collections.Counter(merged) == collections.Counter(
        p for t in range(1, 96) for p in Schedule(6, 12).due(t)
    )
    dropped = collections.Counter(witness.drops)
    assert not dropped.keys() - {"stale report", "unexpected fragment"}
    assert dropped["stale report"] <= 4, "a heartbeat that the next report has overtaken"
    late = dropped["unexpected fragment"]  # of a learner that the others need not wait for
    assert late <= (0.02 * 4 * len(merged) if quorum in (1, 3) else 0)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("merge_time", [0.01, 1.5])
def test_without_faults_nearly_all_work_is_merged_at_the_end(merge_time, shards):
    """Also that of the last steps, which learners take while rounds are merged, but for a slow one's last."""
    policy = SyncPolicy(num_fragments=3, interval=8, quorum=1, rebase=True)
    weather = Weather(delay=0.1, jitter=0.2, speed_spread=0.0, merge_time=merge_time)
    fleet, witness = fleet_of(policy, 45, 4, weather, shards=shards)
    join_all(fleet, [0.0] * 4)
    fleet.run(max_events=100_000)
    merged = collections.Counter()
    for merge in witness.merges:
        merged.update({merge.round.fragment: sum(c.steps for c in merge.contributions)})
    taken = sum(process.core.work.steps for process in fleet.processes.values())
    assert all(taken - 4 <= merged[p] <= taken for p in range(3)), (merged, taken)


def test_learners_of_like_speed_nearly_all_take_part_although_one_would_do():
    """K=1, grace of up to a step: to lag a bit more than that must not shut a learner out for good."""
    policy = SyncPolicy(num_learners=4, num_fragments=12, interval=24, overlap=2, quorum=1)
    for seed in range(times(2, 5)):
        weather = Weather(delay=0.03, speed_spread=0.05, jitter=0.2, merge_time=0.3)
        fleet, witness = fleet_of(policy, 240, seed, weather)
        join_all(fleet, [0.0, 0.7, 1.4, 2.1])
        fleet.run(max_events=100_000)
        given = [len(merge.contributions) for merge in witness.merges]
        assert sum(given) / len(given) > 3.5, seed


@pytest.mark.parametrize(("quorum", "bound"), [(1, None), (None, 2)])
def test_a_syncer_that_is_away_costs_no_committed_merge_and_unbounded_learners_no_step(quorum, bound):
    policy = SyncPolicy(
        num_learners=3,
        num_fragments=4,
        interval=8,
        quorum=quorum,
        max_run_ahead=bound,
        offer_timeout=5.0,
        silence_timeout=8.0,
        resend_timeout=5.0,
    )
    fleet, witness = fleet_of(policy, 80, 5, Weather(delay=0.05, speed_spread=0.2))
    join_all(fleet, [0.0] * 3)
    states = []
    for at in (20.3, 41.7):
        fleet.calendar.at(at, lambda: states.append(fleet.syncer.durable))
        fleet.calendar.at(at, fleet.syncer.crash)
        fleet.calendar.at(at + 6.0, fleet.syncer.restart)
        fleet.calendar.at(at + 6.0, lambda: states.append(fleet.syncer.core.state()))
    fleet.run(max_events=100_000)
    assert fleet.over
    assert states[0] == states[1] and states[2] == states[3]
    assert min(states[2].versions) >= 2
    assert len(set(witness.rounds())) == len(witness.rounds()) == sum(fleet.syncer.durable.versions)
    waited = {process.number for process in fleet.processes.values()} & witness.waited
    stepped_through = fleet.calendar.now < 80 * 1.2 * 1.1 + 10.0
    assert stepped_through if bound is None else waited


def test_fast_learners_whose_offers_age_keep_no_round_from_having_them_all():
    """K=None, H=1: while a slow one's offer is on its way, the others' are not given back again and again."""
    merges = 0
    for seed in range(5):
        policy = SyncPolicy(num_learners=8, num_fragments=3, interval=1, overlap=0, quorum=None)
        fleet, witness = fleet_of(policy, 60, seed, Weather(delay=1.0, speed_spread=4.0))
        join_all(fleet, [0.0] * 8)
        fleet.run(max_events=100_000)
        merges += len(witness.merge_times)
    assert merges > 310  # 262 where two steps made an offer old


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize(("crashes", "shards"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_where_all_are_waited_for_who_is_first_back_does_not_merge_alone(crashes, shards, bound):
    """After all connections broke at once, or the syncer crashed; the others' work would be overwritten."""
    policy = SyncPolicy(num_fragments=2, interval=6, quorum=None, max_run_ahead=bound)
    for seed in range(2):
        rng = random.Random(seed)
        fleet, witness = fleet_of(policy, 60, seed, Weather(delay=0.05), shards=shards)
        join_all(fleet, [0.0] * 4)
        for at in (rng.uniform(5, 20), rng.uniform(40, 60)):
            fleet.calendar.at(at, break_all, fleet, rng, crashes)
        fleet.run(max_events=100_000)
        assert {len(merge.contributions) for merge in witness.merges} == {4}, seed
        assert len(set(witness.rounds())) == 21  # the last one of each fragment, too


def break_all(fleet, rng, crashes):
    """Every learner is cut off for a while, and the syncer hears so at once, unless it is what failed."""
    if crashes:
        for syncer in fleet.syncers:
            syncer.crash()
            syncer.restart()
    # Who has given is lost first: a round that still waited would be merged by who is left.
    given = set() if crashes else {m for one in fleet.syncers for r in one.core.rounds for m in r.arrived}
    for learner in sorted(fleet.processes, key=lambda m: m not in given):
        fleet.cut(learner)
        if not crashes:
            for syncer, incarnation in zip(
                fleet.syncers, fleet.processes[learner].core.incarnations, strict=True
            ):
                syncer.take(events.LearnerLost(learner, incarnation, "connection lost"))
        fleet.calendar.after(rng.uniform(0.0, 15.0), fleet.cut, learner, False)
