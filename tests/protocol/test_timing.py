"""The timing of rounds changes while a run goes on."""

import dataclasses

import pytest

from ddiloco.config import ConfigError
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.settings.timing import timing_of
from tests.protocol.desk import Desk, asked, merges, records


def told(out):
    """Who is sent a timing: learner and interval."""
    sent = [a for a in out if isinstance(a, actions.Send) and isinstance(a.event, events.TimingSet)]
    return [(learner, a.event.interval) for a in sent for learner, _ in a.receivers]


def retimed(desk, **changes):
    return desk.handle(events.TimingSet.of(dataclasses.replace(desk.core.policy, **changes), "why"))


def run_to(desk, *steps):
    """Both learners report each of these steps, and all that follows is done at once."""
    found = []
    for step in steps:
        for learner in (0, 1):
            found += merges(desk.report(learner, step, at=float(step)))
        found += merges(desk.settle())
    return [(step, fragment) for step, fragment, _ in found]


def test_rounds_follow_the_new_interval_from_the_front_on():
    desk = Desk(40, 2, num_learners=2, num_fragments=2, interval=8, quorum=2)
    assert run_to(desk, *range(1, 10)) == [(4, 1), (8, 0)]
    out = retimed(desk, interval=4)
    assert told(out) == [(0, 4), (1, 4)]
    (record,) = records(out, "timing_set")
    assert (record["step"], record["interval"], record["reason"]) == (9, 4, "why")
    assert run_to(desk, *range(10, 17)) == [(10, 1), (12, 0), (14, 1), (16, 0)]
    assert not told(retimed(desk, interval=4)), "it has it already"


def test_an_open_round_stays_and_is_the_last_of_its_fragment_by_the_old_schedule():
    desk = Desk(40, 2, num_learners=2, num_fragments=1, interval=8, quorum=2)
    run_to(desk, *range(1, 7))
    assert asked(desk.report(0, 7, at=7.0)) == [] and desk.core.rounds[0].id.step == 8
    retimed(desk, interval=7)
    assert desk.core.rounds[0].id.step == 8, "open, and kept"
    assert run_to(desk, *range(7, 15)) == [(8, 0), (14, 0)]


def test_a_turn_that_was_due_but_could_not_begin_is_skipped_with_a_record():
    desk = Desk(60, 2, num_learners=2, num_fragments=4, interval=4, overlap=1, quorum=1)
    for step in range(1, 6):
        desk.report(0, step, at=float(step))
        for key, (incarnation, _) in list(desk.owed.items()):
            if desk._is_due(*key):
                desk.offer(key[0], (key[1].step, key[1].fragment), incarnation=incarnation)
    assert len(desk.merging) == 1, "of a slow syncer"
    assert [r.id.step for r in desk.core.rounds] == [1, 2, 3]
    out = retimed(desk, interval=12)
    assert [(r["step"], r["fragment"]) for r in records(out, "round_skipped")] == [(4, 0), (5, 1)]


def test_who_joins_later_is_told_the_timing():
    desk = Desk(40, 1, num_learners=2, num_fragments=1, interval=8, quorum=1)
    assert not told(desk.enter(1))
    retimed(desk, interval=4)
    desk.handle(events.LearnerLost(1, 1, events.LEFT))
    assert told(retimed(desk, interval=8)) == [(0, 8)]
    assert told(desk.enter(1, incarnation=2)) == [(1, 8)], "it has missed the last one"


def test_a_run_whose_rounds_are_over_stays_so():
    desk = Desk(8, 1, num_learners=1, num_fragments=1, interval=8, quorum=1)
    for step in range(1, 9):
        desk.report(0, step, at=float(step))
    desk.settle()
    assert desk.core.finished
    assert retimed(desk, interval=3) == []


def test_a_learner_judges_each_shard_by_the_timing_of_that_shard():
    policy = SyncPolicy(num_learners=1, num_fragments=2, interval=8, quorum=1)
    core = LearnerCore(0, 1, policy, 20, shards=2)
    for shard in range(2):
        core.handle(events.Welcomed(1, 0, (0,), (0,), fragments=(shard,), shard=shard), 0.0)
    core.handle(events.TimingSet(2, 2, 1, 0.8, 1.0, shard=1), 0.0)
    core.handle(events.UpdateArrived(0, 1, 4), 0.0)
    assert core.clock == 0, "half an interval"
    core.handle(events.UpdateArrived(1, 1, 2), 0.0)
    assert core.clock == 2


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (
            {},
            {"offer_timeout": 3.0},
            "config.sync.offer_timeout: cannot change during a run; interval, overlap",
        ),
        (
            {"quorum": None, "max_run_ahead": 0},
            {"interval": 3},
            "config.sync.interval: .*: learners wait for merges",
        ),
        (
            {},
            {"overlap": 3},
            "config.sync.overlap: is 3, but must be at most 2, for which memory was planned",
        ),
        ({}, {"quorum": None}, "config.sync.quorum: is None, but must be a number during this run"),
        ({"quorum": None}, {"quorum": 1}, "config.sync.quorum: is 1, but must be None during this run"),
        ({}, {"interval": 0}, "config.sync.interval: is 0, but must be at least 1"),
        ({}, {"interval": 2.5}, "config.sync.interval: is 2.5, but must be of type int"),
        ({}, {"quorum": 5}, "config.sync.quorum: is 5, but must be at most num_learners, 4"),
    ],
)
def test_what_cannot_change_is_refused_by_name(policy, changes, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        timing_of(SyncPolicy(**policy), changes)
