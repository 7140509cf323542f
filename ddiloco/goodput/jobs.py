"""The event engine: many jobs, elastic or not, that live through interruptions side by side.

An *elastic* job of n slices loses an interrupted slice until that returns. If the job was stepping, it
pauses: DETECTING, RECONFIGURING without the slice (downscale), REPLAYING the lost part of a step; then it
steps on the other slices. The pause also covers interruptions during it. Each reconfiguration ends with all
returned slices in the job; if none is due, an upscale begins `upscale_wait_seconds` after the first return.
A job without slices is FAILED until one returns, and restarts.

A job *without elasticity* pauses as a whole, DETECTING, RECONFIGURING and REPLAYING, and restarts on spare
slices: it always has the same number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ddiloco.goodput.accounting import State
from ddiloco.goodput.failures import Division, FailureModel, divide

_BLOCK = 256  # draws of a job at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Interruption:
    """An interruption of a chip, which takes its slice away until the slice returns."""

    time: float  # seconds
    slice: int  # of the whole fleet
    returns_at: float  # seconds


def draw_interruptions(model: FailureModel, num_chips: int, seed: int, horizon: float) -> list[Interruption]:
    """The interruptions of a fleet before `horizon` (seconds), sorted by time.

    Each slice is struck at its chips' rate while it is there. The same arguments give the same list; a
    longer horizon only adds to its end.
    """
    rng = np.random.default_rng(seed)
    count = model.num_slices(num_chips)
    slices, now = np.arange(count), np.zeros(count)
    found: list[Interruption] = []
    while slices.size:
        struck = now + rng.standard_exponential(count)[slices] * model.mtbi_seconds / model.chips_per_slice
        returns = struck + rng.standard_exponential(count)[slices] * model.return_seconds
        within = struck < horizon
        slices, now = slices[within], returns[within]
        rows = zip(struck[within].tolist(), slices.tolist(), now.tolist(), strict=True)
        found += [Interruption(*row) for row in rows]
    return sorted(found, key=lambda one: (one.time, one.slice))


class InterruptionSource(Protocol):
    """Gives each job its interruptions, in order."""

    next: np.ndarray  # float [jobs]: seconds of each job's next interruption, infinite if there is none

    def take(self, jobs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Takes the next interruption of each job; `resized` must follow.

        Returns the time of the slice's return, and that of its return from the previous interruption (-inf:
        it had none); None instead of the latter if only slices in the job are interrupted.
        """

    def resized(self, jobs: np.ndarray, now: np.ndarray, slices: np.ndarray) -> None:
        """The jobs have these numbers of slices from `now` (seconds) on; earlier interruptions are skipped.

        All three arrays have the same shape [n].
        """


class Draws:
    """Unit exponential draws, with a stream for each job, so that no job depends on what runs beside it."""

    def __init__(self, entropy: Sequence[Sequence[int]]) -> None:
        """`entropy`: for each job the integers that seed its stream."""
        self._streams = [np.random.Generator(np.random.SFC64(list(words))) for words in entropy]
        self._pool = np.array([stream.standard_exponential(_BLOCK) for stream in self._streams])
        self._used = np.zeros(len(self._streams), np.int64)

    def take(self, jobs: np.ndarray) -> np.ndarray:
        """The next draw of each job; no job may be listed twice."""
        used = self._used[jobs]
        try:
            values = self._pool[jobs, used]
        except IndexError:
            for job in jobs[used == _BLOCK]:
                self._pool[job] = self._streams[job].standard_exponential(_BLOCK)
                self._used[job] = 0
            return self.take(jobs)
        self._used[jobs] = used + 1
        return values


class ListedInterruptions:
    """The interruptions of a whole fleet, each for the job that has the slice; without those of spares."""

    def __init__(self, fleet: Division, interruptions: Sequence[Interruption]) -> None:
        """`interruptions`, sorted by time."""
        by_job: list[list[tuple[float, float, float]]] = [[] for _ in fleet.slices_by_job]
        firsts, returns = np.cumsum([0, *fleet.slices_by_job]), {}  # of each job, then of the spares
        for one in interruptions:
            job = int(np.searchsorted(firsts, one.slice, side="right")) - 1
            if 0 <= job < len(by_job):
                by_job[job].append((one.time, one.returns_at, returns.get(one.slice, -np.inf)))
            returns[one.slice] = one.returns_at
        longest = max(map(len, by_job), default=0)
        self._listed = np.full((len(by_job), longest + 1, 3), np.inf)
        for job, rows in enumerate(by_job):
            if rows:
                self._listed[job, : len(rows)] = rows
        self._at = np.zeros(len(by_job), np.int64)
        self.next = self._listed[:, 0, 0].copy()

    def take(self, jobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = self._at[jobs]
        self._at[jobs] = at + 1
        return self._listed[jobs, at, 1], self._listed[jobs, at, 2]

    def resized(self, jobs: np.ndarray, now: np.ndarray, slices: np.ndarray) -> None:
        """As of `InterruptionSource`; the list is the same whatever the sizes."""
        while (past := self._listed[jobs, self._at[jobs], 0] < now).any():
            self._at[jobs] += past
        self.next[jobs] = self._listed[jobs, self._at[jobs], 0]


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
