"""How long things take: the same, or drawn about a mean."""

import random

import pytest

from ddiloco.virtual.durations import Steady, Varying, spread


def test_a_steady_duration_is_the_same_each_time():
    duration = Steady(2.5)
    assert [duration() for _ in range(3)] == [2.5] * 3


def test_without_deviation_the_mean_is_taken_and_nothing_is_drawn():
    rng = random.Random(1)
    before = rng.getstate()
    assert Varying(3.0, 0.0, rng)() == 3.0
    assert rng.getstate() == before


def test_a_varying_duration_follows_its_stream():
    durations, rng = Varying(2.0, 0.3, random.Random(5)), random.Random(5)
    assert [durations() for _ in range(4)] == [2.0 * max(0.1, rng.gauss(1.0, 0.3)) for _ in range(4)]


def test_no_time_comes_near_zero():
    rng = random.Random(0)
    factors = [spread(rng, 1.0) for _ in range(2000)]
    assert min(factors) == 0.1
    assert sum(factors) / len(factors) == pytest.approx(1.08, abs=0.06)
