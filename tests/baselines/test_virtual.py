"""One synchronous job in virtual time: steps against closed forms, arrays against the local driver's."""

import functools
import threading

import pytest

from ddiloco.baselines import virtual as virtual_baseline
from ddiloco.baselines.wall import BaselineRun
from ddiloco.goodput.accounting import State
from ddiloco.goodput.jobs import Interruption
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.run.recipes import assembly_of
from ddiloco.telemetry import records
from ddiloco.virtual import from_settings as virtual_fleet
from tests.virtual_runs import run_timed, run_virtual, virtual
from tests.workbench import devices, experiment

NEVER = 1e9
MODEL = {
    "chips_per_slice": 2,
    "detection_seconds": 1.0,
    "downscale_seconds": 2.0,
    "upscale_seconds": 1.0,
    "upscale_wait_seconds": 3.0,
    "restart_seconds": 4.0,
    "step_seconds": 0.0,  # nothing is done again
    "spare_share": 0.25,
}


@pytest.fixture
def without_arrays(data_dir):
    """Runs a job that is only timed."""

    def run(algorithm, sync=None, **v):
        groups = {"sync": sync} if sync else {}
        return run_timed(virtual(data_dir, algorithm, virtual=v, **groups))

    return run


@pytest.fixture
def interruptions(monkeypatch):
    """Puts a list in the place of drawn interruptions."""

    def listed(*rows):
        found = [Interruption(*row) for row in rows]
        monkeypatch.setattr(virtual_fleet, "draw_interruptions", lambda *drawn: found)

    return listed


@pytest.fixture
def extra(monkeypatch):
    """Puts a list in the place of drawn spare capacity."""

    def listed(*rows):
        monkeypatch.setattr(virtual_baseline, "draw_extra", lambda *drawn: list(rows))

    return listed


def step_ends(*speeds):
    """When each of 12 seconds of work is done; `speeds`: (time, speed) from each time on, sorted."""
    ends, work = [], 0.0
    for (time, speed), (until, _) in zip(speeds, [*speeds[1:], (float("inf"), 0.0)], strict=True):
        while speed and len(ends) < 12 and time + (len(ends) + 1 - work) / speed <= until:
            ends.append(time + (len(ends) + 1 - work) / speed)
        work += (until - time) * speed if until < float("inf") else 0.0
    return ends


def times(run):
    return [record.time for record in run.steps(0)]


def test_an_elastic_job_takes_the_closed_form_time_for_a_failure_and_wastes_what_it_should(
    without_arrays, interruptions
):
    interruptions((2.5, 0, 10.0))
    run = without_arrays("elastic_data_parallel", availability="failures", num_chips=8, failures=MODEL)
    # 1 s to detect, 2 to downscale; 3/4 of the chips until 3 s after the slice is back; 1 to upscale.
    expected = step_ends((0.0, 1.0), (2.5, 0.0), (5.5, 0.75), (13.0, 0.0), (14.0, 1.0))
    assert times(run) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] == 17.875
    allocated = 8 * 17.875
    assert run.timelines.goodput(run.seconds) == pytest.approx(8 * 12 / allocated, rel=1e-12)
    lost = {name: share * allocated for name, share in run.timelines.lost(run.seconds).items() if share}
    assert lost == pytest.approx({"detecting": 6.0, "reconfiguring": 18.0, "failed": 23.0}, rel=1e-12)


def test_a_job_without_elasticity_stands_still_and_starts_again_on_its_spares(without_arrays, interruptions):
    interruptions((2.5, 0, NEVER))
    run = without_arrays("data_parallel", availability="failures", num_chips=8, failures=MODEL)
    # 6 of 8 chips work at all.
    expected = step_ends((0.0, 0.75), (2.5, 0.0), (7.5, 0.75))
    assert times(run) == pytest.approx(expected, rel=1e-12)
    allocated = 8 * 21.0
    assert run.timelines.goodput(run.seconds) == pytest.approx(8 * 12 / allocated, rel=1e-12)
    lost = {name: share * allocated for name, share in run.timelines.lost(run.seconds).items() if share}
    assert lost == pytest.approx({"detecting": 6.0, "reconfiguring": 24.0, "standby": 42.0}, rel=1e-12)


