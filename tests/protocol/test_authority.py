"""Who takes part: joining, recovering, silent, returning, and of a history that was lost."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, merges, only, records


def test_what_an_incarnation_that_has_not_reported_offers_is_not_taken():
    """Nothing says that it has done the work."""
    desk = Desk(learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.0)
    desk.report(1, 1)
    desk.handle(events.LearnerLost(1, 1, "its host died"))
    desk.handle(events.LearnerJoined(1, 2))
    desk.handle(events.LearnerReady(1, 2, 1, (0,)))
    assert only(actions.Drop, desk.offer(1, (2, 0), incarnation=2)).reason == "more work than it reported"


def test_a_silent_learner_is_not_taken_for_slow():
    """The pause of a learner that was silent is no step time: the grace window does not grow by it."""
    desk = Desk(learners=2, num_fragments=1, interval=8, overlap=1, gamma=0.5, silence_timeout=5.0)
    for step in range(1, 5):
        desk.report(0, step, at=float(step))
    desk.report(1, 1, at=4.0)
    desk.handle(events.Timeout(), at=9.0)
    assert desk.core.live == ()
    for step in range(5, 9):
        desk.report(1, step - 3, at=96.0 + step)
        desk.report(0, step, at=96.0 + step)
    desk.offer(0, (8, 0))
    assert desk.core.next_deadline() - desk.now == pytest.approx(0.5)


def test_a_learner_that_is_done_but_says_nothing_more_is_silent_too_and_does_not_keep_the_run_from_its_end():
    """It says that it has work, and neither gives it nor speaks: a hung process, or one that lies."""
    desk = Desk(total_steps=4, learners=2, num_fragments=1, interval=4, gamma=0.0, silence_timeout=20.0)
    desk.report(0, 4, at=1.0, steps=0)
    desk.report(1, 4, at=1.0, steps=4)
    assert (1, RoundId(4, 0)) in desk.owed
    out = []
    for now in range(6, 200, 5):
        out += desk.report(0, 4, at=float(now), steps=0) + desk.handle(events.Timeout())
    assert desk.core.finished
    assert records(out, "learner_silent") == [{"learner": 1}]
    assert records(out, "round_abandoned") == [{"step": 4, "fragment": 0}]


def test_after_a_pause_of_the_syncers_process_learners_have_time_to_be_heard():
    desk = Desk(learners=2, num_fragments=1, interval=4, silence_timeout=8.0)
    desk.report(0, 1, at=1.0)
    assert not records(desk.report(0, 2, at=100.0), "learner_silent"), "learner 1's word may wait behind this"
    desk.report(1, 1, at=100.1)
    assert not records(desk.handle(events.Timeout(), at=103.5), "learner_silent")
    assert desk.core.live == (0, 1)
    said = records(desk.handle(events.Timeout(), at=108.1), "learner_silent")
    assert said == [{"learner": 0}, {"learner": 1}]


def test_after_a_pause_of_the_syncers_process_offers_that_came_meanwhile_are_taken():
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None, offer_timeout=4.0)
    desk.report(0, 2)
    desk.report(1, 2)
    assert not merges(desk.offer(0, (2, 0), at=50.0)), "learner 1's offer may wait behind this one"
    assert merges(desk.offer(1, (2, 0), at=50.1)) == [(2, 0, [0, 1])]


def test_a_repeated_report_is_no_step():
    """Heartbeats of one step do not make steps look short, and the grace window with them."""
    desk = Desk(learners=2, num_fragments=1, interval=2, overlap=1, quorum=1, gamma=0.5)
    desk.report(0, 1, at=1.0)
    for beat in range(1, 10):
        desk.report(0, 1, at=1.0 + beat / 10)
    desk.report(0, 2, at=3.0)
    desk.offer(0, (2, 0))
    assert desk.core.next_deadline() - desk.now == pytest.approx(0.5 * 2.0)


def test_nobody_takes_the_place_of_a_learner_that_speaks_whatever_number_it_bears():
    desk = Desk(learners=1, num_fragments=1, interval=2)
    desk.report(0, 1, at=1.0)
    for incarnation in (1, 2, 2**61):
        out = desk.handle(events.LearnerJoined(0, incarnation), at=2.0)
        assert out == [actions.Drop(0, "the number of a live learner")]
    assert desk.core.live == (0,)
    too_large = desk.handle(events.LearnerJoined(0, 2**62), at=60.0)
    assert too_large == [actions.Drop(0, "incarnation out of range")]
    assert only(events.Welcomed, desk.handle(events.LearnerJoined(0, 2), at=60.0))


def test_a_return_whose_report_overtook_it_may_come_back_under_the_next_number_at_once():
    """The report had it told that it is no member; it is not to wait until its own first return is quiet."""
    desk = Desk(learners=1, num_fragments=1, interval=2)
    desk.handle(events.LearnerLost(0, 1, "connection broken"))
    assert only(events.NotMember, desk.handle(events.StepReported(overtaking(2)))).incarnation == 2
    assert records(desk.handle(events.LearnerJoined(0, 2, 0, (0,))), "learner_ready")
    assert records(desk.handle(events.LearnerJoined(0, 3, 0, (0,))), "learner_ready")


def overtaking(incarnation):
    return Report(0, incarnation, 0, (FragmentCounters(0, 0, 0),))


@pytest.mark.parametrize(
    ("rebase", "learner", "steps", "taken"),
    [
        (True, 1, 13, True),
        (True, 1, 14, False),
        (True, 0, 5, True),
        (True, 0, 6, False),
        (False, 1, 5, True),
        (False, 1, 6, False),
    ],
)
def test_with_rebase_work_counts_from_the_learners_own_last_offer_that_was_merged(
    rebase, learner, steps, taken
):
    """Of learner 1 nothing was merged, and of learner 0 all up to step 8. An interval more is let pass."""
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=4, gamma=0.0, rebase=rebase)
    for step in (4, 8):
        desk.report(0, step, at=float(step), steps=4)
        desk.offer(0, (step, 0))
        desk.merged(step, 0)
    report = Report(learner, 1, 9, (FragmentCounters(2, steps, 10 * steps),))
    out = desk.handle(events.StepReported(report), at=9.0)
    assert (not any(isinstance(action, actions.Drop) for action in out)) == taken


def test_a_departed_incarnation_that_comes_back_with_what_it_holds_hears_that_it_is_no_member():
    desk = Desk(num_fragments=1)
    desk.enter(0)
    desk.handle(events.LearnerLost(0, 1, "connection broken"))
    no_member = actions.Send(((0, 1),), events.NotMember(1))
    assert desk.handle(events.LearnerJoined(0, 1, 0, (0,))) == [no_member]


def test_whoever_comes_too_late_for_its_number_hears_the_newest():
    desk = Desk(num_fragments=1)
    desk.enter(0, incarnation=2**61)
    rejected = events.Rejected(2, "a newer incarnation is known", 2**61)
    assert desk.handle(events.LearnerJoined(0, 2)) == [actions.Send(((0, 2),), rejected)]


@pytest.mark.parametrize(
    ("versions", "lineages", "welcomed"),
    [
        ((5, 3), (7, 0), False),
        ((5, 3), (8, 0), True),  # made by a syncer whose disk was lost: the number alone is the same
        ((4, 3), (8, 0), False),  # what it lacks is sent anyway
        ((6, 3), (8, 0), True),  # newer than anything that is known
        ((5, 3), (7,), True),  # of one fragment only
    ],
)
def test_a_learner_of_a_lost_history_gets_all_fragments_anew(versions, lineages, welcomed):
    """A syncer that starts from an older disk makes versions whose numbers others bore before."""
    state = SyncerState((5, 3), (10, 6), lineages=(7, 0))
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=2, interval=2), None, state, lineage=9)
    out = core.handle(events.LearnerJoined(0, 2, 11, versions, lineages), 0.0)
    assert any(isinstance(getattr(a, "event", None), events.Welcomed) for a in out) == welcomed
    assert core.live == (() if welcomed else (0,))


def test_a_version_bears_the_lineage_of_the_start_that_made_it():
    state = SyncerState((5, 3), (10, 6), lineages=(7, 0))
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=2, interval=2, gamma=0.0), None, state, 9)
    core.handle(events.LearnerJoined(0, 2, 11, (5, 3), (7, 0)), 0.0)
    report = Report(0, 2, 11, (FragmentCounters(5, 1, 10), FragmentCounters(3, 1, 10)))
    core.handle(events.StepReported(report), 0.0)
    offer = Contribution(0, 2, fragment=1, version=3, step=11, steps=1, tokens=10)
    core.handle(events.FragmentArrived(RoundId(11, 1), offer), 0.0)
    update = only(events.UpdateArrived, core.handle(events.MergeFinished(RoundId(11, 1)), 0.0))
    assert update.lineage == 9
    assert core.state().lineages == (7, 9)


def test_the_offer_of_a_silent_learner_is_not_taken_before_it_speaks():
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0, silence_timeout=5.0)
    desk.report(0, 2, at=1.0)
    desk.handle(events.Timeout(), at=6.0)
    assert only(actions.Drop, desk.offer(0, (2, 0))).reason == "unexpected fragment"
    desk.report(0, 2, at=7.0)
    assert merges(desk.offer(0, (2, 0))) == [(2, 0, [0])]
