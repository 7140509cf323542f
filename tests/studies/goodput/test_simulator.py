"""The event simulator: against closed forms, and what must hold whatever the failure model is."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.goodput.failures import YEAR, FailureModel
from experiments.studies.goodput.simulator import Simulation, simulate

SYSTEMS = ("data_parallel", "elastic_data_parallel", "decoupled:2", "decoupled:4", "decoupled:8")


def cells(chips, systems, days=1.0, seeds=3, quorum=None, **failures):
    return simulate(Simulation(chips, systems, days, seeds, quorum, FailureModel(**failures)))


def cell(chips, system, **settings):
    (only,) = cells((chips,), (system,), **settings)
    return only


def test_the_engine_agrees_with_the_closed_forms_and_goodput_falls_with_chips_and_rises_with_learners():
    sizes = (150_000, 600_000, 2_400_000)
    found = {(c.label, c.num_chips): c for c in cells(sizes, SYSTEMS)}
    for one in found.values():
        assert one.goodput == pytest.approx(one.analytic, abs=max(0.006, 1.5 * one.ci95)), one.label
    for chips in sizes:
        by_system = [found[system, chips].goodput for system in SYSTEMS]
        assert by_system == sorted(by_system)
    for system in SYSTEMS:
        by_size = [found[system, chips].goodput for chips in sizes]
        assert by_size == sorted(by_size, reverse=True)


def test_a_job_without_elasticity_is_a_renewal_process():
    found = cell(400_000, "data_parallel", days=4.0, spare_share=0.0, step_seconds=30.0)
    rate = 256 * (400_000 // 256) / YEAR
    assert found.goodput == pytest.approx(1 / (1 + rate * (10.0 + 58.7 + 15.0)), abs=0.01)
    assert found.lost["replaying"] == pytest.approx(rate * 15.0 * found.goodput, rel=0.1)
    assert found.uptime == pytest.approx(found.goodput, rel=1e-9)


def test_learners_of_one_slice_are_dead_until_it_is_back_and_restarted():
    hour = 3600 / YEAR
    settings = {"mtbi_years": hour, "chips_per_slice": 1, "return_seconds": 700.0, "restart_seconds": 200.0}
    found = cell(200, "decoupled:200", **settings)
    # Renewals of up for an hour, away for 700 s, restarts that fail now and then: exp(200/3600) tries each.
    tries = math.exp(200 / 3600)
    cycle = 3600 + 700 * tries + 3600 * (tries - 1)
    assert found.goodput == pytest.approx(3600 / cycle, abs=0.006)
    assert found.lost["failed"] == pytest.approx(700 * tries / cycle, abs=0.006)
    assert found.uptime == 1.0


def test_chips_of_different_speed_wait_for_the_slowest_of_their_job():
    alike, differing = (cell(1_200_000, "decoupled:4", days=0.5, chip_speed_variation=v) for v in (0.0, 0.02))
    # The largest of 300k normals is 4.57 on average: (1 + 1/b^2) of its quantile b, roughly.
    assert differing.goodput / alike.goodput == pytest.approx(1 / (1 + 0.02 * 4.62), abs=0.01)
    assert differing.lost["waiting_for_peers"] == pytest.approx(alike.goodput - differing.goodput, abs=0.01)
    assert differing.uptime == pytest.approx(alike.uptime, abs=0.005)
    assert (alike.lost["waiting_for_peers"], differing.analytic) == (0.0, None)


def test_a_quorum_of_one_is_there_as_long_as_anyone_steps_and_a_larger_one_for_less():
    one, three, all_of_them = (
        cell(2_400_000, "decoupled:4", days=0.2, quorum=quorum) for quorum in (1, 3, 4)
    )
    assert one.quorum_uptime == one.uptime < 1.0
    assert one.uptime > three.quorum_uptime + 0.1 > all_of_them.quorum_uptime + 0.2
    # Learners step 70% of the time, each by itself: all four 0.7^4 of it.
    assert all_of_them.quorum_uptime == pytest.approx(one.goodput**4, abs=0.03)
    assert cell(150_000, "data_parallel", days=0.1, quorum=4).quorum_uptime is None


def test_a_cell_does_not_depend_on_what_else_is_in_the_grid():
    together = cells((150_000, 600_000), ("data_parallel", "decoupled:4"), days=0.1)
    for found in together:
        assert cell(found.num_chips, found.label, days=0.1) == found


def test_one_seed_has_no_confidence_interval():
    assert cell(150_000, "data_parallel", seeds=1, days=0.1).ci95 is None


@st.composite
def models(draw):
    seconds = st.floats(0.0, 100.0)
    return FailureModel(
        mtbi_years=draw(st.floats(1e-4, 1e-2)),
        chips_per_slice=draw(st.integers(1, 8)),
        detection_seconds=draw(seconds),
        downscale_seconds=draw(seconds),
        upscale_seconds=draw(seconds),
        upscale_wait_seconds=draw(seconds),
        return_seconds=draw(st.floats(0.0, 2000.0)),
        restart_seconds=draw(seconds),
        spare_share=draw(st.floats(0.0, 0.9)),
        step_seconds=draw(seconds),
        chip_speed_variation=draw(st.sampled_from([0.0, 0.1])),
    )


@settings(max_examples=40)
@given(models(), st.integers(4, 20))
def test_whatever_the_model_shares_add_up_to_one(model, slices):
    chips = slices * model.chips_per_slice
    systems = ("data_parallel", "elastic_data_parallel", "decoupled:4")
    for found in simulate(Simulation((chips,), systems, 0.05, 2, 2, model)):
        assert found.goodput + sum(found.lost.values()) == pytest.approx(1.0, abs=1e-9)
        assert all(0.0 <= share <= 1.0 for share in (found.goodput, found.uptime, *found.lost.values()))
        assert found.goodput <= found.uptime + 1e-9
        assert found.quorum_uptime is None or found.quorum_uptime <= found.uptime
