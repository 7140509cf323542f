"""The event engine: many jobs, elastic or not, that live through interruptions side by side.

An *elastic* job of n slices loses the slice that is struck, until it is back. If the job was stepping, it
stands still: DETECTING, RECONFIGURING to go on without (downscale), REPLAYING of the part of a step that
was lost; then it steps on what is left. What is struck meanwhile is handled by the pause under way. Every
slice that is back is taken in at the end of each reconfiguration; if none comes by itself, an upscale
begins `upscale_wait_seconds` after the first return. A job that has lost its last slice is FAILED until one
is back, and starts again.

A job *without elasticity* stands still as a whole, DETECTING, RECONFIGURING and REPLAYING, and starts again
on spare slices: it always has as many.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ddiloco.goodput.accounting import State
from ddiloco.goodput.failures import FailureModel
from ddiloco.goodput.interruptions import Draws, Source


class Ledger(Protocol):
    """Takes down what jobs did."""

    def add(
        self,
        lanes: np.ndarray,
        state: State,
        starts: np.ndarray,
        ends: np.ndarray,
        slices: np.ndarray,
        speed: np.ndarray | float,
    ) -> None:
        """The jobs were in `state` from `starts` to `ends` (seconds; may be past the horizon).

        With `slices` of their slices, which did `speed` (a share) of the work of chips that never wait.
        """


class Jobs:
    """Jobs as lanes of arrays, each advanced from one of its events to the next."""

    def __init__(
        self,
        model: FailureModel,
        slices: np.ndarray,
        elastic: np.ndarray,
        source: Source,
        draws: Draws,
        ledger: Ledger,
        horizon: float,
    ) -> None:
        """`slices` (int) and `elastic` (bool) of each job, both [lanes]; they begin at 0, all STEPPING."""
        self._model = model
        self._elastic = elastic
        self._source = source
        self._draws = draws
        self._ledger = ledger
        self._horizon = horizon
        self._reconfiguration = np.where(elastic, model.downscale_seconds, model.restart_seconds)
        self._inside = slices.copy()
        self._away = _Away(len(slices))
        self._time = np.zeros(len(slices))

    def run(self, until: float) -> None:
        """Advances every job to `until` (seconds, at most the horizon) or, within its last cycle, past it."""
        lanes = np.flatnonzero(self._time < until)
        with np.errstate(divide="ignore"):  # a job without slices is struck never: at infinity
            while lanes.size:
                self._live_one_cycle(lanes)
                lanes = lanes[self._time[lanes] < until]

    def _live_one_cycle(self, lanes: np.ndarray) -> None:
        """Stepping until an interruption or an upscale, and the pause that follows."""
        struck_at = self._source.next[lanes]
        upscale_at = self._away.earliest[lanes] + self._model.upscale_wait_seconds
        upscale_at = np.maximum(upscale_at, self._time[lanes])  # it may have come due in the pause before
        end = np.minimum(np.minimum(struck_at, upscale_at), self._horizon)
        self._pass(lanes, State.STEPPING, end)
        struck = (struck_at <= end) & (end < self._horizon)
        growing = lanes[(upscale_at <= end) & (end < self._horizon) & ~struck]
        stopped = self._stop(lanes[struck])
        absorbing = stopped[~self._elastic[stopped]]
        self._source.next[absorbing] = np.inf  # who stands still as a whole loses nothing more
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
        self._revive(lanes[self._inside[lanes] == 0])

    def _stop(self, lanes: np.ndarray) -> np.ndarray:
        """Takes each lane's next interruption, which is now; returns the lanes whose job it stops."""
        elastic = self._elastic[lanes]
        whole = lanes[~elastic]
        if whole.size:
            self._source.take(whole)
            self._resize(whole)
        return np.concatenate([self._lose(lanes[elastic]), whole])

    def _lose(self, lanes: np.ndarray) -> np.ndarray:
        """Takes each elastic lane's next interruption, which is now; returns the lanes that lose a slice."""
        if not lanes.size:
            return lanes
        back, previous = self._source.take(lanes)
        losing = lanes
        if previous is not None:
            idle = self._away.still(lanes, previous, back)
            losing, back = lanes[~idle], back[~idle]
        self._inside[losing] -= 1
        self._away.add(losing, back)
        self._resize(lanes)
        return losing

    def _pause(self, lanes: np.ndarray, state: State, seconds: np.ndarray | float) -> None:
        """So many seconds in `state`, for those that have a slice; may leave some without."""
        end = self._time[lanes] + seconds
        alive = self._inside[lanes] > 0
        lanes, end = lanes[alive], end[alive]
        while (struck := lanes[self._source.next[lanes] < end]).size:
            self._pass(struck, state, self._source.next[struck])
            self._lose(struck)
            alive = self._inside[lanes] > 0
            lanes, end = lanes[alive], end[alive]
        self._pass(lanes, state, end)

    def _admit(self, lanes: np.ndarray) -> None:
        """Takes in what is back by now, in lanes that have a slice."""
        lanes = lanes[(self._away.earliest[lanes] <= self._time[lanes]) & (self._inside[lanes] > 0)]
        if lanes.size:
            self._inside[lanes] += self._away.pop(lanes, self._time[lanes])
            self._resize(lanes)

    def _revive(self, lanes: np.ndarray) -> None:
        """Jobs without a slice wait for one and start again, until they step or the horizon has come."""
        while lanes.size:
            back = np.maximum(self._away.earliest[lanes], self._time[lanes])
            self._pass(lanes, State.FAILED, back)
            self._inside[lanes] += self._away.pop(lanes, back)
            self._resize(lanes)
            self._pause(lanes, State.RECONFIGURING, self._model.restart_seconds)
            self._admit(lanes)
            lanes = lanes[(self._inside[lanes] == 0) & (self._time[lanes] < self._horizon)]

    def _resize(self, lanes: np.ndarray) -> None:
        self._source.resized(lanes, self._time[lanes], self._inside[lanes])

    def _pass(self, lanes: np.ndarray, state: State, until: np.ndarray) -> None:
        """The lanes are in `state` until then."""
        inside, speed = self._inside[lanes], 1.0
        if state is State.STEPPING and self._model.chip_speed_variation:
            speed = 1.0 / (1.0 + self._slowness(lanes, inside))
        self._ledger.add(lanes, state, self._time[lanes], until, inside, speed)
        self._time[lanes] = until

    def _slowness(self, lanes: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """By how much, as a share, the slowest chip's step is longer than a step, never below 0.

        The maximum of n normals is Phi^-1(U^(1/n)) = -Phi^-1(1 - U^(1/n)); -log(U) is a unit exponential.
        """
        from scipy.special import ndtri  # costs every program that starts 0.2 s, and few need it

        chips = inside * self._model.chips_per_slice
        slowest = -ndtri(-np.expm1(-self._draws.take(lanes) / chips))
        return np.maximum(0.0, self._model.chip_speed_variation * slowest)


class _Away:
    """For each lane, when the slices that are not in its job are back (or were); memory for those alone."""

    def __init__(self, lanes: int) -> None:
        self._back = np.full((lanes, 8), np.inf)
        self._count = np.zeros(lanes, np.int64)
        self.earliest = np.full(lanes, np.inf)

    def add(self, lanes: np.ndarray, back: np.ndarray) -> None:
        """One more slice in each lane."""
        count = self._count[lanes]
        try:
            self._back[lanes, count] = back
        except IndexError:
            self._back = np.pad(self._back, ((0, 0), (0, self._back.shape[1])), constant_values=np.inf)
            self._back[lanes, count] = back
        self._count[lanes] = count + 1
        self.earliest[lanes] = np.minimum(self.earliest[lanes], back)

    def pop(self, lanes: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Takes out those that are back by `now`; returns their number by lane."""
        rows = self._back[lanes, : self._count[lanes].max()]
        due = rows <= now[:, None]
        rows[due] = np.inf
        self._store(lanes, rows)
        popped = due.sum(1)
        self._count[lanes] -= popped
        return popped

    def still(self, lanes: np.ndarray, previous: np.ndarray, back: np.ndarray) -> np.ndarray:
        """Whether a slice that was to be back at `previous` is not in its job yet; it now is at `back`."""
        rows = self._back[lanes]
        same = (rows == previous[:, None]) & np.isfinite(rows)
        found = same.any(1)
        rows[found, same[found].argmax(1)] = back[found]
        self._store(lanes, rows)
        return found

    def _store(self, lanes: np.ndarray, rows: np.ndarray) -> None:
        rows.sort(axis=1)
        self._back[lanes, : rows.shape[1]] = rows
        self.earliest[lanes] = rows[:, 0]
