"""A curve of any length in bounded memory, by averaging neighbours when it gets long."""

from __future__ import annotations

import array
import math


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
