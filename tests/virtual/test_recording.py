"""Snapshots of a fleet on its way: they move nothing, are consistent, and a run goes on from any of them."""

import dataclasses
import functools
import random

import pytest

from ddiloco.protocol.clocks import is_consistent_cut
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.graph import GraphError
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.virtual.links import Link, LinkQuality
from ddiloco.virtual.lives import Change
from ddiloco.virtual.syncer_process import VirtualSyncer
from tests.virtual.random_fleets import Plan, draw_plan, end_of, heard, play, stored

POINTS = 6  # in each run
STEADY = Plan(
    seed=0,
    policy=SyncPolicy(num_learners=2, num_fragments=2, interval=4, quorum=1, silence_timeout=8.0),
    steps=24,
    qualities=(LinkQuality(latency=0.5), LinkQuality(latency=0.5)),
    seconds=(1.0, 1.0),
    deviation=0.0,
    merge=(0.25, 0.0),
    sizes=None,
    changes=(),
    cuts=(),
    crashes=(),
)


@functools.cache
def whole(seed):
    """The uninterrupted run of a seed, or None if it never ends."""
    try:
        return play(draw_plan(seed))
    except AssertionError:
        return None


@functools.cache
def with_snapshots(seed):
    """The same with snapshots begun after random numbers of events."""
    rng = random.Random(f"points {seed}")
    return play(draw_plan(seed), [rng.randrange(1, whole(seed).end[1]) for _ in range(POINTS)])


def recordings(seeds):
    return [(seed, r) for seed in seeds if whole(seed) for r in with_snapshots(seed).recordings]


SEEDS = range(60)


def test_a_run_with_snapshots_is_to_the_last_event_the_run_without():
    for seed in SEEDS:
        if whole(seed):
            assert with_snapshots(seed).told == whole(seed).told
            assert with_snapshots(seed).end == whole(seed).end


def test_every_snapshot_is_a_consistent_cut():
    for _, r in recordings(SEEDS):
        learners = {m: d.clock for m, d in r.learners.items() if d.clock is not None}
        assert is_consistent_cut(r.syncer.clock, learners)


def test_from_300_random_snapshot_points_every_later_event_comes_at_its_time():
    taken = recordings(SEEDS)
    assert len(taken) > 250
    for seed, r in taken:
        resumed = play(draw_plan(seed), start=r)
        assert resumed.told == whole(seed).told[heard(r) :], (seed, r.number)
        assert resumed.end == whole(seed).end


def test_the_random_points_are_worth_something():
    taken = [r for _, r in recordings(SEEDS)]
    learners = [d for r in taken for d in r.learners.values()]
    assert sum(bool(d.values["ghosts"]) for d in learners) > 100
    assert sum(bool(d.values["channel"]) for d in learners) > 80
    assert sum(bool(r.in_flight) for r in taken) > 150
    assert sum(not d.told for d in learners) > 50  # dead, or never there
    messages = {name for r in taken for _, _, name, _ in r.in_flight}
    assert {"StepReported", "FragmentArrived", "UpdateArrived", "LearnerJoined", "PullFragment"} <= messages


def test_a_run_that_goes_on_takes_snapshots_from_which_others_go_on():
    rng = random.Random(0)
    again = 0
    for seed in SEEDS:
        for r in with_snapshots(seed).recordings[:1] if whole(seed) else ():
            left = whole(seed).end[1] - r.syncer.values["calendar"][1]
            at = [r.syncer.values["calendar"][1] + 1 + rng.randrange(min(left, 30))]  # learners may lie ahead
            second = play(draw_plan(seed), at, start=r)
            assert second.told == whole(seed).told[heard(r) :]
            for s in second.recordings:
                again += 1
                third = play(draw_plan(seed), start=s)
                assert third.told == whole(seed).told[heard(r) + heard(s) :]
                assert third.end == whole(seed).end
    assert again > 30


def test_a_run_in_which_the_syncer_crashes_goes_on_from_before_and_after_the_crash():
    for seed in range(12):
        plan = draw_plan(seed, crashes=True)
        try:
            run = play(plan)
        except AssertionError:
            continue
        rng = random.Random(seed)
        taken = play(plan, [rng.randrange(1, run.end[1]) for _ in range(4)])
        assert taken.told == run.told
        for r in taken.recordings:
            assert play(plan, start=r).told == run.told[heard(r) :]


