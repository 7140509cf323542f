"""The committed failure model is what the calibration finds, and it reproduces the paper's table."""

import dataclasses

import pytest

from ddiloco.goodput.failures import FailureModel
from experiments.studies.goodput import calibration
from experiments.studies.goodput.systems import CHIPS, GOODPUT_PERCENT, published


def test_the_committed_values_are_those_that_the_calibration_finds():
    committed = FailureModel()
    found = calibration.calibrate(committed)
    for name in calibration.FREE:
        assert getattr(committed, name) == pytest.approx(getattr(found, name), rel=0.01), name
    others = {name: getattr(found, name) for name in calibration.FREE}
    assert dataclasses.replace(committed, **others) == found


def test_a_model_is_found_again_from_its_own_table(monkeypatch):
    truth = dataclasses.replace(FailureModel(), downscale_seconds=8.0, upscale_seconds=25.0, spare_share=0.1)
    columns = zip(
        *[[cell.fitted for cell in calibration.fits(truth, [chips])] for chips in CHIPS], strict=True
    )
    table = dict(zip(GOODPUT_PERCENT, columns, strict=True))
    monkeypatch.setattr(calibration, "GOODPUT_PERCENT", table)
    found = calibration.calibrate(FailureModel())
    for name in calibration.FREE:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-2)


def test_every_cell_is_fitted_within_two_points_and_each_is_foretold_by_those_of_other_sizes():
    assert calibration.largest(calibration.fits(FailureModel())) < 2.0
    assert calibration.rms(calibration.fits(FailureModel())) < 0.6
    assert calibration.largest(calibration.predictions(FailureModel())) < 2.5


def test_an_interval_has_the_fitted_value_in_its_middle_and_the_true_one_within(monkeypatch):
    widths = calibration.intervals(FailureModel())
    assert widths["downscale_seconds"] > FailureModel().downscale_seconds  # the table does not tell it from 0
    truth = dataclasses.replace(FailureModel(), upscale_seconds=20.0)
    cells = [calibration.fits(truth, [chips]) for chips in CHIPS]
    columns = zip(*[[round(cell.fitted) for cell in column] for column in cells], strict=True)
    monkeypatch.setattr(calibration, "GOODPUT_PERCENT", dict(zip(GOODPUT_PERCENT, columns, strict=True)))
    found, widths = calibration.calibrate(FailureModel()), calibration.intervals(FailureModel())
    for name in calibration.FREE:
        assert abs(getattr(found, name) - getattr(truth, name)) < widths[name], name


@pytest.mark.slow
def test_the_event_engine_is_within_two_points_of_every_cell():
    checked = calibration.checks(FailureModel(), days=2.0)
    assert len(checked) == 18
    assert calibration.largest(checked) < 2.0
    assert calibration.rms(checked) < 0.8


def test_the_table_is_asked_by_name_and_count():
    assert published("decoupled:8", 1_200_000) == 88
    assert published("data_parallel", 150_000) == 72
    assert published("decoupled:8", 600_000) is None
    assert published("decoupled:3", 150_000) is None
