"""The link between a learner and the syncer: latency, bandwidth, jitter, losses, partitions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from ddiloco.virtual.calendar import Calendar, Timer


@dataclasses.dataclass(frozen=True)
class LinkQuality:
    """Latency, loss and bandwidth of one direction of a link."""

    latency: float = 0.0  # seconds that every message takes
    bandwidth: float | None = None  # bytes a second, one fragment after the other; None: no bound
    jitter: float = 0.0  # mean seconds of a further, exponential delay; it can reorder messages
    loss: float = 0.0  # share of messages that vanish
    duplicates: float = 0.0  # share of messages that come twice


class Link:
    """One direction between a learner and all shards of the syncer."""

    def __init__(self, quality: LinkQuality, rng: random.Random) -> None:
        self.quality = quality
        self.cut: set[int] = set()  # shards of the syncer behind a partition: what is sent there vanishes
        self._rng = rng
        self.free_at = 0.0  # when all that was sent so far is on its way

    def arrivals(self, now: float, size: int, shard: int = 0) -> list[float]:
        """Arrival times of a message of `size` bytes sent now: one, none, or two."""
        quality = self.quality
        if shard in self.cut or (quality.loss and self._rng.random() < quality.loss):
            return []
        copies = 2 if quality.duplicates and self._rng.random() < quality.duplicates else 1
        return [self._sent(now, size) + quality.latency + self._delay() for _ in range(copies)]

    def _sent(self, now: float, size: int) -> float:
        """When the last byte is sent; messages without bytes use a stream of their own, without waiting."""
        if self.quality.bandwidth is None or not size:
            return now
        self.free_at = max(now, self.free_at) + size / self.quality.bandwidth
        return self.free_at

    def _delay(self) -> float:
        return self._rng.expovariate(1 / self.quality.jitter) if self.quality.jitter else 0.0


class WaitingFragments:
    """The queue of a link: of each fragment the newest version or offer, as on a real link.

    So a link that is too thin for all of them falls no further behind.

    Attributes:
      messages: by fragment, the arguments for `send`; the first in turn comes first.
    """

    def __init__(self, link: Link, calendar: Calendar, send: Callable[..., None]) -> None:
        """`send` puts a message on the link."""
        self.messages: dict[int, tuple[Any, ...]] = {}
        self._link, self._calendar, self._send = link, calendar, send
        self._alarm = Timer(calendar, self._go_on)

    def put(self, fragment: int, *message: Any) -> None:
        """Sends it as soon as it is its turn and the link is free."""
        self.messages[fragment] = message
        self._go_on()

    def _go_on(self) -> None:
        while self.messages and self._link.free_at <= self._calendar.now:
            self._send(*self.messages.pop(next(iter(self.messages))))
        if self.messages:
            self._alarm.set(self._link.free_at)
