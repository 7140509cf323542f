"""Fits the few times of the failure model that nobody published to the paper's table of goodput.

One least-squares fit on all cells at once, in closed form; no parameter belongs to a cell. What is not
fitted is fixed at plausible values, those of `FailureModel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from scipy.optimize import curve_fit
from scipy.special import stdtrit

from ddiloco.goodput.failures import FailureModel
from experiments.studies.goodput.simulator import Simulation, simulate
from experiments.studies.goodput.systems import CHIPS, GOODPUT_PERCENT, system_of

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


def calibrate(fixed: FailureModel, without: Iterable[CellFit] = ()) -> FailureModel:
    """The model with the free values that fit the table's cells best, all but those `without`."""
    values, _ = _search(fixed, without)
    return _with(fixed, values)


def intervals(fixed: FailureModel) -> dict[str, float]:
    """Half the 95% confidence interval of each free value (t distribution), as if errors were independent.

    From the fit's curvature: values of which only the sum is determined have wide ones.
    """
    _, covariance = _search(fixed)
    free = len(fits(fixed)) - len(FREE)
    return dict(zip(FREE, stdtrit(free, 0.975) * np.sqrt(np.diag(covariance)), strict=True))


def _search(fixed: FailureModel, without: Iterable[CellFit] = ()) -> tuple[np.ndarray, np.ndarray]:
    """The free values that fit best, and their covariance."""
    left_out = {(cell.system, cell.num_chips) for cell in without}
    units, low, high = np.transpose(list(FREE.values()))

    def kept(cells: Iterable[CellFit]) -> list[CellFit]:
        return [cell for cell in cells if (cell.system, cell.num_chips) not in left_out]

    def fitted(_: None, *values: float) -> list[float]:
        return [cell.fitted for cell in kept(fits(_with(fixed, values * units)))]

    published = [cell.published for cell in kept(fits(fixed))]
    begin, bounds = np.ones(len(FREE)), (low / units, high / units)
    values, covariance = curve_fit(fitted, None, published, begin, bounds=bounds)
    return values * units, covariance * np.outer(units, units)


def fits(model: FailureModel, chips: Iterable[int] = CHIPS) -> list[CellFit]:
    """The table's cells of those chip counts beside the closed forms."""
    return [
        CellFit(label, count, percent, 100.0 * (system_of(label).analytic_goodput(model, count) or 0.0))
        for count in chips
        for label, percent in ((label, row[CHIPS.index(count)]) for label, row in GOODPUT_PERCENT.items())
    ]


def predictions(fixed: FailureModel) -> list[CellFit]:
    """Each cell as predicted from those of jobs of other sizes.

    Cells with equally many chips a learner are one figure to the model, and are left out together.
    """
    found = {}
    cells = fits(fixed)
    for size in {_chips_a_job(cell) for cell in cells}:
        left_out = [cell for cell in cells if _chips_a_job(cell) == size]
        model = calibrate(fixed, left_out)
        found |= {cell: after for cell, after in zip(cells, fits(model), strict=True) if cell in left_out}
    return [found[cell] for cell in cells]


def _chips_a_job(cell: CellFit) -> float:
    return cell.num_chips / system_of(cell.system).num_learners


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
