"""Curves of bounded length: what averaging neighbours keeps, and the mean of a curve's end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.observe.curves import Curve

values = st.lists(st.integers(-1000, 1000).map(float), max_size=300)
shares = st.floats(0.0, 1.0)


def curve_of(values, capacity):
    curve = Curve(capacity)
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    return curve


@given(values, st.integers(1, 20).map(lambda half: 2 * half))
def test_points_are_means_of_as_many_successive_values_each_and_few(values, capacity):
    steps, means = curve_of(values, capacity).points()
    assert len(means) == len(steps) <= capacity + 1
    stride = 1
    while len(values) >= (capacity + 1) * stride:
        stride *= 2
    groups = [values[start : start + stride] for start in range(0, len(values), stride)]
    assert means == pytest.approx([sum(group) / len(group) for group in groups])
    assert steps == [min((place + 1) * stride, len(values)) for place in range(len(groups))]


@given(values.filter(bool), shares)
def test_the_mean_of_the_end_is_exact_while_the_curve_is_short(values, share):
    wanted = max(1, round(share * len(values)))
    assert curve_of(values, 512).tail_mean(share) == pytest.approx(sum(values[-wanted:]) / wanted)


@given(values.filter(bool), shares, st.integers(1, 10).map(lambda half: 2 * half))
def test_the_mean_of_the_end_of_a_long_curve_takes_in_a_point_more_at_most(values, share, capacity):
    wanted = max(1, round(share * len(values)))
    stride = math.ceil(len(values) / capacity) * 2
    means = [sum(values[-n:]) / n for n in range(wanted, min(len(values), wanted + stride) + 1)]
    found = curve_of(values, capacity).tail_mean(share)
    assert any(found == pytest.approx(mean) for mean in means)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_own_point_only(bad):
    _, means = curve_of([1.0, bad, 3.0], 4).points()
    assert means[0] == 1.0 and math.isnan(means[1]) and means[2] == 3.0
    curve = curve_of([1.0, bad, 3.0], 4)
    assert curve.tail_mean(0.3) == 3.0
    assert math.isnan(curve.tail_mean(1.0))


def test_an_empty_curve_has_no_points_and_no_mean():
    assert Curve().points() == ([], [])
    assert math.isnan(Curve().tail_mean(0.5))
