"""A learner's core that joins, comes back, or whose place was taken: numbers of incarnations and welcomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import JOIN_AGAIN, LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from tests.protocol.learner_desk import step, welcomed


@pytest.mark.parametrize("incarnation", [0, 2])
def test_word_of_another_incarnation_changes_nothing(incarnation):
    core = welcomed()
    assert core.handle(events.NotMember(incarnation), 0.0) == []
    assert core.handle(events.Rejected(incarnation, "a newer one is known"), 0.0) == []
    assert core.incarnation == 1


@given(st.sets(st.integers(1, 1000), min_size=2, max_size=5), st.integers(0, 2**60))
def test_processes_that_begin_with_different_numbers_never_take_the_same(begun_with, newest):
    taken = set()
    for incarnation in begun_with:
        core = LearnerCore(0, incarnation, SyncPolicy())
        core.handle(events.Rejected(incarnation, "a newer one is known", max(newest, incarnation + 1)), 0.0)
        assert core.incarnation > newest
        taken.add(core.incarnation)
    assert len(taken) == len(begun_with)


def test_parts_of_a_welcome_are_adopted_together():
    """Each part of a syncer sends its own fragments; the clock is that of the newest round."""
    core = LearnerCore(0, 1, SyncPolicy(num_fragments=3, interval=3))
    assert core.handle(events.Welcomed(1, 5, (2, 1), (5, 3), (0, 2), (7, 0)), 0.0) == []
    assert not core.recovered
    out = core.handle(events.Welcomed(1, 4, (1,), (4,), (1,)), 0.0)
    assert out[0] == actions.AdoptAll(5, (2, 1, 1), "")
    assert [f.merged_step for f in core.work.fragments] == [5, 4, 3]
    assert [f.lineage for f in core.work.fragments] == [7, 0, 0]


@pytest.mark.parametrize(
    "sent_away", [events.Rejected(1, "a newer incarnation is known", 9), events.NotMember(1)]
)
def test_parts_of_an_earlier_welcome_do_not_count(sent_away):
    """The syncer takes what the next welcome brings for known, and never sends it as an update."""
    core = LearnerCore(0, 1, SyncPolicy(num_fragments=2, interval=2))
    core.handle(events.Welcomed(1, 0, (0,), (0,), (1,)), 0.0)
    core.handle(sent_away, 0.0)
    assert core.handle(events.Welcomed(core.incarnation, 4, (1,), (4,), (0,)), 0.0) == []
    out = core.handle(events.Welcomed(core.incarnation, 2, (1,), (2,), (1,)), 0.0)
    assert out[0] == actions.AdoptAll(4, (1, 1), "")


@pytest.mark.parametrize(
    "part", [((1, 1), (1, 1), (0, 3)), ((1,), (1, 1), (0,)), ((1, 1), (1, 1), (0, 1), (5,))]
)
def test_a_welcome_with_fragments_that_there_are_not_is_dropped(part):
    core = LearnerCore(0, 1, SyncPolicy(num_fragments=3, interval=3))
    (dropped,) = core.handle(events.Welcomed(1, 1, *part), 0.0)
    assert dropped.reason == "welcome with another number of fragments"


def test_a_blocked_learner_keeps_reporting_so_that_it_hears_that_it_is_no_member():
    core = welcomed(num_fragments=1, interval=1, quorum=None, max_run_ahead=0)
    step(core)
    assert core.blocked
    (beat,) = core.handle(events.Heartbeat(), 0.0)
    assert beat.event.report.incarnation == 1
    assert core.heartbeat == core.policy.heartbeat > JOIN_AGAIN
    core.handle(events.NotMember(1), 0.0)
    assert core.blocked
    assert core.heartbeat == JOIN_AGAIN, "all others wait for what it has"
    (beat,) = core.handle(events.Heartbeat(), 0.0)
    assert beat.event.report.incarnation == 2
    assert core.heartbeat == core.policy.heartbeat
