"""Scavenging: how many extra learners there are, against the closed form of the model."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError, build
from ddiloco.goodput.failures import SpareCapacity, draw_extra

YEARS = 6e7  # seconds: 100,000 draws at the default dwell


def share_of_time(counts, horizon, wanted):
    ends = [time for time, _ in counts[1:]] + [horizon]
    there = sum(end - time for (time, count), end in zip(counts, ends, strict=True) if wanted(count))
    return there / horizon


@pytest.mark.parametrize(("extra", "base"), [(1, 1), (4, 2), (8, 4)])
def test_on_average_as_many_are_there_as_the_closed_form_says(extra, base):
    model = SpareCapacity(extra_learners=extra)
    counts = draw_extra(model, base, seed=1, horizon=YEARS)
    for j in range(1, extra + 1):
        expected = model.free_share * math.exp(-j / (base * model.mean_size))
        found = share_of_time(counts, YEARS, lambda count, j=j: count >= j)
        assert found == pytest.approx(expected, abs=0.01), j


MODELS = st.builds(
    SpareCapacity,
    extra_learners=st.integers(0, 6),
    free_share=st.floats(0, 1),
    mean_size=st.floats(0.1, 5),
    dwell_seconds=st.floats(10, 1000),
)


@given(MODELS, st.integers(1, 4), st.integers(0, 99))
def test_counts_begin_at_time_0_change_at_every_entry_and_stay_within_bounds(model, base, seed):
    counts = draw_extra(model, base, seed, horizon=3000.0)
    times = [time for time, _ in counts]
    assert times[0] == 0.0
    assert times == sorted(set(times))
    assert times[-1] < 3000.0
    assert all(a != b for (_, a), (_, b) in itertools.pairwise(counts))
    assert all(0 <= count <= model.extra_learners for _, count in counts)


@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 3))
def test_fleets_with_more_extra_learners_meet_the_same_capacity(seed, few, base):
    def at_every_time(extra):
        counts = draw_extra(SpareCapacity(extra_learners=extra), base, seed, horizon=5000.0)
        return lambda time: [count for begin, count in counts if begin <= time][-1]

    small, large = at_every_time(few), at_every_time(few + 3)
    for time in range(0, 5000, 97):
        assert small(time) == min(few, large(time))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("extra_learners", -1, "must be at least 0"),
        ("free_share", 1.1, "must be at least 0.0 and at most 1.0"),
        ("mean_size", 0.0, "must be above 0.0"),
        ("dwell_seconds", 0.0, "must be above 0.0"),
    ],
)
def test_an_impossible_setting_is_told_by_its_name(name, value, told):
    with pytest.raises(ConfigError) as caught:
        build(SpareCapacity, {name: value}, "config.virtual.spare_capacity")
    assert str(caught.value) == f"config.virtual.spare_capacity.{name}: is {value}, but {told}"
