"""Moving averages against their closed form; slack and grace at and beyond their bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.estimates import RATE, MovingAverage, grace

seconds = st.floats(0, 1e6)


def test_an_average_has_no_value_before_its_first_sample_and_starts_there():
    average = MovingAverage()
    assert average.value is None
    average.add(3.0)
    assert average.value == 3.0


@given(st.lists(seconds, min_size=1, max_size=20))
def test_an_average_weights_samples_geometrically(samples):
    average = MovingAverage()
    for sample in samples:
        average.add(sample)
    last = len(samples) - 1
    weights = [(1.0 if i == 0 else RATE) * (1 - RATE) ** (last - i) for i in range(last + 1)]
    expected = math.fsum(w * s for w, s in zip(weights, samples, strict=True))
    assert average.value == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.floats(0, 0.999), st.floats(-1e6, 1e6), seconds)
def test_grace_stays_between_nothing_and_its_cap_and_below_the_slack(gamma, spare, longest):
    window = grace(gamma, spare, longest)
    assert 0.0 <= window <= longest
    assert window == 0.0 if spare <= 0 else window <= spare
