"""How fast learners step, how long they wait for data and what memory they take, by their steps' metrics."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.observe.scalars import as_float

_GROWTH = math.log(1.01)  # of one class of durations to the next: quantiles are within a percent
PEAK_BYTES = "peak_bytes/"  # before a device's number


class Durations:
    """Counts of durations in classes of equal ratio: quantiles of any number of them, in bounded memory."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, seconds: float) -> None:
        """Counts one; below a nanosecond all are alike."""
        self._counts[round(math.log(max(seconds, 1e-9)) / _GROWTH)] += 1

    def merged(self, others: Iterable[Durations]) -> Durations:
        """These and the others together."""
        result = Durations()
        for one in (self, *others):
            result._counts.update(one._counts)
        return result

    def quantile(self, share: float) -> float | None:
        """The least duration that is at least as long as this share of all; None of none."""
        wanted, passed = share * self._counts.total(), 0
        for place, count in sorted(self._counts.items()):
            passed += count
            if passed >= wanted:
                return math.exp(place * _GROWTH)
        return None


class Performance:
    """Of one learner, over the steps that this process has heard of."""

    def __init__(self) -> None:
        self.steps = Durations()
        self.seconds = 0.0  # of steps that were timed
        self.waited = 0.0  # for data, of these
        self.used = 0.0  # MFU times seconds
        self.measured = 0.0  # seconds of the steps whose MFU is known
        self.peak_bytes: dict[str, int] = {}  # by device

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Takes in what `ddiloco.training.step_meter` measured of a step, if it did."""
        for name, value in metrics.items():
            if name.startswith(PEAK_BYTES):
                self.peak_bytes[name.removeprefix(PEAK_BYTES)] = int(value)
        if "step_seconds" not in metrics:
            return
        seconds = as_float(metrics["step_seconds"])
        self.steps.add(seconds)
        self.seconds += seconds
        self.waited += as_float(metrics.get("data_wait_seconds", 0.0))
        if "mfu" in metrics:
            self.used += as_float(metrics["mfu"]) * seconds
            self.measured += seconds


def mfu(of: Iterable[Performance]) -> float | None:
    """Model FLOPs utilisation in the time of all steps of these learners, in [0, 1]; None: not known."""
    used, measured = map(sum, zip((0.0, 0.0), *((one.used, one.measured) for one in of), strict=True))
    return used / measured if measured else None


def data_wait_share(of: Iterable[Performance]) -> float | None:
    """The share of the time of these learners' steps that went into waiting for a batch."""
    waited, seconds = map(sum, zip((0.0, 0.0), *((one.waited, one.seconds) for one in of), strict=True))
    return waited / seconds if seconds else None


def step_seconds(of: Iterable[Performance], share: float) -> float | None:
    """A quantile of the time of a step, in seconds, over the steps of these learners."""
    return Durations().merged(one.steps for one in of).quantile(share)


def summary(of: Mapping[int, Performance]) -> dict[str, Any]:
    """The fields of `summary.json`; mappings are by learner, memory also by device."""
    everyone = of.values()
    return {
        "mfu": mfu(everyone),
        "mfu_by_learner": {m: mfu([one]) for m, one in of.items()},
        "data_wait_share": data_wait_share(everyone),
        "data_wait_share_by_learner": {m: data_wait_share([one]) for m, one in of.items()},
        "step_seconds_p50": step_seconds(everyone, 0.5),
        "step_seconds_p99": step_seconds(everyone, 0.99),
        "step_seconds_p50_by_learner": {m: one.steps.quantile(0.5) for m, one in of.items()},
        "step_seconds_p99_by_learner": {m: one.steps.quantile(0.99) for m, one in of.items()},
        "peak_memory_bytes": {m: one.peak_bytes for m, one in of.items() if one.peak_bytes},
    }
