"""Measured throughput of transfers, and the timeouts that follow from it."""

from __future__ import annotations

import collections
import statistics
import threading

from ddiloco.protocol.policy import TIMEOUT_SLACK

UNMEASURED = 3600.0  # seconds of a transfer over an unmeasured link
SLOW = 10.0  # times as long as what was measured before
_NOTICED_SECONDS = 2.0  # a shorter transfer delays nobody
_KEPT, _ENOUGH = 31, 3  # transfers


class Throughput:
    """Bytes and seconds of what was measured; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._seconds = 0, 0.0

    @property
    def rate(self) -> float | None:
        """Bytes a second; None: nothing was measured."""
        with self._lock:
            return self._bytes / self._seconds if self._bytes and self._seconds else None

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


class TransferRates:
    """Finds transfers that are far slower than the link's last ones; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates: collections.deque[float] = collections.deque(maxlen=_KEPT)  # bytes a second
        self._slow = False  # whether the last one was

    def add(self, size: int, seconds: float) -> str | None:
        """Adds a transfer; a sentence on it if it is the first one at a tenth of the median before it.

        Example:
          >>> rates = TransferRates()
          >>> [rates.add(10_000_000, 0.5) for _ in range(3)]
          [None, None, None]
          >>> rates.add(10_000_000, 8.0)
          '10.0 MB took 8.0 s, at 1.25 MB/s; before it was 20 MB/s'
        """
        if not size or seconds <= 0.0:
            return None
        with self._lock:
            median = statistics.median(self._rates) if len(self._rates) >= _ENOUGH else None
            before, self._slow = self._slow, is_slow(size, seconds, median)
            self._rates.append(size / seconds)
            return told_slow(size, seconds, median) if median and self._slow and not before else None


def is_slow(size: int, seconds: float, rate: float | None) -> bool:
    """Whether a transfer took SLOW times as long as at this many bytes a second; None: it is not known."""
    return rate is not None and seconds >= max(_NOTICED_SECONDS, SLOW * size / rate)


def told_slow(size: int, seconds: float, rate: float) -> str:
    """A transfer beside the rate that was measured before."""
    mega = f"{1e-6 * size:.1f} MB took {seconds:.1f} s, at {1e-6 * size / seconds:.3g} MB/s"
    return f"{mega}; before it was {1e-6 * rate:.3g} MB/s"
