"""A controller measures a fleet as it is, and retimes it where a play promises less loss."""

import dataclasses

import pytest

from ddiloco.outer.encoding import traffic
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from ddiloco.virtual.run import counting_fleet
from experiments.cli import program
from experiments.studies.planning.adapting import WINDOW, Meter, run
from experiments.studies.planning.fleets import FLEETS, ChangingFleet

LEARNERS = 2


@pytest.fixture(scope="module")
def experiment():
    config = program.load_config("configs/links.py:counted")
    config.sync.num_learners, config.train.steps = LEARNERS, 200
    return parse(config)


def test_what_is_measured_of_the_last_seconds_is_how_the_fleet_is_now(experiment):
    layout, meter = assembly_of(experiment).layout, Meter()
    need = sum(layout.bytes) / experiment.sync.interval
    e = ChangingFleet((1.0,), merge_seconds=0.3).of(experiment, need)
    sizes = traffic(layout, e.outer)
    fleet = counting_fleet(e, e.train.steps, sizes, meter)
    for link in (fleet.places[1].up, fleet.places[1].down):
        thin = dataclasses.replace(link.quality, bandwidth=need / 4)
        fleet.calendar.at(80.0, setattr, link, "quality", thin)
    fleet.run(stop=lambda: fleet.calendar.now > 90.0 + WINDOW)
    found = meter.measured(fleet, sizes)
    assert found.took.offers == {0: pytest.approx(1 / need, rel=0.2), 1: pytest.approx(4 / need, rel=0.2)}
    assert found.took.merge == pytest.approx(0.3, rel=0.1)
    assert [len(steps) for steps in found.taken.values()] == [pytest.approx(WINDOW, abs=8)] * LEARNERS
    again = found.play(e.sync, 144, since=48.0)
    assert again.shares[1] < again.shares[0] - 0.2
    fleet.fail(1)
    assert meter.measured(fleet, sizes).learners == [0]


@pytest.mark.slow
def test_over_wide_links_the_interval_becomes_short_once_and_stays(experiment):
    still, found = (
        run(experiment, FLEETS["wide links"], experiment.sync, adapts, half=150) for adapts in (False, True)
    )
    [(time, interval, gain)] = found.changes
    assert time < 150 and interval == 6 and gain > 0.3
    assert found.losses[1] < still.losses[1] - 0.5 and still.changes == ()
