"""The failure model, and the interruptions that a fleet has of it."""

import dataclasses
import math

import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.goodput.failures import FailureModel, divide
from ddiloco.goodput.jobs import Draws, Interruption, ListedInterruptions, draw_interruptions, job_chips
from tests.refusals import refusal

FLEET = FailureModel(chips_per_slice=4, mtbi_years=1e-3, return_seconds=300.0)


def test_a_fleet_has_as_many_interruptions_as_its_rate_says():
    model = dataclasses.replace(FLEET, return_seconds=0.0)
    found = draw_interruptions(model, 400, seed=1, horizon=50_000.0)
    for horizon in (10_000.0, 50_000.0):
        count, expected = sum(one.time < horizon for one in found), 400 * horizon / model.mtbi_seconds
        assert count == pytest.approx(expected, abs=4 * math.sqrt(expected))


def test_a_slice_is_struck_only_while_it_is_there():
    found = draw_interruptions(FLEET, 40, seed=3, horizon=1e5)
    assert len(found) > 50
    assert found == sorted(found, key=lambda one: one.time)
    assert {one.slice for one in found} == set(range(10))
    assert all(one.time < 1e5 for one in found)
    last = {}
    for one in found:
        assert one.returns_at > one.time >= last.get(one.slice, 0.0)
        last[one.slice] = one.returns_at
    gone = [one.returns_at - one.time for one in found]
    assert np.mean(gone) == pytest.approx(300.0, abs=4 * 300 / math.sqrt(len(gone)))


def test_a_lanes_draws_do_not_depend_on_who_draws_beside_it():
    alone, together = Draws([(7, 1)]), Draws([(7, 0), (7, 1)])
    drawn = []
    for turn in range(600):
        drawn.append(alone.take(np.array([0]))[0])
        lanes = np.array([0, 1]) if turn % 3 else np.array([1])
        assert together.take(lanes)[-1] == drawn[-1]
    assert len(set(drawn)) == 600
    assert np.mean(drawn) == pytest.approx(1.0, abs=4 / math.sqrt(600))


def test_a_listed_interruption_is_for_the_job_that_has_the_slice_and_a_spares_for_nobody():
    model = dataclasses.replace(FLEET, spare_share=0.2)
    fleet = divide(model, 40, 2, elastic=False)
    assert (fleet.slices_by_job, fleet.spares) == ((4, 4), 2)
    assert job_chips(model, 40, 2, elastic=False) == {0: 16, 1: 16, 2: 8}
    assert job_chips(model, 43, 3, elastic=True) == {0: 16, 1: 12, 2: 12}
    strikes = [Interruption(float(time), number, 99.0) for time, number in [(1, 8), (2, 4), (3, 3), (4, 9)]]
    assert ListedInterruptions(fleet, strikes).next.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtbi_years": 0}, "config.mtbi_years: is 0.0, but must be above 0.0"),
        ({"chips_per_slice": 0}, "config.chips_per_slice: is 0, but must be at least 1"),
        ({"spare_share": 1.0}, "config.spare_share: is 1.0, but must be at least 0.0 and below 1.0"),
        ({"detection_seconds": math.nan}, "config.detection_seconds: is nan, but must be at least 0.0"),
    ],
)
def test_an_impossible_model_is_told_in_one_line(change, message):
    assert refusal(ConfigError, build, FailureModel, change) == message