# Nothing of what is recorded could be left out.


def of_links(change):
    def changed(r):
        for m, told in r.syncer.values["links"]:
            change(told)
            change(r.learners[m].values["place"]["up"]["fields"])

    return changed


def of_processes(change):
    def changed(r):
        for document in r.learners.values():
            for _, told in document.values["processes"]:
                change(told)

    return changed


def of_learners(name, value):
    def changed(r):
        for document in r.learners.values():
            document.values[name] = value

    return changed


FORGOTTEN = {
    "random stream of links": of_links(lambda told: told.update(_rng={"random": NEW_STREAM})),
    "what links are busy with": of_links(lambda told: told.update(_free_at=0.0)),
    "partitions": of_links(lambda told: told.update(cut=False)),
    "messages to the syncer": lambda r: r.syncer.values.update(
        entries=[e for e in r.syncer.values["entries"] if e[2] != "syncer.take"]
    ),
    "merges under way": lambda r: r.syncer.values.update(
        entries=[e for e in r.syncer.values["entries"] if e[2] != "syncer._merge"]
    ),
    "the syncer's alarm": lambda r: r.syncer.values.update(
        entries=[e for e in r.syncer.values["entries"] if e[2] != "syncer._fire"]
    ),
    "rounds": lambda r: core(r).update(_rounds=[]),
    "the syncer's estimates": lambda r: core(r)["_sync_time"]["fields"].update(value=None),
    "members": lambda r: core(r)["_attendance"]["fields"]["_members"]["fields"].update(
        _members={"dict": []}, _live=None
    ),
    "what has arrived for rounds": lambda r: r.syncer.values["syncer"]["_arrivals"]["fields"].update(
        _kept={"dict": []}
    ),
    "what learners sent before their cut": of_learners("channel", []),
    "what they did before it": of_learners("ghosts", []),
    "what is on its way to them, and befalls them": of_learners("entries", []),
    "the step under way": of_processes(lambda told: told.update(_step=None)),
    "the shelf": of_processes(lambda told: told.update(_shelf={"dict": []})),
    "pauses": of_processes(lambda told: told.update(_paused=None)),
    "shares": of_processes(lambda told: told.update(_share=1.0)),
    "processes so far": lambda r: [d.values["place"].update(starts=0) for d in r.learners.values()],
    "plans": lambda r: [d.values["place"].update(plan=-1) for d in r.learners.values()],
    "the pace": lambda r: [
        d.values["place"]["step_time"]["fields"].update(_rng={"random": NEW_STREAM})
        for d in r.learners.values()
    ],
}
NEW_STREAM = [3, bytes(624 * 4 - 1).hex() + "01", 624, None]


def core(r):
    return r.syncer.values["syncer"]["core"]["fields"]


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_piece_of_state_that_is_forgotten_is_noticed(name):
    for seed, r in recordings(SEEDS):
        lacking = stored(r)
        FORGOTTEN[name](lacking)
        if lacking == stored(r):
            continue
        try:
            resumed = play(draw_plan(seed), start=lacking)
        except Exception:
            return
        if resumed.told != whole(seed).told[heard(r) :]:
            return
    raise AssertionError(f"nobody would notice if {name} were forgotten")


def test_a_class_that_got_another_field_is_refused_in_a_line_that_names_it():
    r = play(STEADY, [40]).recordings[0]
    del r.learners[1].values["processes"][0][1]["_beating"]
    with pytest.raises(GraphError, match=r"learner\.VirtualLearner has other fields: _beating"):
        play(STEADY, start=r)


def test_a_recording_of_another_fleet_is_refused():
    r = play(STEADY, [40]).recordings[0]
    wider = dataclasses.replace(STEADY, policy=dataclasses.replace(STEADY.policy, num_learners=1))
    with pytest.raises(GraphError, match=r"learners \[0, 1\] were recorded, but there are \[0\]"):
        play(wider, start=r)


def test_a_call_that_the_recording_does_not_know_is_refused():
    r = play(STEADY, [40]).recordings[0]
    r.syncer.values["entries"].append([9.0, 0, "syncer.__init__", None, []])
    with pytest.raises(GraphError, match="is no call of this fleet"):
        play(STEADY, start=r)


# The markers.


def test_on_links_that_keep_the_order_a_learner_is_recorded_a_latency_after_the_syncer():
    (r,) = play(STEADY, [40]).recordings
    assert [d.told["time"] - r.time for d in r.learners.values()] == [0.5, 0.5]


