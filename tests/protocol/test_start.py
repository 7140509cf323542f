"""The start of a run in which a merge is of all: who is late is waited for, and for how long."""

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.messages import FragmentCounters, Report
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, merges


@pytest.mark.parametrize("end", ["ready", "lost", "silence"])
def test_where_a_merge_is_of_all_the_first_waits_for_whom_the_run_starts_with(end):
    """Learner 1 takes part from the start, but is late: its host compiles, or its thread has not run yet."""
    desk = Desk(total_steps=2, num_learners=2, num_fragments=1, interval=2, quorum=None, silence_timeout=9.0)
    desk.enter(0)
    desk.handle(events.LearnerJoined(1, 1))
    desk.report(0, 2, at=5.0)  # its last step too: the run is not over
    assert not merges(desk.offer(0, (2, 0)))
    assert desk.core.next_deadline() == 9.0
    if end == "ready":
        desk.handle(events.LearnerReady(1, 1, 0, (0,)))
        desk.report(1, 2)
        assert merges(desk.offer(1, (2, 0))) == [(2, 0, [0, 1])]
    elif end == "lost":
        assert merges(desk.handle(events.LearnerLost(1, 1, "its host died"))) == [(2, 0, [0])]
    else:
        desk.report(0, 2, at=8.9)
        assert merges(desk.handle(events.Timeout(), at=9.0)) == [(2, 0, [0])]


@pytest.mark.parametrize("restarts", [True, False])
def test_where_a_merge_is_of_all_the_first_that_is_back_waits_for_those_that_were_there(restarts):
    """The syncer was started again, or all connections broke; not for who is silent, nor for long."""
    desk = Desk(learners=3, num_learners=3, num_fragments=1, interval=2, quorum=None, silence_timeout=8.0)
    for learner, at in ((2, 0.0), (0, 7.0), (1, 8.0)):
        desk.report(learner, 2, at=at)
    desk.settle()
    if restarts:
        desk.core = SyncerCore(desk.policy, state=desk.core.state())
    for learner in () if restarts else (0, 1):
        desk.handle(events.LearnerLost(learner, 1, "connection lost"), at=9.0)
    desk.handle(events.LearnerJoined(0, 2, 2, (1,)), at=100.0)
    desk.report(0, 4, incarnation=2, at=101.0)
    assert not merges(desk.offer(0, (4, 0), incarnation=2))
    desk.report(0, 4, incarnation=2, at=107.0)
    assert merges(desk.handle(events.Timeout(), at=108.0)) == [(4, 0, [0])]


def test_where_a_merge_is_of_all_who_was_silent_or_lost_before_the_others_is_not_waited_for():
    desk = Desk(learners=3, num_learners=3, num_fragments=1, interval=2, quorum=None, silence_timeout=8.0)
    for learner, at in ((2, 0.0), (0, 7.0), (1, 8.0)):
        desk.report(learner, 2, at=at)
    desk.settle()
    for learner in (0, 1):
        desk.handle(events.LearnerLost(learner, 1, "connection lost"), at=9.0)
    for learner in (0, 1):
        desk.handle(events.LearnerJoined(learner, 2, 2, (1,)), at=10.0)
        desk.report(learner, 4, incarnation=2, at=12.0)
    assert desk.core.live == (0, 1)
    assert [merge[2] for merge in merges(desk.settle())] == [[0, 1]]


def test_where_a_merge_is_of_all_who_came_back_is_waited_for_until_it_has_said_what_it_has():
    """Here it is nothing, since it missed an update: with its word, and no step of anyone, they go on."""
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None)
    for learner in range(2):
        desk.report(learner, 2, at=2.0)
    desk.settle()
    desk.report(0, 4, at=4.0, steps=2)
    desk.handle(events.LearnerLost(1, 1, "connection lost"))
    desk.handle(events.LearnerJoined(1, 2, 4, (0,)))
    assert not merges(desk.offer(0, (4, 0)))
    has = Report(1, 2, 4, (FragmentCounters(0, 4, 40),))
    assert merges(desk.handle(events.StepReported(has))) == [(4, 0, [0])]
