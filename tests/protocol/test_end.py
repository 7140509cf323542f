"""The end of a run: when those who are done have nothing left for any round, those who lag are called in."""

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import FragmentCounters, Report
from tests.protocol.desk import Desk, asked, merges, only


def calls(out):
    return [
        (action.event.step, action.receivers)
        for action in out
        if isinstance(action, actions.Tell) and isinstance(action.event, events.ClockSet)
    ]


def overtaken(last=4):
    """Learner 0 does its last step while the round of step 2 is merged; the others are at step 1."""
    desk = Desk(total_steps=last, learners=3, num_fragments=1, interval=2, overlap=1, quorum=1, gamma=0.0)
    for learner in range(3):
        desk.report(learner, 1, at=1.0)
    desk.report(0, 2, at=2.0, steps=2)
    assert merges(desk.offer(0, (2, 0)))
    desk.report(0, last, at=5.0, steps=last)
    return desk


def idle(learner, step, version):
    return events.StepReported(Report(learner, 1, step, (FragmentCounters(version, 0, 0),)))


def test_each_incarnation_that_lags_is_told_once_that_the_last_step_has_come():
    desk = overtaken()
    assert calls(desk.merged(2, 0)) == [(4, ((1, 1), (2, 1)))]
    assert not calls(desk.tell(idle(0, 4, 1)))
    assert not calls(desk.tell(idle(1, 2, 1)))
    desk.tell(events.LearnerLost(2, 1, "its host died"))
    assert calls(desk.tell(events.LearnerJoined(2, 2, 1, (1,)))) == [(4, ((2, 2),))]


def test_nobody_is_told_while_a_learner_at_the_rounds_step_has_steps_to_do():
    desk = overtaken(last=5)
    desk.report(1, 4, steps=4)
    assert not calls(desk.merged(2, 0))
    assert calls(desk.tell(events.LearnerLost(1, 1, "its host died"))) == [(5, ((2, 1),))]


def test_nobody_is_told_while_an_offer_that_failed_may_be_repeated():
    desk = Desk(total_steps=2, learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.0)
    desk.report(0, 2, steps=2)
    assert not calls(desk.fail(0, (2, 0)))
    assert asked(desk.report(0, 2, steps=2)) == [(0, 2, 0)]


def test_where_too_few_for_a_quorum_can_still_give_the_rest_are_called():
    """K=2: once two of three are done and have nothing left, what the third offers is merged no more."""
    desk = Desk(total_steps=4, learners=3, num_learners=3, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    for learner in range(3):
        desk.report(learner, 2, at=2.0, steps=2)
    desk.settle()
    desk.report(2, 3, at=3.0)
    desk.offer(2, (4, 0))
    assert not calls(desk.tell(idle(0, 4, 1), at=4.0))
    assert calls(desk.tell(idle(1, 4, 1))) == [(4, ((2, 1),))]


def test_where_all_are_waited_for_all_do_every_step():
    desk = Desk(total_steps=2, learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None)
    assert not calls(desk.tell(idle(0, 2, 0)))


def test_the_run_ends_with_the_last_that_is_called():
    desk = overtaken()
    desk.merged(2, 0)
    desk.tell(idle(1, 4, 1))
    out = desk.tell(idle(2, 4, 1))
    assert only(actions.Record, out).name == "round_abandoned"
    assert isinstance(out[-1], actions.Finish)


def test_once_a_last_round_is_given_up_those_after_it_are_looked_at_at_once():
    """Not with the next sign of life of a learner that has nothing more to do."""
    desk = Desk(total_steps=4, learners=1, num_learners=1, num_fragments=2, interval=2, overlap=1, gamma=0.0)
    out = desk.report(0, 4, at=4.0, steps=4)
    failed = 0
    while desk.owed:
        (_, which), _ = desk.owed.popitem()
        out = desk.fail(0, (which.step, which.fragment))
        failed += 1
    assert failed == 4
    assert out[-1] == actions.Finish()
