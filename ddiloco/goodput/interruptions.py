"""The interruptions of a fleet as a list, and how many jobs side by side meet theirs.

A job is an index into arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ddiloco.goodput.failures import Division, FailureModel

_BLOCK = 256  # draws of a job at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Interruption:
    """A chip of a slice is interrupted, and the slice is gone until it is back."""

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

        Returns when the slice is back, and when it was back from its previous interruption (-inf: it had
        none); None in place of the latter if the slice is always one that is in the job.
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
