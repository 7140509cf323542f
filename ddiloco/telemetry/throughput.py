"""Measured throughput of transfers, and the timeouts that follow from it."""

from __future__ import annotations

import threading

from ddiloco.protocol.policy import TIMEOUT_SLACK

UNMEASURED = 3600.0  # seconds of a transfer over an unmeasured link


class Throughput:
    """Bytes and seconds of what was measured; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._seconds = 0, 0.0

    def add(self, size: int, seconds: float) -> None:
        """So many bytes took so many seconds."""
        with self._lock:
            self._bytes, self._seconds = self._bytes + size, self._seconds + seconds

    def timeout(self, minimum: float, size: int) -> float:
        """Seconds to wait for bytes: `minimum`, and TIMEOUT_SLACK times what they take as measured.

        Example:
          >>> throughput = Throughput()
          >>> throughput.add(1000, 0.5)
          >>> throughput.timeout(30.0, 4000)
          38.0
        """
        with self._lock:
            return minimum + (TIMEOUT_SLACK * size * self._seconds / self._bytes if self._bytes else 0.0)

    def limit(self, minimum: float, size: int) -> float:
        """Seconds after which a transfer is broken off: `timeout`, but UNMEASURED before anything was added.

        What is broken off begins again, for ever if the limit is below what the transfer takes.
        """
        with self._lock:
            known = self._bytes > 0
        return self.timeout(minimum, size) if known else max(minimum, UNMEASURED)
