"""The syncer's core as a whole: how runs begin and end, its deadlines, and its state over a crash."""

import itertools

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import FragmentCounters, Report, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, asked


def test_a_run_shorter_than_the_interval_merges_each_fragment_at_its_end():
    desk = Desk(total_steps=3, learners=2, num_fragments=2, interval=8, quorum=2)
    for learner in (0, 1):
        desk.report(learner, 3, steps=3)
    assert desk.settle()[-1] == actions.Finish()
    assert desk.core.versions == (1, 1) and desk.core.merged_steps == (3, 3)


def test_nobody_left_does_not_finish_a_run_and_the_first_to_return_does():
    desk = Desk(total_steps=2, learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    desk.offer(0, (2, 0))
    desk.handle(events.LearnerLost(0, 1, "its host died"))
    assert actions.Finish() not in desk.merged(2, 0)
    desk.enter(0, incarnation=2)
    assert desk.core.finished


def test_an_endless_run_keeps_a_bounded_state():
    """Learners come, die and lose updates for a long time; what is kept does not grow with it."""
    desk = Desk(num_learners=4, num_fragments=3, interval=3, quorum=1, gamma=0.0, offer_timeout=1.0)
    sizes = []
    step = 0
    for incarnation in range(1, 13):
        for learner in range(4):
            desk.handle(events.LearnerLost(learner, incarnation - 1, "its host died"))
            desk.enter(learner, incarnation)
        for _ in range(30):
            step += 1
            for learner in range(4):
                desk.report(learner, step, at=desk.now + 0.3, incarnation=incarnation)
                if step % 5:
                    desk.settle()
        members = desk.core._members._members
        sizes.append(
            len(members)
            + sum(len(member.sent) + len(member.asked) for member in members.values())
            + sum(len(r.failed) + len(r.arrived) + len(r.owed) for r in desk.core._rounds._open.values())
        )
    assert min(desk.core.versions) > 50
    assert max(sizes) <= 4 + 2 * 4 * 3 + 3 * 4 * 3


@pytest.mark.parametrize("offsets", list(itertools.permutations([0.0, 0.25, 0.5])))
def test_every_deadline_is_in_the_future_and_its_timeout_moves_it_on(offsets):
    """A deadline that stayed in the past would have a driver spin."""
    desk = Desk(learners=3, num_fragments=2, interval=2, quorum=2, offer_timeout=3.0, silence_timeout=7.0)
    for step in (1, 2, 3):
        for learner, offset in sorted(enumerate(offsets), key=lambda pair: pair[1]):
            desk.report(learner, step, at=step + offset)
    seen = []
    while (deadline := desk.core.next_deadline()) is not None:
        assert deadline > desk.now
        seen.append(deadline)
        desk.handle(events.Timeout(), at=deadline)
    assert seen == sorted(set(seen))
    assert desk.core.live == ()


@pytest.mark.parametrize(
    ("merged_steps", "first"),
    [
        ((0, 0, 0), (1, 1)),
        ((6, 4, 2), (5, 2)),
        ((3, 1, 2), (4, 1)),
        ((0, 7, 8), (3, 0)),
        ((9, 7, 8), (10, 1)),
    ],
)
def test_a_restored_syncer_goes_on_with_the_earliest_round_that_was_not_merged(merged_steps, first):
    """Fragments 0, 1, 2 are due at the steps 3, 6 ...; 1, 4 ...; 2, 5 ...; whoever lacks a turn is next."""
    state = SyncerState((1, 1, 1), merged_steps)
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=3, interval=3, gamma=0.0), None, state)
    joined = core.handle(events.LearnerJoined(0, 1, first[0], (1, 1, 1)), 0.0)
    counters = (FragmentCounters(1, 1, 10),) * 3
    out = core.handle(events.StepReported(Report(0, 1, first[0], counters)), 0.0)
    assert asked(joined + out)[:1] == [(0, *first)]
    assert core.step == max(merged_steps)


def test_the_state_is_what_was_merged_and_who_has_been_there():
    desk = Desk(learners=2, num_fragments=2, interval=2, gamma=0.0)
    before = desk.core.state()
    assert before == SyncerState((0, 0), (0, 0), ((0, 1), (1, 1)))
    desk.report(0, 1)
    desk.settle()
    for learner in (0, 1):
        desk.handle(events.LearnerLost(learner, 1, "its host died"))
    desk.enter(0, incarnation=4)
    expected = before.after(RoundId(1, 1))
    marks = ({}, {0: Watermark(0, 1)})
    expected = SyncerState(expected.versions, expected.merged_steps, ((0, 4), (1, 1)), watermarks=marks)
    assert desk.core.state() == expected


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (SyncerState((0,), (0, 0)), "1 versions, 2 merged steps and 1 lineages, but must have 2"),
        (SyncerState((0, 0, 0), (0, 0, 0)), "3 versions, 3 merged steps and 3 lineages, but must have 2"),
        (SyncerState((0, -1), (0, 0)), "below 0"),
    ],
)
def test_a_state_of_another_run_is_the_drivers_mistake(state, told):
    with pytest.raises(LocalProtocolError, match=told):
        SyncerCore(SyncPolicy(num_fragments=2), 10, state)


def test_a_run_that_had_ended_before_a_crash_ends_again_with_the_first_to_return():
    desk = Desk(total_steps=2, learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    assert actions.Finish() in desk.settle()
    desk.core = SyncerCore(desk.policy, 2, desk.core.state())
    assert actions.Finish() in desk.handle(events.LearnerJoined(0, 2, 2, (0,)))
