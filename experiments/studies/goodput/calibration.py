"""Fits the few times of the failure model that nobody published to the paper's table of goodput.

One least-squares fit on all cells at once, in closed form; no parameter belongs to a cell. What is not
fitted is fixed at plausible values, those of `FailureModel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from scipy.optimize import OptimizeResult, least_squares
from scipy.special import stdtrit

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


def calibrate(fixed: FailureModel, without: Iterable[CellFit] = ()) -> FailureModel:
    """The model with the free values that fit the table's cells best, all but those `without`."""
    found, units = _search(fixed, without)
    return _with(fixed, found.x * units)


def intervals(fixed: FailureModel) -> dict[str, float]:
    """Half the 95% confidence interval of each free value (t distribution), as if errors were independent.

    From the fit's curvature: values that only their sum tells apart from another have wide ones.
    """
    found, units = _search(fixed)
    free = found.fun.size - len(FREE)
    covariance = np.linalg.inv(found.jac.T @ found.jac) * (found.fun @ found.fun) / free
    return dict(zip(FREE, stdtrit(free, 0.975) * np.sqrt(np.diag(covariance)) * units, strict=True))


def _search(fixed: FailureModel, without: Iterable[CellFit] = ()) -> tuple[OptimizeResult, np.ndarray]:
    left_out = {(cell.system, cell.num_chips) for cell in without}
    units = np.array([start for start, _, _ in FREE.values()])

    def errors(values: np.ndarray) -> list[float]:
        cells = fits(_with(fixed, values * units))
        return [cell.error for cell in cells if (cell.system, cell.num_chips) not in left_out]

    found: OptimizeResult = least_squares(
        errors,
        np.ones(len(FREE)),
        bounds=([low for _, low, _ in FREE.values()] / units, [high for _, _, high in FREE.values()] / units),
    )
    return found, units


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
