"""Time series in bounded memory: curves, sums in time slots, spans of states, durations."""

from __future__ import annotations

import array
import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ddiloco.telemetry.scalars import as_float

TROUBLED = ("hung", "dead")
_WEIGHT = 8.0  # of these states when one has to stand for all in its time: a short outage is still seen
_GROWTH = math.log(1.01)  # of one class of durations to the next: quantiles are within a percent
PEAK_BYTES = "peak_bytes/"  # before a device's number


class Curve:
    """Values against steps. At most `capacity` points, each the mean of `stride` successive values."""

    def __init__(self, capacity: int = 8192) -> None:
        """`capacity`: positive and even."""
        self._capacity = capacity
        self._stride = 1
        self._steps = array.array("d")
        self._values = array.array("d")
        self._sum, self._count, self._last_step = 0.0, 0, 0.0

    def add(self, step: int, value: float) -> None:
        """Adds a value; one that is not finite makes its point NaN."""
        self._sum += value if math.isfinite(value) else math.nan
        self._count += 1
        self._last_step = step
        if self._count == self._stride:
            if len(self._steps) == self._capacity:
                self._halve()
                return
            self._steps.append(step)
            self._values.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0

    def __bool__(self) -> bool:
        return bool(self._steps or self._count)

    def points(self) -> tuple[list[float], list[float]]:
        """Steps and values, both (n,), oldest first; the last point may average fewer values."""
        steps, values = list(self._steps), list(self._values)
        if self._count:
            steps.append(self._last_step)
            values.append(self._sum / self._count)
        return steps, values

    def tail_mean(self, share: float) -> float:
        """The mean of the last `share` of the values, at least of one; NaN if there is none.

        Exact for up to `capacity` values; beyond that the share is rounded up to whole points.
        """
        wanted = max(1, round(share * (len(self._values) * self._stride + self._count)))
        total, count = self._sum, self._count
        for value in reversed(self._values):
            if count >= wanted:
                break
            total, count = total + value * self._stride, count + self._stride
        return total / count if count else math.nan

    def _halve(self) -> None:
        """Averages pairs of points; the values counted since the last point stay pending."""
        pairs = zip(self._values[::2], self._values[1::2], strict=True)
        self._values = array.array("d", ((first + second) / 2 for first, second in pairs))
        self._steps = self._steps[1::2]
        self._stride *= 2


class Slots:
    """Sums by name in slots of equal length, which doubles when there are too many."""

    def __init__(self, start: float, capacity: int = 256, width: float = 0.25) -> None:
        """`start`: seconds; what is earlier counts in the first slot. `capacity`: even."""
        self.start, self.width = start, width
        self._capacity = capacity
        self._rows: dict[Hashable, list[float]] = {}
        self.used = 0

    def add(self, time: float, values: Mapping[Any, float]) -> None:
        """Adds to the sums of these names at this time."""
        place = max(0, int((time - self.start) / self.width))
        while place >= self._capacity:
            place //= 2
            self._halve()
        if place >= self.used:
            self.used = place + 1
        for name, value in values.items():
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


class StateSpan(NamedTuple):
    """A learner was in a state for a time, in seconds."""

    state: str
    start: float
    end: float


class Lane:
    """The spans of one learner, at most `capacity`; beyond that each stands for several."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._spans: list[StateSpan] = []
        self.state: str | None = None
        self.since = -math.inf

    def enter(self, state: str, time: float) -> None:
        """The learner is in this state from `time` on, or from its last change if that is later."""
        time = max(time, self.since)
        if self.state is not None:
            self._close(time)
        self.state, self.since = state, time

    def hung(self, start: float, end: float) -> None:
        """It has stood still since `start`, though it should have stepped."""
        if self.state is not None and end > max(start, self.since):
            state = self.state
            self._close(max(start, self.since))
            self._spans.append(StateSpan("hung", max(start, self.since), end))
            self.state, self.since = state, end

    def spans(self, now: float, most: int) -> list[StateSpan]:
        """All spans up to `now`, at most so many; the last one lasts."""
        last = [] if self.state is None else [StateSpan(self.state, self.since, max(now, self.since))]
        spans = [*self._spans, *last]
        return spans if len(spans) <= most else coarse(spans, most)

    def _close(self, time: float) -> None:
        if time > self.since and self.state is not None:
            self._spans.append(StateSpan(self.state, self.since, time))
        if len(self._spans) > self._capacity:
            self._spans = coarse(self._spans, self._capacity // 2)


def coarse(spans: list[StateSpan], most: int) -> list[StateSpan]:
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
    return [StateSpan(states[weightiest[place]], *bounds[i : i + 2]) for i, place in enumerate(first)]


@dataclasses.dataclass
class Performance:
    """Performance of one or more learners, over this process's records, in bounded memory."""

    classes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # of durations
    seconds: float = 0.0  # of steps that were timed
    waited: float = 0.0  # for data, of these
    used: float = 0.0  # MFU times seconds
    measured: float = 0.0  # seconds of the steps whose MFU is known
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # by device

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the measurements of `ddiloco.training.step_meter` of a step, if any."""
        for name, value in metrics.items():
            if name.startswith(PEAK_BYTES):
                self.peak_bytes[name.removeprefix(PEAK_BYTES)] = int(value)
        if "step_seconds" not in metrics:
            return
        seconds = as_float(metrics["step_seconds"])
        self.classes[round(math.log(max(seconds, 1e-9)) / _GROWTH)] += 1
        self.seconds += seconds
        self.waited += as_float(metrics.get("data_wait_seconds", 0.0))
        if "mfu" in metrics:
            self.used += as_float(metrics["mfu"]) * seconds
            self.measured += seconds

    def figures(self) -> dict[str, float | None]:
        """MFU and the share of time spent waiting for data, in [0, 1], and seconds of a step."""
        return {
            "mfu": self.used / self.measured if self.measured else None,
            "data_wait_share": self.waited / self.seconds if self.seconds else None,
            "step_seconds_p50": self._quantile(0.5),
            "step_seconds_p99": self._quantile(0.99),
        }

    def _quantile(self, share: float) -> float | None:
        """The least duration that is at least as long as this share of all; None of none."""
        wanted, passed = share * self.classes.total(), 0
        for place, count in sorted(self.classes.items()):
            passed += count
            if passed >= wanted:
                return math.exp(place * _GROWTH)
        return None


def together(of: Iterable[Performance]) -> Performance:
    """The performance of all of these together, without their memory."""
    whole = Performance()
    for one in of:
        whole.classes.update(one.classes)
        for name in ("seconds", "waited", "used", "measured"):
            setattr(whole, name, getattr(whole, name) + getattr(one, name))
    return whole


def performance_summary(of: Mapping[int, Performance]) -> dict[str, Any]:
    """The fields of `summary.json`; mappings are by learner, memory also by device."""
    whole, each = together(of.values()).figures(), {m: one.figures() for m, one in of.items()}
    by_learner = {f"{name}_by_learner": {m: each[m][name] for m in each} for name in whole}
    peaks = {m: one.peak_bytes for m, one in of.items() if one.peak_bytes}
    return {**whole, **by_learner, "peak_memory_bytes": peaks}
