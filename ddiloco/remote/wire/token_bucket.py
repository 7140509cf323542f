"""Limits the rate of a sender, for the rehearsal of a slower network."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator


class TokenBucket:
    """Delays chunks so that they do not exceed a rate, which may change at any time; for several threads.

    The bucket holds one chunk at most: a chunk is sent when nothing is owed, and is then owed whole.

    Attributes:
      rate: bytes a second; None: no limit.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._change = threading.Condition()
        self._owed, self._at = 0.0, 0.0  # bytes, at this time
        self._closed = False

    def set_rate(self, rate: float | None) -> None:
        """Sets the rate, also for chunks that wait."""
        with self._change:
            self._delay(time.monotonic())
            self.rate = rate
            self._change.notify_all()

    def close(self) -> None:
        """Nothing waits any longer."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def limited(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The chunks, each once it may be sent."""
        for item in self.delayed(chunks):
            if isinstance(item, float):
                with self._change:
                    self._change.wait(item)
            else:
                yield item

    def delayed(self, chunks: Iterable[bytes]) -> Iterator[bytes | float]:
        """The chunks, and while the next one may not be sent yet, the seconds to wait."""
        for chunk in chunks:
            while True:
                with self._change:
                    delay = self.take(len(chunk), time.monotonic())
                if not delay:
                    break
                yield delay
            yield chunk

    def take(self, size: int, now: float) -> float:
        """Seconds until so many bytes may be sent; 0.0: now, and they are taken."""
        delay = self._delay(now)
        if not delay:
            self._owed += size
        return delay

    def _delay(self, now: float) -> float:
        """Seconds until less than a byte is owed."""
        if self.rate is None or self._closed:
            self._owed = 0.0
        else:
            self._owed = max(0.0, self._owed - self.rate * (now - self._at))
        self._at = now
        return self._owed / self.rate if self._owed >= 1.0 and self.rate else 0.0
