"""How fast welcomes came to this process, by which waits for as many or more bytes go."""

from __future__ import annotations

import threading

ALLOWANCE = 4.0
"""How much slower than a welcome other bytes may come: a peer trains meanwhile, and may give to another."""


class Pace:
    """Bytes and seconds of the fragments of welcomes; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._seconds = 0, 0.0

    def add(self, size: int, seconds: float) -> None:
        """So many bytes came within so many seconds."""
        with self._lock:
            self._bytes, self._seconds = self._bytes + size, self._seconds + seconds

    def patience(self, least: float, size: int) -> float:
        """Seconds for so many bytes to come: `least`, and ALLOWANCE times what a welcome's would take.

        Example:
          >>> pace = Pace()
          >>> pace.add(1000, 0.5)
          >>> pace.patience(30.0, 4000)
          38.0
        """
        with self._lock:
            return least + (ALLOWANCE * size * self._seconds / self._bytes if self._bytes else 0.0)
