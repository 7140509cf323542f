"""The event engine: many jobs, elastic or not, that live through interruptions side by side.

An *elastic* job of n slices loses the slice that is struck, until it is back. If the job was stepping, it
stands still: DETECTING, RECONFIGURING to go on without it (downscale), REPLAYING the part of a step that
was lost; then it steps on what is left. What is struck meanwhile is handled by the pause under way. Every
slice that is back is taken in at the end of each reconfiguration; if none comes by itself, an upscale
begins `upscale_wait_seconds` after the first return. A job that has lost its last slice is FAILED until one
is back, and starts again.

A job *without elasticity* stands still as a whole, DETECTING, RECONFIGURING and REPLAYING, and starts again
on spare slices: it always has the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ddiloco.goodput.accounting import State
from ddiloco.goodput.failures import FailureModel
from ddiloco.goodput.interruptions import Draws, InterruptionSource


class Stretch(NamedTuple):
    """Jobs were in `state` from `starts` to `ends` (seconds; may be past the horizon).

    `slices` of their slices took part and did `speed` (a share) of the work of chips that never wait.
    """

    jobs: np.ndarray
    state: State
    starts: np.ndarray
    ends: np.ndarray
    slices: np.ndarray
    speed: np.ndarray | float


class Jobs:
    """Jobs as indices into arrays, each advanced from one of its events to the next."""

    def __init__(
        self,
        model: FailureModel,
        slices: np.ndarray,
        elastic: np.ndarray,
        source: InterruptionSource,
        draws: Draws,
        on_stretch: Callable[[Stretch], None],
        horizon: float,
    ) -> None:
        """`slices` (int) and `elastic` (bool) of each job, both [jobs]; they start at 0, all STEPPING."""
        self._model = model
        self._elastic = elastic
        self._source = source
        self._draws = draws
        self._on_stretch = on_stretch
        self._horizon = horizon
        self._reconfiguration = np.where(elastic, model.downscale_seconds, model.restart_seconds)
        self._inside = slices.copy()
        self._away = _Away(len(slices))
        self._time = np.zeros(len(slices))

    def run(self, until: float) -> None:
        """Advances every job to `until` (seconds, at most the horizon) or, within its last cycle, past it."""
        jobs = np.flatnonzero(self._time < until)
        with np.errstate(divide="ignore"):  # a job without slices is never struck: at infinity
            while jobs.size:
                self._live_one_cycle(jobs)
                jobs = jobs[self._time[jobs] < until]

    def _live_one_cycle(self, jobs: np.ndarray) -> None:
        """Stepping until an interruption or an upscale, and the pause that follows."""
        struck_at = self._source.next[jobs]
        upscale_at = self._away.earliest[jobs] + self._model.upscale_wait_seconds
        upscale_at = np.maximum(upscale_at, self._time[jobs])  # it may have come due in the pause before
        end = np.minimum(np.minimum(struck_at, upscale_at), self._horizon)
        self._pass(jobs, State.STEPPING, end)
        struck = (struck_at <= end) & (end < self._horizon)
        growing = jobs[(upscale_at <= end) & (end < self._horizon) & ~struck]
        stopped = self._stop(jobs[struck])
        absorbing = stopped[~self._elastic[stopped]]
        self._source.next[absorbing] = np.inf  # a job that stands still as a whole has nothing more to lose
        self._pause(stopped, State.DETECTING, self._model.detection_seconds)
        reconfiguring = np.concatenate([stopped, growing])
        seconds = np.full(reconfiguring.size, self._model.upscale_seconds)
        seconds[: stopped.size] = self._reconfiguration[stopped]
        self._pause(reconfiguring, State.RECONFIGURING, seconds)
        self._admit(reconfiguring)
        if stopped.size:
            lost = -np.expm1(-self._draws.take(stopped))  # uniform
            self._pause(stopped, State.REPLAYING, self._model.step_seconds * lost)
        if absorbing.size:
            self._resize(absorbing)
        self._revive(jobs[self._inside[jobs] == 0])

    def _stop(self, jobs: np.ndarray) -> np.ndarray:
        """Takes each job's next interruption, which is now; returns the jobs that it stops."""
        elastic = self._elastic[jobs]
        whole = jobs[~elastic]
        if whole.size:
            self._source.take(whole)
            self._resize(whole)
        return np.concatenate([self._lose(jobs[elastic]), whole])

    def _lose(self, jobs: np.ndarray) -> np.ndarray:
        """Takes each elastic job's next interruption, which is now; returns the jobs that lose a slice."""
        if not jobs.size:
            return jobs
        returns, previous = self._source.take(jobs)
        losing = jobs
        if previous is not None:
            idle = self._away.still(jobs, previous, returns)
            losing, returns = jobs[~idle], returns[~idle]
        self._inside[losing] -= 1
        self._away.add(losing, returns)
        self._resize(jobs)
        return losing

    def _pause(self, jobs: np.ndarray, state: State, seconds: np.ndarray | float) -> None:
        """Puts jobs that have a slice into `state` for `seconds`; some may lose their last slice in it."""
        end = self._time[jobs] + seconds
        alive = self._inside[jobs] > 0
        jobs, end = jobs[alive], end[alive]
        while (struck := jobs[self._source.next[jobs] < end]).size:
            self._pass(struck, state, self._source.next[struck])
            self._lose(struck)
            alive = self._inside[jobs] > 0
            jobs, end = jobs[alive], end[alive]
        self._pass(jobs, state, end)

    def _admit(self, jobs: np.ndarray) -> None:
        """Adds the slices that have returned by now to jobs that have a slice."""
        jobs = jobs[(self._away.earliest[jobs] <= self._time[jobs]) & (self._inside[jobs] > 0)]
        if jobs.size:
            self._inside[jobs] += self._away.pop(jobs, self._time[jobs])
            self._resize(jobs)

    def _revive(self, jobs: np.ndarray) -> None:
        """Lets jobs without a slice wait for one and start again, until they step or reach the horizon."""
        while jobs.size:
            returns = np.maximum(self._away.earliest[jobs], self._time[jobs])
            self._pass(jobs, State.FAILED, returns)
            self._inside[jobs] += self._away.pop(jobs, returns)
            self._resize(jobs)
            self._pause(jobs, State.RECONFIGURING, self._model.restart_seconds)
            self._admit(jobs)
            jobs = jobs[(self._inside[jobs] == 0) & (self._time[jobs] < self._horizon)]

    def _resize(self, jobs: np.ndarray) -> None:
        self._source.resized(jobs, self._time[jobs], self._inside[jobs])

    def _pass(self, jobs: np.ndarray, state: State, until: np.ndarray) -> None:
        """The jobs are in `state` until then."""
        inside, speed = self._inside[jobs], 1.0
        if state is State.STEPPING and self._model.chip_speed_variation:
            speed = 1.0 / (1.0 + self._slowness(jobs, inside))
        self._on_stretch(Stretch(jobs, state, self._time[jobs], until, inside, speed))
        self._time[jobs] = until

    def _slowness(self, jobs: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """By what share the slowest chip's step is longer than a normal step, never below 0.

        The maximum of n normals is Phi^-1(U^(1/n)) = -Phi^-1(1 - U^(1/n)); -log(U) is a unit exponential.
        """
        from scipy.special import ndtri  # the import takes 0.2 s, and few programs need it

        chips = inside * self._model.chips_per_slice
        slowest = -ndtri(-np.expm1(-self._draws.take(jobs) / chips))
        return np.maximum(0.0, self._model.chip_speed_variation * slowest)


class _Away:
    """For each job, when the slices that are not in it are back (or were); takes memory for those alone."""

    def __init__(self, jobs: int) -> None:
        self._returns = np.full((jobs, 8), np.inf)
        self._count = np.zeros(jobs, np.int64)
        self.earliest = np.full(jobs, np.inf)

    def add(self, jobs: np.ndarray, returns: np.ndarray) -> None:
        """One more slice of each job."""
        count = self._count[jobs]
        try:
            self._returns[jobs, count] = returns
        except IndexError:
            self._returns = np.pad(
                self._returns, ((0, 0), (0, self._returns.shape[1])), constant_values=np.inf
            )
            self._returns[jobs, count] = returns
        self._count[jobs] = count + 1
        self.earliest[jobs] = np.minimum(self.earliest[jobs], returns)

    def pop(self, jobs: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Removes those that have returned by `now`; returns their number by job."""
        rows = self._returns[jobs, : self._count[jobs].max()]
        due = rows <= now[:, None]
        rows[due] = np.inf
        self._store(jobs, rows)
        popped = due.sum(1)
        self._count[jobs] -= popped
        return popped

    def still(self, jobs: np.ndarray, previous: np.ndarray, returns: np.ndarray) -> np.ndarray:
        """Whether a slice that was to be back at `previous` is not in its job yet; it now is at `back`."""
        rows = self._returns[jobs]
        same = (rows == previous[:, None]) & np.isfinite(rows)
        found = same.any(1)
        rows[found, same[found].argmax(1)] = returns[found]
        self._store(jobs, rows)
        return found

    def _store(self, jobs: np.ndarray, rows: np.ndarray) -> None:
        rows.sort(axis=1)
        self._returns[jobs, : rows.shape[1]] = rows
        self.earliest[jobs] = rows[:, 0]
