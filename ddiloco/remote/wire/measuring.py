"""Measures a link: the time of a round trip, and the throughput each way."""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc

from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import CHUNK_BYTES, WireError, parse

AT_ONCE = 16  # probes that one process answers at a time
MAX_PROBE_BYTES = 1 << 34  # of one probe, each way
_MAX_SECONDS = 120.0  # of one probe
_ROUND_TRIPS = 9


class Link(NamedTuple):
    """What was measured of a link."""

    round_trip: float  # seconds, the median
    up: float  # bytes a second from the caller
    down: float  # bytes a second to it


class Probes:
    """Answers probes, each in a thread of gRPC's."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def answer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Reads what the caller sends, and sends what it wants; nothing is kept."""
        if not self._places.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{AT_ONCE} probes are under way already")
        try:
            with wire.ended_after(_MAX_SECONDS, context.cancel):
                probe = parse(pb.Probe, next(requests, b""))
                if max(probe.up, probe.down) > MAX_PROBE_BYTES:
                    raise WireError("too large a probe")
                _read(probe.up, requests)
                yield pb.Probe(up=probe.up, down=probe.down).SerializeToString()
                yield from _noise(probe.down)
        except WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._places.release()


def measure(address: str, security: Security, size: int, connections: int, timeout: float) -> Link:
    """Measures the link to a process that answers probes at HOST:PORT, with so many bytes each way.

    `connections`: at the same time, which share the bytes. `timeout`: seconds until the first answer.

    Raises:
      grpc.RpcError: it cannot be reached, refuses the caller, or does not answer probes.
      WireError: its answer is none.
    """
    options = wire.options(timeout)
    channels = [security.channel(address, options) for _ in range(connections)]
    try:
        for channel in channels:
            _probe(channel, security, 0, 0, timeout)  # connects
        trips = [_probe(channels[0], security, 0, 0, timeout) for _ in range(_ROUND_TRIPS)]
        each = max(CHUNK_BYTES, size // connections)
        with concurrent.futures.ThreadPoolExecutor(connections) as pool:

            def throughput(up: int, down: int) -> float:
                seconds = pool.map(lambda c: _probe(c, security, up, down, _MAX_SECONDS), channels)
                return sum(each / took for took in seconds)

            up, down = throughput(each, 0), throughput(0, each)
        return Link(statistics.median(trips), up, down)
    finally:
        for channel in channels:
            channel.close()


def _probe(channel: grpc.Channel, security: Security, up: int, down: int, timeout: float) -> float:
    """Seconds until all has come; raises as `measure`."""

    def messages() -> Iterator[bytes]:
        yield pb.Probe(up=up, down=down).SerializeToString()
        yield from _noise(up)

    begun = time.monotonic()
    call = channel.stream_stream(wire.MEASURE)(messages(), metadata=security.metadata, timeout=timeout)
    answer = parse(pb.Probe, next(call, b""))
    if (answer.up, answer.down) != (up, down):
        raise WireError("another probe")
    _read(down, call)
    return time.monotonic() - begun


def _read(size: int, messages: Iterator[bytes]) -> None:
    """Reads so many bytes; raises WireError where others come."""
    while size:
        size -= len(next(messages, b"")) or size + 1
        if size < 0:
            raise WireError("probe of another size")


def _noise(size: int) -> Iterator[bytes]:
    """So many bytes that no link can compress."""
    chunk = os.urandom(min(size, CHUNK_BYTES))
    for begun in range(0, size, CHUNK_BYTES):
        yield chunk[: size - begun]
