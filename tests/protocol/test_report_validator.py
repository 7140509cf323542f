"""How far a learner is believed to have come, and what it can have done on the way."""

import dataclasses

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.membership import SELDOM, Member, Membership
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.report_validator import ReportValidator
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, merges, only

T, LEFT = 48_000, 1000
POLICY = SyncPolicy(num_learners=4, num_fragments=1, interval=24, quorum=1, silence_timeout=60.0)


def restarted(learners=4):
    """A syncer that goes on at step LEFT, with learners that were there before."""
    state = SyncerState((LEFT // 24,), (LEFT,), tuple((m, 1) for m in range(learners)))
    return SyncerCore(POLICY, T, state)


def back(core, learner, step, now, incarnation=2):
    """Whether a learner that comes back with this step is let in with it."""
    core.handle(events.LearnerJoined(learner, incarnation, step, core.versions), now)
    return learner in core.live


def test_after_a_restart_one_learner_that_says_it_has_done_all_steps_is_not_believed():
    core = restarted()
    for n in range(20):
        assert not back(core, 3, T, now=n / 10, incarnation=2 + n)
    assert all(back(core, m, LEFT + 50 + m, now=3.0) for m in (0, 1, 2)), "they went on while it was away"
    assert not core.finished
    assert not back(core, 3, T, now=3.2, incarnation=90)
    assert back(core, 3, LEFT + 60, now=3.3, incarnation=91)


def test_those_who_went_on_for_a_day_are_believed_once_half_of_them_are_back():
    core = restarted()
    assert not back(core, 0, LEFT + 30_000, now=0.0)
    assert back(core, 1, LEFT + 31_000, now=1.0)
    assert back(core, 0, LEFT + 30_001, now=1.1, incarnation=3)


def test_while_a_leap_is_not_believed_its_reports_are_dropped_without_a_word():
    core = restarted()
    assert not back(core, 0, LEFT + 3000, now=0.0)
    told = core.handle(events.StepReported(Report(0, 2, LEFT + 3001, (FragmentCounters(41, 9, 90),))), 0.2)
    assert [type(action).__name__ for action in told] == ["Drop"]
    back(core, 1, LEFT + 3000, now=1.0)
    told = core.handle(events.StepReported(Report(0, 2, LEFT + 3002, (FragmentCounters(41, 9, 90),))), 1.2)
    assert events.NotMember(2) in [getattr(action, "event", None) for action in told], "it joins again"
    assert back(core, 0, LEFT + 3002, now=1.3, incarnation=3)


def test_one_of_two_is_believed_since_nobody_knows_who_is_right():
    assert back(restarted(learners=2), 0, LEFT + 30_000, now=0.0)


def test_where_the_others_do_not_come_back_the_one_that_does_is_believed_in_the_end():
    core = restarted()
    assert back(core, 0, LEFT + 24, now=0.0)
    assert not back(core, 1, LEFT + 500, now=1.0)
    assert back(core, 1, LEFT + 600, now=61.0, incarnation=3)


@pytest.mark.parametrize(("quorum", "speed"), [(1, 3), (1, 12), (2, 12)])
def test_one_that_hurries_is_told_of_and_cuts_nobody_short_where_a_merge_takes_two(quorum, speed):
    last = 480
    desk = Desk(last, 4, num_learners=4, num_fragments=2, interval=24, quorum=quorum, gamma=0.0)
    clocks, seconds, told = [0] * 4, 0, []
    while not desk.core.finished and seconds < 2 * last:
        seconds += 1
        for m in range(4):
            clock, newest = clocks[m] + (speed if m == 3 else 1), desk.core.step
            clocks[m] = min(last, newest if newest - clock > 12 else clock)
            told += desk.report(m, clocks[m], at=float(seconds))
        told += desk.settle()
        if any(getattr(action, "event", None) == events.ClockSet(last) for action in told):
            clocks = [last] * 4
    assert desk.core.finished
    ahead = [a.values for a in told if getattr(a, "name", "") == "clock_ahead"]
    assert (seconds < last / 4) is bool(ahead) is ((quorum, speed) == (1, 12))
    assert all(values["learner"] == 3 and values["speed"] > 4 for values in ahead)
    if quorum == 2:
        assert seconds >= last


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(("steps", "believed"), [(60, True), (9_000, False)])
def test_reports_that_come_all_at_once_after_a_pause_are_believed_as_far_as_it_was_long(
    steps, believed, silent
):
    """The syncer's process stood still, or its network did: nobody is sent away for what it did meanwhile."""
    desk = Desk(num_learners=2, learners=2, num_fragments=1, interval=4, quorum=1, gamma=0.0)
    for now in range(1, 9):
        for m in (0, 1):
            desk.report(m, now, at=float(now))
    told = desk.handle(events.Timeout(), at=68.0) if silent else []
    assert desk.core.live == (() if silent else (0, 1))
    for n in range(1, 61):
        told += desk.report(0, 8 + n * steps // 60, at=68.0 + n / 1000)
    assert ("impossible report" not in [getattr(action, "reason", "") for action in told]) is believed


def test_steps_of_less_than_a_millisecond_are_believed_before_any_was_measured():
    """Of a toy on a fast CPU; a report that is not believed has its learner dismissed."""
    desk = Desk(learners=1, num_learners=1, num_fragments=2, interval=8)
    desk.report(0, 1, at=0.002)
    assert not any(isinstance(one, actions.Drop) for one in desk.report(0, 14, at=0.006, steps=14))
    assert only(actions.Drop, desk.report(0, 1000, at=0.007, steps=1000)).reason == "impossible report"


def dropped(told):
    return [action.reason for action in told if isinstance(action, actions.Drop)]


def test_quick_learners_whose_first_measured_step_was_long_are_believed():
    """As where a toy compiles what copies a fragment: of nobody a word, then steps of 0.4 ms."""
    desk = Desk(learners=2, num_fragments=1, interval=8, quorum=1, gamma=0.0)
    for n in range(1, 60):
        for m in (0, 1):
            told = desk.report(m, n, at=0.0004 * n + (0.2 if n > 1 else 0.0), steps=n)
            assert not dropped(told)


def test_reports_at_one_time_after_a_pause_do_not_make_a_leap_of_another_learner_credible():
    """By their times of arrival steps take microseconds: nearly all rounds would be skipped."""
    desk = Desk(T, 4, num_learners=4, num_fragments=1, interval=24, quorum=1, gamma=0.0)
    for n in range(1, 21):
        for m in range(4):
            desk.report(m, n, at=float(n))
    for n in range(21, 71):
        for m in (0, 1, 2):
            desk.report(m, n, at=70.5 + n * 1e-6)
    assert dropped(desk.report(3, T // 2, at=71.0)) == ["impossible report"]
    assert not dropped(desk.report(3, 71, at=71.1))


def test_the_first_that_is_back_after_all_fell_silent_cannot_leap():
    """The speed that was known last holds on: else a syncer whose network fails believes who speaks first."""
    desk = Desk(T, 4, num_learners=4, num_fragments=1, interval=24, quorum=1, gamma=0.0)
    for n in range(1, 21):
        for m in range(4):
            desk.report(m, n, at=float(n))
    desk.handle(events.Timeout(), at=80.0)
    assert not desk.core.live
    assert dropped(desk.report(3, T - 1, at=85.0)) == ["impossible report"]
    assert not dropped(desk.report(2, 85, at=85.1))


def test_the_speed_of_a_learner_is_known_where_every_report_is_of_many_steps_and_other_versions():
    """Where a fragment has a new version in each: the 20 steps would count as one."""
    member = Membership(range(1)).admit(Member(0, 1, 0.0))
    for n in range(1, 5):
        report = Report(0, 1, 20 * n, (FragmentCounters(2 * n, 6, 60), FragmentCounters(n, 18, 180)))
        assert member.steps_to(report) == (18 if n > 1 else 1)
        member.take(report, {0: 0, 1: 1})
    jumped = Report(0, 1, 500, (FragmentCounters(99, 1, 10), FragmentCounters(9, 3, 30)))
    assert member.steps_to(jumped) == 3


@pytest.mark.parametrize(("step", "steps"), [(1 << 51, 1 << 50), (100, 98), (2, 3)])
def test_an_offer_of_more_steps_than_there_were_is_not_merged(step, steps):
    """The norm that passes the guard grows with them, and so does the weight."""
    desk = Desk(num_learners=1, learners=1, num_fragments=1, interval=2, quorum=1, gamma=0.0)
    desk.report(0, 2, steps=2)
    which = RoundId(2, 0)
    claimed = Contribution(0, 1, 0, 0, step, steps, 10 * steps)
    assert not merges(desk.handle(events.FragmentArrived(which, claimed)))
    assert merges(desk.settle()) == [(2, 0, [0])]


def test_a_report_of_more_work_on_a_version_than_its_clock_allows_is_dropped():
    desk = Desk(num_learners=2, learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.0)
    desk.report(0, 2, steps=2)
    desk.settle()
    assert (desk.core.versions, desk.core.merged_steps) == ((1,), (2,))
    for steps, dropped in ((5, True), (4, False)):
        report = Report(1, 1, 4, (FragmentCounters(1, steps, 10 * steps),))
        told = desk.handle(events.StepReported(report), at=2.0)
        assert ("impossible report" in [getattr(action, "reason", "") for action in told]) is dropped


def test_the_work_of_a_new_process_is_not_counted_from_the_clock_of_the_one_before():
    """It was merging as the new one came, which begins at an earlier clock."""
    desk = Desk(num_learners=2, learners=2, num_fragments=1, interval=2, quorum=2, gamma=0.0, rebase=True)
    for n in range(1, 7):
        desk.report(0, n, at=float(n), steps=n)
        desk.report(1, n, steps=n)
    desk.offer(0, (2, 0))
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [0, 1])]
    desk.handle(events.LearnerLost(0, 1, "connection closed"))
    desk.handle(events.LearnerJoined(0, 1001))
    desk.merged(2, 0)
    desk.handle(events.LearnerReady(0, 1001, 0, (0,)))
    told = desk.report(0, 2, at=8.0, incarnation=1001, steps=2)
    assert not [action for action in told if isinstance(action, actions.Drop)]


def fleet(size):
    """So many learners that take a second for a step."""
    members = Membership(range(1))
    for m in range(size):
        member = members.admit(Member(m, 1, 0.0))
        members.begin(member, 0, (0,))
        member.step_time.add(1.0)
    return members


@pytest.mark.parametrize("size", [1, 4, 1600])
def test_it_soon_follows_learners_that_become_faster(size):
    members = fleet(size)
    policy = dataclasses.replace(POLICY, num_learners=size)
    validator = ReportValidator(policy, None, SyncerState.initial(1), members, (0,))
    assert all(validator.is_possible(0, 0, (0,), float(now)) for now in range(10))
    too_far = POLICY.interval + 200  # in ten seconds: 160 steps of a second are allowed
    assert not validator.is_possible(0, too_far, (0,), 10.0)
    for member in members.live():
        member.step_time.value = 0.5
    tries = [validator.is_possible(0, too_far, (0,), 10.0) for _ in range(size // SELDOM + 1)]
    assert tries[-1]
