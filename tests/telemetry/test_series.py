"""Curves, slots, lanes and durations: bounded, and true to what was put in."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.telemetry.series import Curve, Lane, Performance, Slots, StateSpan, coarse, performance_summary

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


def test_sums_stay_the_same_when_slots_get_wider():
    slots = Slots(100.0, capacity=8, width=1.0)
    for second in range(1000):
        slots.add(100.0 + second, {"tokens": 2.0})
    assert slots.width == 128.0 and slots.used == 8
    assert slots.sums("tokens") == [256.0] * 7 + [208.0]


def test_a_lane_shows_when_a_learner_stood_still():
    lane = Lane()
    lane.enter("stepping", 0.0)
    lane.hung(10.0, 30.0)
    lane.enter("dead", 40.0)
    assert lane.spans(50.0, 10) == [
        StateSpan("stepping", 0.0, 10.0),
        StateSpan("hung", 10.0, 30.0),
        StateSpan("stepping", 30.0, 40.0),
        StateSpan("dead", 40.0, 50.0),
    ]


def test_a_clock_that_is_set_back_does_not_turn_a_span_round():
    lane = Lane()
    lane.enter("stepping", 10.0)
    lane.enter("dead", 5.0)
    assert lane.spans(20.0, 10) == [StateSpan("dead", 10.0, 20.0)]


def test_a_lane_of_many_changes_is_bounded_and_covers_all_its_time():
    lane = Lane(capacity=64)
    for second in range(10_000):
        lane.enter("stepping" if second % 2 else "waiting", float(second))
    spans = lane.spans(10_000.0, 32)
    assert len(spans) <= 32 and len(lane._spans) <= 65
    assert spans[0].start == 0.0 and spans[-1].end == pytest.approx(10_000.0)
    assert all(before.end == pytest.approx(after.start) for before, after in itertools.pairwise(spans))


def test_a_short_outage_is_seen_in_a_coarse_lane():
    told = [("stepping", 0.0, 47.0), ("dead", 47.0, 48.0), ("stepping", 48.0, 100.0)]
    spans = [StateSpan(*one) for one in told]
    assert "dead" in {span.state for span in coarse(spans, 20)}


def learner(*steps):
    found = Performance()
    for metrics in steps:
        found.add(metrics)
    return found


def test_quantiles_are_within_a_percent_of_the_exact_ones():
    seconds = np.random.default_rng(0).lognormal(-3.0, 2.0, 5001)
    figures = learner(*({"step_seconds": one} for one in seconds)).figures()
    for name, share in {"step_seconds_p50": 0.5, "step_seconds_p99": 0.99}.items():
        exact = np.quantile(seconds, share, method="inverted_cdf")
        assert figures[name] == pytest.approx(exact, rel=0.01)


def test_of_no_step_nothing_is_known():
    found = performance_summary({0: Performance(), 1: learner({"loss": 1.0})})
    assert found["mfu"] is found["step_seconds_p50"] is found["data_wait_share"] is None
    assert found["step_seconds_p99_by_learner"] == {0: None, 1: None} and found["peak_memory_bytes"] == {}


def test_a_step_weighs_as_much_as_it_took():
    fast = learner(*[{"step_seconds": 1.0, "data_wait_seconds": 0.5, "mfu": 0.4}] * 2)
    slow = learner({"step_seconds": 2.0, "data_wait_seconds": 0.0, "mfu": 0.2}, {"peak_bytes/3": 7.0})
    found = performance_summary({0: fast, 1: slow})
    assert found["mfu"] == pytest.approx(0.3) and found["mfu_by_learner"] == pytest.approx({0: 0.4, 1: 0.2})
    assert found["data_wait_share"] == pytest.approx(0.25)
    assert found["step_seconds_p50"] == pytest.approx(1.0, rel=0.01)
    assert found["step_seconds_p99_by_learner"][1] == pytest.approx(2.0, rel=0.01)
    assert found["peak_memory_bytes"] == {1: {"3": 7}}
