"""The start of a run in which a merge is of all: who is late is waited for, and for how long."""

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, merges


@pytest.mark.parametrize("end", ["ready", "lost", "silence"])
def test_where_a_merge_is_of_all_the_first_waits_for_whom_the_run_starts_with(end):
    """Learner 1 takes part from the start, but is late: its host compiles, or its thread has not run yet."""
    desk = Desk(total_steps=2, num_learners=2, num_fragments=1, interval=2, quorum=None, silence_timeout=9.0)
    desk.enter(0)
    desk.tell(events.LearnerJoined(1, 1))
    desk.report(0, 2, at=5.0)  # its last step too: the run is not over
    assert not merges(desk.offer(0, (2, 0)))
    assert desk.core.next_deadline() == 9.0
    if end == "ready":
        desk.tell(events.LearnerReady(1, 1, 0, (0,)))
        desk.report(1, 2)
        assert merges(desk.offer(1, (2, 0))) == [(2, 0, [0, 1])]
    elif end == "lost":
        assert merges(desk.tell(events.LearnerLost(1, 1, "its host died"))) == [(2, 0, [0])]
    else:
        desk.report(0, 2, at=8.9)
        assert merges(desk.tell(events.Timeout(), at=9.0)) == [(2, 0, [0])]


def test_where_a_merge_is_of_all_a_syncer_that_goes_on_waits_for_nobody_who_is_not_there():
    desk = Desk(num_learners=2, num_fragments=1, interval=2, quorum=None)
    desk.enter(0)
    desk.enter(1)
    desk.report(0, 2)
    desk.report(1, 2)
    desk.settle()
    desk.core = SyncerCore(desk.policy, state=desk.core.state())
    desk.enter(0, incarnation=2)
    desk.report(0, 4, incarnation=2)
    assert merges(desk.offer(0, (4, 0), incarnation=2)) == [(4, 0, [0])]
