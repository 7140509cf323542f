"""Measured throughput of transfers, and the timeouts that follow from it."""

from __future__ import annotations

import threading

from ddiloco.protocol.policy import ALLOWANCE

UNMEASURED = 3600.0  # seconds of a transfer over a link of which nothing is known


class Pace:
    """Bytes and seconds of what was measured; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._seconds = 0, 0.0

    def add(self, size: int, seconds: float) -> None:
        """So many bytes took so many seconds."""
        with self._lock:
            self._bytes, self._seconds = self._bytes + size, self._seconds + seconds

    def patience(self, least: float, size: int) -> float:
        """Seconds to wait for bytes: `least`, and ALLOWANCE times what they take at the measured pace.

        Example:
          >>> pace = Pace()
          >>> pace.add(1000, 0.5)
          >>> pace.patience(30.0, 4000)
          38.0
        """
        with self._lock:
            return least + (ALLOWANCE * size * self._seconds / self._bytes if self._bytes else 0.0)

    def limit(self, least: float, size: int) -> float:
        """Seconds after which a transfer is broken off: `patience`, but UNMEASURED before anything was added.

        What is broken off begins again, for ever if the limit is below what the transfer takes.
        """
        with self._lock:
            known = self._bytes > 0
        return self.patience(least, size) if known else max(least, UNMEASURED)
