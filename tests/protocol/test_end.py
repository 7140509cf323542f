"""The end of a run: when those who are done have nothing left for any round, those who lag are called in."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import FragmentCounters, Report
from ddiloco.protocol.prospects import MAX_TRIES
from ddiloco.protocol.rounds import UNCHECKED_SECONDS
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, asked, merges, only, records


def calls(out):
    return [
        (action.event.step, action.receivers)
        for action in out
        if isinstance(action, actions.Send) and isinstance(action.event, events.ClockSet)
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
    assert not calls(desk.merged(2, 0)), "learner 0 may have rebased work"
    assert calls(desk.handle(idle(0, 4, 1))) == [(4, ((1, 1), (2, 1)))]
    assert not calls(desk.handle(idle(0, 4, 1)))
    assert not calls(desk.handle(idle(1, 2, 1)))
    desk.handle(events.LearnerLost(2, 1, "its host died"))
    assert calls(desk.handle(events.LearnerJoined(2, 2, 1, (1,)))) == [(4, ((2, 2),))]


def test_nobody_is_told_while_a_learner_at_the_rounds_step_has_steps_to_do():
    desk = Desk(5, 3, num_learners=3, num_fragments=1, interval=2, overlap=1, quorum=2, gamma=0.0)
    for learner in range(3):
        desk.report(learner, 1, at=1.0)
    for learner in range(2):
        desk.report(learner, 2, at=2.0, steps=2)
        desk.offer(learner, (2, 0))
    desk.report(0, 5, at=5.0, steps=5)
    desk.report(1, 4, steps=4)
    assert not calls(desk.merged(2, 0)) + calls(desk.handle(idle(0, 5, 1)))
    assert calls(desk.handle(events.LearnerLost(1, 1, "its host died"))) == [(5, ((2, 1),))]


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
    assert not calls(desk.handle(idle(0, 4, 1), at=4.0))
    assert calls(desk.handle(idle(1, 4, 1))) == [(4, ((2, 1),))]


def test_where_all_are_waited_for_all_do_every_step():
    desk = Desk(total_steps=2, learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None)
    assert not calls(desk.handle(idle(0, 2, 0)))


def test_the_run_ends_with_the_last_that_is_called():
    desk = overtaken()
    desk.merged(2, 0)
    desk.handle(idle(0, 4, 1))
    desk.handle(idle(1, 4, 1))
    out = desk.handle(idle(2, 4, 1))
    assert only(actions.Record, out).name == "round_abandoned"
    assert isinstance(out[-1], actions.Finish)


@pytest.mark.parametrize("learners", [3, 16, 17, 100])
def test_a_run_of_many_ends_though_learners_that_are_done_report_no_more(learners):
    """Whether a round can go on is looked for at few events, and the last of them may not be one of these."""
    desk = Desk(total_steps=4, learners=learners, num_fragments=1, interval=2, overlap=1, quorum=1, gamma=0.0)
    for learner in range(learners):
        desk.report(learner, 1, at=1.0)
    desk.report(0, 2, at=2.0, steps=2)
    desk.offer(0, (2, 0))
    desk.report(0, 4, at=5.0, steps=4)
    desk.merged(2, 0)
    for learner in range(learners):
        desk.handle(idle(learner, 4, 1))
    while not desk.core.finished and (deadline := desk.core.next_deadline()) is not None:
        desk.handle(events.Timeout(), at=deadline)
    assert desk.core.finished and desk.now < 5.0 + 2 * UNCHECKED_SECONDS


def test_every_fragment_has_a_last_round_of_the_work_since_its_round_before():
    desk = Desk(total_steps=6, learners=2, num_learners=2, num_fragments=2, interval=4, quorum=2, gamma=0.0)
    out = []
    for step in range(1, 7):
        for learner in (0, 1):
            desk.report(learner, step, at=float(step), steps=min(step, 2))
        out += desk.settle()
    assert [(step, p) for step, p, _ in merges(out)] == [(2, 1), (4, 0), (6, 0), (6, 1)]
    assert desk.core.finished and desk.core.merged_steps == (6, 6)


@pytest.mark.parametrize("quorum", [1, 2, None])
def test_a_last_round_awaits_the_report_on_the_update_before(quorum):
    """The offers of step 4 are merged while the learners take their last steps, which they rebase."""
    policy = {"num_learners": 2, "num_fragments": 1, "interval": 4, "quorum": quorum, "rebase": True}
    desk = Desk(total_steps=6, learners=2, gamma=0.0, **policy)
    for step in range(1, 7):
        for learner in (0, 1):
            desk.report(learner, step, at=float(step), steps=step)
            if step == 4:
                desk.offer(learner, (4, 0))
    assert desk.merging
    out = desk.merged(4, 0)
    assert not records(out, "round_abandoned") and not desk.core.finished
    for learner in (0, 1):
        desk.report(learner, 6, steps=2)
    assert [(step, who) for step, _, who in merges(desk.settle())] == [(6, [0, 1])]
    assert desk.core.finished


def test_a_learner_that_never_reports_on_an_update_does_not_keep_the_run_from_its_end():
    desk = overtaken()
    desk.merged(2, 0)
    desk.handle(idle(1, 4, 1))
    desk.handle(idle(2, 4, 1))
    while not desk.core.finished and desk.now < 1000.0:
        desk.handle(events.StepReported(desk.reports[0]), at=desk.now + 5.0)
        for learner in (1, 2):
            desk.handle(idle(learner, 4, 1))
    assert desk.core.finished and desk.now < 6 * desk.policy.offer_timeout


def test_once_a_last_round_is_given_up_those_after_it_are_looked_at_at_once():
    """Not with the next sign of life of a learner that has nothing more to do."""
    desk = Desk(total_steps=4, learners=1, num_learners=1, num_fragments=2, interval=2, overlap=1, gamma=0.0)
    out = desk.report(0, 4, at=4.0, steps=4)
    failed = 0
    while not desk.core.finished:
        while desk.owed:
            (_, which), _ = desk.owed.popitem()
            out = desk.fail(0, (which.step, which.fragment))
            failed += 1
        if not desk.core.finished:
            desk.report(0, 4, steps=4)
    assert failed == 4 * MAX_TRIES
    assert out[-1] == actions.Finish()


def back(learner, step):
    """A learner that went on while the syncer was away comes back, with versions of it all."""
    return events.LearnerJoined(learner, 2, step, (11, 11))


def has(learner, step, *steps):
    """Its report: how many steps on each fragment's version it has to give."""
    counters = tuple(FragmentCounters(11, own, 10 * own) for own in steps)
    return events.StepReported(Report(learner, 2, step, counters))