def test_an_elastic_job_stands_still_whenever_chips_come_or_go_and_is_faster_between(without_arrays, extra):
    extra((0.0, 0), (3.5, 1), (9.25, 0))
    spare = {"availability": "spare_capacity", "spare_capacity": {"extra_learners": 2}, "resize_seconds": 2.0}
    run = without_arrays("elastic_data_parallel", **spare)
    expected = step_ends((0.0, 1.0), (3.5, 0.0), (5.5, 1.5), (9.25, 0.0), (11.25, 1.0))
    assert times(run) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] == 14.125
    # 8 chips always, 4 more from 3.5 to 9.25; of these 12 stand still for 2 s, and 8 for another 2.
    stood = 12 * 2 + 8 * 2
    allocated = 8 * 14.125 + 4 * (9.25 - 3.5)
    assert run.timelines.goodput(run.seconds) == pytest.approx(1 - stood / allocated, rel=1e-12)


def test_changes_within_a_resize_wait_for_it_and_what_came_and_went_meanwhile_costs_nothing(
    without_arrays, extra
):
    extra((0.0, 0), (3.5, 1), (4.0, 2), (4.5, 1), (8.25, 2), (9.0, 0))
    spare = {"availability": "spare_capacity", "spare_capacity": {"extra_learners": 2}, "resize_seconds": 2.0}
    run = without_arrays("elastic_data_parallel", **spare)
    speeds = ((0.0, 1.0), (3.5, 0.0), (5.5, 1.5), (8.25, 0.0), (12.25, 1.0))  # two resizes without a gap
    assert times(run) == pytest.approx(step_ends(*speeds), rel=1e-12)


def test_a_job_goes_at_its_slowest_learners_speed_and_the_others_chips_wait(without_arrays):
    run = without_arrays("data_parallel", step_seconds=(1.0, 3.0))
    assert times(run) == pytest.approx([3.0 * n for n in range(1, 13)])
    assert run.timelines.goodput(run.seconds) == pytest.approx(2 / 3, rel=1e-12)
    assert run.timelines.lost(run.seconds)["waiting_for_peers"] == pytest.approx(1 / 3, rel=1e-12)


def test_a_steps_exchange_takes_what_a_ring_takes_beyond_the_backward_pass(data_dir, without_arrays):
    """Four learners of a second a step: 2 * 3/4 * 2 bytes a parameter over the slowest link, and 6 hops."""
    num_params = assembly_of(virtual(data_dir, "data_parallel")).num_params
    slow = 3.0 * num_params / 5.0  # bytes a second: 5 s for a step's gradients
    links = {"bandwidth": (9 * slow, slow, 9 * slow, 9 * slow), "latency": (0.25, 0.0, 0.0, 0.0)}
    run = without_arrays("data_parallel", sync={"num_learners": 4}, **links)
    step = 1 / 3 + 5.0 + 6 * 0.25
    assert times(run) == pytest.approx([step * n for n in range(1, 13)], rel=1e-12)
    lost = {name: share for name, share in run.timelines.lost(run.seconds).items() if share}
    assert lost == pytest.approx({"waiting_for_network": 1 - 1 / step}, rel=1e-12)


def test_an_exchange_does_not_go_on_while_the_job_stands_still(data_dir, without_arrays, interruptions):
    interruptions((0.5, 0, NEVER))  # in the first step, whose chips stand still for 3 s
    num_params = assembly_of(virtual(data_dir, "data_parallel")).num_params
    failing = {"availability": "failures", "num_chips": 8, "failures": MODEL}
    run = without_arrays("elastic_data_parallel", bandwidth=(num_params / 2,), **failing)  # 4 s for a step
    took = 0.5 + 0.5 / 0.75
    assert times(run)[0] == pytest.approx(3.0 + took / 3 + 4.0, rel=1e-12)


