"""A fleet of slices divided among jobs, and interruptions of its slices as a list."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddiloco.goodput.failures import FailureModel


@dataclasses.dataclass(frozen=True, slots=True)
class Interruption:
    """A chip of a slice is interrupted, and the slice is gone until it is back."""

    time: float  # seconds
    slice: int  # of the whole fleet
    back_at: float  # seconds


@dataclasses.dataclass(frozen=True)
class Division:
    """Slices of a fleet by job: job 0 has the first ones, and so on; spares come last."""

    slices_by_job: tuple[int, ...]
    spares: int  # slices on standby


def divide(model: FailureModel, num_chips: int, num_jobs: int, elastic: bool) -> Division:
    """Divides a fleet into jobs as even as can be; jobs without elasticity leave spares.

    Raises:
      ValueError: there are fewer slices than jobs.
    """
    slices = model.num_slices(num_chips)
    if slices < num_jobs:
        raise ValueError(
            f"num_chips: {num_chips} chips are {slices} slices of {model.chips_per_slice}, but {num_jobs} "
            f"{'learner needs' if num_jobs == 1 else 'learners need'} at least one each"
        )
    spares = 0 if elastic else min(round(model.spare_share * slices), slices - num_jobs)
    each, more = divmod(slices - spares, num_jobs)
    return Division(tuple(each + (job < more) for job in range(num_jobs)), spares)


def first_slices(fleet: Division) -> np.ndarray:
    """The first slice of each job, and at the end the first spare; int array [jobs + 1]."""
    return np.concatenate([[0], np.cumsum(fleet.slices_by_job)])
