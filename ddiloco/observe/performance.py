"""How fast learners step, how long they wait for data and what memory they take, by their metrics."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.observe.scalars import as_float

_GROWTH = math.log(1.01)  # of one class of durations to the next: quantiles are within a percent
PEAK_BYTES = "peak_bytes/"  # before a device's number


@dataclasses.dataclass
class Performance:
    """Of one learner or several, over the steps that this process has heard of, in bounded memory."""

    classes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # of durations
    seconds: float = 0.0  # of steps that were timed
    waited: float = 0.0  # for data, of these
    used: float = 0.0  # MFU times seconds
    measured: float = 0.0  # seconds of the steps whose MFU is known
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # by device

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Takes in what `ddiloco.training.step_meter` measured of a step, if it did."""
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


def summary(of: Mapping[int, Performance]) -> dict[str, Any]:
    """The fields of `summary.json`; mappings are by learner, memory also by device."""
    whole, each = together(of.values()).figures(), {m: one.figures() for m, one in of.items()}
    by_learner = {f"{name}_by_learner": {m: each[m][name] for m in each} for name in whole}
    peaks = {m: one.peak_bytes for m, one in of.items() if one.peak_bytes}
    return {**whole, **by_learner, "peak_memory_bytes": peaks}