def test_an_exchange_that_a_failure_interrupts_is_a_wait_also_after_it(
    data_dir, without_arrays, interruptions
):
    interruptions((2.0, 0, NEVER))  # a second into the first exchange, of 10/3
    num_params = assembly_of(virtual(data_dir, "data_parallel")).num_params
    failing = {"availability": "failures", "num_chips": 8, "failures": MODEL}
    run = without_arrays("elastic_data_parallel", bandwidth=(num_params / 2,), **failing)
    end = 1 / 3 + 4.0 + 3.0 + 11 * (1 / 3 / 0.75 + 4.0)
    assert times(run)[-1] == pytest.approx(end, rel=1e-12)
    useful = 8 * 1.0 + 11 * 6 / 0.75
    assert run.timelines.goodput(run.seconds) == pytest.approx(useful / (8 * end), rel=1e-12)


# With arrays.


@pytest.fixture(scope="module")
def run(data_dir):
    return functools.cache(lambda algorithm, **v: run_virtual(virtual(data_dir, algorithm, virtual=v)))


def test_data_parallel_gives_the_same_parameters_under_both_drivers(run, data_dir):
    taken, ours = [], run("data_parallel")
    with devices(1):
        assembly = assembly_of(experiment(data_dir, "data_parallel"))
        theirs = BaselineRun(assembly, taken.append, threading.Event()).run()
    assert ours.sha256 == parameters_sha256(theirs.params)
    assert ours.outcome.eval_loss == theirs.eval_loss
    tokens = [(r.step, r.tokens) for r in taken if isinstance(r, records.StepDone)]
    assert [(r.step, r.tokens) for r in ours.steps(0)] == tokens


def test_failures_cost_a_job_time_and_change_nothing_of_what_it_learns(data_dir, run, interruptions):
    interruptions((2.5, 0, 10.0))
    failing = {"availability": "failures", "num_chips": 8, "failures": MODEL}
    elastic = run_virtual(virtual(data_dir, "elastic_data_parallel", virtual=failing))
    assert elastic.seconds == 17.875
    assert elastic.sha256 == run("data_parallel").sha256
    assert (State.RECONFIGURING, 6) in [(state, chips) for _, state, chips in elastic.states(0)]


def test_a_job_that_stands_still_for_good_ends_with_what_it_learnt_until_then(data_dir, interruptions):
    interruptions(*((2.5, slice, NEVER) for slice in range(4)))
    failing = {"availability": "failures", "num_chips": 8, "failures": MODEL}
    run = run_virtual(virtual(data_dir, "elastic_data_parallel", virtual=failing))
    assert run.outcome.failure == "the job stands still from 2.5 virtual seconds on"
    assert run.of(records.Evaluated)[-1].tokens == sum(run.tokens.values())
    assert times(run) == [1.0, 2.0]
    assert (run.outcome.finished, run.outcome.step) == (False, 2)


@pytest.mark.parametrize("lives", ["failures", "spare_capacity"])
def test_failures_and_capacity_are_drawn_for_as_long_as_a_job_takes_that_waits_for_its_links(
    lives, data_dir, monkeypatch
):
    drawn = []
    draws = {
        "failures": (virtual_fleet, "draw_interruptions"),
        "spare_capacity": (virtual_baseline, "draw_extra"),
    }
    module, name = draws[lives]
    monkeypatch.setattr(
        module, name, lambda *args: drawn.append(args[-1]) or [(0.0, 0)] * (lives != "failures")
    )
    settings = {"availability": lives, "bandwidth": (1.0,), "failures": MODEL}
    e = virtual(data_dir, "elastic_data_parallel", virtual=settings)
    num_params = assembly_of(e).num_params
    virtual_baseline.JobClock(e, num_params, lambda record: None)
    assert drawn == [virtual_fleet.horizon(e, virtual_baseline.exchange_seconds(e, num_params))]
    assert drawn[0] > 2 * e.train.steps * virtual_baseline.exchange_seconds(e, num_params)