def restarted(quorum):
    """A syncer that died at step 88 of 100, of two learners."""
    desk = Desk(100, num_learners=2, num_fragments=2, interval=8, quorum=quorum, silence_timeout=60.0)
    state = SyncerState((11, 11), (88, 84), ((0, 1), (1, 1)))
    desk.core = SyncerCore(desk.policy, 100, state, lineage=5)
    return desk


@pytest.mark.parametrize("quorum", [1, 2, None])
def test_the_first_learner_that_is_back_and_done_does_not_end_the_run_of_a_restarted_syncer(quorum):
    desk, out = restarted(quorum), []
    for event in (back(1, 100), has(1, 100, 0, 0), back(0, 100)):
        out += desk.handle(event, at=1.0)
    assert not records(out, "round_abandoned") and not desk.core.finished
    out = desk.handle(has(0, 100, 12, 12))
    if quorum == 2:  # the other has nothing to give
        assert records(out, "round_abandoned") and desk.core.finished
    else:
        assert 0 in {learner for learner, _ in desk.owed} and not desk.core.finished


@pytest.mark.parametrize("quorum", [1, 2, None])
def test_a_learner_that_is_never_back_keeps_a_restarted_syncer_for_the_silence_timeout_alone(quorum):
    desk, out = restarted(quorum), []
    for event in (back(1, 100), has(1, 100, 0, 0)):
        out += desk.handle(event, at=1.0)
    desk.handle(has(1, 100, 0, 0), at=50.0)  # it says so again, and is not silent
    assert not records(out, "round_abandoned") and desk.core.next_deadline() == 61.0
    out = desk.handle(events.Timeout(), at=61.0)
    assert records(out, "round_abandoned") and desk.core.finished


