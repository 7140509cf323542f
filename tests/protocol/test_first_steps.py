"""How far a learner is believed to have come before the speed of the fleet was measured."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import FragmentCounters, Report
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, records

T, H = 1_000_000, 24
SLOW = 300.0  # seconds of a step
QUICK = 1e-4
LEAPS = {
    "in its first report": {60: 600_000},
    "in its second report": {1: 1, 60: 500_000},
    "once others have ended a step": {1: 1, 310: 600_000},
    "with small steps from the start": {n: 20 * n for n in range(1, 900)},
    "with small steps and a leap": {**{n: n for n in range(1, 60)}, 450: 6_000},
}


def desk(size, learners=None, total_steps=T, interval=H):
    there = size if learners is None else learners
    return Desk(
        total_steps, there, num_learners=size, num_fragments=1, interval=interval, quorum=1, gamma=0.0
    )


class Honest:
    """A learner that applies what was merged, takes steps, and reports them."""

    def __init__(self, fleet, learner):
        self.fleet, self.learner = fleet, learner
        self.clock = self.version = self.steps = 0

    def adopt(self):
        core = self.fleet.core
        if core.versions[0] > self.version:
            self.version, self.steps = core.versions[0], 0
            self.clock = core.step if core.step - self.clock > self.fleet.policy.band else self.clock

    def go(self, steps, at):
        steps = min(steps, self.fleet.core.total_steps - self.clock)
        self.clock, self.steps = self.clock + steps, self.steps + steps
        report = Report(
            self.learner, 1, self.clock, (FragmentCounters(self.version, self.steps, self.steps),)
        )
        self.fleet.reports[self.learner] = report
        told = self.fleet.handle(events.StepReported(report), at) + self.fleet.settle()
        assert not told_off(told) and not {"impossible report", LEAP} & set(reasons(told))
        return told

    def beat(self):
        """A sign of life, in a long step."""
        first = Report(self.learner, 1, 0, (FragmentCounters(0, 0, 0),))
        self.fleet.handle(events.StepReported(self.fleet.reports.get(self.learner, first)))


def together(learners, steps, at):
    """All of them take so many steps; updates come before."""
    for m in learners:
        m.adopt()
    for m in learners:
        m.go(steps, at + 1e-6 * m.learner)


LEAP = "a step too far ahead of the other learners"


def reasons(told):
    return [action.reason for action in told if isinstance(action, actions.Drop)]


def told_off(told):
    return [a.event for a in told if isinstance(getattr(a, "event", None), events.NotMember)]


@pytest.mark.parametrize(
    ("way", "size", "parted"),
    [
        *((way, 3, "live") for way in LEAPS),
        ("in its first report", 4, "recovering"),
        ("in its first report", 32, "not there yet"),
        ("with small steps from the start", 4, "not there yet"),
        ("with small steps and a leap", 32, "recovering"),
    ],
)
def test_where_steps_are_long_a_leap_is_not_believed_before_one_was_measured(way, size, parted):
    """Clocks would be set forward, all rounds skipped, and the run end with nothing trained."""
    fleet = desk(size, 1 if parted != "live" else None)
    others = [Honest(fleet, m) for m in range(1, size)]
    begins = {"live": 0, "recovering": 200, "not there yet": 50}[parted]
    for second in range(900):
        fleet.now = float(second)
        if second in LEAPS[way]:
            fleet.report(0, LEAPS[way][second])
            fleet.settle()
        for m in others:
            if second < begins and parted == "recovering":
                fleet.handle(events.LearnerJoined(m.learner, 1))
            elif second == begins and parted == "recovering":
                fleet.handle(events.LearnerReady(m.learner, 1, 0, (0,)))
            elif second == begins and parted == "not there yet":
                fleet.enter(m.learner)
            elif second > begins and (second - begins) % SLOW == 0:
                m.adopt()
                m.go(1, at=float(second))
            elif second > begins and second % 15 == 0:
                m.beat()
        assert fleet.core.step <= 16 * second / SLOW + 2 * H
    assert len(fleet.core.live) >= size - 1


@pytest.mark.parametrize(("size", "interval"), [(1, 2), (2, 2), (3, 2), (4, 4), (32, 4)])
def test_learners_with_steps_of_a_tenth_of_a_millisecond_are_believed_from_the_first_report(size, interval):
    """Reports go out every 2 ms at most; what half of the learners say is believed at once."""
    fleet = desk(size, total_steps=200, interval=interval)
    learners = [Honest(fleet, m) for m in range(size)]
    for n in range(1, 11):
        together(learners, 20, at=0.002 * n)
        assert fleet.core.step >= 20 * (n - 1)
    assert all(clock == 200 for _, clock in fleet.core.clocks.values())


@pytest.mark.parametrize(
    ("size", "others", "step"), [(3, "never came", QUICK), (4, "died", 0.01), (32, "died", 1.0)]
)
def test_one_that_is_alone_goes_on_at_any_speed(size, others, step):
    fleet = desk(size, 1 if others == "never came" else size)
    if others == "died":
        for m in range(1, size):
            fleet.handle(events.LearnerLost(m, 1, "connection closed"), at=0.0)
    alone = Honest(fleet, 0)
    for second in range(1, 90):
        together([alone], int(1 / step), at=float(second))
    assert fleet.core.step > 88 / step - H


@pytest.mark.parametrize("size", [2, 4])
def test_one_that_compiles_for_minutes_holds_nobody_up(size):
    fleet = desk(size)
    others = [Honest(fleet, m) for m in range(1, size)]
    for second in range(1, 300):
        together(others, 10, at=float(second))
        if second % 15 == 0:
            Honest(fleet, 0).beat()
        assert fleet.core.step > 10 * (second - 1) - H


@pytest.mark.parametrize("size", [4, 32])
def test_the_first_that_has_compiled_waits_for_no_more_than_half_to_be_believed(size):
    """It is not dismissed meanwhile; what it did in the first minutes counts when others begin to step."""
    fleet = desk(size)
    first, *rest = (Honest(fleet, m) for m in range(size // 2))
    for second in range(1, 310):
        together([first, *rest] if second > 300 else [first], 10, at=float(second))
        for m in range(1, size):
            if second % 15 == 0 and second < 300:
                Honest(fleet, m).beat()
    assert fleet.core.step > 3080 - H


def test_a_last_report_that_was_not_believed_yet_counts_once_it_can():
    """Its learner says nothing more before the next sign of life, so the run would end that much later."""
    fleet = desk(3, total_steps=40, interval=4)
    for m in range(3):
        Honest(fleet, m).go(40, at=0.004 + m * 1e-5)
    assert all(clock == 40 for _, clock in fleet.core.clocks.values())


@pytest.mark.parametrize("size", [4, 32])
def test_once_learners_are_back_after_a_restart_none_leaps_before_a_step_is_measured(size):
    fleet = desk(size)
    state = SyncerState((40,), (960,), tuple((m, 1) for m in range(size)))
    fleet.core = SyncerCore(fleet.policy, T, state)
    for m in range(size):
        fleet.handle(events.LearnerJoined(m, 2, 970, (40,)), at=m / 10)
    assert len(fleet.core.live) == size
    for second in range(15, 300, 15):
        fleet.report(0, 600_000, at=float(second), incarnation=2)
        for m in range(1, size):
            report = Report(m, 2, 970, (FragmentCounters(40, 10, 100),))
            fleet.handle(events.StepReported(report))
        assert max(fleet.core.clocks.values())[1] <= 970 + H


def test_learners_beyond_m_are_witnesses_too_and_do_not_hold_the_others_up():
    fleet = desk(2, total_steps=T)
    for m in (2, 3, 4):
        fleet.enter(m)
    fleet.report(4, 600_000, at=50.0)
    assert fleet.core.clocks[4] == (1, 0)
    for second in range(51, 100):
        for m in range(4):
            told = fleet.report(m, second - 50, at=float(second))
            fleet.settle()
            assert m not in [action.learner for action in told if isinstance(action, actions.Drop)]
    assert 40 < fleet.core.step <= 49


def test_a_report_that_waits_ends_with_its_incarnation():
    fleet = desk(4)
    assert [record.values["step"] for record in fleet.report(0, 600, at=6.0)] == [600]  # that it waits
    assert fleet.report(0, 601, at=6.1) == []
    fleet.handle(events.LearnerLost(0, 1, "killed"), at=7.0)
    told = []
    for second in range(8, 78):
        for m in (1, 2, 3):
            told += fleet.report(m, 10 * (second - 7), at=float(second)) + fleet.settle()
    assert fleet.core.step > 600
    assert 0 not in [action.learner for action in told if isinstance(action, actions.Drop)]
    assert not any((0, 1) in action.receivers for action in told if isinstance(action, actions.Send))


def test_a_learner_whose_report_waits_is_silent_like_any_other():
    fleet = desk(4)
    fleet.report(0, 600, at=6.0)
    for second in range(7, 80):
        for m in (1, 2, 3):
            fleet.report(m, 0, at=float(second))  # in their first step
    assert fleet.core.live == (1, 2, 3)


def test_a_report_that_comes_late_does_not_take_the_place_of_one_that_waits():
    fleet = desk(4)
    fleet.report(0, 90, at=6.0)
    fleet.report(0, 20, at=6.1)
    assert fleet.core.clocks[0] == (1, 20)
    for m in (1, 2, 3):
        fleet.report(m, 80, at=7.0)
    assert fleet.core.clocks[0] == (1, 90)


def test_one_whose_clock_is_not_believed_is_not_waited_for_by_those_that_it_waits_for():
    """Where all are needed each waits for the others' rounds, so none would come as far as it."""
    fleet = Desk(T, 3, num_learners=3, num_fragments=1, interval=1, quorum=None, silence_timeout=10.0)
    for m in (1, 2):
        fleet.report(m, 1, at=1.0)
        fleet.offer(m, (1, 0))
    beyond = Report(0, 1, 30, (FragmentCounters(0, 1, 1),))
    told = [action for second in range(2, 20) for action in beats(fleet, beyond, second)]
    assert [values["learner"] for values in records(told, "learner_silent")] == [0]
    fleet.settle()
    assert fleet.core.versions == (1,)
    for m in (1, 2):
        fleet.report(m, 8, at=20.0)
    assert 0 in fleet.core.live, "others are far enough by now"


def beats(fleet, beyond, second):
    """What follows as all report once more what they reported."""
    told = fleet.handle(events.StepReported(beyond), at=float(second))
    return told + [a for m in (1, 2) for a in fleet.handle(events.StepReported(fleet.reports[m]))]
