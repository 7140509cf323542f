"""Unions of intervals: when at least one of them holds, or at least a number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_PENDING = 4096  # intervals that a `Cover` keeps before it joins them


def covered(starts: np.ndarray, ends: np.ndarray, depth: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Times covered by at least `depth` intervals: starts and ends of sorted disjoint intervals.

    `starts` and `ends` are float arrays of shape [n]; intervals that abut are one, empty ones are none.
    """
    times = np.concatenate([starts, ends])
    change = np.repeat([1, -1], len(starts))
    order = np.lexsort((-change, times))  # at one time starts come before ends, so that no gap opens there
    inside = np.cumsum(change[order]) >= depth
    edges = np.diff(inside, prepend=False, append=False)
    at = times[order][np.flatnonzero(edges[: len(order)])]
    starts, ends = at[0::2], at[1::2]
    return starts[ends > starts], ends[ends > starts]


class Cover:
    """A union of intervals that grows; it keeps the disjoint intervals of which it consists."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._joined = 0  # intervals in front that are disjoint and sorted

    def add(self, start: float, end: float) -> None:
        """One more interval, `start` <= `end`."""
        self._starts.append(start)
        self._ends.append(end)
        if len(self._starts) > 2 * self._joined + _PENDING:
            self._join()

    def seconds(self, open_ones: Sequence[tuple[float, float]] = ()) -> float:
        """The length of the union with these intervals, which are not kept."""
        self._join()
        intervals = [*zip(self._starts, self._ends, strict=True), *open_ones]
        starts, ends = covered(*np.array(intervals).reshape(-1, 2).T)
        return math.fsum(ends - starts)

    def _join(self) -> None:
        starts, ends = covered(np.array(self._starts), np.array(self._ends))
        self._starts, self._ends = starts.tolist(), ends.tolist()
        self._joined = len(self._starts)