def test_what_overtakes_the_marker_finds_the_learner_recorded(monkeypatch):
    monkeypatch.setattr(Link, "soonest", lambda link, now: now + 20.0)
    plan = dataclasses.replace(STEADY, steps=60)
    run = play(plan)
    taken = play(plan, [60, 200])
    assert taken.told == run.told
    for r in taken.recordings:
        assert all(0 < d.told["time"] - r.time < 20.0 for d in r.learners.values())
        assert play(plan, start=r).told == run.told[heard(r) :]
    assert taken.recordings


def test_a_marker_that_is_lost_in_a_partition_comes_once_it_has_healed():
    plan = dataclasses.replace(STEADY, cuts=((5.0, 1, True), (9.0, 1, False)), steps=40)
    run = play(plan)
    events = next(n for n in range(10, 200) if time_after(plan, n) > 5.0)
    (r,) = play(plan, [events]).recordings
    assert r.learners[0].told["time"] == r.time + 0.5
    assert r.learners[1].told["time"] > 9.0
    assert play(plan, start=r).told == run.told[heard(r) :]


def time_after(plan, events):
    """The time after so many events."""
    fleet, _, _ = plan.fleet()
    for _ in range(events):
        fleet.calendar.advance()
    return fleet.calendar.now


def test_a_snapshot_that_a_partition_holds_up_for_too_long_is_given_up_and_a_later_one_is_taken():
    plan = dataclasses.replace(STEADY, cuts=((5.0, 1, True), (15.0, 1, False)), steps=60)
    events = next(n for n in range(10, 200) if time_after(plan, n) > 5.0)
    last = play(plan).end[1]
    taken = play(plan, [events, last - 40], timeout=3.0)
    assert taken.given_up == [(1, "not every learner had recorded its state within 3 s")]
    assert [r.number for r in taken.recordings] == [2]
    assert taken.told == play(plan).told


def test_a_learner_that_dies_before_its_marker_comes_is_recorded_as_it_died():
    far = LinkQuality(latency=4.0)
    plan = dataclasses.replace(
        STEADY,
        qualities=(far, far),
        changes=(Change(14.25, 1, "fail"), Change(20.0, 1, "recover")),
        steps=60,
    )
    run = play(plan)
    events = next(n for n in range(10, 200) if time_after(plan, n) > 13.0)
    (r,) = play(plan, [events]).recordings
    assert r.time < 14.25 < r.time + 4.0
    assert r.learners[1].told == {}
    assert r.learners[0].told["time"] == r.time + 4.0
    assert [message for who, whom, message, _ in r.in_flight if message == "LearnerLost"] == ["LearnerLost"]
    assert play(plan, start=r).told == run.told[heard(r) :]


def test_a_snapshot_is_given_up_when_the_syncer_crashes():
    crashed = dataclasses.replace(STEADY, crashes=(10.25,), steps=40)
    events = next(n for n in range(10, 200) if time_after(crashed, n) > 10.0)
    taken = play(crashed, [events])
    assert taken.given_up == [(1, "the syncer crashed")]
    assert taken.told == play(crashed).told


def test_a_call_that_nobody_knows_ends_the_snapshot_and_not_the_run():
    def prepare(fleet):
        fleet.calendar.at(30.0, lambda: None)

    taken = play(STEADY, [40], prepare=prepare)
    assert taken.given_up == [(1, "'<lambda>' in the calendar cannot be recorded")]
    assert taken.told == play(STEADY).told


def test_a_state_that_nobody_knows_ends_the_snapshot_and_not_the_run():
    def prepare(fleet):
        fleet.places[0].step_time = lambda: 1.0

    taken = play(STEADY, [40], prepare=prepare)
    assert taken.given_up == [(1, "builtins.function cannot be recorded")]
    assert taken.told == play(STEADY).told


def test_every_call_that_entries_may_make_is_there():
    from ddiloco.virtual import calls

    for cls, names in (
        (Fleet, calls._OF_FLEET),
        (VirtualLearner, calls._OF_PROCESS),
        (VirtualSyncer, calls._OF_SYNCER),
    ):
        assert all(callable(getattr(cls, name)) for name in names)


def test_the_end_of_a_run_is_the_end():
    fleet, _, _ = STEADY.fleet()
    fleet.run()
    assert end_of(fleet) == play(STEADY).end
