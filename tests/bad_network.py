"""A bad network on the way to a server: latency, jitter, a thin line, losses."""

import dataclasses
import random

from experiments.studies.chaos.proxy import Proxy

PACKET = 1448  # bytes of payload in a TCP segment on an Ethernet


@dataclasses.dataclass(frozen=True)
class LinkShape:
    """What a connection suffers, in each of its two directions."""

    latency: float = 0.0  # seconds one way
    jitter: float = 0.0  # seconds more, uniformly from 0; bytes stay in order
    bytes_per_second: float | None = None  # of one connection's direction; None: no bound
    loss: float = 0.0  # share of packets lost; TCP hides a loss behind a pause, and so does this
    retransmission: float = 0.2  # seconds of the pause after a loss
    buffer_bytes: int = 1 << 22  # on the way in one direction at most


class Schedule:
    """When bytes that come into one direction of a connection leave it; reads no clock."""

    def __init__(self, shape: LinkShape, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self._line_free = self._last = -float("inf")

    def due(self, now: float, size: int) -> float:
        """When the last of `size` bytes that came at `now` (seconds) leaves; never before an earlier one."""
        shape = self._shape
        sent = max(now, self._line_free)
        if shape.bytes_per_second is not None:
            sent += size / shape.bytes_per_second
        packets = -(-size // PACKET)
        if shape.loss and self._rng.random() >= (1 - shape.loss) ** packets:
            sent += shape.retransmission  # what comes behind waits too, as in TCP
        self._line_free = sent
        self._last = max(self._last, sent + shape.latency + shape.jitter * self._rng.random())
        return self._last


class BadNetwork(Proxy):
    """A proxy whose connections all have one shape."""

    def __init__(self, target, shape):
        super().__init__(target)
        self.buffer_bytes = shape.buffer_bytes
        self._shape, self._rng = shape, random.Random("bad network")

    def schedule(self):
        return Schedule(self._shape, self._rng).due
