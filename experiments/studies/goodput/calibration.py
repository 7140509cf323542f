"""Fits the few times of the failure model that nobody published to the paper's table of goodput.

One least-squares fit on all cells at once, in closed form; no parameter belongs to a cell. What is not
fitted is fixed at plausible values, those of `FailureModel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from scipy.optimize import least_squares

from ddiloco.goodput.failures import FailureModel
from experiments.studies.goodput.published import CHIPS, GOODPUT_PERCENT
from experiments.studies.goodput.simulator import Simulation, simulate
from experiments.studies.goodput.systems import system_of

# Names of `FailureModel`, where the search begins, and the least and largest values.
FREE = {
    "downscale_seconds": (10.0, 0.0, 120.0),
    "upscale_seconds": (10.0, 0.0, 120.0),
    "upscale_wait_seconds": (60.0, 0.0, 600.0),
    "restart_seconds": (60.0, 0.0, 1200.0),
    "spare_share": (0.05, 0.0, 0.3),
}


@dataclasses.dataclass(frozen=True)
class CellFit:
    """A cell of the table and what a model makes of it, both in percent."""

    system: str
    num_chips: int
    published: float
    fitted: float

    @property
    def error(self) -> float:
        """Points by which the model is above the table."""
        return self.fitted - self.published


def calibrate(fixed: FailureModel, chips: Iterable[int] = CHIPS) -> FailureModel:
    """The model with the free values that fit the table's columns of those chip counts best."""
    columns = tuple(chips)
    units = np.array([start for start, _, _ in FREE.values()])

    def errors(values: np.ndarray) -> list[float]:
        return [cell.error for cell in fits(_with(fixed, values * units), columns)]

    found = least_squares(
        errors,
        np.ones(len(FREE)),
        bounds=([low for _, low, _ in FREE.values()] / units, [high for _, _, high in FREE.values()] / units),
    )
    return _with(fixed, found.x * units)


def fits(model: FailureModel, chips: Iterable[int] = CHIPS) -> list[CellFit]:
    """The table's cells of those chip counts beside the closed forms."""
    return [
        CellFit(label, count, percent, 100.0 * (system_of(label).analytic_goodput(model, count) or 0.0))
        for count in chips
        for label, percent in ((label, row[CHIPS.index(count)]) for label, row in GOODPUT_PERCENT.items())
    ]


def predictions(fixed: FailureModel) -> list[CellFit]:
    """Each column of the table as predicted from the others: leave one chip count out."""
    found = []
    for left_out in CHIPS:
        model = calibrate(fixed, [count for count in CHIPS if count != left_out])
        found += fits(model, [left_out])
    return found


def checks(model: FailureModel, days: float) -> list[CellFit]:
    """The table's cells beside the event engine's over this number of days, five seeds."""
    cells = simulate(Simulation(CHIPS, tuple(GOODPUT_PERCENT), days=days, failures=model))
    percents = {(cell.label, cell.num_chips): 100.0 * cell.goodput for cell in cells}
    return [dataclasses.replace(cell, fitted=percents[cell.system, cell.num_chips]) for cell in fits(model)]


def rms(cells: Iterable[CellFit]) -> float:
    """Root of the mean squared error, in points."""
    return float(np.sqrt(np.mean([cell.error**2 for cell in cells])))


def largest(cells: Iterable[CellFit]) -> float:
    """The largest error, in points."""
    return max(abs(cell.error) for cell in cells)


def _with(model: FailureModel, values: np.ndarray) -> FailureModel:
    return dataclasses.replace(model, **dict(zip(FREE, values.tolist(), strict=True)))
