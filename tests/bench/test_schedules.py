"""The benchmark that explores schedules: its rows, and what it says of a schedule that breaks a rule."""

import pytest

from experiments.bench import schedules as bench_schedules
from experiments.studies.schedules.ledger import Violation
from tests.studies.schedules.planted_bugs import quorum_off_by_one


def first_to_break():
    for seed in range(100):
        try:
            bench_schedules.explore(seed)
        except Violation as violation:
            return seed, str(violation)
    raise AssertionError("none did")


@pytest.mark.parametrize(("schedules", "fair"), [(5, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_rows_are_told_of_schedules_and_of_events(schedules, fair):
    rows = bench_schedules.run(schedules=schedules, fair=fair)
    assert [(row["name"], row["unit"]) for row in rows] == [
        ("schedules", "schedules/s"),
        ("schedule_events", "events/s"),
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["measured"] / row["reference"])
        assert min(row["measured"], row["reference"], row["limit"]) > 0


def test_a_schedule_that_breaks_a_rule_ends_the_benchmark_with_the_command_that_replays_it(monkeypatch):
    quorum_off_by_one(monkeypatch)
    seed, message = first_to_break()
    with pytest.raises(Violation) as told:
        bench_schedules.run(first=seed, schedules=1)
    assert str(told.value) == message
    assert message.startswith(
        f"python -m experiments.bench schedules --seed={seed}: a merge has its quorum: "
    )
    assert "\n" not in message


def test_the_replay_of_a_broken_schedule_shows_its_last_events(monkeypatch, capsys):
    quorum_off_by_one(monkeypatch)
    seed, _ = first_to_break()
    with pytest.raises(Violation, match=f"^seed {seed}: a merge has its quorum"):
        bench_schedules.run(seed=seed)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"SchedulePlan(seed={seed}, ")
    assert any(line.lstrip().startswith("-> Merge ") for line in lines[-10:])
    times = [float(line.split()[0]) for line in lines if "  syncer: " in line or "  learner " in line]
    assert times and times == sorted(times)


def test_the_replay_of_a_sound_schedule_says_so(capsys):
    bench_schedules.replay(0)
    assert "seed 0: every rule held after each of " in capsys.readouterr().out.splitlines()[-1]
