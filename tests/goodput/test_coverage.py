"""Unions of intervals, against a count of every unit of time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.goodput import accounting
from ddiloco.goodput.accounting import Cover, covered

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def depths(intervals):
    """How many intervals hold in each unit of time."""
    return [sum(start <= t < start + length for start, length in intervals) for t in range(60)]


@given(INTERVALS, st.integers(1, 4))
def test_the_moments_covered_by_several_intervals_are_those_counted_one_by_one(intervals, depth):
    starts = np.array([start for start, _ in intervals], float)
    ends = np.array([start + length for start, length in intervals], float)
    found = covered(starts, ends, depth)
    inside = {t for start, end in zip(*found, strict=True) for t in range(int(start), int(end))}
    assert inside == {t for t, n in enumerate(depths(intervals)) if n >= depth}
    edges = np.stack(found, 1).ravel()
    assert (np.diff(edges) > 0).all()


@given(INTERVALS, st.integers(0, 8))
def test_a_cover_that_joins_now_and_then_knows_the_length_of_the_union(intervals, last):
    cover, kept = Cover(), accounting._PENDING
    accounting._PENDING = 2
    try:
        for start, length in intervals:
            cover.add(start, start + length)
    finally:
        accounting._PENDING = kept
    assert cover.seconds([(60 - last, 60)]) == sum(n > 0 for n in depths([*intervals, (60 - last, last)]))
