"""Virtual time: order, ties, and no call into the past."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.virtual.calendar import Calendar

TIMES = st.lists(st.floats(0, 1e9) | st.integers(0, 3).map(float), max_size=30)


def run_out(calendar):
    while calendar.advance():
        pass


@given(TIMES)
def test_calls_come_in_the_order_of_their_times_and_ties_in_the_order_of_their_entry(times):
    calendar, made = Calendar(), []
    for number, time in enumerate(times):
        calendar.at(time, lambda *entry: made.append((*entry, calendar.now)), time, number)
    run_out(calendar)
    assert made == [(time, number, time) for time, number in sorted((t, n) for n, t in enumerate(times))]
    assert calendar.happened == len(times)
    assert calendar.now == max(times, default=0.0)


def test_what_a_call_enters_for_its_own_time_comes_after_what_was_there():
    calendar, made = Calendar(), []
    calendar.at(2.0, lambda: calendar.after(0.0, made.append, "entered later"))
    calendar.at(2.0, made.append, "entered before")
    run_out(calendar)
    assert made == ["entered before", "entered later"]
    assert calendar.now == 2.0


@pytest.mark.parametrize("time", [0.999, -math.inf, math.nan])
def test_no_call_is_made_in_the_past_or_at_no_time(time):
    calendar = Calendar()
    calendar.at(1.0, lambda: None)
    run_out(calendar)
    with pytest.raises(ValueError, match=r"is not a time from 1\.0 on"):
        calendar.at(time, lambda: None)
    assert calendar.advance() is False


def test_a_delay_counts_from_now_and_may_not_be_negative():
    calendar, made = Calendar(), []
    calendar.at(5.0, lambda: calendar.after(2.5, lambda: made.append(calendar.now)))
    run_out(calendar)
    assert made == [7.5]
    with pytest.raises(ValueError):
        calendar.after(-0.001, lambda: None)
