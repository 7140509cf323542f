"""Limits how often a learner may do what costs the syncer: a burst, then a steady rate."""

from __future__ import annotations

import threading


class Allowances:
    """By learner, a bucket that fills up again; for several threads."""

    def __init__(self, most: float, a_second: float) -> None:
        """`most`: at once. `a_second`: how many a second brings back."""
        self._most, self._a_second = most, a_second
        self._lock = threading.Lock()
        self._left: dict[int, tuple[float, float]] = {}  # by learner: how many, and when

    def take(self, learner: int, now: float, cost: float = 1.0) -> bool:
        """Whether it may once more; `now` in monotonic seconds. What costs more than all only empties it."""
        with self._lock:
            left, then = self._left.get(learner, (self._most, now))
            left = min(self._most, left + (now - then) * self._a_second)
            enough = left >= min(cost, self._most)
            self._left[learner] = (max(0.0, left - cost) if enough else left, now)
            return enough
