"""What happened over time in bounded memory: sums in slots, and the states of a learner in spans."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

TROUBLED = ("hung", "dead")
_WEIGHT = 8.0  # of these states when one has to stand for all in its time: a short outage is still seen


class Slots:
    """Sums by name in slots of equal time; they get wider when there are too many."""

    def __init__(self, start: float, capacity: int = 256, width: float = 0.25) -> None:
        """`start`: seconds; what is earlier counts in the first slot. `capacity`: even."""
        self.start, self.width = start, width
        self._capacity = capacity
        self._rows: dict[Hashable, list[float]] = {}
        self.used = 0

    def add(self, time: float, name: Hashable, value: float = 1.0) -> None:
        """Adds to the sum of this name at this time."""
        place = max(0, int((time - self.start) / self.width))
        while place >= self._capacity:
            place //= 2
            self._halve()
        self.used = max(self.used, place + 1)
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = [0.0] * self._capacity
        row[place] += value

    def sums(self, name: Hashable) -> list[float]:
        """The sums in each slot so far, (used,)."""
        return self._rows.get(name, [0.0] * self._capacity)[: self.used]

    def means(self, name: Hashable, counts: Hashable) -> list[float | None]:
        """The sums over those of `counts`, (used,); None where nothing was counted."""
        pairs = zip(self.sums(name), self.sums(counts), strict=True)
        return [total / count if count else None for total, count in pairs]

    def _halve(self) -> None:
        self.width *= 2
        self.used = (self.used + 1) // 2
        for name, row in self._rows.items():
            half = [row[i] + row[i + 1] for i in range(0, self._capacity, 2)]
            self._rows[name] = half + [0.0] * (self._capacity // 2)


class Span(NamedTuple):
    """A learner was in a state for a time, in seconds."""

    state: str
    start: float
    end: float


class Lane:
    """The spans of one learner, at most `capacity`; when there are more, each stands for several."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._spans: list[Span] = []
        self.state: str | None = None
        self.since = -math.inf

    def enter(self, state: str, time: float) -> None:
        """The learner is in this state from `time` on, or from its last change if that is later."""
        time = max(time, self.since)
        if self.state is not None:
            self._close(time)
        self.state, self.since = state, time

    def hung(self, start: float, end: float) -> None:
        """It had stood still since `start`, though it should have stepped."""
        if self.state is not None and end > max(start, self.since):
            state = self.state
            self._close(max(start, self.since))
            self._spans.append(Span("hung", max(start, self.since), end))
            self.state, self.since = state, end

    def spans(self, now: float, most: int) -> list[Span]:
        """All spans up to `now`, at most so many; the last one lasts."""
        last = [] if self.state is None else [Span(self.state, self.since, max(now, self.since))]
        spans = [*self._spans, *last]
        return spans if len(spans) <= most else coarse(spans, most)

    def _close(self, time: float) -> None:
        if time > self.since and self.state is not None:
            self._spans.append(Span(self.state, self.since, time))
        if len(self._spans) > self._capacity:
            self._spans = coarse(self._spans, self._capacity // 2)


def coarse(spans: list[Span], most: int) -> list[Span]:
    """At most so many spans in the place of these: each the state that weighs most in its time."""
    edges = np.linspace(spans[0].start, spans[-1].end, most + 1)
    starts, ends = (np.array([span[place] for span in spans]) for place in (1, 2))
    within = np.minimum.outer(edges[1:], ends) - np.maximum.outer(edges[:-1], starts)  # (most, spans)
    states = sorted({span.state for span in spans})
    seconds = [
        within.clip(0.0)[:, [span.state == state for span in spans]].sum(1)
        * (_WEIGHT if state in TROUBLED else 1.0)
        for state in states
    ]
    weightiest = np.argmax(seconds, axis=0)
    first = [0, *(np.flatnonzero(np.diff(weightiest)) + 1).tolist()]
    bounds = [*edges[first].tolist(), spans[-1].end]
    return [Span(states[weightiest[place]], *bounds[i : i + 2]) for i, place in enumerate(first)]
