"""What the paper (arXiv 2604.21428) claims of the protocol: one test a claim, told in its docstring."""

import random

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.estimates import grace, slack
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule
from experiments.studies.schedules.conditions import Weather, WeatheredFleet
from tests.protocol.desk import Desk, merges, only
from tests.protocol.learner_desk import step, welcomed
from tests.studies.schedules.witness import Witness, join_all


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_a_round_waits_until_k_learners_have_reported_its_step(quorum):
    """One synchronisation, 2: at step t the syncer waits until at least K learners have reported step t."""
    desk = Desk(learners=4, num_fragments=1, interval=2, quorum=quorum, gamma=0.0)
    for learner in range(4):
        desk.report(learner, 1)
        desk.offer(learner, (2, 0))  # offers may be here before: they make no quorum
    for learner in range(quorum - 1):
        assert not merges(desk.report(learner, 2))
    assert merges(desk.report(quorum - 1, 2)) == [(2, 0, [0, 1, 2, 3])]


def test_slack_is_the_overlap_less_the_time_for_quorum_and_synchronising():
    """One synchronisation, 3: slack = tau * xi_step - (xi_quorum + xi_sync)."""
    assert slack(2, step_time=1.5, quorum_time=0.25, sync_time=0.5) == 2 * 1.5 - (0.25 + 0.5)


@pytest.mark.parametrize("gamma", [0.125, 0.25])
def test_the_grace_window_is_gamma_times_the_slack_of_measured_times(gamma):
    """One synchronisation, 3: the grace is at most gamma of the slack; the times in it are measured."""
    desk = Desk(
        learners=3,
        num_fragments=1,
        interval=4,
        overlap=2,
        quorum=2,
        gamma=gamma,
        max_grace=9.0,
        grace="paper",
    )
    windows = []
    for clock in range(1, 17):  # steps of 1 s; learner 1 is 0.125 s after learner 0; learner 2 never comes
        desk.report(0, clock, at=clock)
        desk.report(1, clock, at=clock + 0.125)
        if clock % 4 == 0:
            desk.offer(0, (clock, 0))
            desk.offer(1, (clock, 0))
            windows.append(desk.core.next_deadline() - desk.now)
            assert merges(desk.handle(events.Timeout(), at=desk.now + windows[-1]))
            desk.merged(clock, 0, at=desk.now + 0.25)
    assert windows[1:] == pytest.approx([gamma * (2 * 1.0 - (0.125 + 0.25))] * 3)


def test_the_grace_window_is_never_negative():
    """One synchronisation, 3: without slack there is no grace, and the quorum is merged at once."""
    assert grace(0.8, slack_seconds=-3.0, longest=1.0) == 0.0
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=2, overlap=1, quorum=1, gamma=0.9)
    for clock in (1, 2):
        desk.report(0, clock, at=clock)
    assert not merges(desk.offer(0, (2, 0)))
    assert merges(desk.handle(events.Timeout(), at=desk.core.next_deadline()))
    desk.merged(2, 0, at=9.0)  # synchronising took longer than the step that it may overlap
    desk.report(0, 3, at=9.5)
    desk.report(0, 4, at=10.5)
    assert merges(desk.offer(0, (4, 0))) == [(4, 0, [0])]


def test_the_grace_window_is_capped():
    """Notation and defaults: the grace is up to about one step, however much slack there is."""
    desk = Desk(learners=2, num_fragments=1, interval=2, overlap=50, quorum=1, gamma=0.9, max_grace=1.0)
    for clock in (1, 2):
        desk.report(0, clock, at=3.0 * clock)
    desk.offer(0, (2, 0))
    assert desk.core.next_deadline() - desk.now == 1.0 * 3.0


def test_every_learner_is_asked_for_the_fragment_and_those_that_gave_it_are_merged_by_their_work():
    """One synchronisation, 4: the syncer gets the fragment of all that are in; an absent one has weight 0.

    The paper's syncer pulls once the quorum is there. Ours asks ahead, so that offers are there with it.
    """
    desk = Desk(learners=3, num_fragments=2, interval=4, quorum=2, gamma=0.0)
    assert {(who, 2, 1) for who in range(3)} == {(who, r.step, r.fragment) for who, r in desk.owed}
    desk.report(2, 2, steps=2)
    desk.offer(2, (2, 1))
    desk.report(0, 2, steps=2)
    merge = only(actions.Merge, desk.offer(0, (2, 1)))
    assert [(c.learner, c.steps, c.tokens) for c in merge.contributions] == [(0, 2, 20), (2, 2, 20)]


@pytest.mark.parametrize(
    ("quorum", "merged_at", "adopted"),
    [(1, 6, 6), (1, 5, 3), (1, 2, 3), (None, 4, 4), (None, 3, 3), (None, 2, 3)],
)
def test_a_learner_adopts_the_global_step_if_it_is_ahead_of_its_own(quorum, merged_at, adopted):
    """One synchronisation, 9: a larger global step is adopted, a smaller one leaves the clock as it is.

    Where merges do not wait for all, ours adopts it only beyond half an interval: within that, a slower
    learner is asked for the steps that it will have done.
    """
    core = welcomed(num_fragments=2, interval=4, quorum=quorum)
    for _ in range(3):
        step(core)
    core.handle(events.UpdateArrived(0, 1, merged_at), 0.0)
    assert core.clock == adopted


def test_by_default_one_fragment_is_due_at_each_step():
    """Notation and defaults: P=24 fragments, each every H=24 steps, so one fragment at each step."""
    policy = SyncPolicy()
    assert (policy.num_fragments, policy.interval, policy.overlap, policy.quorum) == (24, 24, 2, 1)
    schedule = Schedule(policy.num_fragments, policy.interval)
    for start in range(1, 60):
        due = [schedule.due(t) for t in range(start, start + 24)]
        assert all(len(fragments) == 1 for fragments in due)
        assert {fragment for (fragment,) in due} == set(range(24))


def test_rounds_are_paced_by_steps_not_by_the_speed_of_messages():
    """What others measured: a network a thousand times as fast must not make rounds more frequent."""
    rounds = []
    for delay in (1e-4, 1e-1):
        policy = SyncPolicy(num_learners=3, num_fragments=6, interval=12, quorum=1)
        weather, witness = Weather(delay=delay, merge_time=delay, speed_spread=0.0), Witness()
        fleet = WeatheredFleet(policy, 48, random.Random(1), weather, observer=witness)
        join_all(fleet, [0.0] * 3)
        fleet.run(max_events=100_000)
        rounds.append(witness.rounds())
    schedule = Schedule(6, 12, 48)
    due = [(t, p) for t in range(1, 49) for p in schedule.due(t)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == due


def test_a_slow_learner_never_makes_a_fast_one_wait():
    """Setting: learners share nothing; with K=1 one that is ten times as slow costs the other no time."""
    policy, witness = SyncPolicy(num_learners=2, num_fragments=4, interval=4, quorum=1), Witness()
    fleet = WeatheredFleet(policy, 80, random.Random(2), Weather(jitter=0.0), observer=witness)
    join_all(fleet, [0.0] * 2)
    for learner, seconds in enumerate((1.0, 10.0)):
        fleet.places[learner].step_time = lambda seconds=seconds: seconds
    clocks = []
    fleet.calendar.at(80.0 + 5.0, lambda: clocks.append(fleet.processes[0].core.clock))
    fleet.run(max_events=100_000)
    assert clocks == [80], "80 steps of a second, and what it took to join"
    assert not witness.waited
