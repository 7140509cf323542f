"""When learners are asked, and for which clock: by the front's speed, their own, and missed rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.asking import Front, OfferRequests
from ddiloco.protocol.membership import Member, Membership, MemberState
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.round import Round
from tests.protocol.desk import clocks


def member(learner=0, *, step, at, step_time=1.0, delivery=None, steps=None, **known):
    """A learner that came to `step` at the time `at`, with all of its steps on version 0."""
    count = step if steps is None else steps
    m = Member(learner, 1, heard_at=at, step=step, reported_at=at, **known)
    m.report = Report(learner, 1, step, (FragmentCounters(0, count, 10 * count),) * 4)
    m.places = {p: p for p in range(4)}
    if step_time is not None:
        m.step_time.add(step_time)
    if delivery is not None:
        m.delivery.add(delivery)
    return m


def of(*members):
    """A membership of live learners."""
    membership = Membership((0,))
    for m in members:
        step, m.state = m.step, MemberState.JOINING
        membership.begin(membership.admit(m), step, ())
    return membership


def asking_at(front, now, *, seconds=1.0, **policy):
    """Questions where the quorum has come to step `front` now, at a step every `seconds`."""
    settings = {"num_learners": 8, "num_fragments": 1, "interval": 24} | policy
    asking = OfferRequests(SyncPolicy(**settings))
    asking.front.move(0, now - front * seconds, joined=False)
    asking.front.move(front, now, joined=False)
    return asking


def ask(asking, live, due=24, now=22.0):
    """By learner, the clock that it is asked for."""
    return clocks(asking.ask(Round(RoundId(due, 0), 0), live, now))


# The front.


def test_the_front_measures_seconds_a_step_and_foresees_when_it_comes_to_one():
    front = Front()
    assert front.reaches(5, 1.0) is None
    front.move(1, 1.0, joined=True)
    assert front.reaches(5, 1.0) is None, "one step has no speed"
    front.move(3, 5.0, joined=False)
    assert front.step_time.value == 2.0
    assert front.reaches(5, 6.0) == 9.0
    assert front.reaches(4, 30.0) == 30.0, "what is late comes now at the earliest"


def test_learners_that_join_move_the_front_but_measure_nothing():
    front = Front()
    front.move(0, 0.0, joined=False)
    front.move(500, 1.0, joined=True)
    assert front.step_time.value is None, "they have not taken 500 steps in a second"
    front.move(502, 5.0, joined=False)
    assert (front.step, front.step_time.value) == (502, 2.0)


# When.


@pytest.mark.parametrize(("front", "asked"), [(21, False), (22, True), (23, True), (24, True)])
def test_a_learner_is_asked_two_steps_of_the_front_ahead(front, asked):
    live = [member(step=front, at=float(front))]
    assert bool(ask(asking_at(front, float(front)), live, now=float(front))) == asked


def test_a_learner_with_a_longer_lead_is_asked_earlier_and_rounds_are_open_for_it():
    near, far = member(0, step=20, at=20.0), member(1, step=20, at=20.0, lead=4.0)
    asking = asking_at(20, 20.0)
    asking.merging(Round(RoundId(19, 0), 0), of(near, far), 20.0)
    assert asking.furthest(of(near, far)) == 24
    assert list(ask(asking, [near, far], now=20.0)) == [1]


def test_where_all_are_waited_for_each_is_asked_by_its_own_clock():
    ahead, behind = member(0, step=22, at=22.0), member(1, step=12, at=22.0)
    asking = asking_at(12, 22.0, quorum=None)
    assert asking.furthest(of(ahead, behind)) == 24
    assert ask(asking, [ahead, behind]) == {0: 24}


# For which clock.


@pytest.mark.parametrize(
    ("learner", "clock"),
    [
        (member(step=22, at=22.0), 24),
        (member(step=22, at=22.0, step_time=None), 24),
        (member(step=21, at=21.4), 23),  # 0.4 s behind: its step 24 would come at 24.4
        (member(step=11, at=22.0, step_time=2.0), 12),
        (member(step=11, at=21.0, step_time=2.0), 12),
        (member(step=7, at=21.0, step_time=3.0), 8),
        (member(step=22, at=22.0, delivery=1.0), 23),
        (member(step=22, at=22.0, delivery=9.0), 22),
        (member(step=22, at=22.0, margin=0.5), 23),
        (member(step=11, at=22.0, step_time=2.0, margin=0.5), 11),
    ],
    ids=[
        "in step",
        "of unknown speed",
        "a little late",
        "twice as slow",
        "in mid-step",
        "three times as slow",
        "far",
        "farther than the round",
        "that missed rounds",
        "slow that missed rounds",
    ],
)
def test_a_learner_is_asked_for_the_clock_at_which_its_offer_comes_when_the_quorum_does(learner, clock):
    """The quorum has come to step 22 at 22 s, a step a second: step 24 is due at 24 s."""
    assert ask(asking_at(22, 22.0), [learner]) == {0: clock}


def test_where_all_are_waited_for_everyone_is_asked_for_the_due_step():
    slow = member(step=22, at=22.0, step_time=9.0, delivery=5.0, margin=3.0)
    assert ask(asking_at(22, 22.0, quorum=None), [slow]) == {0: 24}


def test_those_that_are_more_than_a_step_short_as_the_window_opens_are_asked_for_what_they_have():
    asking, r = asking_at(22, 22.0), Round(RoundId(24, 0), 0)
    live = [member(learner, step=22, at=22.0) for learner in range(3)]
    asking.ask(r, live, 22.0)
    live[0].step = 23  # a step short: its offer comes
    del r.owed[2]  # it has given its offer
    assert clocks(asking.ask_late(r, of(*live))) == {1: 0}


@given(
    due=st.integers(1, 200),
    short=st.integers(0, 2),
    behind=st.integers(0, 300),
    at=st.floats(0.0, 50.0),
    seconds=st.floats(1e-3, 100.0),
    step_time=st.none() | st.just(0.0) | st.floats(1e-9, 1e3),
    delivery=st.none() | st.floats(0.0, 1e4),
    margin=st.floats(0.0, 50.0),
    quorum=st.sampled_from([1, None]),
)
def test_the_clock_is_never_past_the_due_step_nor_before_what_the_learner_has_reported(
    due, short, behind, at, seconds, step_time, delivery, margin, quorum
):
    now = 1000.0
    m = member(step=max(0, due - behind), at=now - at, delivery=delivery, step_time=step_time, margin=margin)
    m.lead = 24.0
    asking = asking_at(max(0, due - short), now, seconds=seconds, quorum=quorum)
    for clock in ask(asking, [m], due, now).values():
        assert m.step <= clock <= due


# What is learned.


def test_a_learner_that_misses_a_round_is_asked_a_step_earlier_and_for_a_step_less():
    asking, r, m = asking_at(22, 22.0), Round(RoundId(24, 0), 0), member(step=22, at=22.0)
    asking.ask(r, [m], 22.0)
    asking.merging(r, of(m), 24.0)
    assert (m.lead, m.margin) == (3.0, 1.0)


def test_leads_and_margins_that_grow_stay_within_the_interval():
    asking, m = asking_at(22, 22.0, interval=12), member(step=22, at=22.0)
    for _ in range(100):
        r = Round(RoundId(24, 0), 0)
        asking.ask(r, [m], 22.0)
        asking.merging(r, of(m), 24.0)
    assert (m.lead, m.margin) == (12.0, 3.0)


@pytest.mark.parametrize(("arrived_at", "margin"), [(22.5, 0.45), (23.5, 0.5)])
def test_a_learner_with_more_than_a_step_to_spare_is_asked_for_more_the_next_time(arrived_at, margin):
    asking, r = asking_at(22, 22.0), Round(RoundId(24, 0), 0)
    m = member(step=22, at=22.0, margin=0.5, lead=5.0)
    asking.ask(r, [m], 22.0)
    offer = Contribution(0, 1, 0, 0, 22, 22, 220)
    asking.arrived(m, RoundId(24, 0), offer, arrived_at)
    r.arrived[0] = offer
    asking.merging(r, of(m), 24.0)
    assert m.margin == pytest.approx(margin)
    assert m.lead == pytest.approx(4.9)


def test_leads_and_margins_that_shrink_stop_where_they_began():
    asking, m = asking_at(22, 22.0), member(step=22, at=22.0, margin=0.1, lead=2.1)
    offer = Contribution(0, 1, 0, 0, 22, 22, 220)
    for _ in range(9):
        r = Round(RoundId(24, 0), 0)
        asking.ask(r, [m], 22.0)
        asking.arrived(m, RoundId(24, 0), offer, 22.0)
        r.arrived[0] = offer
        asking.merging(r, of(m), 24.0)
    assert (m.lead, m.margin) == (2.0, 0.0)


def test_a_delivery_takes_from_the_report_of_the_offered_step_until_the_offer_is_here():
    asking, m = asking_at(22, 22.0), member(step=22, at=22.0)
    asking.arrived(m, RoundId(24, 0), Contribution(0, 1, 0, 0, step=22, steps=22, tokens=220), 22.75)
    assert m.delivery.value == 0.75
    m = member(step=22, at=22.0)
    asking.arrived(m, RoundId(24, 0), Contribution(0, 1, 0, 0, step=20, steps=20, tokens=200), 22.75)
    assert m.delivery.value == 2.75, "it was made two steps before the last report"


def test_a_question_that_came_after_the_step_that_it_was_about_is_asked_earlier_the_next_time():
    asking, r, m = asking_at(22, 22.0), Round(RoundId(24, 0), 0), member(step=22, at=22.0)
    asking.ask(r, [m], 22.0)
    asking.arrived(m, RoundId(24, 0), Contribution(0, 1, 0, 0, step=24, steps=24, tokens=240), 24.0)
    assert m.lead == 2.0
    asking.arrived(m, RoundId(24, 0), Contribution(0, 1, 0, 0, step=27, steps=27, tokens=270), 27.0)
    assert m.lead == 5.0


def test_so_is_one_whose_reports_were_of_an_older_version_by_then():
    """It is so far away that the version had not come to it, and its offers miss their rounds."""
    asking, r, m = asking_at(4, 4.0), Round(RoundId(24, 0), 1), member(step=4, at=4.0, lead=20.0)
    assert m.version(0) == 0
    asking.ask(r, [m], 4.0)
    asking.arrived(m, RoundId(24, 0), Contribution(0, 1, 0, 1, step=27, steps=22, tokens=220), 37.0)
    assert m.lead == 23.0


def test_an_offer_for_a_round_before_says_nothing_of_the_next_request():
    asking, m = asking_at(22, 22.0), member(step=22, at=22.0)
    asking.ask(Round(RoundId(24, 0), 0), [m], 22.0)
    asking.arrived(m, RoundId(12, 0), Contribution(0, 1, 0, 0, step=27, steps=22, tokens=220), 27.0)
    assert (m.lead, m.asked[0].arrived_at, m.lag.value) == (2.0, None, None)


def test_an_offer_that_comes_once_its_learner_is_asked_for_the_next_round_is_measured():
    """Else only those that came soon would say how late it is."""
    asking, m = asking_at(22, 22.0), member(step=22, at=22.0, lead=26.0)
    asking.ask(Round(RoundId(24, 0), 0), [m], 22.0)
    m.asked[0].quorum_at = 24.0
    for _ in range(2):  # as after an offer that failed
        asking.ask(Round(RoundId(48, 0), 1, unasked={0}), [m], 40.0)
    asking.arrived(m, RoundId(24, 0), Contribution(0, 1, 0, 0, step=24, steps=22, tokens=220), 41.0)
    assert (m.lag.value, m.asked[0].arrived_at) == (17.0, None)