@pytest.mark.parametrize("comes", [True, False])
def test_with_no_round_left_a_slower_learner_is_waited_for_but_none_that_never_comes_to_the_end(comes):
    """It repeats its report, as in a long step, and lacks the updates, as behind a thin link."""
    desk = Desk(4, 2, num_learners=2, num_fragments=1, interval=2, overlap=1, gamma=0.0, silence_timeout=10.0)
    for step in (1, 2, 3, 4):
        desk.report(0, step, at=float(step))
        desk.settle()
    assert desk.core.versions == (2,)
    out = []
    while not desk.core.finished and desk.now < 100.0:
        out += desk.report(0, 4, at=desk.now + 3.0, steps=0)
        if comes and desk.now == 13.0:
            desk.report(1, 4, steps=1)
        else:
            out += desk.handle(events.StepReported(Report(1, 1, 1, (FragmentCounters(0, 1, 10),))))
    lost = [(values["learner"], values["reason"]) for values in records(out, "learner_lost")]
    assert (desk.now, lost) == ((13.0, []) if comes else (19.0, [(1, "never at the last step")]))


def test_where_a_round_waits_for_one_that_is_told_to_end_and_speaks_on_it_is_given_up_and_the_run_ends():
    desk = overtaken()
    desk.merged(2, 0)
    assert calls(desk.handle(idle(0, 4, 1))) == [(4, ((1, 1), (2, 1)))]
    desk.handle(idle(1, 4, 1))
    out = []
    while not desk.core.finished and desk.now < 1000.0:
        desk.now += 5.0
        out += [*desk.handle(idle(0, 4, 1)), *desk.handle(idle(1, 4, 1))]
        out += desk.handle(events.StepReported(Report(2, 1, 1, (FragmentCounters(0, 1, 10),))))
    assert [values["learner"] for values in records(out, "learner_lost")] == [2]
    assert records(out, "round_abandoned") and desk.core.finished


@pytest.mark.parametrize("offered", [0, 1, 3])
def test_where_all_must_give_a_run_goes_on_to_its_end_after_all_connections_broke_at_once(offered):
    policy = {"num_fragments": 1, "interval": 2, "overlap": 1, "quorum": None, "max_run_ahead": 0}
    desk = Desk(total_steps=4, learners=3, num_learners=3, **policy)
    for learner in range(3):
        desk.report(learner, 2, at=2.0, steps=2)
    for learner in range(offered):
        desk.offer(learner, (2, 0))
    for learner in range(3):
        desk.handle(events.LearnerLost(learner, 1, "connection lost"))
    out = desk.settle()
    for learner in range(3):
        desk.handle(events.LearnerJoined(learner, 2, 2, (0,), (0,)))
        desk.report(learner, 2, incarnation=2, steps=2 - desk.core.versions[0])
        out += desk.settle()
    assert (desk.core.live, desk.core.versions) == ((0, 1, 2), (1,))
    assert [values["learners"] for values in records(out, "round")] == [[0, 1, 2]]
    for learner in range(3):
        desk.report(learner, 4, at=4.0, incarnation=2, steps=2)
    assert [values["learners"] for values in records(desk.settle(), "round")] == [[0, 1, 2]]
    assert desk.core.finished
