"""The closed forms of the schedule against counting, for any number of fragments and any interval."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.schedule import Schedule

schedules = st.builds(Schedule, st.integers(1, 30), st.integers(1, 30))


def due_by_definition(schedule: Schedule, step: int) -> tuple[int, ...]:
    """Fragment p is due at the steps t >= 1 with t mod H = floor(p * H / P)."""
    p_count, h = schedule.num_fragments, schedule.interval
    return tuple(p for p in range(p_count) if step >= 1 and step % h == (p * h) // p_count)


@given(schedules, st.integers(-3, 100))
def test_the_fragments_due_are_those_of_the_definition(schedule, step):
    assert schedule.due(step) == due_by_definition(schedule, step)


@given(schedules, st.integers(0, 100), st.data())
def test_last_due_is_the_newest_step_found_by_looking_back(schedule, step, data):
    fragment = data.draw(st.integers(0, schedule.num_fragments - 1))
    found = [t for t in range(1, step + 1) if fragment in due_by_definition(schedule, t)]
    assert schedule.last_due(fragment, step) == max(found, default=0)


def test_at_the_last_step_all_fragments_are_due():
    schedule = Schedule(2, 4, last=7)
    assert [schedule.due(t) for t in range(1, 8)] == [(), (1,), (), (0,), (), (1,), (0, 1)]
    assert schedule.due(0) == ()


@given(schedules, st.integers(0, 60), st.integers(1, 60), st.data())
def test_next_due_is_the_first_step_found_by_looking_ahead(schedule, step, last, data):
    fragment = data.draw(st.integers(0, schedule.num_fragments - 1))
    with_end = dataclasses.replace(schedule, last=last)
    for one in (schedule, with_end) if step < last else (schedule,):
        found = next(t for t in itertools.count(step + 1) if fragment in one.due(t))
        assert one.next_due(fragment, step) == found
