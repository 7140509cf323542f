"""Random schedules: every rule holds after every event, every run ends, and planted mistakes are found."""

import pytest

from ddiloco.protocol.rounds import Rounds
from experiments.studies.schedules.ledger import Violation
from experiments.studies.schedules.plans import draw_plan
from experiments.studies.schedules.random_schedule import RandomSchedule, explore
from tests.long import times
from tests.studies.schedules.planted_bugs import QUICKLY, SLOWLY, UNFAIR

ENOUGH = 1000  # schedules within which a planted mistake must show


@pytest.mark.parametrize("first", [0, pytest.param(29, marks=pytest.mark.slow)])
def test_every_rule_holds_after_every_event(first):
    """`python -m experiments.bench schedules --schedules=N` explores more of them."""
    for seed in range(first, first + times(29, 60)):
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


@pytest.mark.parametrize(
    "seed",
    [
        # Learners that waited for each other stood still for ever after a syncer's end.
        pytest.param(6473, marks=pytest.mark.slow),
        15783,
        # A report from before a welcome, or one that was kept back, was taken for the newest.
        *(1238, 4030, 20010, 400565, 610359, 611598, 611859),
        # An offer taken for fresh or old: one that came again while it was merged, reports of the same event,
        # an older one that was believed first, two of one step.
        *(1001152, 1001347, 1003834, 3007831, 3007988),
        # A report that was kept back did not say of which shards its learner is a member, or a late one did.
        *(1785, 3082866, 3085376, 3086467),
        # A disk came back that was of a history which the run had left for a snapshot.
        *(3015116, 3015298, 3051222),
        # A join reached a shard that had come back, on an older disk, since it was sent.
        5224,
        # Data that were behind another shard's mark already counted from the moment of the welcome.
        21058,
        # All waited for a learner whose clock nobody could confirm while they waited.
        3042384,
        # One whose reports were kept back spoke, and was replaced.
        3054692,
        # Work was counted from the clock of an earlier process, whose offer was merged as another had begun.
        3049614,
        # A quorum that was lowered merged at once what was there.
        3034967,
        # A learner that waits for updates kept work, and its request had come before the version.
        21183,
        # Of two offers of a step that was skipped, the older one's request was kept.
        21590,
        # Work on one shard's fragments was claimed to begin behind data that another shard had merged since.
        30524,
        # A new schedule, set while nobody was live, began before rounds that had opened.
        2000018,
        # A shard had merged data of a process beside this one, which went on to draw them; or another shard
        # named an older one, and the data went back.
        *(3000904, 3067532, 3069940, 3070765),
    ],
)
def test_schedules_that_once_broke_a_rule(seed):
    explore(seed)


@pytest.mark.parametrize(
    "seed", [1, 3, 6, 207, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 4, 5, 7, 2052))]
)  # 207 and 2052 missed rounds in succession
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
    for seed in range(6):
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
