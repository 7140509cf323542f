"""Random schedules: every rule holds after every event, every run ends, and planted mistakes are found."""

import pytest

from ddiloco.protocol.rounds import Rounds
from experiments.studies.schedules.ledger import Violation
from experiments.studies.schedules.plans import draw_plan
from experiments.studies.schedules.random_schedule import RandomSchedule, explore
from tests.long import times
from tests.studies.schedules.planted_bugs import QUICKLY, SLOWLY, UNFAIR

CHUNKS = 4
PER_CHUNK = times(15, 30)
ENOUGH = 1000  # schedules within which a planted mistake must show


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_rule_holds_after_every_event(chunk):
    """`python -m experiments.bench schedules --schedules=N` explores more of them."""
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        explored = explore(seed)
        assert all(rules.checks > 0 for rules in (explored.learners, *explored.invariants))


@pytest.mark.parametrize(
    "plant", [*QUICKLY, *(pytest.param(plant, marks=pytest.mark.slow) for plant in SLOWLY)]
)
def test_a_planted_mistake_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Violation, match=r"^python -m experiments.bench schedules --seed=\d+: "):
        for seed in range(ENOUGH):
            explore(seed)


@pytest.mark.parametrize("seed", [6473, 15783])
def test_learners_that_wait_for_each_other_go_on_after_a_syncers_end(seed):
    """Both stood still for ever, since a round was passed over that one was waiting for."""
    explore(seed)


@pytest.mark.parametrize("seed", [1238, 4030, 610359, 611598, 611859])
def test_the_rules_hold_reports_for_as_old_as_the_syncer_does(seed):
    """A report of before a welcome, or one that was kept back, was taken for the newest: a false alarm."""
    explore(seed)


def test_a_report_that_is_kept_back_says_of_which_shards_its_learner_is_a_member():
    """Another process had taken its place, as that of one that had come to a part of the shards only."""
    explore(1785)


@pytest.mark.parametrize("seed", [*range(8), 207, 2052])  # the last two missed rounds in succession
def test_where_nothing_goes_wrong_everybodys_work_is_merged(seed):
    """`python -m experiments.bench schedules --fair --schedules=N` explores more of them."""
    assert explore(seed, fair=True).shares.share() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("plant", UNFAIR)
def test_a_mistake_by_which_work_is_lost_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Violation, match=r"^python -m experiments.bench schedules --fair --seed=\d+: of any "):
        for seed in range(ENOUGH):
            explore(seed, fair=True)


def test_a_core_that_raises_is_a_violation_with_its_command_too(monkeypatch):
    monkeypatch.setattr(Rounds, "_merge", lambda rounds, r, now: 1 / 0)
    told = (
        r"^python -m experiments.bench schedules --seed=0: a core raised ZeroDivisionError: division by zero$"
    )
    with pytest.raises(Violation, match=told):
        explore(0)


def test_a_seed_is_one_schedule():
    first, second = (RandomSchedule(draw_plan(11)) for _ in range(2))
    first.run()
    second.run()
    assert first.history() == second.history()
    assert first.events == second.events > 0
    assert draw_plan(11) != draw_plan(12)


def test_a_schedule_runs_the_same_without_checks():
    for seed in range(20):
        checked, unchecked = (RandomSchedule(draw_plan(seed), checked=checked) for checked in (True, False))
        checked.run()
        unchecked.run()
        assert checked.events == unchecked.events
        for one, other in zip(checked.fleet.syncers, unchecked.fleet.syncers, strict=True):
            assert one.durable == other.durable
        assert unchecked.learners.checks == 0


def test_the_first_seeds_meet_every_fault_and_every_preset():
    plans = [draw_plan(seed) for seed in range(100)]
    assert {name for plan in plans for _, name, _ in plan.faults} == {
        "crash",
        "false_alarm",
        "hang",
        "leave",
        "nonsense",
        "partition",
        "second_process",
        "stray",
        "syncer_crash",
    }
    policies = [plan.policy for plan in plans]
    assert {policy.max_run_ahead is None for policy in policies} == {True, False}
    assert any(policy.quorum == policy.num_learners > 1 for policy in policies)
    assert any(len(plan.joins) > plan.policy.num_learners for plan in plans)
    beyond = lambda plan: any(m >= plan.policy.num_learners for _, m in plan.retired)  # noqa: E731
    assert any(map(beyond, plans)) and any(plan.retired and not beyond(plan) for plan in plans)
    assert any(policy.overlap == 0 for policy in policies)
    assert any(policy.interval == 1 for policy in policies)
    assert any(policy.num_fragments > plan.total_steps for policy, plan in zip(policies, plans, strict=True))
    assert {plan.shards for plan in plans} == {1, 2, 3, 4}
    assert any(plan.crash_at_commit and plan.crash_in_merge for plan in plans)
