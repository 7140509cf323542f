"""How often a learner may do what costs the syncer: some times at once, and more as time goes by."""

from __future__ import annotations

import threading


class Allowances:
    """By learner, a bucket that fills up again; for several threads."""

    def __init__(self, most: int, a_second: float) -> None:
        """`most`: at once. `a_second`: how many a second brings back."""
        self._most, self._a_second = most, a_second
        self._lock = threading.Lock()
        self._left: dict[int, tuple[float, float]] = {}  # by learner: how many, and when

    def take(self, learner: int, now: float) -> bool:
        """Whether it may once more; `now` in monotonic seconds."""
        with self._lock:
            left, then = self._left.get(learner, (float(self._most), now))
            left = min(float(self._most), left + (now - then) * self._a_second)
            self._left[learner] = (left - 1.0 if left >= 1.0 else left, now)
            return left >= 1.0
