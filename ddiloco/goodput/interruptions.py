"""Where the interruptions of many jobs come from: drawn as the jobs live, or a list of a fleet's.

A job is a *lane*: an index into arrays. `next` holds each lane's next interruption (seconds), infinite if
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ddiloco.goodput.division import Division, Interruption, first_slices
from ddiloco.goodput.failures import FailureModel

_BLOCK = 256  # draws of a lane at a time


class Source(Protocol):
    """What a lane's interruptions are asked of."""

    next: np.ndarray  # float [lanes]

    def take(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Takes the next interruption of each lane; `resized` must follow.

        Returns when the slice is back, and when it was back from its interruption before (-inf: it had none);
        None in place of the latter if it is always a slice that is in the job.
        """

    def resized(self, lanes: np.ndarray, now: np.ndarray, slices: np.ndarray) -> None:
        """The lanes' jobs have so many slices from `now` (seconds) on; what comes before is nobody's.

        All three of one shape [n].
        """


class Draws:
    """Unit exponential draws, a stream a lane, so that no lane's fate depends on what runs beside it."""

    def __init__(self, entropy: Sequence[Sequence[int]]) -> None:
        """`entropy`: for each lane the integers that seed its stream."""
        self._streams = [np.random.Generator(np.random.SFC64(list(words))) for words in entropy]
        self._pool = np.array([stream.standard_exponential(_BLOCK) for stream in self._streams])
        self._used = np.zeros(len(self._streams), np.int64)

    def take(self, lanes: np.ndarray) -> np.ndarray:
        """The next draw of each lane; no lane may come twice."""
        used = self._used[lanes]
        try:
            values = self._pool[lanes, used]
        except IndexError:
            for lane in lanes[used == _BLOCK]:
                self._pool[lane] = self._streams[lane].standard_exponential(_BLOCK)
                self._used[lane] = 0
            return self.take(lanes)
        self._used[lanes] = used + 1
        return values


class DrawnInterruptions:
    """Interruptions of the slices that are in a job, at the rate of the failure model."""

    def __init__(self, model: FailureModel, slices: np.ndarray, draws: Draws) -> None:
        """`slices`: int [lanes], in each job at time 0."""
        self._model = model
        self._draws = draws
        self.next = np.full(len(slices), np.inf)
        self.resized(np.arange(len(slices)), np.zeros(len(slices)), slices)

    def take(self, lanes: np.ndarray) -> tuple[np.ndarray, None]:
        """As of `Source`."""
        return self.next[lanes] + self._model.return_time(self._draws.take(lanes)), None

    def resized(self, lanes: np.ndarray, now: np.ndarray, slices: np.ndarray) -> None:
        """As of `Source`: in the time of the cumulative hazard interruptions have no memory."""
        each = self._draws.take(lanes) / (slices * self._model.chips_per_slice)
        self.next[lanes] = self._model.time_of_hazard(self._model.hazard(now) + each)


class ListedInterruptions:
    """The interruptions of a whole fleet, each for the job that has the slice; a spare's are nobody's."""

    def __init__(self, fleet: Division, interruptions: Sequence[Interruption]) -> None:
        """`interruptions`, sorted by time."""
        by_job: list[list[tuple[float, float, float]]] = [[] for _ in fleet.slices_by_job]
        firsts, back = first_slices(fleet), {}
        for one in interruptions:
            job = int(np.searchsorted(firsts, one.slice, side="right")) - 1
            if 0 <= job < len(by_job):
                by_job[job].append((one.time, one.back_at, back.get(one.slice, -np.inf)))
            back[one.slice] = one.back_at
        longest = max(map(len, by_job), default=0)
        self._listed = np.full((len(by_job), longest + 1, 3), np.inf)
        for job, rows in enumerate(by_job):
            if rows:
                self._listed[job, : len(rows)] = rows
        self._at = np.zeros(len(by_job), np.int64)
        self.next = self._listed[:, 0, 0].copy()

    def take(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As of `Source`."""
        at = self._at[lanes]
        self._at[lanes] = at + 1
        return self._listed[lanes, at, 1], self._listed[lanes, at, 2]

    def resized(self, lanes: np.ndarray, now: np.ndarray, slices: np.ndarray) -> None:
        """As of `Source`: a list knows of no sizes."""
        while (past := self._listed[lanes, self._at[lanes], 0] < now).any():
            self._at[lanes] += past
        self.next[lanes] = self._listed[lanes, self._at[lanes], 0]
