"""The states of a fleet's jobs under a list of interruptions.

A data-parallel job of all slices and M learners of a share of them each meet the same interruptions, so that
training runs can be compared under the same failures ("Failure simulation" of the paper).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ddiloco.goodput.accounting import State
from ddiloco.goodput.failures import FailureModel, divide
from ddiloco.goodput.interruptions import Draws, Interruption, ListedInterruptions
from ddiloco.goodput.jobs import Jobs, Stretch


@dataclasses.dataclass(frozen=True, slots=True)
class JobChange:
    """A job is in `state`, with `chips` of its chips in it, from `time` (seconds) on."""

    time: float
    job: int
    state: State
    chips: int


def job_chips(model: FailureModel, num_chips: int, num_jobs: int, elastic: bool) -> dict[int, int]:
    """The chips of each job of `job_changes`; spares are the job `num_jobs`. Raises as `divide` does."""
    fleet = divide(model, num_chips, num_jobs, elastic)
    slices = [*fleet.slices_by_job, *([fleet.spares] if fleet.spares else [])]
    return {job: count * model.chips_per_slice for job, count in enumerate(slices)}


def job_changes(
    model: FailureModel,
    interruptions: Sequence[Interruption],
    num_chips: int,
    num_jobs: int,
    seed: int,
    horizon: float,
    elastic: bool,
) -> list[JobChange]:
    """What jobs of contiguous slices go through from 0 (STEPPING) until `horizon` (seconds), sorted by time.

    `seed` is for what the jobs draw themselves: the shares of steps that are done again. Spares are a job of
    their own, see `job_chips`, always on STANDBY. Chips' speeds do not vary here.

    Raises:
      ValueError: there are fewer slices than jobs.
    """
    fleet = divide(model, num_chips, num_jobs, elastic)
    changes: list[JobChange] = []
    last: dict[int, tuple[State, int]] = {}  # of each job

    def on_stretch(one: Stretch) -> None:
        columns = (one.jobs, one.starts, one.ends, one.slices * model.chips_per_slice)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for job, start, end, chips in rows:
            if start < min(end, horizon) and last.get(job) != (one.state, chips):
                last[job] = one.state, chips
                changes.append(JobChange(start, job, one.state, chips))

    Jobs(
        dataclasses.replace(model, chip_speed_variation=0.0),
        np.array(fleet.slices_by_job),
        np.full(num_jobs, elastic),
        ListedInterruptions(fleet, interruptions),
        Draws([(seed, job) for job in range(num_jobs)]),
        on_stretch,
        horizon,
    ).run(horizon)
    if fleet.spares:
        changes.append(JobChange(0.0, num_jobs, State.STANDBY, fleet.spares * model.chips_per_slice))
    return sorted(changes, key=lambda change: (change.time, change.job))
